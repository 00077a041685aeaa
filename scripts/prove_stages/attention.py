"""Canonical attention and prefill, in turns with the vendor's attention over contiguous keys and values."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from kernel_shapes import AttentionShape

from prove_stages.ceilings import random
from prove_stages.journal import Entry
from prove_stages.paged import attention_program, of_model, schedule_of
from prove_stages.programs import Measurement, Program, Setting
from prove_stages.timing import in_turns, ratio, typical

LEAST_OF_VENDOR = 0.6  # in prefill, where both are bound by arithmetic


def programs(setting: Setting) -> Iterator[Program]:
    """Ours and the vendor's; cuDNN's compile only where cuDNN is, so XLA's stand for them elsewhere."""
    for shape in shapes(setting):
        yield ours(setting, shape)
        yield vendors(shape, "xla")


def measurements(setting: Setting) -> Iterator[Measurement]:
    """One for each shape."""
    for shape in shapes(setting):
        yield Measurement(shape.name, partial(measure, setting, shape))


def measure(setting: Setting, shape: AttentionShape) -> Iterator[Entry]:
    """Time of one shape, and the vendor's time over it."""
    library = "cudnn" if setting.platform == "gpu" else "xla"
    calls = {"ours": ours(setting, shape).call()}
    note = ""
    try:
        calls[library] = vendors(shape, library).call()
        jax.block_until_ready(calls[library]())
    except Exception as error:  # ours is measured without it, too
        del calls[library]
        note = f"{library} failed: {str(error).strip().splitlines()[0][:200]}"
    samples = in_turns(calls, setting.size)
    seconds = typical(samples, "ours")
    work = ours(setting, shape).work
    arithmetic = shape.window > 64
    rate = f"{work.flop / seconds / 1e12:.0f} TFLOP/s" if arithmetic else f"{work.bytes / seconds / 1e12:.2f} TB/s"
    bound = "arithmetic" if arithmetic else "bandwidth"
    yield Entry(shape.name, 1e6 * seconds, "us", bound=bound, note="; ".join(filter(None, (rate, note))))
    if library in calls:
        bar = setting.bar(LEAST_OF_VENDOR) if shape.max_len == shape.window else None
        value = ratio(samples, library, "ours")
        yield Entry(f"{shape.name}, of the vendor's speed", value, "", bar, bound=bound, note=f"the vendor's: {library}")


def shapes(setting: Setting) -> list[AttentionShape]:
    """Canonical passes at the end of the context, and a whole prompt."""
    size = setting.size
    passes = [of_model(size.cfg, f"canonical {g}x{w} at {size.context}", g, w, size.context) for g, w in size.canonical]
    return [*passes, of_model(size.cfg, f"prefill 1x{size.prefill}", 1, size.prefill, size.prefill)]


def ours(setting: Setting, shape: AttentionShape) -> Program:
    """The kernel over pages."""
    return attention_program(shape, schedule_of(shape, setting))


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

    return Program(f"{library}'s {shape.name}", attend, make, calls=50)
