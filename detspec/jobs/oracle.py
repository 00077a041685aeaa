"""Audits of integer models' records by code that shares nothing with what generated: `spec.py` in numpy, or `audit.c`."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from detspec.checkpoint.load import Model
from detspec.engine.request import Replay, Request
from detspec.errors import InputError
from detspec.integer import audit, spec
from detspec.integer.audit import AuditedText, AuditFound
from detspec.model.to_integer import spec_model

ORACLES = ("numpy", "c")
ReplayFn = Callable[[Request, Sequence[int]], Replay]  # a request and its new tokens -> what the oracle has there
# Parameters that change tokens or reported numbers, and that oracles do not know.
UNKNOWN: dict[str, Any] = {"logit_bias": (), "min_tokens": 0, "logprobs": 0, "prompt_logprobs": None, "logprobs_mode": "raw"}


@contextmanager
def oracle(model: Model, name: str) -> Iterator[ReplayFn]:
    """The oracle called `name` for texts of an integer model; audit.c is compiled, and forgotten at the end.

    Raises `InputError` for a model in floats, or if no C compiler is found.
    """
    if model.cfg.weights != "integer":
        raise InputError(f'"{name}" audits integer models alone: models in floats are replayed by the engine')
    weights, sizes = spec_model(model.cfg, model.params)
    with tempfile.TemporaryDirectory() as folder:
        if name == "c":
            program = audit.compile_audit(Path(folder))
            file = Path(folder) / "model"
            audit.write_model(file, weights, sizes)

        def audited(text: AuditedText) -> AuditFound:
            if name == "c":
                return audit.audited_by_c([program], file, [text])[0]
            return audit.audited_by_spec(weights, sizes, text)

        yield lambda request, tokens: replay_of(audited, request, tokens, model.cfg.max_position)


def replay_of(
    audited: Callable[[AuditedText], AuditFound], request: Request, tokens: Sequence[int], max_position: int
) -> Replay:
    """Findings of an oracle about the new `tokens` of a request, as a replay by the engine has them.

    Raises `InputError` if the request asks for something that oracles do not know.
    """
    asked = request.sampling
    if others := [name for name, value in UNKNOWN.items() if getattr(asked, name) != value]:
        raise InputError(f"request {request.id!r} asks for {others[0]}, which oracles do not work out: audit by the engine")
    prompt = request.prompt_token_ids
    end = [0] if len(prompt) + len(tokens) < max_position else []  # the choice after the last token
    text = AuditedText(
        [*prompt, *tokens, *end],
        len(prompt),
        asked.temperature,
        asked.top_k,
        asked.top_p,
        asked.min_p,
        asked.seed,
        asked.repetition_penalty,
        asked.frequency_penalty,
        asked.presence_penalty,
    )
    found = audited(text)
    lost = found.logprobs == audit.LEFT_RANGE
    logprobs = np.where(lost, np.nan, found.logprobs / 2**spec.FRACTION).astype(np.float32)[len(prompt) - 1 :]
    # Log-probabilities are of the given tokens: where the oracle chooses another one, that is the difference.
    return Replay(found.chosen[len(prompt) - 1 :], logprobs, logprobs[: len(tokens)])
