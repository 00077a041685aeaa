"""The cases of one batch size, run in turn: warm-up, then rounds in which each is timed once."""

import dataclasses
import functools
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from detspec.checkpoint.load import Model
from detspec.config import ModelConfig
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Needs
from detspec.engine.request import Completion, Request
from detspec.environment import default_schedule
from detspec.errors import InputError
from detspec.riders.counters import Stats
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule

METHODS = dict.fromkeys(("ordinary", "canonical", "batch_invariant"), "none") | {
    "ngram": "ngram",
    "dvr": "self",
    "auto": "auto",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A timed case: a mode, and how many of the batch's requests are deterministic."""

    mode: str
    window: int
    num_deterministic: int
    share: int

    @property
    def label(self) -> str:
        """Short name for tables and progress bars."""
        name = f"dvr W={self.window}" if self.mode == "dvr" else self.mode
        return f"{name} {self.share} %" if self.mode in ("dvr", "auto") else name

    def schedule(self, cfg: ModelConfig) -> Schedule:
        """The device's own schedule for a model; with pinned products for "batch_invariant"."""
        own = default_schedule(cfg)
        return own.with_numerics(linear="pinned") if self.mode == "batch_invariant" else own


def counted_runs(total: int, on_progress: Callable[[int, int, str], None] | None) -> Callable[[str], None]:
    """Makes a function that is called with the name of each run, and tells `on_progress` how many of `total` ran before."""
    done = itertools.count()
    return lambda name: None if on_progress is None else on_progress(next(done), total, name)


def cases_of(batch: int, modes: Sequence[str], shares: Sequence[int], windows: Sequence[int]) -> list[Case]:
    """The cases of one batch size, ordinary generation first.

    Shares are rounded up to whole requests. Of two shares with the same number of requests only the larger is kept: with 1
    request, 10 % is already all of it, and called 100 %.
    """
    numbers = {-(-share * batch // 100): share for share in sorted(shares)}
    longest = max(windows)
    cases = [Case("ordinary", 1, 0, 0)]
    cases += [Case(mode, 1, batch, 100) for mode in ("canonical", "batch_invariant") if mode in modes]
    if "ngram" in modes:
        cases.append(Case("ngram", longest, batch, 100))
    if "dvr" in modes:
        cases += [Case("dvr", window, number, share) for window in windows for number, share in numbers.items() if number]
    if "auto" in modes:
        cases += [Case("auto", longest, number, share) for number, share in numbers.items()]
    return cases


def measure(
    model: Model,
    cases: list[Case],
    prompts: list[tuple[int, ...]],
    new_tokens: int,
    repeats: int,
    on_run: Callable[[str], None],
    by_mode: "Variants",
) -> dict[str, Any]:
    """Runs all cases of one batch size: a warm-up of each, then `repeats` rounds. Adds the results to `by_mode`."""
    refused: dict[Case, str] = {}
    samples: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
    variants = Variants()

    @functools.cache
    def engine_of(method: str, window: int, schedule: Schedule) -> Engine:
        config = EngineConfig(
            max_requests=len(prompts),
            max_len=max(len(prompts[0]) + new_tokens, schedule.budget.window, window),
            method=method,
            num_speculative_tokens=max(window - 1, 1),
            schedule=schedule,
        )
        return Engine(model, config)

    def run(case: Case) -> dict[str, Any]:
        engine = engine_of(METHODS[case.mode], case.window, case.schedule(model.cfg))
        engine.prepare(len(prompts), Needs(case.num_deterministic > 0, case.num_deterministic < len(prompts), False))
        return _run_once(engine, case, prompts, new_tokens, variants, by_mode)

    for case in cases:
        on_run(f"batch {len(prompts)}, {case.label}: compiling and certifying")
        try:
            run(case)
        except InputError as error:  # this device does not certify it: a result, not a failure
            refused[case] = str(error)
    for _ in range(repeats):
        for case in cases:
            on_run(f"batch {len(prompts)}, {case.label}")
            if case not in refused:
                samples[case].append(run(case))
    ordinary = [sample["tok_per_s"] for sample in samples[cases[0]]]
    return {"cases": [_summary(case, samples[case], ordinary, refused.get(case)) for case in cases], "bits": variants.counts()}


def _run_once(
    engine: Engine, case: Case, prompts: list[tuple[int, ...]], new_tokens: int, variants: "Variants", by_mode: "Variants"
) -> dict[str, Any]:
    """Times one run; returns its speed and the counters of its completions."""
    ordinary = SamplingParams(max_tokens=new_tokens, ignore_eos=True, deterministic=False)
    deterministic = dataclasses.replace(ordinary, deterministic=True)
    each = [deterministic] * case.num_deterministic + [ordinary] * (len(prompts) - case.num_deterministic)
    requests = [Request(str(i), prompt, sampling) for i, (prompt, sampling) in enumerate(zip(prompts, each, strict=True))]
    began = time.perf_counter()
    completions = list(engine.run(requests))
    seconds = time.perf_counter() - began
    for completion in completions:
        kind = "deterministic" if requests[int(completion.id)].sampling.deterministic else "ordinary"
        # Pinned products are another schedule, with bits of its own.
        variants.add(case.mode if case.mode == "batch_invariant" else kind, completion)
        by_mode.add(f"{case.mode} {kind}", completion)
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    counted = dataclasses.asdict(sum((completion.stats for completion in completions), Stats()))
    return {"seconds": seconds, "tok_per_s": num_tokens / seconds, **counted}


def _summary(case: Case, samples: list[dict[str, Any]], ordinary: list[float], refused: str | None) -> dict[str, Any]:
    """A case with the medians of its samples and of their ratios to the ordinary run of the same round; counters are summed."""
    described = {**dataclasses.asdict(case), "label": case.label, "refused": refused}
    if refused is not None:
        return described
    tok_per_s = [sample["tok_per_s"] for sample in samples]
    ratios = [mine / other for mine, other in zip(tok_per_s, ordinary, strict=True)]
    counted = {name: sum(sample[name] for sample in samples) for name in samples[0] if name.startswith("num_")}
    drafted = counted["num_draft_tokens"]
    passes = counted["num_verify_passes"]
    accepted = counted["num_accepted_draft_tokens"]
    return {
        **described,
        "tok_per_s": tok_per_s,
        "median_tok_per_s": median(tok_per_s),
        "ratios": ratios,
        "ratio_to_ordinary": median(ratios),
        **counted,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": 1 + accepted / passes if passes else None,
    }


class Variants:
    """The different results, bit for bit, of each request, by kinds that are compared."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, set[bytes]]] = defaultdict(lambda: defaultdict(set))

    def add(self, kind: str, completion: Completion) -> None:
        """Adds a result of a request."""
        tokens = np.asarray(completion.token_ids, np.int32)
        logprobs = np.asarray(completion.logprobs, np.float32)
        self._seen[kind][completion.id].add(tokens.tobytes() + logprobs.tobytes())

    def most(self, kind: str) -> int:
        """Most different results of any one request; 0 if there is none."""
        return max((len(results) for results in self._seen[kind].values()), default=0)

    def counts(self) -> dict[str, int]:
        """Most variants of any "deterministic" request (promised: 1), and how many "ordinary" ones differ from it."""
        promised = self._seen["deterministic"]
        ordinary = self._seen["ordinary"]
        compared = promised.keys() & ordinary.keys()
        return {
            "deterministic_variants": self.most("deterministic"),
            "ordinary_compared": len(compared),
            "ordinary_differ": sum(bool(ordinary[id] - promised[id]) for id in compared),
        }
