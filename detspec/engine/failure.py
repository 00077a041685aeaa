"""A request that the host cannot go on with: it fails alone, and the engine goes on."""

import logging

import jax

from detspec.engine.request import FAILED, Completion, Update
from detspec.engine.sequence import SequenceState
from detspec.errors import DivergenceError, shortened

LOG = logging.getLogger("detspec")
NOT_OF_ONE = (jax.errors.JaxRuntimeError, DivergenceError)  # faults of the device, and of processes that share it
MAX_WHY = 500  # characters


def failed(sequence: SequenceState, error: Exception) -> Update:
    """The last update of `sequence`, which `error` has ended; the traceback goes into the log, under the request's id."""
    request = sequence.request
    LOG.error("request %s failed, the others go on", request.id, exc_info=error)
    completion = Completion(
        id=request.id,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=(),
        logprobs=(),
        text="",
        finish_reason=FAILED,
        digest="",
        stats=sequence.stats,
        index=request.index,
        logprobs_mode=request.sampling.logprobs_mode,
        error=shortened(f"{type(error).__name__}: {error}", MAX_WHY),
    )
    return Update(request, (), (), "", completion)
