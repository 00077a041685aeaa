"""Pallas's simulator of a GPU's memories and barriers."""

from typing import Any


def simulator() -> Any:
    """The simulator, which has no public name in jax 0.10."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()
