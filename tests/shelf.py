"""The shapes of what tests compile: few, so that tests share programs. A test takes its shape from here, or derives it."""

import dataclasses
from typing import Any, NamedTuple

from detspec.config import ModelConfig
from detspec.model.dense import dense_config
from detspec.schedule import Budget, Numerics, Schedule
from tests.fakes import RANDOM_CFG, TABLE_CFG
from tests.thinking.fakes import ALIBI_THINKER_CFG, TABLE_THINKER_CFG, THINKER_CFG


class Shape(NamedTuple):
    """All that decides which program is compiled, besides the draft."""

    cfg: ModelConfig
    schedule: Schedule
    batch: int
    length: int  # positions of a sequence

    @property
    def alone(self) -> "Shape":
        """Shape of a sequence alone, a token a window, in passes of as many rows: the plainest way, which others must equal."""
        return self._replace(schedule=self.schedule.with_budget(self.schedule.budget.rows, 1), batch=1)

    def with_numerics(self, **changes: Any) -> "Shape":
        """Returns the shape with some fields of `Numerics` changed."""
        return self._replace(schedule=self.schedule.with_numerics(**changes))

    def with_dtype(self, dtype: str) -> "Shape":
        """Returns the shape with weights and streams of `dtype`."""
        return self._replace(cfg=dataclasses.replace(self.cfg, dtype=dtype))


def _schedule(page: int, rows: int, window: int) -> Schedule:
    return Schedule(Numerics(page=page), Budget(rows, window))


# Answers are worked out by hand; two windows a pass.
TABLE = Shape(TABLE_CFG, _schedule(4, 8, 4), batch=5, length=24)
TABLE_THINKER = Shape(TABLE_THINKER_CFG, _schedule(8, 16, 4), batch=4, length=16)
# Few rows and many; more and fewer requests than windows in a pass; a window of a page. Two layers: keys and values of the
# first do not depend on what attention found.
FEW = Shape(RANDOM_CFG, _schedule(16, 16, 4), batch=3, length=48)
MANY = Shape(RANDOM_CFG, _schedule(16, 64, 8), batch=5, length=48)
PAGE_WIDE = Shape(RANDOM_CFG, _schedule(16, 64, 16), batch=5, length=48)
# In float32, because rounding to bfloat16 hides most differences.
CROWD = Shape(dataclasses.replace(RANDOM_CFG, dtype="float32"), _schedule(16, 64, 4), batch=64, length=48)
THINKER = Shape(THINKER_CFG, _schedule(16, 16, 4), batch=3, length=48)
ALIBI_THINKER = Shape(ALIBI_THINKER_CFG, _schedule(16, 16, 8), batch=2, length=48)
# Never run: weights and cache large enough to be told from the rest of the memory.
LARGE = Shape(dense_config(2048, 256, 4, 4, 2, 64, 688, tie_embeddings=True), _schedule(64, 64, 16), batch=8, length=512)
