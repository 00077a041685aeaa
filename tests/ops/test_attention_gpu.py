"""The GPU kernel in Pallas's simulator of GPU memories and barriers, which finds races and reads of what was never written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from detspec.config import Schedule
from detspec.errors import InputError
from detspec.ops.attention import pallas_gpu
from detspec.ops.attention.api import paged_attention
from tests.gpu_simulator import simulated_programs_are_compiled_once  # noqa: F401
from tests.ops.attention_contract import AttentionContract, AttentionValues, Problem, attended


class Simulated(AttentionValues):
    """Every call runs in the simulator, must find no race, and starts from memory full of nan."""

    implementation = "pallas_gpu"
    interpret = True
    page = 64
    head_dim = 64

    def run(self, problem: Problem, schedule: Schedule, **rule) -> np.ndarray:
        got, raced = simulated(problem, schedule, **rule)
        assert not raced
        return got


def simulated(problem: Problem, schedule: Schedule, **rule) -> tuple[np.ndarray, bool]:
    """What the kernel answers, and whether it raced; Pallas has no public name for the latter yet."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as simulator
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode

    with force_gpu_interpret_mode(InterpretGPUParams(detect_races=True, uninitialized_memory="nan")):
        got = attended(problem, schedule, **rule)
    return got, simulator.get_races().races_found


class TestPallasGpu(Simulated, AttentionContract):
    dtype = "bfloat16"
