"""Layers with experts next to dense layers of the active size: milliseconds, and the ratio of times and of bytes read.

    JAX_PLATFORMS=cpu python scripts/measure_experts.py --rows 1 2 4 8 16 32 64

Both kinds take turns, in calls of two layers, so that some calls are not interrupted. Layers change from call to call, and rows
choose experts at random, so that weights come from memory and not from a cache. Neighbours on the same machine only ever add
time, so minima say most.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from detspec.ops.experts.api import experts_fn
from detspec.ops.linear.api import linears_fn
from detspec.ops.linear.int8 import QTensor, quantize
from detspec.schedule import Numerics

NUMERICS = Numerics(linear="pinned", implementation="cpu")
LAYERS = 2  # of a call
KEPT = 8  # layers with experts, in all; dense layers have as many bytes

Layer = tuple[Any, Any, Any]  # weights: gate, up and down


class Sizes(NamedTuple):
    """Sizes of the layers."""

    width: int
    expert_width: int
    num_experts: int
    active: int


def main() -> int:
    """Prints one line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="rows of a pass")
    parser.add_argument(
        "--sizes", type=int, nargs=4, default=[1024, 512, 64, 8], help="width, expert width, experts, active ones"
    )
    parser.add_argument("--dtype", default="bfloat16", help="of weights: a float dtype, or int8")
    parser.add_argument("--rounds", type=int, default=30, help="rounds")
    args = parser.parse_args()
    sizes = Sizes(*args.sizes)
    dense_out = sizes.active * sizes.expert_width
    dense = make_layers(KEPT * sizes.num_experts // sizes.active, (), dense_out, sizes.width, args.dtype)
    experts = make_layers(KEPT, (sizes.num_experts,), sizes.expert_width, sizes.width, args.dtype)
    print("rows  bytes  dense_ms  experts_ms  time  time / bytes")
    for rows in args.rows:
        bytes_ratio, dense_ms, experts_ms = measure(sizes, dense, experts, rows, args.rounds)
        of_row = f"{rows:4d}  {bytes_ratio:5.2f}  {dense_ms:8.3f}  {experts_ms:10.3f}  {experts_ms / dense_ms:4.2f}"
        print(f"{of_row}  {experts_ms / dense_ms / bytes_ratio:12.3f}", flush=True)
    return 0


def make_layers(number: int, leading: tuple[int, ...], hidden: int, width: int, dtype: str) -> list[Layer]:
    """Layers of random weights; they differ in nothing but their place in memory."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> Any:
        drawn = jnp.asarray(
            rng.standard_normal(shape, np.float32) / shape[-1] ** 0.5, jnp.bfloat16 if dtype == "int8" else dtype
        )
        return quantize(drawn) if dtype == "int8" else drawn

    layer = weight(*leading, hidden, width), weight(*leading, hidden, width), weight(*leading, width, hidden)
    return [jax.tree.map(lambda leaf: leaf.copy(), layer) for _ in range(number)]


@jax.jit
def run_dense(x: jax.Array, layers: Sequence[Layer]) -> jax.Array:
    """`x [R, width]` through dense layers."""
    linears_f32 = linears_fn(NUMERICS)
    for gate, up, down in layers:
        [y_f32] = linears_f32(hidden(*linears_f32(x, gate, up), x.dtype), down)
        x += y_f32.astype(x.dtype)
    return x


@jax.jit
def run_experts(x: jax.Array, ids: jax.Array, layers: Sequence[Layer]) -> jax.Array:
    """`x [R, width]` through layers with experts, which are `ids [LAYERS, R, k]`."""
    experts_f32 = experts_fn(NUMERICS)
    for of_layer, (gate, up, down) in zip(ids, layers, strict=True):
        [y_f32] = experts_f32(hidden(*experts_f32(x, of_layer, gate, up), x.dtype), of_layer, down)
        x += sum(y_f32[:, j] for j in range(y_f32.shape[1])).astype(x.dtype)
    return x


def hidden(gate_f32: jax.Array, up_f32: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rows of the down product."""
    return (jax.nn.silu(gate_f32) * up_f32).astype(dtype)


def measure(
    sizes: Sizes, dense: Sequence[Layer], experts: Sequence[Layer], rows: int, rounds: int
) -> tuple[float, float, float]:
    """The mean ratio of bytes that are read, and milliseconds of a dense layer and of one with experts that read so many.

    Both are of the round in which that kind took the least time for its bytes.
    """
    rng = np.random.default_rng(rows)
    dtype = jnp.bfloat16 if isinstance(dense[0][0], QTensor) else dense[0][0].dtype
    x = jnp.asarray(rng.standard_normal((rows, sizes.width)), dtype)
    ratios, found_ms = [], []
    for turn in range(rounds + 1):
        ids = rng.random((LAYERS, rows, sizes.num_experts)).argsort(-1)[..., : sizes.active].astype(np.int32)
        ratios.append(np.mean([len(np.unique(of_layer)) for of_layer in ids]) / sizes.active)
        dense_ms = layer_ms(run_dense, x, of_turn(dense, turn))
        found_ms.append((dense_ms, layer_ms(run_experts, x, jnp.asarray(ids), of_turn(experts, turn)) / ratios[-1]))
    least_ms = np.min(found_ms[1:], 0)  # the first round compiles
    ratio = float(np.mean(ratios))
    return ratio, float(least_ms[0]), float(least_ms[1]) * ratio


def of_turn(layers: Sequence[Layer], turn: int) -> Sequence[Layer]:
    """The layers of a call."""
    return layers[turn * LAYERS % len(layers) :][:LAYERS]


def layer_ms(run: Callable[..., jax.Array], *arguments: Any) -> float:
    """Milliseconds of one of `LAYERS` layers."""
    began = time.perf_counter()
    run(*arguments).block_until_ready()
    return 1e3 * (time.perf_counter() - began) / LAYERS


if __name__ == "__main__":
    raise SystemExit(main())
