"""The contract of attention over a paged cache, and the choice of its implementation by name."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from detspec.cache import KV, Int8Pages, Pages, append, numbers
from detspec.errors import InputError
from detspec.ops.attention.scores import Scores
from detspec.ops.attention.tiles import NO_POSITION as NO_POSITION  # part of the contract
from detspec.ops.implementations import operations
from detspec.schedule import Numerics

TAKE_INT8 = ("reference", "cpu", "pallas_tpu")  # implementations that read keys and values in int8


def paged_attention(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    page_tables: jax.Array,
    positions: jax.Array,
    *,
    scores: Scores,
    numerics: Numerics,
) -> jax.Array:
    """Causal attention of `G` windows of `W` queries, each over its own sequence in the cache.

    A query at absolute position `p` attends to positions `0 .. p` of its window's sequence, or with a sliding window to the
    last `sliding_window` of these. All of them must be written. The bits of a query depend on itself, these keys and values,
    and `numerics` (page, splits, implementation). They do not depend on other windows, on stale slots with finite contents,
    on the number of pages of other sequences, or on where pages lie.

    Args:
        q: `[G, W, N, H]`, in the activations' dtype.
        k_pages: `[num_pages, K, page, H]`, or `[num_pages, K, H, page]` if `numerics.key_slot_axis` is 3; in the cache's dtype.
            In int8 they are `Int8Pages` of these.
        v_pages: `[num_pages, K, page, H]`, in the cache's dtype. The `H` of pages is `numerics.cache_head_dim` of the queries'.
        page_tables: `[G, max_pages]` int32, each window's pages in order.
        positions: `[G, W]` int32. Within a window they ascend by one; a partial window repeats its last position. A window
            that needs no attention holds NO_POSITION. What repeats and NO_POSITION give is finite if scratch pages are.
        scores: how scores are computed.
        numerics: gives `query_tile`, `block_pages`, `num_splits`, `reductions` and `implementation`.

    Returns:
        `[G, W, N, H]` float32.

    Raises:
        InputError: shapes contradict each other, or the implementation does not support them.
    """
    return attention_and_lse(q, k_pages, v_pages, page_tables, positions, scores=scores, numerics=numerics)[0]


def attention_and_lse(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    page_tables: jax.Array,
    positions: jax.Array,
    *,
    scores: Scores,
    numerics: Numerics,
) -> tuple[jax.Array, jax.Array | None]:
    """`paged_attention`, and with `scores.lse` the logarithm of each query's sum of exponentiated scores, else None.

    That is float32 `[G, W, N]`. Queries that need no attention have something finite there, if scratch pages are.
    """
    _check(q, k_pages, v_pages, page_tables, positions, numerics)
    head_dim = q.shape[3]
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, numbers(v_pages).shape[3] - head_dim)))
    attend = operations(numerics).paged_attention
    attended, lse = attend(q, k_pages, v_pages, page_tables, positions, scores=scores, numerics=numerics)
    return attended[..., :head_dim], lse


def beside_sinks(attended: jax.Array, lse: jax.Array, sinks: jax.Array) -> jax.Array:
    """`attended [..., N, H]` by softmaxes that had one more score, `sinks [N]`, and nothing to attend to there (gpt-oss)."""
    share = jax.nn.sigmoid(lse - sinks.astype(jnp.float32).reshape((1,) * (lse.ndim - 1) + sinks.shape))
    return attended * share[..., None]


def append_fn(numerics: Numerics) -> Callable[..., KV]:
    """Returns the function that writes keys and values `[R, K, H]` of token rows into the pools of a layer.

    It is `(pools, k, v, page_ids [R], slots [R]) -> pools`. A token whose keys or values are not finite breaks the tokens that
    attend to it, and no other. So its keys become nan, which is masked with their scores. Its values become zeros, since those
    that are nan would reach tokens that mask them, as `0 * nan`.
    """
    ops = operations(numerics)
    in_int8 = numerics.cache_dtype == "int8"
    if ops.append is not None and not in_int8:
        return partial(ops.append, key_slot_axis=numerics.key_slot_axis)
    write: Callable[..., Pages] = ops.append_int8 if in_int8 else append

    def append_sound(pools: KV, k: jax.Array, v: jax.Array, page_ids: jax.Array, slots: jax.Array) -> KV:
        sound = (jnp.isfinite(k) & jnp.isfinite(v)).all((1, 2))[:, None, None]
        return KV(
            k=write(pools.k, jnp.where(sound, k, jnp.nan), page_ids, slots, slot_axis=numerics.key_slot_axis),
            v=write(pools.v, jnp.where(sound, v, jnp.zeros_like(v)), page_ids, slots),
        )

    return append_sound


def _check(
    q: jax.Array, k_pages: Pages, v_pages: Pages, page_tables: jax.Array, positions: jax.Array, numerics: Numerics
) -> None:
    """Raises `InputError` for arguments that contradict each other under any implementation."""
    in_int8 = numerics.cache_dtype == "int8"
    if in_int8 and numerics.implementation not in TAKE_INT8:
        raise InputError(
            f"the {numerics.implementation!r} attention takes keys and values in floats, got Numerics.cache_dtype 'int8': "
            f"{', '.join(map(repr, TAKE_INT8))} take it"
        )
    if {isinstance(k_pages, Int8Pages), isinstance(v_pages, Int8Pages)} != {in_int8}:
        raise InputError(
            f"k_pages and v_pages must be {'Int8Pages' if in_int8 else 'arrays'} for Numerics.cache_dtype "
            f"{numerics.cache_dtype!r}, got {type(k_pages).__name__} and {type(v_pages).__name__}"
        )
    named = {"k_pages": k_pages, "v_pages": v_pages}
    scales = {name: pages.scale.shape for name, pages in named.items() if isinstance(pages, Int8Pages)}
    k_pages = numbers(k_pages)
    v_pages = numbers(v_pages)
    for name, x, axes in (
        ("q", q, "[G, W, N, H]"),
        ("k_pages", k_pages, "[num_pages, K, page, H]"),
        ("v_pages", v_pages, "[num_pages, K, page, H]"),
        ("page_tables", page_tables, "[G, max_pages]"),
        ("positions", positions, "[G, W]"),
    ):
        if x.ndim != axes.count(",") + 1:
            raise InputError(f"{name} must be {axes}, got shape {x.shape}")
    G, W, N, H = q.shape
    num_pages, K, page, _ = v_pages.shape
    H = numerics.cache_head_dim(H)
    expected = {
        "k_pages": (k_pages.shape, (num_pages, K, page, H) if numerics.key_slot_axis == 2 else (num_pages, K, H, page)),
        "v_pages": (v_pages.shape, (num_pages, K, numerics.page, H)),
        "page_tables": (page_tables.shape, (G, page_tables.shape[1])),
        "positions": (positions.shape, (G, W)),
    }
    for name, (given, wanted) in expected.items():
        if given != wanted:
            raise InputError(
                f"{name} must have shape {wanted} for queries {q.shape}, pages of {numerics.page} slots and the "
                f"{numerics.implementation!r} attention, got {given}"
            )
    if N % K:
        raise InputError(f"q has {N} heads, which must be a multiple of the {K} heads of k_pages and v_pages")
    for name, given in scales.items():
        if given != (num_pages, K, numerics.page):
            raise InputError(f"the scales of {name} must have shape {(num_pages, K, numerics.page)}, got {given}")
    if k_pages.dtype != v_pages.dtype:
        raise InputError(f"k_pages and v_pages must have one dtype, got {k_pages.dtype} and {v_pages.dtype}")
    for name, x in (("page_tables", page_tables), ("positions", positions)):
        if x.dtype != jnp.int32:
            raise InputError(f"{name} must be int32, got {x.dtype}")
