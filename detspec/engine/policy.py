"""Plans: how the passes of a step spend their rows, and which plans an engine makes for what is asked of it."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from detspec.engine.engine_config import EngineConfig
from detspec.sampling_params import SamplingParams, all_stop_ids
from detspec.schedule import Budget, Schedule

WORTH_MAKING = 1 / 16  # share of the passes
LARGE_ROWS = 512  # more token rows a pass make larger products
WORTH_LARGER = 4  # prefill has large passes, too, where they have so many times the rows


@dataclasses.dataclass(frozen=True)
class Plan:
    """Program of a step: `batch` sequences, canonical passes of `budget`, up to `num_drafts` tokens of the source `draft`.

    Without drafts it is plain canonical decoding of all sequences, ordinary ones too. `ordinary` decodes without verification.
    With `skips` a pass reads one row of each sequence when its drafts are worth no more. Without `processing` it can sample,
    but not process logits first: it is smaller, and for requests that ask for no more.
    """

    batch: int
    budget: Budget
    draft: str = "none"
    num_drafts: int = 0
    ordinary: bool = False
    processing: bool = False
    skips: bool = False

    @property
    def narrow(self) -> Budget | None:
        """The budget of passes that read no drafts, if it `skips`."""
        return Budget(self.batch, 1) if self.skips else None

    @property
    def reads_one_each(self) -> bool:
        """Whether its passes hold one row of each sequence, at its own place."""
        return not self.ordinary and not self.num_drafts and self.budget == Budget(self.batch, 1)

    @property
    def most_tokens(self) -> int:
        """Most tokens that one step commits for a sequence."""
        return self.num_drafts + 1

    @property
    def label(self) -> str:
        """Short name for tables: "ordinary[8]", "8x1[8]", "4x16 self[8]", "8x1 processing[8]"."""
        kind = "ordinary" if self.ordinary else f"{self.budget.groups}x{self.budget.window}"
        draft = "" if self.draft == "none" else f" {self.draft}"
        return f"{kind}{draft}{' processing' if self.processing else ''}[{self.batch}]"


class Needs(NamedTuple):
    """Needs of requests as to programs, all of them together; by default anything."""

    deterministic: bool = True  # some requests are deterministic
    ordinary: bool = True  # some requests are ordinary
    processing: bool = True  # some requests ask for more than a temperature

    @classmethod
    def of(cls, sampling: Iterable[SamplingParams]) -> "Needs":
        """Joins the needs of requests with these parameters."""
        deterministic = ordinary = processing = False
        for params in sampling:
            deterministic |= params.deterministic
            ordinary |= not params.deterministic
            processing |= params.needs_processing
        return cls(deterministic, ordinary, processing)

    def __or__(self, other: "Needs") -> "Needs":
        """Joins both needs."""
        return Needs(*(one or another for one, another in zip(self, other, strict=True)))


def pow2_ceil(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def buckets(max_requests: int) -> tuple[int, ...]:
    """Batch sizes that programs are compiled for: 1, 4, 8, 16 and so on up to half of `max_requests`, and `max_requests`."""
    sizes = [1] if max_requests > 1 else []
    size = 4
    while 2 * size <= max_requests:
        sizes.append(size)
        size *= 2
    return (*sizes, max_requests)


def ordinary_plan(batch: int, processing: bool = False) -> Plan:
    """Ordinary decoding, one token a step."""
    return Plan(batch, Budget(batch, 1), ordinary=True, processing=processing)


class Drafting(NamedTuple):
    """Use of the rows of canonical passes: windows of `window`, for up to `num_drafts` tokens of the source `draft`."""

    draft: str = "none"
    window: int = 1
    num_drafts: int = 0
    skips: bool = False  # see `Plan`


NO_DRAFTS = Drafting()


def canonical_plans(batch: int, rows: int, drafting: Drafting = NO_DRAFTS, *, processing: bool = False) -> tuple[Plan, ...]:
    """Plans of one way to draft in the order in which they are tried: the cheapest first, at last the anchor's `rows`.

    batch 5, windows of 1, rows 64:     5, 8, 64 rows        batch 5, windows of 16, rows 64:     64 rows
    """
    draft, window, num_drafts, skips = drafting
    anchor = max(rows, window)
    budgets = [*(min(anchor, count * window) for count in (batch, pow2_ceil(batch))), anchor]
    return tuple(
        Plan(batch, Budget(budget, window), draft, num_drafts, processing=processing, skips=skips and batch < budget)
        for budget in dict.fromkeys(budgets)
    )


def needed_batches(config: EngineConfig, num_requests: int) -> tuple[int, ...]:
    """Batches that `num_requests` at once need: none for none, and all if they are refilled."""
    sizes = buckets(config.max_requests)
    return sizes if num_requests > config.max_requests else tuple(size for size in sizes if size >= num_requests > 0)[:1]


def worth_making(passes: Mapping[int, int]) -> tuple[int, ...]:
    """Batches that took part in so many of `passes`, a number for each, that all their plans are worth compiling."""
    least = WORTH_MAKING * sum(passes.values())
    return tuple(sorted(batch for batch, number in passes.items() if number >= least))


def lookup_window(schedule: Schedule) -> int:
    """Rows of a window that verifies prompt lookup: few where rows cost arithmetic, a tile's where they are free."""
    return 4 if schedule.numerics.implementation in ("reference", "cpu") else 8


def allowed_drafts(config: EngineConfig, schedule: Schedule, more: Iterable[str] = ()) -> tuple[Drafting, ...]:
    """The ways to draft that the method allows; "auto" also tries the sources called `more`.

    A source that drafts for all sequences fills a window of each. Prompt lookup drafts for some, so its windows are short: the
    likeliest drafts get several. Aligned windows keep the schedule's length, because the bits depend on it.
    """
    auto = config.method == "auto"
    num_drafts = config.num_speculative_tokens
    if schedule.numerics.alignment == "window":
        window = schedule.budget.window
        names = ("self", "ngram", *more) if auto else config.methods
        ways = tuple(Drafting(name, window, 0 if name == "none" else window - 1) for name in names)
        return ways if window > 1 else (Drafting(),)
    names = ("none", "ngram", "self", *more) if auto else config.methods
    window = min(num_drafts + 1, lookup_window(schedule))
    special = {"none": Drafting(), "ngram": Drafting("ngram", window, num_drafts, skips=True)}
    return tuple(special.get(name, Drafting(name, num_drafts + 1, num_drafts)) for name in names)


def needed_plans(config: EngineConfig, schedule: Schedule, num_requests: int, needs: Needs) -> tuple[Plan, ...]:
    """The plans that an engine compiles at most for `num_requests`.

    It tries those of one batch and draft in this order until one is certified, and no drafts that cannot win.
    """
    plans: list[Plan] = []
    for batch in needed_batches(config, num_requests):
        plans.append(ordinary_plan(batch, needs.processing))
        for drafting in allowed_drafts(config, schedule) if needs.deterministic else ():
            plans += canonical_plans(batch, schedule.budget.rows, drafting, processing=needs.processing)
    return tuple(plans)


def large_passes(schedule: Schedule, max_len: int) -> Schedule:
    """Returns the schedule with passes of more rows and windows of a query tile at least; aligned windows keep their length."""
    window = schedule.budget.window
    if schedule.numerics.alignment == "free":
        window = max(window, schedule.numerics.query_tile)
    return schedule.with_budget(max(schedule.budget.rows, LARGE_ROWS, window), window) if window <= max_len else schedule


def as_large(passes: int, times: int) -> tuple[int, int]:
    """Large passes, and others after them, in place of `passes`; a large one has `times` their rows, half of them at least.

    times 8     passes 3 4 8 11 12     large 0 1 1 1 2     others 3 0 0 3 0
    """
    large, others = divmod(passes, times)
    return (large + 1, 0) if 2 * others >= times else (large, others)


class Room(NamedTuple):
    """Most stop tokens and biased tokens of one request.

    Programs take them as arrays of a fixed length, so another room means other programs. It starts with the config's, and grows
    by powers of two to what a request asks for. What is not used of it changes no bit.
    """

    stop_ids: int
    logit_bias: int

    def with_room_for(self, sampling: SamplingParams, eos_ids: Sequence[int]) -> "Room":
        """This room, or one of more tokens if requests with `sampling` need it; `eos_ids` are the model's own stop tokens."""

        def grown(room: int, number: int) -> int:
            return room if number <= room else pow2_ceil(number)

        stop_ids = len(all_stop_ids(sampling, eos_ids))
        return Room(grown(self.stop_ids, stop_ids), grown(self.logit_bias, len(sampling.logit_bias)))
