"""How a folder's weights become a model."""

import dataclasses
from typing import Any

from detspec.choices import WEIGHTS
from detspec.config import ModelConfig, check_flags
from detspec.errors import InputError
from detspec.model.dense import for_long_texts
from detspec.model.to_integer import with_weights


@dataclasses.dataclass(frozen=True)
class Loading:
    """Options of `detspec.load` that decide bits.

    Attributes:
        weights: one of `WEIGHTS`; None are those of the folder.
        long_texts: rotations as for texts beyond the original length, for all texts.
    """

    weights: str | None = None
    long_texts: bool = False

    def __post_init__(self) -> None:
        if self.weights not in (None, *WEIGHTS):
            raise InputError(f"weights must be one of {WEIGHTS}, or None for those of the folder, got {self.weights!r}")
        check_flags(self, "long_texts")

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords of `load`."""
        return dataclasses.asdict(self)

    def float_config(self, cfg: ModelConfig) -> ModelConfig:
        """The config of the weights in floats, of a folder's `cfg`; `InputError` if no long texts are to be had of it."""
        return for_long_texts(cfg) if self.long_texts else cfg

    def config(self, cfg: ModelConfig) -> ModelConfig:
        """The config of the model that is made of a folder's `cfg`; `InputError` if none can be."""
        return with_weights(self.float_config(cfg), self.weights)


AS_IT_IS = Loading()  # the model that a folder holds
