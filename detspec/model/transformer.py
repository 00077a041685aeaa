"""The decoder over windows of a paged cache, for generation; and over whole sequences, for training."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from detspec.cache import KVCache
from detspec.config import ModelConfig
from detspec.model.layers import head_f32, logits_f32, run_layer, scale_embeddings, through_layers
from detspec.model.params import Params
from detspec.model.places import Where, place
from detspec.model.rows import RowOps, canonical_ops, training_ops
from detspec.ops import collectives
from detspec.ops.implementations import operations
from detspec.schedule import Numerics
from detspec.state import Injected, Riding, Windows

NO_RIDING = Riding()


class Pass(NamedTuple):
    """Results of a pass over windows; rows that pad it or are not wanted hold nothing of use."""

    logits_f32: jax.Array  # [R, V]; on chips this one's share of the rows, see `collectives.to_rows`
    cache: KVCache  # with what the windows left in the layers' pools
    tapped: jax.Array | None  # [G, W, D], the stream after `tap_layer` layers


def forward(
    params: Params,
    cfg: ModelConfig,
    windows: Windows,
    cache: KVCache,
    *,
    numerics: Numerics,
    riding: Riding = NO_RIDING,
    tap_layer: int | None = None,
) -> Pass:
    """Runs a pass over `G * W` token rows: writes their keys and values, then attends, layer by layer.

    Because a layer writes before it attends, several windows of one pass may hold consecutive spans of one sequence. Padding
    writes to the scratch page. `cache.length` is left as it is: the caller commits.

    Args:
        windows: token rows to feed; `tokens [G, W]`. Rows that are not `wanted` leave keys and values, and give nothing of use.
        cache: pages, and the page table that the windows' sequences refer to.
        numerics: fixes the order of the floating-point operations.
        riding: what riders put in: vectors `[G, W, D]`, and changes of the products of layers; the head's are left as they are.
        tap_layer: the number of layers after which the stream is wanted; nowhere if None.
    """
    G, W = windows.tokens.shape
    positions = windows.positions.reshape(-1)
    prepared = [kind.mixer.prepare(positions) for kind in cfg.kinds]
    places = last_places = place(windows, cache, numerics.page)
    ops = last_ops = canonical_ops(cfg, numerics, windows.used)
    if windows.wanted is not None:  # the last layer may do no more for the others than their keys and values
        last_ops = canonical_ops(cfg, numerics, windows.wanted)
        last_places = places.for_windows(windows.wanted.any(1))

    def run(index: int, layer_params: Params, x: jax.Array) -> tuple[jax.Array, Any]:
        is_last = index == cfg.num_layers - 1
        layer = cfg.layer(index)
        own_ops, out_ops = (
            some._replace(layer=index, adapt_fn=riding.adapt_fn) for some in (ops, last_ops if is_last else ops)
        )
        where = Where(windows, last_places if is_last else places, prepared[cfg.pattern[index]], numerics)

        def mix(normed: jax.Array) -> tuple[jax.Array, Any]:
            return layer.mixer.windows(layer_params, normed, where, cache.pools[index], own_ops, out_ops)

        return run_layer(layer, layer_params, x, mix, own_ops, out_ops)

    x = embedded(params, cfg, windows.tokens.reshape(-1), positions, numerics=numerics)
    streams, pools = through_layers(params, cfg, x, run, riding.inject)
    return Pass(
        logits_f32=logits_f32(params, cfg, streams[-1], last_ops),
        cache=cache.replace(pools=pools),
        tapped=None if tap_layer is None else streams[tap_layer].reshape(G, W, -1),
    )


def logits_fn(
    params: Params, cfg: ModelConfig, windows: Windows, stream: jax.Array, *, numerics: Numerics
) -> Callable[[], jax.Array]:
    """Returns a function for the logits `[R, V]` of a pass over `windows`; `stream [G, W, D]` is that after its last layer."""
    used = windows.used if windows.wanted is None else windows.wanted
    normed = last_normed(params, cfg, stream, numerics=numerics)
    return lambda: head_f32(params, cfg, normed, canonical_ops(cfg, numerics, used))


def last_normed(params: Params, cfg: ModelConfig, stream: jax.Array, *, numerics: Numerics) -> jax.Array:
    """The input `[R, D]` of the output head, given the stream `[G, W, D]` after the last layer.

    It is to be worked out in the program of the pass: XLA does not round what it hands from one to the other.
    """
    return canonical_ops(cfg, numerics).normed(stream.reshape(-1, stream.shape[-1]), params, "final_norm")


def embedded(params: Params, cfg: ModelConfig, tokens: jax.Array, positions: jax.Array, *, numerics: Numerics) -> jax.Array:
    """The stream `[R, D]` before the first layer, of `tokens [R]` at `positions [R]`."""
    x = scale_embeddings(cfg, lookup(params["embed"], tokens, numerics=numerics))
    if cfg.learned_positions:
        x = x + lookup(params["positions"], jnp.clip(positions, 0, cfg.max_position - 1), numerics=numerics)
    return x


def lookup(table: jax.Array, rows: jax.Array, *, numerics: Numerics) -> jax.Array:
    """`table[rows]` for `rows [R]`, of a `table [V, D]` that chips may share: each has `V/n` rows of it."""
    size = table.shape[0]
    place = rows - collectives.chip() * size
    take = operations(numerics).take
    if collectives.num_chips() == 1:
        return take(table, rows)
    found = take(table, jnp.clip(place, 0, size - 1))
    return collectives.select(found, (place >= 0) & (place < size))


def forward_sequences(
    params: Params, cfg: ModelConfig, tokens: jax.Array, *, inject: Injected | None = None, tap_layer: int | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Logits of whole sequences from position 0, differentiable; `inject` (`[B, T, D]`) and `tap_layer` as in `forward`.

    Returns:
        For `tokens [B, T]` int32, float32 `[B, T, V]`, and the stream `[B, T, D]` after `tap_layer` layers.
    """
    ops = training_ops(cfg)
    streams = sequence_streams(params, cfg, tokens, ops, inject)
    return logits_f32(params, cfg, streams[-1], ops), None if tap_layer is None else streams[tap_layer]


def sequence_streams(
    params: Params, cfg: ModelConfig, tokens: jax.Array, ops: RowOps, inject: Injected | None = None, *, remat: bool = False
) -> Sequence[jax.Array]:
    """The streams `[B, T, D]` of whole sequences `tokens [B, T]` after 0, 1, .. `L` layers, differentiable if `ops` are.

    With `remat` derivatives work out what is inside of a layer once more, instead of keeping it.
    """
    B, T = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    prepared = [kind.mixer.prepare(positions) for kind in cfg.kinds]

    def run(index: int, layer_params: Params, x: jax.Array) -> tuple[jax.Array, None]:
        layer = cfg.layer(index)

        def whole(layer_params: Params, x: jax.Array) -> jax.Array:
            def mix(normed: jax.Array) -> tuple[jax.Array, None]:
                return layer.mixer.whole(layer_params, normed, prepared[cfg.pattern[index]], ops), None

            return run_layer(layer, layer_params, x, mix, ops, ops)[0]

        return (jax.checkpoint(whole) if remat else whole)(layer_params, x), None

    x = scale_embeddings(cfg, ops.take(params["embed"], tokens))
    if cfg.learned_positions:
        x = x + ops.take(params["positions"], jnp.arange(T, dtype=jnp.int32))[None]
    return through_layers(params, cfg, x, run, inject)[0]
