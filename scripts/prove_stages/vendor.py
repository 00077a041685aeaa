"""Canonical attention and prefill in turns with the vendor's attention over contiguous keys and values.

The vendor's library may fail or hang, so this is a stage of its own.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from kernel_shapes import AttentionShape

from detspec.roofline import Work
from prove_stages.attention import ours, shapes
from prove_stages.ceilings import random
from prove_stages.journal import Entry
from prove_stages.programs import Measurement, Program, Setting
from prove_stages.timing import in_turns, ratio

LEAST_OF_VENDOR = 0.6  # in prefill, where both are bound by arithmetic


def programs(setting: Setting) -> Iterator[Program]:
    """The vendor's; cuDNN's compile only where cuDNN is, so XLA's stand for them elsewhere."""
    for shape in shapes(setting):
        yield vendors(shape, "xla")


def measurements(setting: Setting) -> Iterator[Measurement]:
    """Measures each shape, the prompt first."""
    for shape in reversed(shapes(setting)):
        yield Measurement(shape.name, partial(measure, setting, shape))


def measure(setting: Setting, shape: AttentionShape) -> Iterator[Entry]:
    """The vendor's time over ours."""
    library = "cudnn" if setting.platform == "gpu" else "xla"
    own, other = ours(setting, shape), vendors(shape, library)
    value = ratio(in_turns({"ours": own.call(), library: other.call()}, setting.size), library, "ours")
    bar = setting.bar(LEAST_OF_VENDOR) if shape.max_len == shape.window else None
    name = f"{shape.name}, of the vendor's speed"
    least = setting.predicted_ratio(other.work, own.work)
    yield Entry(name, value, "", bar, bound=setting.bound(own.work), note=f"the vendor's: {library}", predicted=least)


def vendors(shape: AttentionShape, library: str) -> Program:
    """jax's attention over contiguous keys and values, implemented by `library`."""
    G, W, S = shape.groups, shape.window, shape.max_len
    whole = (G, S, shape.num_kv_heads, shape.head_dim)

    def make() -> tuple[jax.Array, ...]:
        mask = np.arange(S - W, S)[:, None] >= np.arange(S)[None, :]
        return (
            random((G, W, shape.num_heads, shape.head_dim)),
            random(whole, 1),
            random(whole, 2),
            jnp.asarray(mask)[None, None],
        )

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        how = {"is_causal": True} if W == S else {} if W == 1 else {"mask": mask}
        return jax.nn.dot_product_attention(q, k, v, scale=shape.scores.scale, implementation=library, **how)

    heads = shape.num_heads * shape.head_dim
    seen = S * W - W * (W - 1) // 2  # by all queries of a window
    num_bytes = 2.0 * G * (2 * S * shape.num_kv_heads * shape.head_dim + 2 * W * heads)
    return Program(f"{library}'s {shape.name}", attend, make, work=Work(num_bytes, 4.0 * G * heads * seen), calls=50)
