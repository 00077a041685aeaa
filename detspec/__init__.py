"""detspec: text generation that is reproducible bit for bit at full speed, by verified speculation.

Speculate anywhere, verify canonically, commit by index.

Dimension key of the whole package: `B` sequences, `G` windows in a canonical pass, `W` window length, `R = G*W` its rows,
`P` prompt, `T` new tokens in this call, `S` cache slots, `L` layers, `D` model width, `N` query heads, `K` KV heads,
`Q = N/K`, `H` head dim, `F` MLP width, `V` vocabulary, `C` tokens of a chunk, `M` most tokens of the thought after one.
"""

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
from detspec.traces.record_thoughts import run_thought_trace
from detspec.traces.record_windows import find_rollback, run_trace
from detspec.traces.thoughts import save_thoughts
from detspec.traces.windows import save_trace, trace_figure

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "InputError",
    "Model",
    "ModelConfig",
    "Request",
    "SamplingParams",
    "Schedule",
    "Stats",
    "ThinkingConfig",
    "Thought",
    "Update",
    "default_schedule",
    "find_rollback",
    "fingerprint",
    "generate",
    "load",
    "run_thought_trace",
    "run_trace",
    "save_thoughts",
    "save_trace",
    "score",
    "trace_figure",
]
