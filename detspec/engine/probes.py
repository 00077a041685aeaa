"""Made-up requests that programs are tried with, in the places and pages of a device.

Some begin at position 0; the others begin far into the cache and cost no prefill, because two pages of made-up keys and values
fill their page tables. Each writes only to pages of its own at the end. Pages of 16, `max_len` 128, 3 pages of its own:

    probe 0    table [1 2 1 2 1 3 4 5]     begins at position 83, in its first own page, and crosses the border at 96
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from detspec.cache import SCRATCH_PAGE
from detspec.engine.device import Device, GivenText
from detspec.engine.policy import Plan
from detspec.engine.programs import Placement, Report
from detspec.generation.loop import NEVER, Limits
from detspec.riders.rider import Entry
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule
from detspec.thinking.rider import thinks

NUM_NEW = 24  # tokens that a probe generates
PROMPT = 40  # tokens that it reads before
NUM_CHUNKS = 3  # chunks of the longest prompt, if the model thinks
FILLERS = 2  # pages of made-up keys and values
LOOKED_AT = 8  # tokens before a text by which it is found again
NUM_PROBES = 10  # at least, in a certificate: five places to begin at, each greedy and sampled


def most_far(device: Device) -> int:
    """Number of probes that fit into `device` at once, most of them far into the cache, each with all pages that it writes."""
    return min(device.config.max_requests, (device.num_pages - FILLERS) // _own_pages(device))


def _own_pages(device: Device) -> int:
    """Pages that a probe far into the cache writes to."""
    return device.schedule.numerics.num_pages(PROMPT + NUM_NEW) + 1


class Probe(NamedTuple):
    """A made-up request for one place; the cache holds its first `known` positions already."""

    tokens: list[int]
    known: int
    pages: list[int]
    sampling: SamplingParams


class Probes:
    """Probes of mixed lengths, greedy and sampled, in the first places of a device.

    All places must be free, and any page may be written over. `each` has the probe of each place, and each generates `num_new`
    tokens.
    """

    def __init__(
        self, device: Device, num_probes: int, *, deterministic: bool = True, far: bool = False, first: int = 0
    ) -> None:
        """Makes up the probes with numbers from `first` on.

        With `far` most of them begin far into the cache; not where a layer keeps states, which nothing makes up.
        """
        self.device = device
        self._page = device.schedule.numerics.page
        num_fillers = FILLERS if far and device.shares_pages and device.num_pages - FILLERS >= num_probes else 0
        self._own = min((device.num_pages - num_fillers) // num_probes, device.max_pages)
        if num_fillers:
            self._own = min(self._own, _own_pages(device))
        self.num_new = max(1, min(NUM_NEW, min(device.config.max_len, self._own * self._page) // 2))
        last = device.max_pages - self._own
        begins = (last, None, 0, min(1, last), last // 2) if num_fillers else (None,)
        rng = np.random.default_rng(first)
        self.each: list[Probe] = []
        for place, number in enumerate(range(first, first + num_probes)):
            own = [1 + num_fillers + place * self._own + i for i in range(self._own)]
            begin = begins[number % len(begins)]
            known, length = self._near(number) if begin is None else self._far(number, begin)
            sampling = SamplingParams(
                max_tokens=self.num_new,
                temperature=float(number % 2),
                seed=number,
                ignore_eos=True,
                deterministic=deterministic,
                thinking=None if begin is None or device.model.cfg.thinking is None else False,
            )
            tokens = rng.integers(0, device.model.cfg.vocab_size, known + length).tolist()
            pages = [*(1 + i % FILLERS for i in range(known // self._page)), *own][: device.max_pages]
            self.each.append(Probe(tokens, known, pages, sampling))

    def _near(self, number: int) -> tuple[int, int]:
        """Positions that the cache holds, none, and tokens to read, of a probe from position 0."""
        cfg = self.device.model.cfg
        wanted = PROMPT if cfg.thinking is None else max(PROMPT, NUM_CHUNKS * cfg.thinking.chunk + 1)
        most = max(1, min(wanted, min(self.device.config.max_len, self._own * self._page) - self.num_new))
        return 0, most - (7 * number) % most

    def _far(self, number: int, begin: int) -> tuple[int, int]:
        """Positions and tokens of a probe from inside of page `begin`: they cross the border after it, or end the cache."""
        first = begin * self._page
        end = min(self.device.config.max_len, first + self._own * self._page) - self.num_new
        is_last = begin + self._own == self.device.max_pages
        border = end if is_last else min(first + self._page - self.num_new // 2, end)
        most = max(1, min(PROMPT, border - first))
        length = most - (7 * number) % most
        return max(first, border - length), length

    @property
    def placement(self) -> Placement:
        """Places of the probes."""
        return self._placement([probe.pages for probe in self.each])

    def start(
        self,
        *,
        brings: Sequence[Mapping[str, Any]] | None = None,
        reverse: bool = False,
        schedule: Schedule | None = None,
        answers: bool = False,
    ) -> Report | None:
        """Puts the probes into their places and prefills them, by passes of `schedule`; in `reverse` the last one comes first.

        `brings` is what each of them brings for riders, nothing by default. See `Device.prefill` for `answers` and the report.
        """
        if any(probe.known for probe in self.each):
            self._fill()
        self.device.put(self.entries(brings=brings, reverse=reverse))
        return self.device.prefill(self.placement, NEVER, schedule=schedule, answers=answers)

    def entries(self, *, brings: Sequence[Mapping[str, Any]] | None = None, reverse: bool = False) -> list[Entry]:
        """The probes as they go into their places, see `start`."""
        places = range(len(self.each))
        return [
            Entry(
                place=place,
                tokens=probe.tokens,
                sampling=probe.sampling,
                length=probe.known,
                brings={} if brings is None else brings[b],
            )
            for b, (place, probe) in enumerate(zip(places[::-1] if reverse else places, self.each, strict=True))
        ]

    def step(self, plan: Plan, steps: int, *, wide_cost: float = 0.0) -> list[Report]:
        """Starts at most `steps` steps of `plan`, for one group of `plan.batch` probes after another."""
        placement = self.placement
        groups = placement.chosen.reshape(-1, plan.batch)
        limits = Limits(steps, 1, NEVER)
        return [self.device.step(plan, placement._replace(chosen=group), limits, wide_cost=wide_cost) for group in groups]

    def plant(self, texts: Sequence[Sequence[int]]) -> None:
        """Writes what each probe is known to generate, but every eighth token, to where its text says what no pass reads.

        The keys and values of `known` positions are made up, so their tokens are free, and prompt lookup finds them there.
        """
        for place, (probe, text) in enumerate(zip(self.each, texts, strict=True)):
            spoiled = [
                token if number % 8 else (token + 1) % self.device.model.cfg.vocab_size
                for number, token in enumerate(text, start=1)
            ]
            found = [*probe.tokens[probe.known :][-LOOKED_AT:], *spoiled][: probe.known]
            self.each[place] = probe._replace(tokens=[*found, *probe.tokens[len(found) :]])

    def given(self, texts: Sequence[Sequence[int] | np.ndarray]) -> dict[int, GivenText]:
        """The text of each probe, to be replayed from where it can: thoughts are not replayed."""
        cfg = self.device.model.cfg
        starts = [len(probe.tokens) - 1 if thinks(cfg, probe.sampling) else probe.known for probe in self.each]
        return {
            place: GivenText(text, start, len(probe.tokens))
            for place, (probe, text, start) in enumerate(zip(self.each, texts, starts, strict=True))
        }

    def _fill(self) -> None:
        """Makes up the keys and values of the first pages, by a prompt, and copies one of them to where a probe begins."""
        num_filled = min(FILLERS, self.device.max_pages)
        length = min(num_filled * self._page + 1, self.device.config.max_len - 1)
        rng = np.random.default_rng(1)
        tokens = rng.integers(0, self.device.model.cfg.vocab_size, length).tolist()
        thinking = False if self.device.model.cfg.thinking else None
        self.device.put([Entry(place=0, tokens=tokens, sampling=SamplingParams(max_tokens=1, thinking=thinking))])
        self.device.prefill(self._placement([list(range(1, 1 + num_filled))]), NEVER)
        firsts = [probe.pages[probe.known // self._page] for probe in self.each if probe.known]
        self.device.copy([(1, first) for first in firsts])

    def _placement(self, pages: Sequence[Sequence[int]]) -> Placement:
        table = np.full((self.device.config.max_requests, self.device.max_pages), SCRATCH_PAGE, np.int32)
        for b, held in enumerate(pages):
            table[b, : len(held)] = held
        in_use = np.arange(self.device.config.max_requests) < len(pages)
        return Placement(table, in_use, np.arange(len(pages), dtype=np.int32))
