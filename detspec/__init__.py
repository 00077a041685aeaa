"""detspec: text generation that is reproducible bit for bit at full speed, by verified speculation.

Speculate anywhere, verify canonically, commit by index.

Dimension key of the whole package: `B` sequences, `G` windows in a canonical pass, `W` window length, `R = G*W` its rows,
`P` prompt, `T` new tokens in this call, `S` cache slots, `L` layers, `D` model width, `N` query heads, `K` KV heads,
`Q = N/K`, `H` head dim, `F` MLP width, `V` vocabulary, `C` tokens of a chunk, `M` most tokens of the thought after one.

Names are imported when they are first used: `import detspec` alone takes no time, and `detspec --help` needs no jax.
Pictures of real runs are in `detspec.traces`.
"""

import importlib
from typing import TYPE_CHECKING

from detspec.garbage import kept_garbage

__all__ = ["Completion", "Engine", "EngineConfig", "InputError", "Model", "ModelConfig", "Needs", "Request"]
__all__ += ["SamplingParams", "Schedule", "Stats", "ThinkingConfig", "Thought", "Update"]
__all__ += ["compare", "default_schedule", "dense_config", "draft_model", "fingerprint", "generate", "load", "logprobs"]
__all__ += ["score", "traces"]

if TYPE_CHECKING:
    from detspec import traces
    from detspec.checkpoint.load import Model, load
    from detspec.config import ModelConfig, ThinkingConfig
    from detspec.draft.draft_model import draft_model
    from detspec.engine.engine import Engine
    from detspec.engine.engine_config import EngineConfig
    from detspec.engine.policy import Needs
    from detspec.engine.request import Completion, Request, Thought, Update
    from detspec.environment import default_schedule, fingerprint
    from detspec.errors import InputError
    from detspec.generation.logprobs import logprobs
    from detspec.generation.loop import generate
    from detspec.generation.score import score
    from detspec.jobs.comparison import compare
    from detspec.model.dense import dense_config
    from detspec.riders.counters import Stats
    from detspec.sampling_params import SamplingParams
    from detspec.schedule import Schedule
else:
    FILES = {
        "Completion": "engine.request",
        "Engine": "engine.engine",
        "EngineConfig": "engine.engine_config",
        "InputError": "errors",
        "Model": "checkpoint.load",
        "ModelConfig": "config",
        "Needs": "engine.policy",
        "Request": "engine.request",
        "SamplingParams": "sampling_params",
        "Schedule": "schedule",
        "Stats": "riders.counters",
        "ThinkingConfig": "config",
        "Thought": "engine.request",
        "Update": "engine.request",
        "compare": "jobs.comparison",
        "default_schedule": "environment",
        "dense_config": "model.dense",
        "draft_model": "draft.draft_model",
        "fingerprint": "environment",
        "generate": "generation.loop",
        "load": "checkpoint.load",
        "logprobs": "generation.logprobs",
        "score": "generation.score",
    }

    def __getattr__(name: str) -> object:
        if name == "traces":
            return importlib.import_module("detspec.traces")
        if name not in FILES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with kept_garbage():
            found = globals()[name] = getattr(importlib.import_module(f"detspec.{FILES[name]}"), name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
