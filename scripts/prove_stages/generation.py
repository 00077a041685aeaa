"""Generation end to end, in turns with ordinary generation by the same engine: how much of its speed determinism keeps."""

import dataclasses
import time
from collections.abc import Iterator
from functools import cache, partial
from statistics import median

from detspec.bench.bench import bench_prompts, random_model
from detspec.checkpoint.load import Model
from detspec.engine.compiled import PROGRAMS
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Request
from detspec.model.params import pass_work
from detspec.riders.counters import Stats
from detspec.roofline import Work
from detspec.sampling_params import SamplingParams
from prove_stages.completions import NEEDS, bits_of, surely_made
from prove_stages.journal import Entry
from prove_stages.programs import Measurement, Program, Setting, engine_programs

ROUNDS = 3
LEAST_OF_ORDINARY = 0.95  # all requests deterministic
LEAST_OF_SHARED = 0.99  # one of several requests deterministic
LOOK_S = 0.1
SELF = "self"  # the draft source that runs the model itself


@dataclasses.dataclass(frozen=True)
class Case:
    """A number of requests, and how many of them are deterministic."""

    requests: int
    deterministic: int

    @property
    def name(self) -> str:
        """Names it as tables do: "32 requests, all deterministic"."""
        return f"{self.requests} requests, {'all' if self.deterministic == self.requests else self.deterministic} deterministic"


def programs(setting: Setting) -> Iterator[Program]:
    """All programs that the engines of all cases may need; a device that certifies the cheapest plans needs fewer."""
    for case in cases(setting):
        config = config_of(setting, case)
        yield from engine_programs(setting.size.model, config, surely_made(setting, config, case.requests), name=case.name)


def measurements(setting: Setting) -> Iterator[Measurement]:
    """Measures each case; those that the time is too short for are left out."""

    @cache
    def model() -> Model:
        return random_model(setting.size.model)

    for case in cases(setting):
        yield Measurement(case.name, lambda case=case: run(setting, model(), case), costly=True)


def cases(setting: Setting) -> list[Case]:
    """The most valuable first."""
    return [Case(*each) for each in setting.size.generation]


def run(setting: Setting, model: Model, case: Case) -> Iterator[Entry]:
    """The speed of each round's ordinary run, and what determinism keeps of it; each round's figures replace the last ones."""
    size = setting.size
    engine = Engine(model, config_of(setting, case))
    engine.device.start_compiling(surely_made(setting, engine.config, case.requests), apart=True)  # all at the same time
    engine.prepare(case.requests, NEEDS)
    prompts = bench_prompts(model, case.requests, size.prompt_len)
    once = partial(run_once, engine, prompts, size.new_tokens)
    seen: list[set[bytes]] = [set() for _ in range(case.deterministic)]
    speeds: list[float] = []
    ratios: list[float] = []
    while PROGRAMS.is_compiling:  # a plan that was not tried after all; tuning would take the device's time
        time.sleep(LOOK_S)
    once(0)  # what is compiled when it first runs
    once(case.deterministic)
    for _ in range(min(ROUNDS, size.repeats)):
        ordinary, before, _ = once(0)
        speed, results, stats = once(case.deterministic)
        for bits, result in zip(seen, results, strict=False):
            bits.add(result)
        speeds.append(ordinary)
        ratios.append(speed / ordinary)
        shared = case.deterministic < case.requests
        bar = setting.bar(LEAST_OF_SHARED if shared else LEAST_OF_ORDINARY)
        accepted = f"{stats.draft_acceptance_rate:.1%} of drafts accepted, " if stats.num_draft_tokens else ""
        note = f"{speed:.0f} tok/s, {accepted}{stats.num_rollbacks} rollbacks; plans: {certified(engine)}"
        step_s = setting.predicted_s(work_of(setting, case.requests))
        predicted = None if step_s is None else case.requests / step_s
        yield Entry(f"{case.name}, of ordinary", median(ratios), "", bar, note=note, predicted=predicted_ratio(setting, case))
        yield Entry(f"{case.name}, ordinary speed", median(speeds), "tok/s", predicted=predicted)
        differ = sum(one not in bits for bits, one in zip(seen, before, strict=False))
        note = f"{differ} of {case.deterministic} ordinary results differ"
        yield Entry(f"{case.name}, results of a request", float(max(map(len, seen))), "", 1.0, True, note=note)


def run_once(
    engine: Engine, prompts: list[tuple[int, ...]], new_tokens: int, deterministic: int
) -> tuple[float, list[bytes], Stats]:
    """Tokens a second of all prompts at once, the first ones `deterministic`; each one's bits in order, and all counters."""
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    requests = [
        Request(str(i), prompt, dataclasses.replace(sampling, deterministic=i < deterministic))
        for i, prompt in enumerate(prompts)
    ]
    began = time.perf_counter()
    found = sorted(engine.run(requests), key=lambda completion: int(completion.id))
    seconds = time.perf_counter() - began
    num_tokens = sum(len(completion.token_ids) for completion in found)
    return num_tokens / seconds, [*map(bits_of, found)], sum((completion.stats for completion in found), Stats())


def certified(engine: Engine) -> str:
    """The plans that the engine may choose from."""
    return ", ".join(each.plan.label for each in engine.certificates.values() if each.is_certified)


def predicted_ratio(setting: Setting, case: Case) -> float | None:
    """Ordinary steps over the cheapest way to commit as many tokens, every draft accepted; None without peaks.

    Canonical passes hold one row of each sequence, as many as the anchor where the library's products depend on rows. With
    self drafts a window of ordinary steps is followed by passes that verify the windows of deterministic requests.
    """
    own = setting.schedule_fn(setting.size.model)
    window, anchor = own.budget.window, own.budget.rows
    rows = case.requests if own.numerics.linear == "pinned" else max(case.requests, anchor)
    step = setting.predicted_s(work_of(setting, case.requests))
    canonical = setting.predicted_s(work_of(setting, rows, canonical=True))
    verify = setting.predicted_s(work_of(setting, max(anchor, window), canonical=True))
    if step is None or canonical is None or verify is None:
        return None
    passes = -(-case.deterministic * window // max(anchor, window))
    return step / min(canonical, ((window - 1) * step + passes * verify) / window)


def work_of(setting: Setting, rows: int, *, canonical: bool = False) -> Work:
    """The work of one token of each sequence, in the middle of its text."""
    size = setting.size
    own = setting.schedule_fn(size.model)
    schedule = own.with_budget(rows, 1) if canonical else own.fast(rows)
    return pass_work(size.model, schedule, windows=rows, context=size.prompt_len + size.new_tokens // 2)


def config_of(setting: Setting, case: Case) -> EngineConfig:
    """Room for a case; the engine chooses whether to draft, in windows of the schedule's length.

    Texts of random weights repeat themselves, which would flatter prompt lookup: it is left out.
    """
    own = setting.schedule_fn(setting.size.model)
    window = own.budget.window
    return EngineConfig(
        max_requests=case.requests,
        max_len=max(setting.size.prompt_len + setting.size.new_tokens, window),
        method=("none", SELF),
        num_speculative_tokens=max(window - 1, 1),
        schedule=own,
    )
