"""The TPU kernel in Pallas's simulator of TPU memories, which finds races and reads of what was never written."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from detspec.cache import Int8Pages
from detspec.errors import InputError
from detspec.ops.attention import pallas_tpu
from detspec.ops.attention.api import NO_POSITION, paged_attention
from detspec.ops.attention.scores import Scores
from detspec.schedule import Numerics
from tests.ops.attention_contract import AttentionContract, Problem, attended, make_problem, oracle


def simulated(problem: Problem, numerics: Numerics, **rule) -> tuple[np.ndarray, bool]:
    """Result of the kernel, and whether it raced; Pallas has no public name for the latter yet."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")):
        got = attended(problem, numerics, **rule)
    races = simulator.get_races() if hasattr(simulator, "get_races") else simulator.races
    return got, races.races_found


@pytest.mark.kernels
class TestPallasTpu(AttentionContract):
    """Every call runs in the simulator, must find no race, and starts from memory full of nan."""

    implementation = "pallas_tpu"
    interpret = True
    head_dim = 128
    dtype = "bfloat16"

    def run(self, problem: Problem, numerics: Numerics, **rule) -> np.ndarray:
        got, raced = simulated(problem, numerics, **rule)
        assert not raced
        return got

    @pytest.mark.parametrize(("block_pages", "num_splits", "sliding_window"), [(2, 1, 60), (4, 2, None)])
    def test_attention_in_blocks_of_pages_equals_float64(self, block_pages, num_splits, sliding_window):
        """Blocks that end within the table, past the last page of a sequence, and past the table."""
        shape = self.shape(G=3, W=1, K=2, Q=4)
        problem = self.problem(shape, ends=(9, 83, 96))
        numerics = self.numerics(shape, query_tile=1, block_pages=block_pages, num_splits=num_splits)
        self.check_value(self.run(problem, numerics, sliding_window=sliding_window), problem, sliding_window=sliding_window)

    def test_tiles_and_splits_without_pages_have_no_program(self, monkeypatch):
        """Reads the second of two splits, for sequences of one page, of three and of none, in memory full of nan."""
        shape = self.shape(G=3, W=1, K=2, Q=2)
        problem = self.problem(shape, ends=(9, 40, 40))
        problem.positions[2] = NO_POSITION
        numerics = self.numerics(shape, query_tile=1, num_splits=2)
        whole = self.run(problem, numerics)
        assert np.isfinite(whole).all()
        assert (whole[2] == 0).all()
        monkeypatch.setattr(pallas_tpu, "put_together", lambda works, attended, lse: (attended[:, 1], None))
        traced_anew = dataclasses.replace(numerics, reductions="native")
        second = self.run(problem, traced_anew)
        assert np.isnan(second[[0, 2]]).all()
        assert np.isfinite(second[1]).all()

    def test_attention_of_float32_pages_is_as_close_as_the_reference(self):
        """Products of float32 are not rounded to bfloat16 on the way."""
        shape = self.shape(G=2, W=5, K=2, Q=2)
        problem = make_problem(shape)
        got = self.run(problem, self.numerics(shape, cache_dtype="float32"))
        assert np.abs(got - oracle(problem)).max() <= 2e-6

    def test_a_kernel_that_does_not_wait_for_its_pages_is_caught(self, monkeypatch):
        shape = self.shape(G=2, W=8, K=2, Q=2)
        problem, numerics = self.problem(shape), self.numerics(shape, query_tile=8)
        copy = pltpu.make_async_copy
        monkeypatch.setattr(pltpu, "make_async_copy", lambda *refs: SimpleNamespace(start=copy(*refs).start, wait=lambda: None))
        got, raced = simulated(problem, numerics)
        assert raced or np.isnan(got).any()  # the simulator copies late: what was not waited for is not there


@pytest.mark.slow
@pytest.mark.kernels
class TestPallasTpuInInt8(AttentionContract):
    """Queries in float32, so that it is as close to float64 as the reference."""

    implementation = "pallas_tpu"
    interpret = True
    head_dim = 128
    dtype = "int8"

    def run(self, problem: Problem, numerics: Numerics, **rule) -> np.ndarray:
        got, raced = simulated(problem, numerics, **rule)
        assert not raced
        return got


@pytest.mark.parametrize(
    ("sizes", "changes", "dtype", "message"),
    [
        ({}, {}, "float16", "cache_dtype float16"),
        ({"H": 96}, {}, "bfloat16", r"k_pages must have shape \(4, 8, 128, 128\).*got \(4, 8, 128, 96\)"),
        ({"page": 8}, {}, "bfloat16", "at least 16 slots, got Numerics.page 8"),
        ({"N": 64, "K": 64}, {"block_pages": 8}, "bfloat16", "VMEM.*block_pages 8"),
        ({"page": 64}, {}, "int8", "int8 cache takes pages of 128 slots or a multiple, got 64"),
        ({"pages": 200_000}, {}, "bfloat16", "bytes for scalars.*2 windows and 200000 pages: lower max_len"),
        ({"N": 6}, {}, "bfloat16", "q has 6 heads.*multiple of the 8"),
        ({}, {"page": 64}, "bfloat16", r"v_pages must have shape \(4, 8, 64, 128\).*got \(4, 8, 128, 128\)"),
        ({"H": 256, "page": 64}, {"implementation": "reference"}, "bfloat16", r"k_pages must have shape \(4, 8, 256, 64\)"),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_take_is_refused_before_compilation(sizes, changes, dtype, message):
    size = {"N": 32, "K": 8, "H": 128, "page": 128, "pages": 6, **sizes}
    q = jax.ShapeDtypeStruct((2, 4, size["N"], size["H"]), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((4, size["K"], size["page"], size["H"]), dtype)
    if dtype == "int8":
        pages = Int8Pages(pages, jax.ShapeDtypeStruct(pages.shape[:3], jnp.float32))
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, size["pages"]), (2, 4))]
    numerics = Numerics(**{"page": size["page"], "implementation": "pallas_tpu", "cache_dtype": dtype, **changes})
    with pytest.raises(InputError, match=message):
        jax.eval_shape(lambda *args: paged_attention(*args, scores=Scores(1.0), numerics=numerics), q, pages, pages, *integers)
