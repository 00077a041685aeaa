"""Pallas's simulator of GPUs, as tests use it."""

import threading
from collections.abc import Iterator

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
