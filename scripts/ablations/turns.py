"""Settings that generate the same texts, in turns within one process: how long they take, and which bits they give.

A first round compiles and is not counted. Every other round runs in reverse order, and each has prompts and seeds of its own.
A setting is compared with another one of the same round, so other load on the machine meets both alike. Time by the clock and
time of the processor are both kept: neighbours disturb the second one less.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

import detspec as ds
from detspec.bench.bench import bench_prompts
from detspec.draft.source import Drafter
from detspec.draft.table import drafters_of
from detspec.progress import Progress
from detspec.riders.counters import COUNTED
from detspec.state import GenState
from scripts.ablations.table import Options, Spread

Key = TypeVar("Key", bound=tuple[Any, ...])
Run = Callable[[int], GenState]  # generates the texts of a round, 0 for the first one
ROUNDS = {"tiny": 2, "full": 15}
NEW_TOKENS = {"tiny": 24, "full": 96}
NUM_PROMPTS, PROMPT_LEN = (64, 32)


@dataclasses.dataclass
class Turns:
    """Results of a setting, an entry for each counted round."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    cpu_s: list[float] = dataclasses.field(default_factory=list)  # of all threads
    texts: list[list[np.ndarray]] = dataclasses.field(default_factory=list)  # `[2, T]` uint32 of each request, see `texts_of`
    counts: list[dict[str, int]] = dataclasses.field(default_factory=list)  # `Stats`, summed over requests

    def compared_with(self, other: "Turns") -> dict[str, Any]:
        """Columns of a row: how many times as fast as `other`, by the clock and by processor time, and `moved_from` it."""
        return {
            "speed": Spread.of(b / a for a, b in zip(self.seconds, other.seconds, strict=True)),
            "speed by cpu time": Spread.of(b / a for a, b in zip(self.cpu_s, other.cpu_s, strict=True)),
            "moved %": self.moved_from(other),
        }

    def ratio(self, name: str, over: str) -> Spread:
        """Ratio of the count `name` to the count `over`; nan where that is 0."""
        return Spread.of(counted[name] / counted[over] if counted[over] else math.nan for counted in self.counts)

    def percent(self, name: str, over: str) -> Spread:
        """Ratio in percent, as `ratio`."""
        return Spread(*(100 * value for value in self.ratio(name, over)))

    def moved_from(self, other: "Turns", *, requests: int | None = None) -> float:
        """The share of tokens, in percent, that have another id or other bits of their log-probability than in `other`.

        Both are compared as far as both have rounds, requests (at most the first `requests`) and tokens.
        """
        pairs = [
            pair for a, b in zip(self.texts, other.texts, strict=False) for pair in list(zip(a, b, strict=False))[:requests]
        ]
        shortest = [min(a.shape[1], b.shape[1]) for a, b in pairs]
        differs = [(a[:, :n] != b[:, :n]).any(0) for (a, b), n in zip(pairs, shortest, strict=True)]
        return 100 * float(np.mean(np.concatenate(differs)))


def in_turns(runs: Mapping[Key, Run], options: Options, *, rounds: int | None = None) -> dict[Key, Turns]:
    """Runs all of `runs` in each of `rounds` rounds, by default as many as the size says, after one that is not counted."""
    rounds = rounds or ROUNDS[options.size]
    found = {key: Turns() for key in runs}
    with Progress(len(runs) * (rounds + 1), "runs") as progress:
        for number in range(rounds + 1):
            for key in runs if number % 2 == 0 else reversed(runs):
                progress.stage(" ".join(map(str, key)) + ("" if number else ": compiling"))
                began_s = time.perf_counter(), time.process_time()
                state = jax.block_until_ready(runs[key](number))
                ended_s = time.perf_counter(), time.process_time()
                progress.finished()
                if number:
                    found[key].seconds.append(ended_s[0] - began_s[0])
                    found[key].cpu_s.append(ended_s[1] - began_s[1])
                    found[key].texts.append(texts_of(state))
                    found[key].counts.append(counts_of(state))
    return found


def asked(options: Options, **changes: Any) -> ds.SamplingParams:
    """Sampling parameters of a request, greedy unless `changes` say otherwise."""
    common = {"max_tokens": NEW_TOKENS[options.size], "seed": options.seed, "ignore_eos": True}
    return ds.SamplingParams(**{**common, **changes})


def generation(
    model: ds.Model,
    schedule: ds.Schedule,
    sampling: Sequence[ds.SamplingParams],
    *,
    draft: str = "none",
    prompts: Sequence[Sequence[int]] | None = None,
) -> Run:
    """A run of `ds.generate` for `len(sampling)` requests; rounds take `prompts`, by default short texts, in turn."""
    source = drafters_of()[draft].source
    drafter = Drafter(source, source.derive(model.params, model.cfg) if source.derive else ())
    prompts = bench_prompts(model, NUM_PROMPTS, PROMPT_LEN) if prompts is None else prompts
    B = len(sampling)

    def run(number: int) -> GenState:
        own = [prompts[(number * B + b) % len(prompts)] for b in range(B)]
        each = [dataclasses.replace(one, seed=one.seed + number * B + b) for b, one in enumerate(sampling)]
        return ds.generate(model.params, model.cfg, own, each, schedule=schedule, drafter=drafter)

    return run


def texts_of(state: GenState) -> list[np.ndarray]:
    """For each request `[2, T]` uint32: the ids of its new tokens, and the bits of their log-probabilities."""
    whole = np.stack([np.asarray(state.tokens).view(np.uint32), np.asarray(state.logprobs).view(np.uint32)], axis=1)
    bounds = zip(np.asarray(state.sampling.prompt_len), np.asarray(state.committed), strict=True)
    return [whole[b, :, start:end] for b, (start, end) in enumerate(bounds)]


def counts_of(state: GenState) -> dict[str, int]:
    """All counters, summed over requests, and "num_tokens", new ones."""
    new = int((np.asarray(state.committed) - np.asarray(state.sampling.prompt_len)).sum())
    return {**{name: int(np.asarray(getattr(state.counters, name)).sum()) for name in COUNTED}, "num_tokens": new}
