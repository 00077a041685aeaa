"""The work of one pass of a model: what it must read and multiply."""

from detspec.config import ModelConfig
from detspec.model.params import active_bytes, active_params
from detspec.roofline import PassShape, Work
from detspec.schedule import Schedule


def pass_work(cfg: ModelConfig, schedule: Schedule, *, windows: int, context: int, chips: int = 1) -> Work:
    """The work of one pass of `schedule.budget.rows` token rows; on several chips, that of each. See `PassShape`.

    Active weights are read once and multiplied with every row, rows of padding too. Layers add what their mixers read and
    multiply. Logits are written and read once, in float32. Activations, new keys and values, and sampling are left out.

    A chip multiplies for its own outputs and heads, and samples its share of the rows.
    """
    shape = PassShape(schedule, windows, context, chips)
    rows = schedule.budget.rows
    mixed = [layer.mixer.work(shape) for layer in cfg.layers]
    return Work(
        bytes=(active_bytes(cfg, rows=rows) + 2 * 4 * rows * cfg.vocab_size) / chips + sum(work.bytes for work in mixed),
        flop=2 * rows * active_params(cfg) / chips + sum(work.flop for work in mixed),
    )
