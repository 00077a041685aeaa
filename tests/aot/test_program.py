"""The whole generator compiles to one program for missing devices, with kernels inside and page pools updated in place."""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import pytest
from fixed_order import PRODUCT, kernels, offences
from hlo import kernel_calls, pool_moves

from detspec.cache import KVCache
from detspec.config import ModelConfig, ThinkingConfig
from detspec.draft.draft_model import draft_model_source
from detspec.draft.source import Drafter, draft_fn
from detspec.generation.init import init_state
from detspec.generation.loop import Limits, dvr_step, generate_state, run
from detspec.generation.prefill import prefill
from detspec.model.dense import with_fields
from detspec.model.params import Params, param_shapes
from detspec.presets import preset
from detspec.schedule import Schedule
from detspec.state import GenState
from detspec.target_compilers import Compiled, compile_for
from detspec.targets import canonical_schedule, target
from detspec.thinking.think_prompt import think_prompt

# The heads of Qwen3 0.6B; compilers take long for wide layers and many tokens. Logits must not be as large as a pool.
CFG = with_fields(preset("qwen3_0_6b"), num_layers=2, d_model=256, d_ff=512, vocab_size=512)
SMALL = with_fields(CFG, num_layers=1, num_heads=8, num_kv_heads=4)  # a draft model
THINKING = ThinkingConfig(chunk=8, in_layer=1, out_layer=2, max_thought=4, end_id=0)
MAX_REQUESTS = 23  # 1 + 23 * 8 pages: 185 * 8 * 128 * 128 elements, which no other array has
MAX_LEN = 1000


def compiled_for(
    name: str, program: Callable[[Schedule, Params, GenState], Any], cfg: ModelConfig = CFG, **numerics: Any
) -> tuple[Compiled, GenState]:
    """Compiles `program` with a donated state; also returns the state's shapes."""
    schedule = canonical_schedule(target(name), cfg).with_numerics(**numerics)
    state = state_shapes(schedule, cfg)
    return compile_for(target(name), partial(program, schedule), param_shapes(cfg), state, donate=(1,)), state


def attention_calls(hlo: str, name: str) -> int:
    """Calls of kernels but those of products, which are pinned where a GPU's schedule is the default."""
    products = [kernel for kernel in kernels(hlo, apart=()) if kernel.name == PRODUCT]
    assert bool(products) == (target(name).platform == "gpu")
    return kernel_calls(hlo, target(name).platform) - len(products)


def state_shapes(schedule: Schedule, cfg: ModelConfig) -> GenState:
    """A state's shapes."""
    room = {"max_requests": MAX_REQUESTS, "max_len": MAX_LEN, "max_stop_ids": 2, "max_logit_bias": 2}
    return jax.eval_shape(partial(init_state, cfg, **room, schedule=schedule))


def generator(schedule: Schedule, params: Params, state: GenState) -> GenState:
    """Prefill, then draft, canonical pass and commit in a loop."""
    return generate_state.__wrapped__(params, CFG, state, schedule=schedule)


def prefill_that_keeps_the_old_cache(schedule: Schedule, params: Params, state: GenState) -> tuple[GenState, KVCache]:
    """Does what no program should: the old page pools must be copied before they are written to."""
    return prefill(params, CFG, state, schedule=schedule), state.cache


@pytest.mark.parametrize(
    ("name", "numerics"),
    [
        pytest.param("v6e:2x2", {}, marks=pytest.mark.slow, id="v6e"),
        pytest.param("v5e:2x2", {"cache_dtype": "int8"}, marks=pytest.mark.slow, id="v5e, int8"),
        pytest.param("h200", {}, id="h200"),
    ],
)
def test_generator_compiles_with_kernels_inside_and_moves_no_page_pool(name: str, numerics: dict[str, str]):
    compiled, state = compiled_for(name, generator, **numerics)
    hlo = compiled.program.as_text()
    pools = tuple(jax.tree.leaves(state.cache.pools))
    # Prefill, draft and canonical pass attend once a layer; what the last layer of prefill would attend to is never read.
    assert attention_calls(hlo, name) == 3 * CFG.num_layers - 1
    assert pool_moves(hlo, pools) == []
    pool_bytes = sum(pool.size * pool.dtype.itemsize for pool in pools)
    assert compiled.alias_bytes >= pool_bytes
    assert compiled.temp_bytes < pool_bytes / 2  # a copy of all keys


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v6e:2x2", pytest.param("h200", marks=pytest.mark.sweep)])
def test_steps_with_a_draft_model_move_neither_models_page_pools(name: str):
    schedule = canonical_schedule(target(name), CFG)
    source = draft_model_source(SMALL, 0.1)
    state = state_shapes(schedule, CFG)
    state = state.replace(draft=jax.eval_shape(partial(source.init, CFG, schedule), state))

    def steps(params: Params, own_params: Params, state: GenState) -> GenState:
        draft = draft_fn(Drafter(source, own_params), schedule)
        step = partial(dvr_step, params, CFG, draft_fn=draft, schedule=schedule)
        return run(state, lambda state: step(state)[0], limits=Limits(MAX_LEN))[0]

    hlo = compile_for(target(name), steps, param_shapes(CFG), param_shapes(SMALL), state, donate=(2,)).program.as_text()
    # The canonical pass and the draft model's decoding; its reading ends with the keys and values of its one layer.
    assert attention_calls(hlo, name) == CFG.num_layers + SMALL.num_layers
    held = state.draft.shared
    assert pool_moves(hlo, jax.tree.leaves((state.cache.pools, held.pools))) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e:2x2", "h200"])
def test_reading_with_thoughts_compiles_with_kernels_inside_and_moves_no_page_pool(name: str):
    cfg = dataclasses.replace(CFG, thinking=THINKING)

    def reader(schedule: Schedule, params: Params, state: GenState) -> GenState:
        return think_prompt(params, cfg, state, schedule=schedule)

    compiled, state = compiled_for(name, reader, cfg)
    hlo = compiled.program.as_text()
    # The backbone, the thinker over chunk and thought, and the compressor before and after the pass.
    assert attention_calls(hlo, name) == CFG.num_layers + 4
    pools = jax.tree.leaves(state.cache.pools)
    assert pool_moves(hlo, pools) == []
    assert compiled.alias_bytes >= sum(pool.size * pool.dtype.itemsize for pool in pools)


@pytest.mark.parametrize("weights", ["int8", None])
@pytest.mark.parametrize("name", ["v6e:2x2", "h200"])
def test_only_the_products_of_weights_in_int8_are_integers_and_no_such_weight_becomes_floats(name: str, weights: str | None):
    cfg = with_fields(CFG, d_ff=768, weights=weights)  # no other array has the shape of such a matrix

    def program(schedule: Schedule, params: Params, state: GenState) -> GenState:
        return prefill(params, cfg, state, schedule=schedule)

    compiled, _ = compiled_for(name, program, cfg)
    hlo = compiled.program.as_text()
    in_int8 = weights == "int8"
    assert bool(re.search(r"s8\[(2,)?768,256\]", hlo)) == in_int8
    assert bool(re.search(r"(bf16|f32)\[(2,)?768,256\]", hlo)) != in_int8
    assert bool(re.search(r"s32\[\d+,(768|1536)\]", hlo)) == in_int8
    left_to_xla = [offence for offence in offences(hlo) if offence.kind == "product that XLA may cut"]
    assert bool(left_to_xla) == (not in_int8 and target(name).platform == "tpu")


@pytest.mark.parametrize("name", ["v5e:2x2", "h200"])
def test_program_that_keeps_the_old_cache_does_move_page_pools(name: str):
    compiled, state = compiled_for(name, prefill_that_keeps_the_old_cache)
    pools = jax.tree.leaves(state.cache.pools)
    assert len(pool_moves(compiled.program.as_text(), pools)) >= len(pools)
