"""Generation end to end, each way in turns with ordinary generation: how much of its speed determinism keeps."""

from collections.abc import Iterator
from functools import cache

from detspec.bench.bench import bench_prompts, random_model
from detspec.bench.rounds import Case, RunProgress, Variants, measure
from detspec.checkpoint.load import Model
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Needs, needed_plans
from prove_stages.journal import Entry
from prove_stages.programs import Measurement, Program, Setting, engine_programs

WINDOW = 8  # of the self draft
ROUNDS = 3
LEAST_OF_ORDINARY = 0.95  # all requests deterministic
LEAST_OF_SHARED = 0.99  # one request of nine deterministic
ORDINARY = Case("ordinary", 1, 0, 0)


def programs(setting: Setting) -> Iterator[Program]:
    """All programs that the engines of all cases may need; a device that certifies the cheapest plans needs fewer."""
    cfg = setting.size.model
    for requests, case in cases(setting):
        config = config_of(setting, requests, case)
        assert config.schedule is not None
        needs = Needs(case.num_deterministic > 0, case.num_deterministic < requests, False)
        yield from engine_programs(
            cfg, config, needed_plans(config, config.schedule, requests, needs), name=f"{requests}, {case.label}"
        )


def measurements(setting: Setting) -> Iterator[Measurement]:
    """One for each case."""

    @cache
    def model() -> Model:
        return random_model(setting.size.model)

    for requests, case in cases(setting):
        name = f"{requests} requests, {case.label}"
        yield Measurement(name, lambda requests=requests, case=case, name=name: run(setting, model(), requests, case, name))


def run(setting: Setting, model: Model, requests: int, case: Case, name: str) -> Iterator[Entry]:
    """Speed, its ratio to ordinary generation, and what speculation did."""
    size = setting.size
    prompts = bench_prompts(model, requests, size.prompt_len)
    result = measure(
        model, [ORDINARY, case], prompts, size.new_tokens, min(ROUNDS, size.repeats), RunProgress(0, None), Variants()
    )
    ordinary, found = result["cases"]
    if found["refused"]:
        raise RuntimeError(found["refused"])
    yield Entry(f"{requests} requests, ordinary, before {case.label}", ordinary["median_tok_per_s"], "tok/s")
    shared = case.num_deterministic < requests
    bar = setting.bar(LEAST_OF_SHARED if shared else LEAST_OF_ORDINARY) if case.mode == "auto" else None
    accepted = f"{found['draft_acceptance_rate']:.1%} of drafts accepted, " if found["num_draft_tokens"] else ""
    note = f"{found['median_tok_per_s']:.0f} tok/s, {accepted}{found['num_rollbacks']} rollbacks"
    yield Entry(f"{name}, of ordinary", found["ratio_to_ordinary"], "", bar, note=note)
    bits = result["bits"]
    note = f"{bits['ordinary_differ']} of {bits['ordinary_compared']} ordinary results differ"
    if case.mode != "batch_invariant":
        yield Entry(f"{name}, results of a request", float(bits["deterministic_variants"]), "", 1.0, True, note=note)


def cases(setting: Setting) -> list[tuple[int, Case]]:
    """Numbers of requests, each with what is compared with ordinary generation.

    Each method with all requests deterministic, and one case with a single deterministic request among ordinary ones.
    """
    requests, mixed = setting.size.requests, setting.size.mixed
    window = setting.schedule_fn(setting.size.model).budget.window
    return [
        (requests, Case("auto", window, requests, 100)),
        (mixed, Case("auto", window, 1, -(-100 // mixed))),
        (requests, Case("batch_invariant", 1, requests, 100)),
        (requests, Case("dvr", WINDOW, requests, 100)),
    ]


def config_of(setting: Setting, requests: int, case: Case) -> EngineConfig:
    """The engine of a case, as `detspec.bench.rounds` makes it."""
    own = setting.schedule_fn(setting.size.model)
    schedule = own.with_numerics(linear="pinned") if case.mode == "batch_invariant" else own
    methods = {"auto": "auto", "dvr": "self", "batch_invariant": "none"}
    return EngineConfig(
        max_requests=requests,
        max_len=max(setting.size.prompt_len + setting.size.new_tokens, own.budget.window, case.window),
        method=methods[case.mode],
        num_speculative_tokens=max(case.window - 1, 1),
        schedule=schedule,
    )
