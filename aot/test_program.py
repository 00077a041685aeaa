"""The whole generator as one program for devices that are not here: kernels inside, page pools updated in place."""

import dataclasses
from functools import partial

import jax
import pytest
from hlo import kernel_calls, pool_moves

from detspec.config import ModelConfig
from detspec.generate.insert import init_state
from detspec.generate.loop import generate_state
from detspec.model.params import Params, param_shapes
from detspec.presets import preset
from detspec.state import GenState
from detspec.targets import Compiled, canonical_schedule, compile_for, target

CFG = dataclasses.replace(preset("qwen3_0_6b"), num_layers=2, vocab_size=8192)  # sampling compiles slowly on large ones
ROWS, MAX_LEN = 23, 1000  # 1 + 23 * 8 pages: 185 * 8 * 128 * 128 elements, which no other array has


def compiled_generator(cfg: ModelConfig, name: str, *, keep_old_cache: bool = False) -> tuple[Compiled, GenState]:
    """`generate_state` with a donated state: prefill, then draft, canonical pass and commit in a loop."""
    schedule = canonical_schedule(target(name), head_dim=cfg.head_dim)

    def program(params: Params, state: GenState):
        old = state.cache
        state = generate_state.__wrapped__(params, cfg, state, schedule=schedule)
        return (state, old.k, old.v) if keep_old_cache else state

    room = {"max_rows": ROWS, "max_len": MAX_LEN, "max_stop_ids": 2, "max_logit_bias": 2}
    state = jax.eval_shape(partial(init_state, cfg, **room, schedule=schedule))
    return compile_for(target(name), program, param_shapes(cfg), state, donate=(1,)), state


@pytest.mark.parametrize("name", ["v5e:2x2", "v6e:2x2", "h200"])
def test_generator_compiles_with_kernels_inside_and_moves_no_page_pool(name: str):
    compiled, state = compiled_generator(CFG, name)
    hlo = compiled.program.as_text()
    pools = (*state.cache.k, *state.cache.v)
    # Prefill, draft and canonical pass attend once a layer; what the last layer of prefill would attend to, nobody reads.
    assert kernel_calls(hlo, target(name).platform) == 3 * CFG.num_layers - 1
    assert pool_moves(hlo, pools) == []
    pool_bytes = sum(pool.size * pool.dtype.itemsize for pool in pools)
    assert compiled.alias_bytes >= pool_bytes
    assert compiled.temp_bytes < pool_bytes / 2  # a copy of all keys


@pytest.mark.parametrize("name", ["v5e:2x2", "h200"])
def test_generator_that_keeps_its_old_cache_does_move_page_pools(name: str):
    compiled, state = compiled_generator(dataclasses.replace(CFG, num_layers=1), name, keep_old_cache=True)
    assert len(pool_moves(compiled.program.as_text(), (*state.cache.k, *state.cache.v))) >= 2
