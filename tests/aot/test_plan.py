"""`detspec plan` end to end, with the real compilers."""

import json
from pathlib import Path

import pytest

from detspec.cli import main


def with_config(folder: Path, vocab_size: int) -> Path:
    """`folder` with the config of a two-layer Qwen3 0.6B with a small vocabulary; no weights."""
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_plan_prints_what_it_writes(tmp_path, capsys):
    """For a TPU; the plan for chips is one for GPUs."""
    folder = with_config(tmp_path, vocab_size=1024)
    file = folder / "plan.json"
    assert main(["plan", "--model", str(folder), "--target", "v6e:2x2", "--max-requests", "8", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(file.read_text())
    memory = result["memory"]
    for name in ("weights_bytes", "cache_bytes", "peak_bytes", "usable_bytes"):
        assert f"{memory[name] / 1e9:.2f} GB" in printed
    assert memory["weights_bytes"] + memory["cache_bytes"] < memory["peak_bytes"] < 2 * memory["weights_bytes"] + 1e9
    for name in ("draft_step", "canonical_pass"):
        assert result[name]["bound"] in printed
        assert result[name]["compiler"]["alias_bytes"] >= memory["cache_bytes"]
    assert f"{result['predicted']['canonical_tok_per_s']:,.0f} tok/s" in printed


@pytest.mark.slow
def test_plan_for_chips_prints_what_they_exchange(tmp_path, capsys):
    folder = with_config(tmp_path, vocab_size=1024)
    file = folder / "plan.json"
    options = ["--target", "h200", "--chips", "2", "--max-requests", "8", "--json", str(file)]
    assert main(["plan", "--model", str(folder), *options]) == 0
    printed = capsys.readouterr().out
    result = json.loads(file.read_text())
    assert [found["chips"] for found in result["numbers"]] == [1, 2]
    one, two = (found["memory"] for found in result["numbers"])
    assert two["cache_bytes"] == one["cache_bytes"] / 2
    assert two["weights_bytes"] < 1.02 * one["weights_bytes"] / 2
    for name in ("draft_step", "canonical_pass"):
        assert result[name]["equals_formula"]
        assert result[name]["added_floats"] == 0
    assert printed.count("as the formula says; 0 of them add floats") == 2


def test_plan_of_a_pass_whose_temporaries_do_not_fit_says_what_would(tmp_path, capsys):
    """Weights and cache fit, but the program with the logits of 524288 rows does not."""
    arguments = [
        "plan",
        "--model",
        str(with_config(tmp_path, vocab_size=4096)),
        "--target",
        "v5e:2x2",
        "--max-requests",
        "8",
        "--window",
        "512",
        "--group",
        "1024",
    ]
    assert main(arguments) == 2
    *progress, error = capsys.readouterr().err.splitlines()
    assert all(line.startswith("detspec: compiling") for line in progress)
    assert "GB of v5e:2x2, whose programs may use 16.9 GB: not even one request" in error
