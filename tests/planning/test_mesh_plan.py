"""Predictions and refusals of a plan for several chips; the compilers are not asked, see tests/aot/test_mesh.py."""

import dataclasses
from types import SimpleNamespace

import pytest

from detspec.errors import InputError
from detspec.model.params import param_shapes, params_bytes
from detspec.planning import mesh_plan
from detspec.planning.mesh_plan import num_stages, numbers_of_chips, plan_chips
from detspec.planning.planning import predict
from detspec.planning.programs import Deployment, expected
from detspec.planning.tables import mesh_table
from detspec.presets import preset
from detspec.targets import canonical_schedule, target

QWEN, LLAMA = preset("qwen3_8b"), preset("llama3_3_70b")
V6E, V5P = target("v6e:2x2"), target("v5p:2x2x2")
SCHEDULE = canonical_schedule(V6E)


def answering(monkeypatch: pytest.MonkeyPatch, *, layer_temp: int = 1_000_000, more: str = "") -> list:
    """A compiler whose programs exchange what the formula says and `more`, and need 10 MB and `layer_temp` for each layer.

    Returns what it is asked: program, chips and layers.
    """
    asked = []

    def compile_program(name, deployed, chips):
        layers = deployed.cfg.num_layers
        asked.append((name, chips, layers))
        lines = [] if chips == 1 else list(expected(name, deployed, chips).elements())
        hlo = "\n".join(f"%x = {e.dtype}[{e.elements}] {e.kind}(%y), replica_groups=[1,{e.chips}]<=[{e.chips}]" for e in lines)
        return SimpleNamespace(
            argument_bytes=1000 * layers,
            output_bytes=100,
            alias_bytes=100,
            temp_bytes=10_000_000 + layer_temp * layers,
            code_bytes=5,
            seconds=1.0,
            hlo=hlo + more,
        )

    monkeypatch.setattr(mesh_plan, "compile_program", compile_program)
    return asked


def test_plan_compiles_two_depths_of_what_is_asked_and_one_of_smaller_numbers(monkeypatch):
    asked = answering(monkeypatch)
    stages = []
    plan_chips(Deployment(QWEN, V6E, SCHEDULE), 4, on_stage=stages.append)
    assert asked == [
        ("draft step", 4, 2),
        ("draft step", 4, 4),
        ("canonical pass", 4, 2),
        ("canonical pass", 4, 4),
        ("canonical pass", 1, 2),
        ("canonical pass", 2, 2),
    ]
    assert len(stages) == num_stages(QWEN, 4) == 4


def test_memory_and_collectives_of_all_layers_follow_from_two_depths(monkeypatch):
    """36 layers: 1000 bytes of arguments and 1 MB of temporaries each, 10 MB of temporaries without any, 5 bytes of code."""
    answering(monkeypatch)
    result = plan_chips(Deployment(QWEN, V6E, SCHEDULE), 4)
    assert result["canonical_pass"]["compiler"]["temp_bytes"] == 46_000_000
    assert result["canonical_pass"]["peak_bytes"] == 36_000 + 46_000_000 + 5
    assert result["canonical_pass"]["equals_formula"]
    gathers = [row for row in result["canonical_pass"]["exchanges"] if row["dtype"] == "bf16"]
    assert sum(row["count"] for row in gathers) == 4 * 36
    assert result["numbers"][-1]["memory"]["weights_bytes"] == pytest.approx(
        2 * 8_190_735_360 / 4, rel=2e-4
    )  # norms are copies


def test_program_that_exchanges_more_is_reported(monkeypatch):
    answering(monkeypatch, more="\n%z = f32[8] all-reduce(%y), replica_groups={{0,1,2,3}}")
    result = plan_chips(Deployment(QWEN, V6E, SCHEDULE), 4)
    assert not result["canonical_pass"]["equals_formula"]
    assert result["canonical_pass"]["added_floats"] == 1
    table = mesh_table(result)
    assert "NOT as the formula says; 1 of them add floats" in table


def test_model_that_fits_on_many_chips_alone_says_where_it_does_not(monkeypatch):
    """Weights of 141 GB: nothing is compiled for one chip of 102 GB."""
    asked = answering(monkeypatch)
    result = plan_chips(Deployment(LLAMA, V5P, SCHEDULE), 8)
    assert [(found["chips"], found["fits"]) for found in result["numbers"]] == [(1, False), (2, True), (4, True), (8, True)]
    assert 1 not in {chips for _, chips, _ in asked}
    table = mesh_table(result)
    for shown in ("does not fit", "as the formula says; 0 of them add floats", "nothing was run", "most tokens per second: 8"):
        assert shown in table


def test_rates_of_one_chip_are_those_of_a_plan_without_chips(monkeypatch):
    answering(monkeypatch)
    one = plan_chips(Deployment(QWEN, V6E, SCHEDULE), 4)["numbers"][0]
    alone = predict(QWEN, V6E, schedule=SCHEDULE, live=32, context=1024)["predicted"]
    assert one["predicted"] == {"gather": [alone, alone], "psum": [alone, alone]}


def test_more_overlap_is_faster_and_psum_exchanges_less(monkeypatch):
    answering(monkeypatch)
    result = plan_chips(Deployment(QWEN, V6E, SCHEDULE), 4)
    for key in ("draft_step", "canonical_pass"):
        found = result[key]
        assert found["at_once_ms"] < found["in_turn_ms"] == pytest.approx(found["chip_ms"] + found["exchange_ms"], rel=1e-9)
        assert 1 <= found["over_psum"][1] < 1.5


@pytest.mark.parametrize(
    ("chips", "message"),
    [
        (8, "8 chips were asked for, but v6e:2x2 has 4 devices"),
        (3, "cannot be cut over 3 chips: numbers that divide its"),
        (0, "chips must be an integer of at least 1, got 0"),
    ],
)
def test_numbers_of_chips_that_do_not_work_are_refused(chips: int, message: str, monkeypatch):
    asked = answering(monkeypatch)
    with pytest.raises(InputError, match=message):
        plan_chips(Deployment(QWEN, V6E, SCHEDULE), chips)
    assert asked == []


def test_numbers_that_are_compared_are_powers_of_two_and_the_one_asked_for():
    assert numbers_of_chips(QWEN, 8) == [1, 2, 4, 8]


def test_weights_in_int8_are_counted_with_their_scales_and_halved_by_two_chips(monkeypatch):
    """Only norms are not cut."""
    answering(monkeypatch)
    rounded = dataclasses.replace(QWEN, weights="int8")
    alone, halved = (
        plan_chips(Deployment(rounded, V6E, SCHEDULE), chips)["numbers"][-1]["memory"]["weights_bytes"] for chips in (1, 2)
    )
    assert alone == params_bytes(param_shapes(rounded))
    assert alone / 2 < halved < 0.501 * alone
