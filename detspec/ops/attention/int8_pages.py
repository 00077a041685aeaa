"""Keys and values in int8: each of a token and KV head is rounded by itself, when it is written.

    key = scale[k] * values[k]          score = (q . values[k]) * scale[k]
    value = scale[v] * values[v]        sum of p * value = sum of (p * scale[v]) * values[v]

So attention multiplies with scales once for each slot, not once for each number. Values are exact in every float dtype.
"""

import jax
import jax.numpy as jnp

from detspec.cache import Int8Pages
from detspec.cache import append as append_numbers
from detspec.ops.linear.int8 import quantize


def append(pages: Int8Pages, new: jax.Array, page_ids: jax.Array, slots: jax.Array, *, slot_axis: int = 2) -> Int8Pages:
    """See `cache.append`; each row `[H]` of `new [R, K, H]` is rounded as `linear.int8.quantize` does."""
    rounded = quantize(new)
    num_pages, K, page = pages.scale.shape
    head = jnp.arange(K, dtype=jnp.int32)[None, :]
    places = (page_ids[:, None] * K + head) * page + slots[:, None]  # [R, K]
    scale = pages.scale.reshape(-1).at[places].set(rounded.scale, mode="promise_in_bounds")
    return Int8Pages(
        append_numbers(pages.values, rounded.values, page_ids, slots, slot_axis=slot_axis), scale.reshape(num_pages, K, page)
    )
