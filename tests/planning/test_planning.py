"""Predictions and refusals of a plan; the compilers are not asked, see tests/aot/test_plan.py."""

import jax
import pytest

from detspec.errors import InputError
from detspec.model.params import pass_work
from detspec.planning import programs
from detspec.planning.planning import ACCEPTANCE, plan, predict
from detspec.planning.programs import Deployment
from detspec.planning.tables import plan_table
from detspec.presets import preset
from detspec.target_compilers import Compiled
from detspec.targets import canonical_schedule, target

V5E, V6E, H200 = (target(name) for name in ("v5e:2x2", "v6e:2x2", "h200"))
QWEN = preset("qwen3_8b")
SCHEDULE = canonical_schedule(V6E)
NEVER_ENDING = 1e30


def answering(monkeypatch: pytest.MonkeyPatch, answer) -> list:
    """Lets `answer` stand in for the compiler: a `Compiled`, or an error to raise. Returns what it is asked."""
    asked = []

    def compile_for(target, fn, *args, donate, options):
        asked.append((target, fn, args, donate))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(programs, "compile_for", compile_for)
    return asked


def compiled(peak_gb: float) -> Compiled:
    """A program that needs `peak_gb`, all of it temporaries."""
    return Compiled(
        program=None,
        seconds=2.0,
        argument_bytes=0,
        output_bytes=0,
        alias_bytes=0,
        temp_bytes=int(peak_gb * 1e9),
        code_bytes=0,
        flop=None,
        accessed_bytes=None,
    )


def test_plan_asks_for_two_programs_of_shapes_alone(monkeypatch):
    asked = answering(monkeypatch, compiled(30))
    plan(Deployment(QWEN, V6E, SCHEDULE, max_requests=32, max_len=1024))
    assert len(asked) == 2
    for _, _, args, donate in asked:
        assert {type(leaf) for leaf in jax.tree.leaves(args)} == {jax.ShapeDtypeStruct}
        assert donate == (1,)
        assert args[1].tokens.shape == (32, 1024)


def test_plan_says_what_memory_there_is_and_what_it_needs(monkeypatch):
    """Weights: 8.19 B of 2 bytes. Cache: 1 + 32 x 8 pages of 128 slots, 36 layers of 2 x 8 x 128 values of 2 bytes."""
    answering(monkeypatch, compiled(30))
    result = plan(Deployment(QWEN, V6E, SCHEDULE, max_requests=32, max_len=1024))
    assert result["memory"]["weights_bytes"] == 2 * 8_190_735_360
    assert result["memory"]["cache_bytes"] == 257 * 128 * 36 * 2 * 8 * 128 * 2
    assert result["memory"]["peak_bytes"] == 30e9
    in_int8 = plan(Deployment(QWEN, V6E, SCHEDULE.with_numerics(cache_dtype="int8"), max_requests=32, max_len=1024))
    assert in_int8["memory"]["cache_bytes"] == 257 * 128 * 36 * 2 * 8 * (128 + 4)  # a scale of 4 bytes for 128 values
    table = plan_table(result)
    for shown in ("16.38 GB", "4.85 GB", "30.00 GB", "33.54 GB", "memory", "nothing was run"):
        assert shown in table


def test_plan_that_does_not_fit_says_how_many_rows_would(monkeypatch):
    asked = answering(monkeypatch, compiled(NEVER_ENDING))
    with pytest.raises(
        InputError, match=r"128 requests needs 35\.7 GB of v6e:2x2, .* may use 33\.5 GB; (\d+) requests"
    ) as error:
        plan(Deployment(QWEN, V6E, SCHEDULE, max_requests=128, max_len=1024))
    assert asked == []  # nothing is compiled that cannot fit
    rows = int(str(error.value).split("GB; ")[1].split()[0])
    answering(monkeypatch, compiled(30))
    assert plan(Deployment(QWEN, V6E, SCHEDULE, max_requests=rows, max_len=1024))["settings"]["max_requests"] == rows
    with pytest.raises(InputError, match=f"{rows} requests of this length should fit"):
        plan(Deployment(QWEN, V6E, SCHEDULE, max_requests=rows + 1, max_len=1024))


def test_plan_of_weights_that_do_not_fit_says_how_many_devices_they_take():
    """Llama 3.3 70B: 141.1 GB over 33.54 GB."""
    with pytest.raises(InputError, match=r"weights alone take 141\.1 GB, at least 5 such devices"):
        plan(Deployment(preset("llama3_3_70b"), V6E, SCHEDULE))


def test_plan_whose_program_does_not_fit_counts_its_temporaries(monkeypatch):
    """40 GB over 33.54 GB is 6.46 GB too much: 43 rows of 151 MB."""
    answering(monkeypatch, compiled(40))
    with pytest.raises(InputError, match=r"64 requests needs 40\.0 GB .*; 21 requests of this length should fit"):
        plan(Deployment(QWEN, V6E, SCHEDULE, max_requests=64, max_len=1024))
    with pytest.raises(InputError, match="not even one request"):
        plan(Deployment(QWEN, V6E, SCHEDULE, max_requests=32, max_len=1024))


@pytest.mark.parametrize(
    "message",
    [
        "Ran out of memory on HBM, the total memory required for HLO temporaries (37.25G) exceeds available HBM (31.24G).",
        "Ran out of memory in memory space hbm. Used 37.25G of 31.24G hbm. Exceeded hbm capacity by 6.00G.",
    ],
)
def test_plan_turns_the_compilers_out_of_memory_into_a_refusal(message: str, monkeypatch):
    answering(monkeypatch, jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}"))
    with pytest.raises(InputError, match=r"needs 40\.0 GB .* may use 33\.5 GB; 21 requests"):
        plan(Deployment(QWEN, V6E, SCHEDULE, max_requests=64, max_len=1024))


@pytest.mark.parametrize(
    "message",
    ["INTERNAL: Mosaic failed", "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20.00M of 16.00M vmem."],
)
def test_plan_passes_on_other_errors_of_the_compiler(message: str, monkeypatch):
    answering(monkeypatch, jax.errors.JaxRuntimeError(message))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        plan(Deployment(QWEN, V6E, SCHEDULE, max_requests=32, max_len=1024))


@pytest.mark.parametrize(("name", "value"), [("max_requests", 0), ("max_len", -1), ("max_requests", True)])
def test_plan_refuses_what_is_no_number_of_rows_or_positions(name: str, value: int):
    with pytest.raises(InputError, match=f"{name}.*{value}"):
        plan(Deployment(QWEN, V6E, SCHEDULE, **{name: value}))


def test_predicted_rates_are_tokens_over_roofline_times():
    """16 windows take 16 of 20 rows, so verifying takes two passes, of 16 windows and of 4."""
    live, context = 20, 1024
    decode_s = pass_work(QWEN, SCHEDULE.fast(live), windows=live, context=context).seconds(H200)
    passes = [pass_work(QWEN, SCHEDULE, windows=windows, context=context).seconds(H200) for windows in (16, 4)]
    rates = predict(QWEN, H200, schedule=SCHEDULE, live=live, context=context)["predicted"]
    assert rates["ordinary_tok_per_s"] == pytest.approx(live / decode_s, rel=1e-12)  # another order of the same products
    lookup_s = pass_work(QWEN, SCHEDULE.with_budget(160, 8), windows=20, context=context).seconds(H200)
    assert rates["lookup_tok_per_s"] == pytest.approx(2 * live / lookup_s, rel=1e-12)
    committed = live * sum(ACCEPTANCE**i for i in range(16))
    assert rates["drafting_tok_per_s"] == pytest.approx(committed / (15 * decode_s + sum(passes)), rel=1e-12)


def test_best_split_is_the_fastest_of_all_that_the_budget_allows():
    result = predict(QWEN, V6E, schedule=SCHEDULE, live=4, context=1024)
    assert [(split["groups"], split["window"]) for split in result["splits"]] == [(256 >> i, 1 << i) for i in range(9)]
    best = max(result["splits"], key=lambda split: split["tok_per_s"])
    assert (best["groups"], best["window"]) == (result["predicted"]["best_groups"], result["predicted"]["best_window"])


def test_best_window_is_long_where_few_rows_are_live_and_one_where_a_pass_is_full():
    """A pass of 1024 rows is bound by arithmetic on v5e, and takes several decode steps. For 8 live rows drafts spread it over
    their windows; with as many rows live as the pass has, each is worth its place, and windows of one win."""
    wide = SCHEDULE.with_budget(1024, 16)
    assert predict(QWEN, V5E, schedule=wide, live=8, context=256)["predicted"]["best_window"] > 1
    assert predict(QWEN, V5E, schedule=wide, live=1024, context=256)["predicted"]["best_window"] == 1


def test_splits_longer_than_a_row_are_left_out():
    splits = predict(QWEN, V6E, schedule=SCHEDULE, live=4, context=100)["splits"]
    assert max(split["window"] for split in splits) == 64
