"""Products with the weights of experts compile for the targets, in layers of published shapes, and copy none of the weights."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from compile_proof import TARGETS
from hlo import kernel_calls, pool_moves
from prove_stages.experts import numerics_of, shapes_of
from prove_stages.programs import Setting
from prove_stages.sizes import FULL, Experts

from detspec.generation.init import init_state
from detspec.generation.prefill import prefill
from detspec.model.dense import with_fields
from detspec.model.experts import MixtureOfExperts
from detspec.model.params import param_shapes
from detspec.ops.experts.api import experts_fn
from detspec.presets import preset
from detspec.target_compilers import Compiled, compile_for
from detspec.targets import canonical_schedule, target

MIXTRAL = Experts("Mixtral 8x7B", 8, 2, 4096, 14336)
PARTS = ("gate and up", "down")
CASES = [(name, size, 256) for name in (*TARGETS, "v5e:2x2") for size in (*FULL.experts, MIXTRAL)]
CASES += [(name, FULL.experts[0], rows) for name in ("h100", "v6e:2x2") for rows in (1, 32)]


def compiled(name: str, size: Experts, rows: int, part: str) -> tuple[Compiled, tuple[jax.ShapeDtypeStruct, ...]]:
    """Gate and up, or down, of a layer of `size`; and the weights."""
    gate, up, down = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes_of(size))
    x, weights = {"gate and up": ((rows, size.d_model), (gate, up)), "down": ((rows, size.active, size.d_ff), (down,))}[part]
    multiply = experts_fn(numerics_of(Setting.of_target(FULL, target(name))))
    ids = jax.ShapeDtypeStruct((rows, size.active), jnp.int32)
    return compile_for(target(name), multiply, jax.ShapeDtypeStruct(x, jnp.bfloat16), ids, *weights), weights


@pytest.mark.parametrize(("name", "size", "rows"), CASES, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("part", PARTS)
def test_experts_compile_for_target_without_a_copy_of_their_weights(name: str, size: Experts, rows: int, part: str):
    found, weights = compiled(name, size, rows, part)
    assert kernel_calls(found.hlo, target(name).platform) == (1 if target(name).platform == "gpu" else len(weights))
    assert pool_moves(found.hlo, weights) == []
    assert found.temp_bytes < 2 * weights[0].size / 10


@pytest.mark.parametrize("outputs", [96, 360])
def test_eighth_of_an_expert_is_not_padded_on_a_gpu(outputs: int):
    """The outputs of Qwen3 30B-A3B and gpt-oss 20B that one of eight chips has: less than a block, and a block that is cut."""
    multiply = experts_fn(numerics_of(Setting.of_target(FULL, target("h100"))))
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((32, 2048), (128, outputs, 2048)))
    found = compile_for(target("h100"), multiply, x, jax.ShapeDtypeStruct((32, 8), jnp.int32), weight)
    assert found.temp_bytes < weight.size  # half of its bytes


@pytest.mark.parametrize("part", PARTS)
def test_experts_on_gpus_spill_no_register(part: str, capfd, monkeypatch):
    """As ptxas says of a number of rows that is compiled nowhere else: a process keeps what it has compiled."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled("h100", FULL.experts[0], 48, part)
    assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", capfd.readouterr().out) == [("0", "0")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kernels"), [("h200", 2), ("v6e:2x2", 3)])
def test_pass_of_a_model_runs_the_kernels_of_experts_without_a_copy_of_their_weights(name: str, kernels: int):
    """Gate and up are one kernel on a GPU, two on a TPU. The last of two layers has none: prefill reads no logits."""
    experts = MixtureOfExperts(24, 4, 384, renormalised=True)
    cfg = with_fields(preset("qwen3_0_6b"), num_layers=2, d_model=256, vocab_size=512, experts=experts)
    schedule = canonical_schedule(target(name), cfg).with_numerics(linear="pinned")
    room = {"max_requests": 8, "max_len": 256, "max_stop_ids": 2, "max_logit_bias": 2}
    state = jax.eval_shape(partial(init_state, cfg, **room, schedule=schedule))
    params = param_shapes(cfg)
    hlo = compile_for(target(name), lambda params, state: prefill(params, cfg, state, schedule=schedule), params, state).hlo
    calls = [
        line for line in hlo.splitlines() if kernel_calls(line, target(name).platform) and re.search(r"bf16\[24,\d+,\d", line)
    ]
    assert len(calls) == kernels
    assert pool_moves(hlo, (params["layers"][0]["experts_up"],)) == []
