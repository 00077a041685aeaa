"""Pallas's simulator of GPUs, as tests use it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def simulated_programs_are_compiled_once() -> Iterator[None]:
    """jax 0.10 compiles what a warpgroup does anew for every CTA, about a second each; later ones keep it, and so does this."""
    from jax._src.pallas.mosaic.interpret import thread_map

    programs, lock = {}, threading.Lock()

    def run_jaxpr(jaxpr, consts, *args):
        with lock:
            if jaxpr not in programs:
                evaluate = jax.jit(lambda consts, *args: jax.core.eval_jaxpr(jaxpr, consts, *args))
                programs[jaxpr] = evaluate.lower(consts, *args).compile()
        programs[jaxpr](consts, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thread_map, "_run_jaxpr", run_jaxpr)
        yield


@contextmanager
def memory_of_nan() -> Iterator[None]:
    """Runs GPU kernels from memory full of nan, and fails if the last of them raced: jax 0.12 then gives no answer."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as simulator
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode

    with force_gpu_interpret_mode(InterpretGPUParams(detect_races=True, uninitialized_memory="nan")):
        yield
    assert not simulator.get_races().races_found
