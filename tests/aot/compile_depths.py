"""Seconds to compile one canonical pass by the number of layers: unrolled, as it runs, and scanned over stacked layers.

    .venv/aot/bin/python tests/aot/compile_depths.py --targets cpu v6e:2x2 h200 --layers 4 16 64

The scanned pass has one body: weights are stacked, all layers share one pool of pages, and the page table counts from the first
page of a layer. Its program does not grow; what it costs shows in the temporaries and the bytes that the compiler counts, since
a sliced weight may be copied before it is multiplied. Compile nothing else meanwhile.
"""

import argparse
import os
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # jax must not look for the devices compiled for

import time

import jax
import jax.numpy as jnp

from detspec.cache import KV, KVCache, init_cache
from detspec.config import ModelConfig
from detspec.environment import default_schedule
from detspec.model.dense import with_fields
from detspec.model.layers import logits_f32, run_layer, scale_embeddings
from detspec.model.params import Params, param_shapes
from detspec.model.places import Where, place
from detspec.model.rows import canonical_ops
from detspec.model.transformer import forward, lookup
from detspec.presets import preset
from detspec.schedule import Schedule
from detspec.state import Windows
from detspec.target_compilers import compile_for, compilers
from detspec.targets import canonical_schedule, target

ROOM = {"max_requests": 8, "max_len": 2048}


def main() -> None:
    """Prints a line for each pass."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=["cpu", "v6e:2x2", "h200"], metavar="NAME", help='targets, or "cpu"')
    parser.add_argument("--layers", nargs="+", type=int, default=[4, 16, 64], help="depths")
    parser.add_argument("--preset", default="qwen3_0_6b", help="the model whose layers they are")
    args = parser.parse_args()
    print(compilers())
    print(f"{'target':10}{'layers':>8} {'pass':10}{'compile s':>11}{'temporaries MB':>16}{'GB accessed':>13}")
    for name in args.targets:
        for layers in args.layers:
            cfg = with_fields(preset(args.preset), num_layers=layers)
            schedule = default_schedule() if name == "cpu" else canonical_schedule(target(name), cfg)
            for kind, program in (("unrolled", unrolled), ("scanned", scanned)):
                seconds, temporaries, accessed = compiled(name, partial(program, cfg, schedule), *shapes(cfg, schedule, kind))
                print(
                    f"{name:10}{layers:8} {kind:10}{seconds:11.1f}{temporaries / 1e6:16.1f}{accessed / 1e9:13.2f}", flush=True
                )


def compiled(name: str, program: Any, *args: Any) -> tuple[float, int, float]:
    """Seconds to compile, bytes of temporaries, and bytes accessed as the compiler counts them; the cache is donated."""
    if name != "cpu":
        found = compile_for(target(name), program, *args, donate=(2,))
        return found.seconds, found.temp_bytes, found.accessed_bytes or 0.0
    lowered = jax.jit(program, donate_argnums=(2,)).lower(*args)
    began = time.perf_counter()
    done = lowered.compile()
    seconds = time.perf_counter() - began
    memory = done.memory_analysis()
    assert memory is not None
    return seconds, memory.temp_size_in_bytes, (done.cost_analysis() or {}).get("bytes accessed", 0.0)


def shapes(cfg: ModelConfig, schedule: Schedule, kind: str) -> tuple[Params, Windows, KVCache]:
    """Arguments of a pass: weights, windows and cache, as shapes."""
    G, W = schedule.budget.groups, schedule.budget.window
    int32 = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    windows = Windows(tokens=int32((G, W)), sequence=int32((G,)), start=int32((G,)), count=int32((G,)))
    params: Params = param_shapes(cfg)
    cache = jax.eval_shape(partial(init_cache, cfg, **ROOM, numerics=schedule.numerics))
    if kind == "scanned":

        def stack(*leaves: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype)

        def join(pools: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((len(pools) * pools[0].shape[0], *pools[0].shape[1:]), pools[0].dtype)

        params = {**params, "layers": jax.tree.map(stack, *params["layers"])}
        cache = cache.replace(pools=(KV(*map(join, zip(*cache.pools, strict=True))),))
    return params, windows, cache


def unrolled(cfg: ModelConfig, schedule: Schedule, params: Params, windows: Windows, cache: KVCache) -> Any:
    """The pass as it runs."""
    logits, cache, _ = forward(params, cfg, windows, cache, numerics=schedule.numerics)
    return logits, cache


def scanned(cfg: ModelConfig, schedule: Schedule, params: Params, windows: Windows, cache: KVCache) -> Any:
    """Runs a pass with one body for all layers, which must be alike."""
    numerics = schedule.numerics
    places = place(windows, cache, numerics.page)
    layer = cfg.layer(0)
    prepared = layer.mixer.prepare(windows.positions.reshape(-1))
    ops = canonical_ops(cfg, schedule.numerics)
    num_pages = cache.num_pages // cfg.num_layers

    def body(carry: tuple[jax.Array, KV], item: tuple[Any, jax.Array]) -> tuple[Any, None]:
        x, pools = carry
        layer_params, index = item
        first = index * num_pages
        moved = places._replace(tables=places.tables + first, page_ids=places.page_ids + first)
        where = Where(windows, moved, prepared, numerics)

        def mix(normed: jax.Array) -> tuple[jax.Array, KV]:
            return layer.mixer.windows(layer_params, normed, where, pools, ops, ops)

        return run_layer(layer, layer_params, x, mix, ops, ops), None

    x = scale_embeddings(cfg, lookup(params["embed"], windows.tokens.reshape(-1), numerics=numerics))
    items = params["layers"], jnp.arange(cfg.num_layers, dtype=jnp.int32)
    (x, pools), _ = jax.lax.scan(body, (x, cache.pools[0]), items)
    return logits_f32(params, cfg, x, ops), cache.replace(pools=(pools,))


if __name__ == "__main__":
    main()
