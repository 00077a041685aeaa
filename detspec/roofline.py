"""What a pass must read and multiply, and how long that takes a device at its peaks: arithmetic, nothing is run or compiled.

Compilers' estimates do not serve for this: they count the body of a loop once and know of kernels what kernels tell them.
"""

import dataclasses

import jax.numpy as jnp

from detspec.config import ModelConfig
from detspec.schedule import Schedule
from detspec.targets import Target


@dataclasses.dataclass(frozen=True)
class Work:
    """Bytes of the device's memory that a pass reads and writes, and its floating-point operations."""

    bytes: float
    flop: float

    def seconds(self, target: Target) -> float:
        """Least time on `target`, memory and arithmetic each at their peaks and at once."""
        return max(self.bytes / target.bytes_per_s, self.flop / target.flop_per_s)

    def bound(self, target: Target) -> str:
        """Which of the two takes so long: "memory" or "arithmetic"."""
        return "memory" if self.bytes / target.bytes_per_s >= self.flop / target.flop_per_s else "arithmetic"


def pass_work(cfg: ModelConfig, schedule: Schedule, *, windows: int, context: int) -> Work:
    """The work of one pass of `schedule.budget.rows` token rows.

    Weights are read once and multiplied with every row, rows of padding too. A query tile reads the pages that it attends to
    once, and multiplies what they hold twice. Logits are written and read once, in float32. Activations, new keys and values,
    and what sampling does to logits are left out.

    Args:
        cfg: the model.
        schedule: the pass's own: its rows, window, query tile, page and cache dtype.
        windows: windows that are no padding, at most `schedule.budget.groups`.
        context: positions that each of them attends to, its own included.
    """
    lookup = 0 if cfg.tie_embeddings else cfg.vocab_size * cfg.d_model  # an embedding that is no head is not multiplied
    num_multiplied = cfg.num_params - lookup
    num_bytes = num_multiplied * cfg.jax_dtype.itemsize + 2 * 4 * schedule.budget.rows * cfg.vocab_size
    flop = 2 * schedule.budget.rows * num_multiplied
    tiles = windows * -(-schedule.budget.window // schedule.numerics.query_tile)
    slot_bytes = (
        2
        * cfg.num_kv_heads
        * schedule.numerics.cache_head_dim(cfg.head_dim)
        * jnp.dtype(schedule.numerics.cache_dtype).itemsize
    )
    for layer in range(cfg.num_layers):
        sliding = cfg.sliding_window_of(layer)
        seen = context if sliding is None else min(context, sliding)
        num_bytes += tiles * schedule.numerics.whole_pages(seen) * slot_bytes
        flop += windows * schedule.budget.window * 4 * seen * cfg.num_heads * cfg.head_dim
    return Work(bytes=float(num_bytes), flop=float(flop))
