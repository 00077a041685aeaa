"""Acceptance of drafts over window and temperature, counted window by window."""

import dataclasses
from collections.abc import Sequence

from detspec.checkpoint.load import Model
from detspec.draft.source import Drafter
from detspec.errors import InputError
from detspec.sampling_params import SamplingParams
from detspec.traces.record_windows import Prompt, drafter_of, trace_batch
from detspec.traces.windows import TraceWindow


@dataclasses.dataclass(frozen=True)
class AcceptanceCell:
    """Counts of all passes of one window length at one temperature."""

    num_passes: int  # windows that the canonical pass verified
    num_drafted: int  # tokens
    num_accepted: int  # drafted tokens that equal the pass's choice, and all before them do
    num_committed: int  # tokens

    @property
    def rate(self) -> float | None:
        """Accepted over drafted tokens; None if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def tokens_a_pass(self) -> float:
        """Tokens that a request gains by one pass, on average; 1 without drafts."""
        return self.num_committed / self.num_passes


@dataclasses.dataclass(frozen=True)
class AcceptanceTable:
    """The result of `measure_acceptance`, which prints as a table.

    Attributes:
        drafter: name of the draft source.
        windows: window lengths, one more than the tokens of a whole draft.
        temperatures: temperatures of the requests.
        cells: a row for each temperature, with a cell for each window length.
    """

    drafter: str
    windows: tuple[int, ...]
    temperatures: tuple[float, ...]
    cells: tuple[tuple[AcceptanceCell, ...], ...]

    def __repr__(self) -> str:
        lines = [
            f"drafts of {self.drafter}: accepted, and tokens a pass",
            "temperature" + "".join(f"{f'window {window}':>16}" for window in self.windows),
        ]
        for temperature, row in zip(self.temperatures, self.cells, strict=True):
            cells = (f"{percent(cell)} {cell.tokens_a_pass:5.2f}" for cell in row)
            lines.append(f"{temperature:<11g}" + "".join(f"{cell:>16}" for cell in cells))
        return "\n".join(lines)


def percent(cell: AcceptanceCell) -> str:
    """The share of accepted tokens as a percentage; a dash if nothing was drafted."""
    return "-" if cell.rate is None else f"{100 * cell.rate:.0f} %"


def measure_acceptance(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    drafter: Drafter | str = "int8",
    windows: Sequence[int] = (2, 4, 8, 16),
    temperatures: Sequence[float] = (0.0, 0.5, 1.0),
    max_tokens: int = 64,
    seed: int = 0,
) -> AcceptanceTable:
    """Generates from all prompts in one batch at each temperature and window, and counts the drafted tokens that are accepted.

    Committed tokens do not depend on window and draft, so each row of the table is about the same texts.

    Args:
        model: weights and tokenizer.
        prompts: texts or token ids.
        drafter: a draft source with its weights, or the name of one that needs none: "int8", "ngram" or "self".
        windows: window lengths, powers of two of at least 2. Each compiles a program.
        temperatures: of the requests; 0 is greedy.
        max_tokens: most new tokens of a request.
        seed: of the first request; prompt `b` has `seed + b`.

    Raises:
        InputError: there is no prompt, window or temperature, one of them is invalid, or no draft source has this name.
    """
    if not (len(prompts) and windows and temperatures):
        raise InputError("measure_acceptance needs at least one prompt, one window and one temperature")
    source = drafter_of(model, drafter) if isinstance(drafter, str) else drafter

    def count(temperature: float, window: int) -> AcceptanceCell:
        sampling = SamplingParams(temperature=temperature, seed=seed)
        traces = trace_batch(model, prompts, sampling, window=window, max_tokens=max_tokens, drafter=source)
        return counted([window for trace in traces for window in trace.windows])

    cells = tuple(tuple(count(temperature, window) for window in windows) for temperature in temperatures)
    return AcceptanceTable(source.source.name, tuple(windows), tuple(temperatures), cells)


def counted(windows: Sequence[TraceWindow]) -> AcceptanceCell:
    """Sums over windows."""
    return AcceptanceCell(
        num_passes=len(windows),
        num_drafted=sum(len(window.drafted) for window in windows),
        num_accepted=sum(window.accepted for window in windows),
        num_committed=sum(len(window.committed) for window in windows),
    )
