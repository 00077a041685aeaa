"""Audits of integer models' records by code that shares nothing with what generated: `spec.py` in numpy, or `audit.c`."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from detspec.checkpoint.load import Model
from detspec.engine.request import Replay, Request
from detspec.errors import InputError
from detspec.integer import audit, spec
from detspec.integer.audit import AuditedText, AuditFound
from detspec.model.to_integer import spec_model
from detspec.sampling_params import all_stop_ids

ORACLES = ("numpy", "c")
ReplayFn = Callable[[Request, Sequence[int]], Replay]  # a request and its new tokens -> what the oracle has there


@contextmanager
def oracle(model: Model, name: str) -> Iterator[ReplayFn]:
    """The oracle called `name` for texts of an integer model; audit.c is compiled, and forgotten at the end.

    Raises `InputError` for a model in floats, or if no C compiler is found.
    """
    if not model.cfg.is_integer:
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

        yield lambda request, tokens: replay_of(audited, request, tokens, model)


def replay_of(audited: Callable[[AuditedText], AuditFound], request: Request, tokens: Sequence[int], model: Model) -> Replay:
    """Findings of an oracle about the new `tokens` of a request to `model`, as a replay by the engine has them.

    Raises `InputError` if the request asks for thoughts or brings values for riders, which no oracle knows.
    """
    asked = request.sampling
    for name, is_asked in (("thinking", asked.thinking), ("brings", request.brings)):
        if is_asked:
            raise InputError(f"request {request.id!r} asks for {name}, which oracles do not work out: audit by the engine")
    prompt = request.prompt_token_ids
    vocab_size = model.cfg.vocab_size
    end = [0] if len(prompt) + len(tokens) < model.cfg.max_position else []  # the choice after the last token
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
        asked.logit_bias,
        [token for token in all_stop_ids(asked, model.eos_ids) if token < vocab_size],
        asked.min_tokens,
        asked.logprobs_mode,
        min(max(asked.logprobs, asked.prompt_logprobs or 0), vocab_size),
    )
    found = audited(text)
    logprobs = as_floats(found.logprobs)
    new = logprobs[len(prompt) - 1 :]
    # Log-probabilities are of the given tokens: where the oracle chooses another one, that is the difference.
    return Replay(
        targets=found.chosen[len(prompt) - 1 :],
        logprobs=new,
        given_logprobs=new[: len(tokens)],
        likeliest=(from_first(logprobs), from_first(found.likeliest), from_first(as_floats(found.likeliest_logprobs))),
    )


def as_floats(logprobs: np.ndarray) -> np.ndarray:
    """Log-probabilities as the float32 that records hold; nan where numbers have left their range."""
    return np.where(logprobs == audit.LEFT_RANGE, np.nan, logprobs / 2**spec.FRACTION).astype(np.float32)


def from_first(found: np.ndarray) -> np.ndarray:
    """Findings about all tokens of a text: zeros for the first, then those `found` about the others."""
    return np.concatenate([np.zeros_like(found[:1]), found])
