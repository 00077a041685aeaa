"""How a step spends its rows: a pure function of what is live and of measured pass times."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step's program: `batch` rows of state, a canonical pass of `rows` in windows of `window`.

    `window` 1 is plain canonical decoding of every row, ordinary ones too. `fast` is ordinary decoding: nothing is verified.
    """

    batch: int
    rows: int
    window: int
    fast: bool = False

    @property
    def label(self) -> str:
        """Short name for tables."""
        return f"fast[{self.batch}]" if self.fast else f"{self.rows // self.window}x{self.window}[{self.batch}]"


def pow2_ceil(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def buckets(max_rows: int) -> tuple[int, ...]:
    """Batch sizes that programs are compiled for: powers of four up to half of `max_rows`, and `max_rows` itself."""
    sizes = [1] if max_rows > 1 else []
    while sizes and sizes[-1] * 8 <= max_rows:
        sizes.append(sizes[-1] * 4)
    return (*sizes, max_rows)


def fast_plan(batch: int) -> Plan:
    """Ordinary decoding, one token a step."""
    return Plan(batch=batch, rows=batch, window=1, fast=True)


def canonical_plans(batch: int, window: int, rows: int) -> tuple[Plan, ...]:
    """Plans of one window size in the order in which they are tried, the cheapest first and at last the anchor's `rows`.

        batch 5, window 1, rows 64:     5, 8, 64 rows        batch 5, window 16, rows 64:     64 rows

    `window` 1 is plain canonical decoding; larger ones are filled by the self draft.
    """
    anchor = max(rows, window)
    budgets = [*(min(anchor, count * window) for count in (batch, pow2_ceil(batch))), anchor]
    return tuple(Plan(batch=batch, rows=budget, window=window) for budget in dict.fromkeys(budgets))


def step_tokens(plan: Plan, num_deterministic: int, num_ordinary: int, acceptance: float) -> float:
    """Tokens that one step is expected to commit.

    With a chance `a` that a guess agrees, a window of `W` commits `1 + a + a^2 + ... + a^(W-1)`.
    """
    if plan.fast or plan.window == 1:
        return num_deterministic + num_ordinary
    committed = sum(acceptance**i for i in range(plan.window))
    return num_deterministic * committed + num_ordinary * (plan.window - 1)


def choose(plans: Mapping[Plan, float], num_deterministic: int, num_ordinary: int, acceptance: float) -> Plan:
    """The plan with the most expected tokens per second.

    Args:
        plans: seconds that a step of each candidate takes with its batch full. Not empty.
        num_deterministic, num_ordinary: live rows of each kind, together at least 1.
        acceptance: chance that a drafted token agrees, 0 to 1.
    """
    return max(plans, key=lambda plan: step_tokens(plan, num_deterministic, num_ordinary, acceptance) / plans[plan])
