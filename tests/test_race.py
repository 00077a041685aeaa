"""The race against other generators: its arithmetic, the model's other form, and a race of detspec with itself."""

import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import save_file

from detspec.errors import InputError
from tests.engine.byte_model import write_folder

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield


@pytest.fixture(scope="module")
def script(importable: None) -> ModuleType:
    spec = importlib.util.spec_from_file_location("race", SCRIPTS / "race.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(importable: None) -> ModuleType:
    return importlib.import_module("race_systems.results")


@pytest.fixture(scope="module")
def tensors(importable: None) -> ModuleType:
    return importlib.import_module("race_systems.llama_tensors")


def samples_of(results: ModuleType, whole_s: dict[str, list[float]], first_s: float) -> list:
    """A sample for each system and round at batch 4, all with the same time of first tokens."""
    return [results.Sample(4, name, i, s, first_s) for name, seconds in whole_s.items() for i, s in enumerate(seconds, 1)]


@pytest.mark.slow
def test_main_races_detspec_with_itself_and_names_what_is_absent(script, tmp_path, capsys):
    model = write_folder(tmp_path / "bytes")
    arguments = f"--folder {tmp_path / 'race'} --model {model} --systems detspec llama.cpp --env gguf=/bin/false"
    sizes = f"--batches 2 1 --prompt-len 8 --new-tokens 6 --rounds 2 --texts 3 --json {tmp_path / 'out' / 'race.json'}"
    assert script.main(f"{arguments} {sizes}".split()) == 0
    result = json.loads((tmp_path / "out" / "race.json").read_text())
    names = ["detspec deterministic", "detspec ordinary"]
    assert {(s["batch"], s["system"], s["round"]) for s in result["samples"]} == {
        (batch, name, number) for batch in (1, 2) for name in names for number in (1, 2)
    }
    assert all(sample["whole_s"] > 0 and sample["first_s"] > 0 for sample in result["samples"])
    assert list(result["systems"]) == names
    deterministic = result["systems"]["detspec deterministic"]
    assert deterministic["num_changed"] == 0
    assert deterministic["peak_bytes"] > result["model"]["params_bytes"] > 0
    assert "jax" in deterministic["versions"]
    assert "no output" in result["absent"]["llama.cpp"]
    table = capsys.readouterr().out
    assert table.count("| detspec deterministic |") == 3
    assert "not in the race: llama.cpp: no output" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--new-tokens 1", "--new-tokens must be at least 2, got 1"),
        ("--rounds 0", "--rounds must be at least 1, got 0"),
        ("--batches 1 0", "--batches must be at least 1, got 0"),
        ("--systems vllm", "--systems must include detspec"),
        ("--env vllm", "--env must be NAME=PYTHON"),
        ("--env nothing=/bin/true", "--env must be NAME=PYTHON, NAME one of detspec, "),
        ("--systems other", "invalid choice: 'other'"),
    ],
)
def test_parse_refuses_bad_input_by_name(script, capsys, arguments, message):
    with pytest.raises(SystemExit):
        script.parse(f"--folder x {arguments}".split())
    assert message in capsys.readouterr().err


def test_main_refuses_texts_longer_than_the_model_was_made_for(script, tmp_path):
    with pytest.raises(InputError, match=r"together must be at most 1024, .* got 1025"):
        script.main(f"--folder {tmp_path} --systems detspec --prompt-len 1000 --new-tokens 25".split())


def test_worker_that_fails_gives_its_error_and_stops_outside_its_turn(importable, tmp_path):
    process_module = importlib.import_module("race_systems.process")
    systems = importlib.import_module("race_systems.systems")
    limits = importlib.import_module("race_systems").Limits(1, 8, 1)
    process = process_module.Process(systems.System("x", "detspec", "missing"), Path(sys.executable), tmp_path, limits)
    try:
        with process.turn():
            pass
        stat = Path(f"/proc/{process._process.pid}/stat")
        deadline = time.monotonic() + 300
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with process.turn(), pytest.raises(RuntimeError, match=r"^ModuleNotFoundError: No module named 'race_systems.missing'"):
            process.wait_until_loaded()
    finally:
        process.close()
    assert process.peak_bytes() == 0


def test_turns_of_a_round_and_its_reverse(results):
    """detspec takes 2 and 4 s without first tokens, the other 1 and 4: speed ratios 1/2 and 1, so 0.75."""
    samples = samples_of(results, {"detspec deterministic": [3.0, 5.0], "a": [2.0, 5.0], "b": [9.0, 9.0]}, first_s=1.0)
    assert results.ratio(samples, 4, "a", "decode") == 0.75
    assert results.ratio(samples, 4, "a", "prefill") == 1.0
    assert results.ratio(samples, 4, "a", "whole") == pytest.approx((2 / 3 + 1) / 2)
    assert results.best_of_others(samples, 4, "whole") == "a"
    assert results.best_of_others(samples[:2], 4, "whole") is None


def test_texts_that_change_and_agree_until_the_first_difference(results):
    """The second text differs from its second token on, the third from its first on."""
    texts = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]
    others = [[1, 2, 3, 4], [1, 9, 3, 4], [9, 2, 3, 4]]
    assert results.num_changed(texts, others) == 2
    assert results.num_changed(texts, texts) == 0
    assert results.agreement(texts, others) == {
        "first_token": pytest.approx(2 / 3),
        "until_first_difference": pytest.approx((1 + 1 / 4) / 3),
    }


def test_table_shows_all_systems_and_the_best_of_the_others(results):
    """At batch 4 with 3 new tokens detspec takes 3 s, 1 s of it for first tokens; the other 2 s. So 4 tok/s and 1 s a step."""
    samples = samples_of(results, {"detspec deterministic": [3.0], "a": [2.0]}, first_s=1.0)
    described = {
        "peak_bytes": 3_000_000,
        "num_changed": 1,
        "agreement": {"first_token": 1.0, "until_first_difference": 0.5},
        "load_s": 0.25,
        "versions": {"package": "1.2"},
    }
    result = {
        "machine": {"cpu": "some processor", "load_average": 0.0},
        "model": {"num_params": 500_000, "dtype": "bfloat16", "params_bytes": 1_000_000, "cache_bytes": 500_000},
        "settings": {"batches": [4], "prompt_len": 2, "new_tokens": 3, "rounds": 1, "texts": 2, "threads": 1},
        "samples": [vars(sample) for sample in samples],
        "systems": {"detspec deterministic": described, "a": described | {"peak_bytes": 6_000_000}},
        "reference": "a",
        "absent": {"b": "no compiler"},
    }
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in results.table(result).splitlines()]
    assert ["4", "detspec deterministic", "4.0", "1000.00", "1000.0", "1.00", "1.00", "1.00", "1.00"] in cells
    assert ["4", "a *", "6.0", "500.00", "1000.0", "1.00", "0.50", "1.00", "0.67"] in cells
    assert ["a", "6", "4.00", "1", "100%", "50%", "0.2", "package 1.2"] in cells
    assert ["4", "0.50 (a)", "1.00 (a)", "0.67 (a)"] in cells
    assert ["not in the race: b: no compiler"] in cells
    assert any("0.50 times the memory of a" in row[0] for row in cells)


def test_markdown_is_aligned(results):
    assert results.markdown(["a", "b"], [["x", "10"], ["long", "2"]], "lr").splitlines() == [
        "| a    |  b |",
        "| ---- | -: |",
        "| x    | 10 |",
        "| long |  2 |",
    ]


def test_interleave_rope_moves_halves_of_each_head_next_to_each_other(tensors):
    rows = np.arange(12)[:, None] * np.array([[1, 100]])  # two heads of six rows
    assert tensors.interleave_rope(rows, 6)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert tensors.interleave_rope(rows, 6)[1].tolist() == [3, 300]


def test_rotation_of_interleaved_pairs_gives_the_same_scores(tensors):
    """A score does not depend on which pairs are rotated, if rows are reordered for them; otherwise it does."""
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 6, 4)) @ rng.normal(size=4)
    angles = 7 * 10.0 ** -np.arange(3)

    def rotate(x: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        out = np.empty_like(x)
        out[first] = x[first] * np.cos(angles) - x[second] * np.sin(angles)
        out[second] = x[first] * np.sin(angles) + x[second] * np.cos(angles)
        return out

    halves = np.arange(3), np.arange(3) + 3
    neighbours = 2 * np.arange(3), 2 * np.arange(3) + 1
    moved_query, moved_key = (tensors.interleave_rope(x[:, None], 6)[:, 0] for x in (query, key))
    score = rotate(query, *halves) @ key
    assert rotate(moved_query, *neighbours) @ moved_key == pytest.approx(score)
    assert rotate(query, *neighbours) @ key != pytest.approx(score)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("lm_head.weight", "output.weight"),
        ("model.layers.11.self_attn.q_proj.weight", "blk.11.attn_q.weight"),
        ("model.layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight"),
        ("model.layers.13.self_attn.k_norm.weight", "blk.13.attn_k_norm.weight"),
        ("model.layers.1.mlp.gate.weight", "blk.1.ffn_gate_inp.weight"),
        ("model.layers.2.mlp.experts.down_proj.weight", "blk.2.ffn_down_exps.weight"),
    ],
)
def test_gguf_name_is_llama_cpps(tensors, name, expected):
    assert tensors.gguf_name(name) == expected


def test_stack_experts_makes_one_tensor_of_a_layers_matrices_in_the_order_of_experts(tensors):
    """Two layers of eleven experts, whose names come in another order than their numbers."""
    names = sorted(f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight" for layer in range(2) for expert in range(11))
    parts = [(name, np.full((3, 2), index, np.uint16)) for index, name in enumerate(names)]
    norm = ("model.norm.weight", np.ones(2, np.uint16))
    found = dict(tensors.stack_experts([*parts, norm], 11))
    assert found.keys() == {"model.norm.weight", *(f"model.layers.{layer}.mlp.experts.up_proj.weight" for layer in range(2))}
    assert found["model.layers.1.mlp.experts.up_proj.weight"].shape == (11, 3, 2)
    order = [11, 12, 14, 15, 16, 17, 18, 19, 20, 21, 13]  # of the second layer: 0, 1, 10, 2, 3, ...
    assert found["model.layers.1.mlp.experts.up_proj.weight"][:, 0, 0].tolist() == order
    with pytest.raises(ValueError, match=r"experts are missing of model\.layers\.0\.mlp\.experts\.up_proj\.weight"):
        list(tensors.stack_experts(parts[1:], 11))


def test_read_safetensors_gives_bits_and_refuses_other_dtypes(tensors, tmp_path):
    data = {"__metadata__": {"format": "pt"}, "a": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [0, 4]}}
    header = json.dumps(data).encode()
    bits = np.array([[0x3F80, 0xC000]], np.uint16)  # 1 and -2
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bits.tobytes())
    ((name, found),) = tensors.read_safetensors(tmp_path)
    assert name == "a"
    assert found.dtype == np.uint16
    assert found.tolist() == bits.tolist()
    os.remove(tmp_path / "model.safetensors")
    save_file({"b": np.zeros(2, np.float32)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"b in .* must be BF16, got F32"):
        list(tensors.read_safetensors(tmp_path))
