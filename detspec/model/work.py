"""The work of one pass of a model: what it must read and multiply."""

import math

from detspec.cache import slot_bytes
from detspec.config import ModelConfig
from detspec.model.params import active_bytes, active_params
from detspec.roofline import Work
from detspec.schedule import Schedule


def pass_work(cfg: ModelConfig, schedule: Schedule, *, windows: int, context: int, chips: int = 1) -> Work:
    """The work of one pass of `schedule.budget.rows` token rows; on several chips, that of each.

    Active weights are read once and multiplied with every row, rows of padding too. A query tile reads the pages that it
    attends to once, and multiplies their contents twice. Logits are written and read once, in float32. Activations, new keys
    and values, and sampling are left out.

    Args:
        schedule: the schedule of this pass: its rows, window, query tile, page and cache dtype count.
        windows: windows that are not padding, at most `schedule.budget.groups`.
        context: positions that each token attends to, its own included.
        chips: chips that share the model, see `detspec.mesh`. Each reads its weights and the pages of its KV heads,
            multiplies for its own outputs and heads, and samples its share of the rows.
    """
    budget = schedule.budget
    numerics = schedule.numerics
    num_bytes = (active_bytes(cfg, rows=budget.rows) + 2 * 4 * budget.rows * cfg.vocab_size) / chips
    flop = 2 * budget.rows * active_params(cfg)
    tiles = windows * -(-budget.window // numerics.query_tile)
    own_kv_heads = cfg.num_kv_heads // math.gcd(cfg.num_kv_heads, chips)
    read_bytes = 2 * own_kv_heads * slot_bytes(cfg.head_dim, numerics)  # of a position
    for layer in range(cfg.num_layers):
        sliding = cfg.sliding_window_of(layer)
        seen = context if sliding is None else min(context, sliding)
        num_bytes += tiles * numerics.whole_pages(seen) * read_bytes
        flop += windows * budget.window * 4 * seen * cfg.num_heads * cfg.head_dim
    return Work(bytes=float(num_bytes), flop=flop / chips)
