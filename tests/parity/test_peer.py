"""The loop in PyTorch that `scripts/prove_on_device.py` sets next to ours: it is a Llama, and its stage runs on a CPU."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from detspec.config import ModelConfig, RopeScaling
from detspec.environment import default_schedule
from detspec.model.dense import dense_config, with_fields
from detspec.model.params import Params, init_params
from detspec.model.transformer import forward_sequences

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "scripts")]

from prove_stages import peer  # noqa: E402
from prove_stages.programs import Setting  # noqa: E402
from prove_stages.sizes import TINY  # noqa: E402
from prove_stages.torch_graphs import DecodeLoop, device_of, num_different  # noqa: E402
from prove_stages.torch_llama import TorchLayer, TorchLlama, random_cache, random_llama, rotations_of, step  # noqa: E402

CPU = torch.device("cpu")
LENGTH = 40  # longer than the rotary length before it was extended
SHAPE = dense_config(
    vocab_size=101,
    d_model=48,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=12,
    d_ff=56,
    dtype="float32",
    rope_scaling=RopeScaling("llama3", 8.0, original_max_position=16),
)
# Relative to the largest logit. float32: sums in another order, as in test_families.py. bfloat16 has 8 bits, and PyTorch rounds
# to them in more places than we do: products, gates, logits.
TOLERANCES = {"float32": 2e-5, "bfloat16": 3e-2}
sequences_of = jax.jit(forward_sequences, static_argnames="cfg")


def on_cpu(earlier: dict | None = None) -> Setting:
    """A rehearsal on the CPU, also where there is a GPU."""
    return Setting(TINY, "cpu", default_schedule, earlier or {})


def weights_of(cfg: ModelConfig, dtype: str) -> tuple[Params, TorchLlama]:
    """Random weights, for us and for PyTorch; norms differ from 1."""
    params = jax.tree.map(lambda leaf: leaf.astype("float32"), init_params(cfg, jax.random.key(0)))
    params = jax.tree.map(lambda leaf: leaf if leaf.ndim > 1 else leaf + jnp.linspace(-0.5, 0.5, leaf.size), params)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    def tensor(*arrays: jax.Array) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.asarray(a, np.float32) for a in arrays])).to(getattr(torch, dtype))

    layers = [
        TorchLayer(
            attn_norm=tensor(layer["attn_norm"]),
            qkv=tensor(layer["q"], layer["k"], layer["v"]),
            o=tensor(layer["o"]),
            mlp_norm=tensor(layer["mlp_norm"]),
            gate_up=tensor(layer["gate"], layer["up"]),
            down=tensor(layer["down"]),
        )
        for layer in params["layers"]
    ]
    rotations = rotations_of(cfg, LENGTH, CPU)
    embed, final_norm, head = (tensor(params[name]) for name in ("embed", "final_norm", "head"))
    return params, TorchLlama(cfg, embed, layers, final_norm, head, rotations)


def logits_step_by_step(model: TorchLlama, tokens: np.ndarray) -> np.ndarray:
    """Logits `[B, T, V]` of `tokens [B, T]`, one position a step; the cache holds nan wherever nothing was written."""
    cache = [(keys * math.nan, values * math.nan) for keys, values in random_cache(model.cfg, len(tokens), LENGTH, CPU)]
    steps = [step(model, cache, torch.from_numpy(column), position) for position, column in enumerate(tokens.T)]
    return torch.stack(steps, dim=1).float().numpy()


def off_by(got: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest logit."""
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_steps_over_a_cache_have_the_logits_of_whole_sequences_in_our_own_model(dtype):
    cfg = dataclasses.replace(SHAPE, dtype=dtype)
    params, model = weights_of(cfg, dtype)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (3, LENGTH))
    expected = np.asarray(sequences_of(params, cfg, jnp.asarray(tokens, jnp.int32))[0], np.float32)
    assert off_by(logits_step_by_step(model, tokens), expected) < TOLERANCES[dtype]


@pytest.mark.parametrize("changes", [{"rope_scaling": None}, {"norm_eps": 1e-2}, {"rope_theta": 9000.0}])
def test_steps_of_another_model_have_other_logits(changes):
    params, model = weights_of(SHAPE, "float32")
    other = with_fields(SHAPE, **changes)
    model = dataclasses.replace(model, cfg=other, rotations=rotations_of(other, LENGTH, CPU))
    tokens = np.random.default_rng(0).integers(0, SHAPE.vocab_size, (1, LENGTH))
    expected = np.asarray(sequences_of(params, SHAPE, jnp.asarray(tokens, jnp.int32))[0])
    assert off_by(logits_step_by_step(model, tokens), expected) > 10 * TOLERANCES["float32"]


def test_loop_feeds_each_step_with_the_tokens_of_the_last_and_begins_again_for_the_first_row():
    model = random_llama(SHAPE, LENGTH, CPU)
    first = torch.tensor([5, 7, 11])
    loop = DecodeLoop(model, random_cache(SHAPE, 4, LENGTH, CPU), first, LENGTH - 1)
    row = loop.first_row()
    chosen = loop.logits.argmax(-1)
    assert torch.equal(loop.tokens, chosen)
    assert not torch.equal(chosen, first)
    loop.call()
    assert num_different(loop.logits[0], row) > SHAPE.vocab_size // 2
    assert num_different(loop.first_row(), row) == 0


def test_loops_of_all_batches_have_one_first_row_up_to_rounding():
    setting = on_cpu()
    loops = peer.running(setting, peer.random_model(setting))
    alone, among = (loops(rows).first_row().float() for rows in (1, max(TINY.steps)))
    assert float((alone - among).abs().max()) < TOLERANCES["bfloat16"] * float(alone.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_are_different_by_their_bits(dtype):
    """Zeros of different sign are different, though equal; nan is the same, though not equal; so is 3."""
    one = torch.tensor([0.0, math.nan, 3.0, 1.0], dtype=dtype)
    assert num_different(one, torch.tensor([-0.0, math.nan, 3.0, 1.0078125], dtype=dtype)) == 2


def test_stage_names_a_torch_that_sees_no_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match=re.escape(f"torch {torch.__version__} sees no GPU, jax does")):
        device_of("gpu")


def test_figures_stand_next_to_ceilings_and_our_own_steps():
    """A step of 4 rows took us 2 ms. It has 4 x (2 x 174,848 + 4 x 16 x 128) operations, for as many weights, and for 16
    positions of 128 numbers: more than it reads bytes, and the device does 1e12 a second of either.
    """
    earlier = {
        "ceilings": {"copy": {"value": 1.0}, "product": {"value": 1.0}},
        "passes": {"step of 4 rows, 1 layer": {"value": 2.0}},
    }
    setting = on_cpu(earlier)
    found = {entry.name: entry for each in peer.measurements(setting) for entry in each.run()}
    assert all(torch.__version__ in entry.note for entry in found.values() if entry.unit)
    took = found["PyTorch without graphs, step of 4 rows, 1 layer"]
    assert found[f"{took.name}, over detspec's"].value == took.value / 2
    assert took.bound == "arithmetic"
    assert took.predicted == pytest.approx(0.001431552)
    assert "PyTorch without graphs, step of 1 rows, 1 layer, over detspec's" not in found
    assert found["PyTorch without graphs, logits that change in a second run"].value == 0
    assert found["PyTorch without graphs, gate_up 512 x 128, 16 rows"].bound == "arithmetic"


def test_stage_runs_in_its_own_process(tmp_path):
    script = ROOT / "scripts" / "prove_on_device.py"
    command = [sys.executable, str(script), "--out", str(tmp_path), "--size", "tiny", "--stages", "peer"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert lines[-1]["status"] == "done"
    names = [line["name"] for line in lines if line["kind"] == "measurement"]
    assert names == [each.name for each in peer.measurements(on_cpu())]
