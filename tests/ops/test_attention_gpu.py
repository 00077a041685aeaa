"""The GPU kernel in Pallas's simulator of GPU memories and barriers, which finds races and reads of what was never written."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from detspec.errors import InputError
from detspec.ops.attention import pallas_gpu
from detspec.ops.attention.api import NO_POSITION, paged_attention
from detspec.ops.attention.scores import Scores
from detspec.schedule import Numerics
from tests.gpu_simulator import simulated_programs_are_compiled_once  # noqa: F401
from tests.ops.attention_contract import AttentionContract, Problem, Shape, attended


def simulated(problem: Problem, numerics: Numerics, **rule) -> tuple[np.ndarray | None, bool]:
    """Result of the kernel, and whether it raced: jax 0.12 then gives no answer. Pallas has no public names for this yet."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as simulator
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode

    with force_gpu_interpret_mode(InterpretGPUParams(detect_races=True, uninitialized_memory="nan")):
        try:
            got = attended(problem, numerics, **rule)
        except jax.errors.JaxRuntimeError as error:
            simulator.reset_gpu_interpret_mode_state()
            if "RACE DETECTED" not in str(error):
                raise
            return None, True
    return got, simulator.get_races().races_found


@pytest.mark.kernels
class TestPallasGpu(AttentionContract):
    """Every call runs in the simulator, must find no race, and starts from memory full of nan."""

    implementation = "pallas_gpu"
    interpret = True
    dtype = "bfloat16"
    page = 64
    head_dim = 64

    def run(self, problem: Problem, numerics: Numerics, **rule) -> np.ndarray:
        got, raced = simulated(problem, numerics, **rule)
        assert not raced
        assert got is not None
        return got

    @property
    def SHAPE(self) -> Shape:
        return self.shape(G=4, W=8, K=1, Q=2)  # one CTA a window: each takes the simulator a tenth of a second

    @pytest.mark.parametrize(("block_pages", "num_splits", "sliding_window"), [(2, 1, 240), (4, 2, None)])
    def test_attention_in_blocks_of_pages_equals_float64(self, block_pages, num_splits, sliding_window):
        """Blocks that end within the table, past the last page of a sequence, and past the table."""
        shape = self.shape(G=3, W=1, K=2, Q=4)
        problem = self.problem(shape, ends=self.positions(9, 83, 96))
        numerics = self.numerics(shape, query_tile=1, block_pages=block_pages, num_splits=num_splits)
        self.check_value(self.run(problem, numerics, sliding_window=sliding_window), problem, sliding_window=sliding_window)

    def test_attention_of_heads_in_several_accumulators_equals_float64(self):
        shape = self.shape(G=2, W=3, K=1, Q=2, H=256)
        problem = self.problem(shape)
        self.check_value(self.run(problem, self.numerics(shape, query_tile=4)), problem)

    def test_attention_with_linear_biases_in_two_warpgroups_equals_float64(self):
        """96 rows: the second warpgroup's first one is of the fifth head."""
        shape = self.shape(G=1, W=16, K=1, Q=6)
        problem = self.problem(shape, ends=self.positions(90))
        self.check_value(self.run(problem, self.numerics(shape), alibi=True), problem, alibi=True)

    def test_tiles_and_splits_without_pages_write_nothing(self, monkeypatch):
        """Reads the second of two splits, for sequences of one page, of three and of none, in memory full of nan."""
        shape = self.shape(G=3, W=1, K=2, Q=2)
        problem = self.problem(shape, ends=self.positions(9, 40, 40))
        problem.positions[2] = NO_POSITION
        numerics = self.numerics(shape, query_tile=1, num_splits=2)
        whole = self.run(problem, numerics)
        assert np.isfinite(whole).all()
        assert (whole[2] == 0).all()
        monkeypatch.setattr(pallas_gpu, "put_together", lambda works, attended, lse: (attended[:, 1], None))
        traced_anew = dataclasses.replace(numerics, reductions="native")
        second = self.run(problem, traced_anew)
        assert np.isnan(second[[0, 2]]).all()
        assert np.isfinite(second[1]).all()

    def test_a_kernel_that_waits_for_nothing_is_caught(self, monkeypatch):
        shape = self.shape(G=2, W=4, K=1, Q=2)
        problem, numerics = self.problem(shape, ends=self.positions(83, 96)), self.numerics(shape, query_tile=4)
        monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None)
        assert simulated(problem, numerics)[1]


@pytest.mark.parametrize(
    ("sizes", "changes", "dtype", "message"),
    [
        ({}, {}, "float32", "bfloat16 or float16 cache, got cache_dtype float32"),
        ({}, {}, "int8", "'pallas_gpu' attention takes keys and values in floats, got Numerics.cache_dtype 'int8'"),
        ({"H": 320}, {}, "bfloat16", "head_dim of 64, 128, 192 or 256, got 320"),
        ({"page": 32}, {}, "bfloat16", "multiple of 64 slots, got Numerics.page 32"),
        ({}, {"block_pages": 4}, "bfloat16", "at most 256 slots per step, got block_pages 4 of Numerics.page 128"),
        ({}, {"query_tile": 64}, "bfloat16", "128 query rows in a tile, got query_tile 64 of 4 heads a KV head"),
        ({"H": 256}, {}, "bfloat16", "232,448 bytes of shared memory, and would need .* for a head_dim of 256, pages of 128"),
        ({"N": 6}, {}, "bfloat16", "q has 6 heads.*multiple of the 8"),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_take_is_refused_before_compilation(sizes, changes, dtype, message):
    size = {"N": 32, "K": 8, "H": 128, "page": 128, **sizes}
    q = jax.ShapeDtypeStruct((2, 4, size["N"], size["H"]), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((4, size["K"], size["page"], size["H"]), dtype)
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 6), (2, 4))]
    numerics = Numerics(**{"page": size["page"], "implementation": "pallas_gpu", "cache_dtype": dtype, **changes})
    with pytest.raises(InputError, match=message):
        jax.eval_shape(lambda *args: paged_attention(*args, scores=Scores(1.0), numerics=numerics), q, pages, pages, *integers)


@pytest.mark.parametrize(("W", "expected"), [(1, (1, 8, 5)), (5, (1, 24, 5)), (256, (1, 64, 5))])
def test_rows_computed_stay_while_rows_copied_follow_the_window(W, expected):
    """Llama 8B: 16 positions of 4 heads are 64 rows; a page's keys are 32 KiB, of which five fit next to 53 KiB of the rest."""
    q = jax.ShapeDtypeStruct((2, W, 32, 128), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((4, 8, 128, 128), jnp.bfloat16)
    numerics = Numerics(page=128, implementation="pallas_gpu", cache_dtype="bfloat16")
    assert pallas_gpu.cta_shape(q, pages, numerics) == expected
    rest = 64 * (128 * 2 + 128 * 2 + 64 * 4) + 5 * 1024
    assert pallas_gpu.smem_bytes(q, pages, numerics) == rest + 5 * 32 * 1024
