"""detspec: text generation that is reproducible bit for bit at full speed, by verified speculation.

Speculate anywhere, verify canonically, commit by index.

Dimension key of the whole package: `B` sequences, `G` windows in a canonical pass, `W` window length, `R = G*W` its rows,
`P` prompt, `T` new tokens in this call, `S` cache slots, `L` layers, `D` model width, `N` query heads, `K` KV heads,
`Q = N/K`, `H` head dim, `F` MLP width, `V` vocabulary, `C` tokens of a chunk, `M` most tokens of the thought after one.

Pictures of real runs are in `detspec.traces`, which is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

from detspec.checkpoint.load import Model, load
from detspec.config import ModelConfig, ThinkingConfig
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Completion, Request, Stats, Thought, Update
from detspec.environment import default_schedule, fingerprint
from detspec.errors import InputError
from detspec.generate.loop import generate
from detspec.generate.score import score
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule

if TYPE_CHECKING:
    from detspec import traces as traces

__all__ = ["Completion", "Engine", "EngineConfig", "InputError", "Model", "ModelConfig", "Request", "SamplingParams"]
__all__ += ["Schedule", "Stats", "ThinkingConfig", "Thought", "Update"]
__all__ += ["default_schedule", "fingerprint", "generate", "load", "score"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name != "traces":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module("detspec.traces")


def __dir__() -> list[str]:
    return sorted({*globals(), "traces"})
