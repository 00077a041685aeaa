"""The benchmark: what is measured, in which order, and how it is summed up. Nothing here depends on speed."""

import json
from statistics import median

import pytest

from detspec.bench.bench import BenchSettings, bench_table, random_model, run_bench
from detspec.bench.bound import bound
from detspec.bench.rounds import Case, Variants, cases_of
from detspec.engine.engine import Engine
from detspec.engine.request import Completion
from detspec.errors import InputError
from detspec.model.dense import with_fields
from detspec.model.params import num_params
from detspec.presets import preset
from detspec.riders.counters import Stats
from tests.fakes import RANDOM_CFG

pytestmark = pytest.mark.slow

REFUSED_WINDOW = 8
CFG = with_fields(RANDOM_CFG, num_layers=1)


@pytest.fixture(scope="module")
def seen() -> list[tuple[int, int, str]]:
    """Messages to progress, filled by `result`."""
    return []


@pytest.fixture(scope="module")
def result(seen: list[tuple[int, int, str]]) -> dict:
    settings = BenchSettings(batches=(2,), shares=(0, 50, 100), windows=(4,), prompt_len=8, new_tokens=12, repeats=3)
    return run_bench(random_model(CFG), settings, on_progress=lambda *args: seen.append(args))


def test_run_bench_result_survives_json(result: dict):
    assert json.loads(json.dumps(result)) == result


def test_run_bench_names_versions_model_and_settings(result: dict):
    assert {"jax", "device_kind", "model", "schedule"} <= set(result["fingerprint"])
    assert result["model"]["num_params"] == num_params(CFG)
    assert result["settings"]["repeats"] == 3
    assert result["machine"]["read_bytes_per_s"] > 0
    assert result["machine"]["flop_per_s"] > 0


def test_run_bench_measures_every_mode_and_share(result: dict):
    labels = [case["label"] for case in result["batches"][0]["cases"]]
    others = ["dvr W=4 50 %", "dvr W=4 100 %", "auto 0 %", "auto 50 %", "auto 100 %"]
    assert labels == ["ordinary", "canonical", "batch_invariant", "ngram", *others]


def test_run_bench_runs_interleaved_after_a_warm_up(result: dict, seen: list[tuple[int, int, str]]):
    labels = [f"batch 2, {case['label']}" for case in result["batches"][0]["cases"]]
    warm_up = [f"{label}: compiling and certifying" for label in labels]
    assert [what for _, _, what in seen] == warm_up + 3 * labels
    assert [done for done, _, _ in seen] == list(range(4 * len(labels)))
    assert {total for _, total, _ in seen} == {4 * len(labels)}


def test_run_bench_ratios_are_medians_of_pairs_of_one_round(result: dict):
    ordinary, *others = result["batches"][0]["cases"]
    assert ordinary["ratios"] == [1.0, 1.0, 1.0]
    for case in others:
        assert len(case["tok_per_s"]) == 3
        assert case["ratios"] == [a / b for a, b in zip(case["tok_per_s"], ordinary["tok_per_s"], strict=True)]
        assert case["ratio_to_ordinary"] == median(case["ratios"])
        assert case["median_tok_per_s"] == median(case["tok_per_s"])


def test_run_bench_counts_what_verification_did(result: dict):
    cases = {case["label"]: case for case in result["batches"][0]["cases"]}
    assert cases["ordinary"]["num_verify_passes"] == 0
    assert cases["ordinary"]["draft_acceptance_rate"] is None
    # Canonical: one pass a token, 2 requests of 12 tokens in 3 rounds.
    assert cases["canonical"]["num_verify_passes"] == 72
    assert cases["canonical"]["num_draft_tokens"] == cases["batch_invariant"]["num_draft_tokens"] == 0
    assert cases["dvr W=4 50 %"]["num_draft_tokens"] > 0
    assert 1 < cases["dvr W=4 100 %"]["mean_acceptance_length"] <= 4


def test_run_bench_deterministic_results_are_one_variant(result: dict):
    assert result["batches"][0]["bits"]["deterministic_variants"] == 1
    assert result["batches"][0]["bits"]["ordinary_compared"] == 2


def test_run_bench_says_how_many_results_a_request_gave_in_each_mode(result: dict):
    assert result["variants"].keys() == {"ordinary", "canonical", "batch_invariant", "ngram", "dvr", "auto"}
    assert result["variants"]["canonical"] == result["variants"]["batch_invariant"] == 1
    assert bench_table(result).endswith(", ".join(f"{mode} {number}" for mode, number in result["variants"].items()))


def completion(id: str, logprob: float) -> Completion:
    return Completion(id, (1,), (2,), (logprob,), "", "length", "", Stats())


def test_variants_counts_results_by_their_bits():
    """Ordinary request "0" gives 0.0 and -0.0, two bit patterns, and request "1" one result three times."""
    variants = Variants()
    for id, logprob in (("0", 0.0), ("0", -0.0), ("1", -1.0), ("1", -1.0), ("1", -1.0)):
        variants.add("ordinary", completion(id, logprob))
    for id, logprob in (("0", 0.0), ("1", -1.0), ("2", -2.0)):
        variants.add("deterministic", completion(id, logprob))
    assert (variants.most("ordinary"), variants.most("deterministic"), variants.most("another")) == (2, 1, 0)
    assert variants.counts() == {"deterministic_variants": 1, "ordinary_compared": 2, "ordinary_differ": 1}


def test_bench_table_has_a_line_per_case_and_names_the_bound(result: dict):
    table = bench_table(result)
    entry = result["batches"][0]
    for case in entry["cases"]:
        assert f"\n  {case['label']} " in table
    assert f"bound by {entry['bound']['name']}" in table
    columns = {len(line) for line in table.splitlines() if line.startswith("  ") and "bits" not in line}
    assert len(columns) == 1


def test_run_bench_program_that_is_not_certified_is_a_result(monkeypatch: pytest.MonkeyPatch):
    def run(engine: Engine, requests):
        if engine.config.num_speculative_tokens == REFUSED_WINDOW - 1:
            raise InputError("not certified")
        yield from genuine(engine, requests)

    genuine = Engine.run
    monkeypatch.setattr(Engine, "run", run)
    model = random_model(CFG)
    shape = {"batches": (2,), "prompt_len": 8, "new_tokens": 12}  # that of `result`
    settings = BenchSettings(**shape, modes=("dvr",), shares=(100,), windows=(REFUSED_WINDOW,), repeats=1)
    result = run_bench(model, settings)
    ordinary, refused = result["batches"][0]["cases"]
    assert ordinary["refused"] is None
    assert refused["refused"] == "not certified"
    assert "refused: not certified" in bench_table(result)


def test_cases_shares_are_rounded_up_and_not_repeated():
    assert cases_of(1, ("auto",), (0, 10, 50, 100), (4,)) == [
        Case("ordinary", 1, 0, 0),
        Case("auto", 4, 0, 0),
        Case("auto", 4, 1, 100),
    ]
    assert [case.num_deterministic for case in cases_of(8, ("auto",), (10, 50, 100), (4,))] == [0, 1, 4, 8]


@pytest.mark.parametrize(
    ("read_share", "multiply_share", "name"),
    [(0.8, 0.1, "memory"), (0.1, 0.8, "compute"), (0.1, 0.1, "overhead"), (2.0, 0.1, "overhead")],
    ids=("reading", "multiplying", "neither", "weights in caches"),
)
def test_bound_names_what_explains_the_step(read_share: float, multiply_share: float, name: str):
    needs = bound(RANDOM_CFG, {"read_bytes_per_s": 1.0, "flop_per_s": 1.0}, batch=1, context=10, step_ms=1.0)
    step_s = 1e-3
    machine = {
        "read_bytes_per_s": needs["bytes"] / (read_share * step_s),
        "flop_per_s": needs["flop"] / (multiply_share * step_s),
    }
    assert bound(RANDOM_CFG, machine, batch=1, context=10, step_ms=1e3 * step_s)["name"] == name


def test_bound_counts_weights_once_and_keys_and_values_per_row():
    """100.7 M weights less an embedding of 16384 x 768 that is only looked up: 88,099,584."""
    machine = {"read_bytes_per_s": 1.0, "flop_per_s": 1.0}
    cfg = preset("random_100m")
    one, two = (bound(cfg, machine, batch=batch, context=100, step_ms=1.0) for batch in (1, 2))
    assert 2 * one["bytes"] - two["bytes"] == 2 * 88_099_584
    assert two["flop"] == 2 * one["flop"]
    assert one["flop"] == 2 * 88_099_584 + 4 * 100 * 12 * 12 * 64


def test_random_model_digest_names_config_and_seed():
    small = with_fields(RANDOM_CFG, num_layers=1)
    digests = {random_model(RANDOM_CFG).digest, random_model(RANDOM_CFG, seed=1).digest, random_model(small).digest}
    assert len(digests) == 3
    assert random_model(RANDOM_CFG).digest in digests


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modes": ("slow",)}, "unknown mode 'slow'; there are ordinary, canonical, batch_invariant, ngram, dvr, auto"),
        ({"shares": (101,)}, "percentages from 0 to 100, got 101"),
        ({"batches": ()}, "batches is empty"),
        ({"batches": (0,)}, "batches must be at least 1, got 0"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
    ],
)
def test_bench_settings_out_of_range_are_rejected(changes: dict, message: str):
    with pytest.raises(InputError, match=message):
        BenchSettings(**changes)
