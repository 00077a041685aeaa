"""CPU kernels under `jax.vmap`: each element has the bits that it has by itself, whichever arguments are mapped."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.cache import KV, Int8Pages
from detspec.ops import moves
from detspec.ops.attention import cpu as attention
from detspec.ops.attention.scores import Scores
from detspec.ops.experts import cpu as experts
from detspec.ops.linear import cpu as linear
from detspec.ops.linear import xla
from detspec.ops.linear.int8 import quantize
from detspec.ops.row_sum import cpu_sum
from detspec.schedule import Numerics

# Arrays are numpy's: each process that collects tests imports this file, and jax would compile for it.
RNG = np.random.default_rng(0)
SIZE = 3  # elements


def floats(*shape: int, dtype: Any = jnp.bfloat16) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def ints(*shape: int, below: int) -> np.ndarray:
    return RNG.integers(0, below, shape).astype(np.int32)


class Case(NamedTuple):
    """A kernel, its arguments, and which of them are mapped: 0 along their first axis, None not at all."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    axes: tuple[Any, ...]


X = floats(SIZE, 5, 48)
WEIGHT = floats(32, 48)
EXPERTS = floats(4, 32, 48)
PAGES = floats(SIZE, 4, 2, 16, 16)  # [num_pages, K, page, H] of each element
KEYS = PAGES.swapaxes(-1, -2)
NEW = floats(SIZE, 3, 2, 16)
PLACES = (np.asarray([2, 0, 3], np.int32), np.asarray([1, 15, 7], np.int32))
INT8_PAGES = Int8Pages(np.zeros((SIZE, 4, 2, 16, 16), np.int8), np.zeros((SIZE, 4, 2, 16), np.float32))
attend = partial(
    attention.paged_attention, scores=Scores(0.25, None, None, False), numerics=Numerics(page=16, implementation="cpu")
)
append = partial(moves.append, key_slot_axis=3)
CONTROL = "products of XLA with several weights"
CASES = {
    CONTROL: Case(xla.linear_f32, (floats(16, 333, dtype=jnp.float32), floats(SIZE, 48, 333, dtype=jnp.float32)), (None, 0)),
    "products": Case(lambda x, w: linear.linears_f32(x, [w, w]), (X, floats(SIZE, 32, 48)), (0, 0)),
    "products with one weight": Case(lambda x, w: linear.linears_f32(x, [w]), (X, WEIGHT), (0, None)),
    "products with several weights": Case(lambda x, w: linear.linears_f32(x, [w]), (X[0], floats(SIZE, 32, 48)), (None, 0)),
    "products of used rows": Case(
        lambda x, used: linear.linears_f32(x, [WEIGHT], used), (X, RNG.random((SIZE, 5)) < 0.5), (0, 0)
    ),
    "products in int8": Case(lambda x: linear.int8_linears_f32(x, [quantize(WEIGHT)]), (X,), (0,)),
    "products with experts": Case(
        lambda x, ids, w: experts.experts_f32(x, ids, [w, w]),
        (X, ints(SIZE, 5, 2, below=5), floats(SIZE, 4, 32, 48)),
        (0, 0, 0),
    ),
    "products with experts in int8": Case(
        lambda x, ids: experts.int8_experts_f32(x, ids, [quantize(EXPERTS)]), (X, ints(SIZE, 5, 2, below=5)), (0, 0)
    ),
    "sums": Case(partial(cpu_sum, cache_dtype="bfloat16"), (floats(SIZE, 5, 77, dtype=jnp.float32),), (0,)),
    "sums of products": Case(
        partial(cpu_sum, cache_dtype="bfloat16"), tuple(floats(SIZE, 5, 77, dtype=jnp.float32) for _ in range(2)), (0, 0)
    ),
    "attention": Case(
        attend, (floats(SIZE, 2, 4, 4, 16), KEYS, PAGES, ints(SIZE, 2, 2, below=4), ints(SIZE, 2, 4, below=32)), (0, 0, 0, 0, 0)
    ),
    "attention over one cache": Case(
        attend,
        (floats(SIZE, 2, 4, 4, 16), KEYS[0], PAGES[0], ints(2, 2, below=4), ints(2, 4, below=32)),
        (0, None, None, None, None),
    ),
    "writing pages": Case(append, (KV(KEYS, PAGES), NEW, NEW, *PLACES), (0, 0, 0, None, None)),
    "writing pages of one cache": Case(append, (KV(KEYS[0], PAGES[0]), NEW, NEW, *PLACES), (None, 0, 0, None, None)),
    "writing pages in int8": Case(moves.append_int8, (INT8_PAGES, NEW, *PLACES), (0, 0, None, None)),
    "copying pages": Case(moves.copy_pages, (PAGES, ints(SIZE, 1, below=2), 2 + ints(SIZE, 1, below=2)), (0, 0, 0)),
    "taking rows": Case(moves.take, (floats(SIZE, 9, 8), ints(SIZE, 4, below=9)), (0, 0)),
}


def elements(case: Case) -> list[tuple[Any, ...]]:
    """The arguments of each element."""
    args = list(zip(case.args, case.axes, strict=True))
    return [
        tuple(arg if axis is None else jax.tree.map(lambda leaf: leaf[index], arg) for arg, axis in args)  # noqa: B023
        for index in range(SIZE)
    ]


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of each case under `jax.vmap`, and those of each element by itself; two programs for all cases."""
    mapped = jax.jit(
        lambda all_args: {name: jax.vmap(CASES[name].fn, CASES[name].axes)(*args) for name, args in all_args.items()}
    )
    single = jax.jit(lambda of: {name: [CASES[name].fn(*args) for args in each] for name, each in of.items()})
    all_args = {name: case.args for name, case in CASES.items()}
    return mapped(all_args), single({name: elements(case) for name, case in CASES.items()})


def have_equal_bits(name: str, found: tuple[dict[str, Any], dict[str, Any]]) -> bool:
    mapped, single = (jax.tree.leaves(part[name]) for part in found)
    stacked = [np.stack(single[i :: len(mapped)]) for i in range(len(mapped))]
    assert all(len({element.tobytes() for element in leaf}) == SIZE for leaf in stacked[:1])  # elements differ
    return all(np.asarray(leaf).tobytes() == expected.tobytes() for leaf, expected in zip(mapped, stacked, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != CONTROL])
def test_kernel_under_vmap_has_the_bits_of_a_loop(name: str, found):
    assert have_equal_bits(name, found)


def test_products_of_xla_with_several_weights_have_other_bits(found):
    """The inverse control: XLA makes one product with all weights, whose sums have another order."""
    assert not have_equal_bits(CONTROL, found)


def test_kernel_has_no_derivative():
    with pytest.raises(ValueError, match=r"FFI call to `detspec_linear_BF16_.*` cannot be differentiated"):
        jax.eval_shape(jax.grad(lambda x: linear.linears_f32(x, [WEIGHT])[0].sum()), X[0])
