"""The first place where a record differs from the canonical completion, which follows from a replay of the record's tokens."""

import itertools
import json

import numpy as np

from detspec.checkpoint.load import Model
from detspec.engine.bits import first_difference
from detspec.engine.ending import decode_thought
from detspec.engine.replayer import Replay
from detspec.engine.request import GIVEN, Request, completion_digest
from detspec.engine.sequence import asked_logprobs
from detspec.engine.text import text_of
from detspec.jobs.audit_report import Difference
from detspec.jobs.lines import LOGPROB_KEYS, as_json, thought_line
from detspec.jobs.records import Record
from detspec.sampling_params import all_stop_ids


def difference_of(record: Record, request: Request, replay: Replay, model: Model, context: str) -> Difference | None:
    """The first difference between `record` and the canonical completion of `request`, one sample; None if they are equal.

    `context` is the digest of everything else that the bits depend on.
    """
    if other := _first_other_thought(record, replay, model):
        return other
    length, finish_reason, text = _ending(record, request, replay, model)
    recorded = record.token_ids
    shared = min(len(recorded), len(record.logprobs), length)
    targets = replay.targets[:shared]
    logprobs = replay.logprobs[:shared]
    # Compared as float64, so a decimal that is not exactly a float32 differs, too. What is not finite is null in a record.
    given = np.asarray(recorded[:shared], np.int32), record.logprobs[:shared]
    expected = targets, np.where(np.isfinite(logprobs), logprobs, np.float32(np.nan)).astype(np.float64)
    if place := first_difference(list(zip(given, expected, strict=True))):
        at = place[0]
        if targets[at] != recorded[at]:
            return Difference(record.name, at, f"token: recorded {recorded[at]}, canonical {targets[at]}")
        what = f"log-probability: recorded {float(record.logprobs[at])!r}, canonical {float(logprobs[at])!r}"
        return Difference(record.name, at, what)
    if len(recorded) > length:
        what = f"token: recorded {recorded[length]}, but the canonical text ends before it ({finish_reason})"
        return Difference(record.name, length, what)
    if finish_reason is None:
        what = f"token: the record ends, but the canonical text goes on with {replay.targets[length]}"
        return Difference(record.name, length, what)
    if len(record.logprobs) != length:
        return Difference(record.name, shared, f"log-probability: recorded {len(record.logprobs)} for {length} tokens")
    facts = {
        "finish_reason": (record.finish_reason, finish_reason),
        "logprobs_mode": (record.logprobs_mode, request.sampling.logprobs_mode),
        "prompt_len": (record.prompt_len, len(request.prompt_token_ids)),
        "text": (record.text, text),
        "digest": (record.digest, completion_digest(request, recorded, logprobs, replay.thoughts, context)),
    }
    for name, (found, canonical) in facts.items():
        if found != canonical:
            return Difference(record.name, None, f"{name}: recorded {found!r}, canonical {canonical!r}")
    return _first_asked_difference(record, request, replay)


def _first_other_thought(record: Record, replay: Replay, model: Model) -> Difference | None:
    """The first thought about the prompt that is not the recorded one."""
    canonical = [thought_line(decode_thought(token_ids, model)) for token_ids in replay.thoughts]
    pairs = itertools.zip_longest(map(json.dumps, record.thoughts), map(json.dumps, canonical), fillvalue="nothing")
    for chunk, (found, thought) in enumerate(pairs):
        if found != thought:
            return Difference(record.name, None, f"thought after chunk {chunk}: recorded {found}, canonical {thought}")
    return None


def _ending(record: Record, request: Request, replay: Replay, model: Model) -> tuple[int, str | None, str]:
    """Number of recorded tokens that the canonical text may have, its finish reason (None if it goes on), and its text."""
    sampling = request.sampling
    n = len(record.token_ids)
    text = text_of(request, model.token_bytes)
    if request.given_token_ids:
        finish = "error" if np.isnan(replay.logprobs).any() else GIVEN
        n = min(n, sampling.max_tokens)
        text.read(record.token_ids)
        return n, finish if n == sampling.max_tokens else None, text.whole
    stops = all_stop_ids(sampling, model.eos_ids)
    broken = ~np.isfinite(replay.logprobs[: sampling.max_tokens])  # also for the token after the last
    stopped = np.isin(replay.targets[: min(n, sampling.max_tokens)], stops)
    length, finish_reason = (sampling.max_tokens, "length") if n >= sampling.max_tokens else (n, None)
    if broken.any() and not stopped[: np.argmax(broken)].any():
        length = int(np.argmax(broken))
        finish_reason = "error"
    elif stopped.any():
        length = int(np.argmax(stopped)) + 1
        finish_reason = "stop"
    text.read(record.token_ids[:length])
    if text.is_stopped:
        return text.num_tokens, "stop", text.text
    return length, finish_reason, text.whole


def _first_asked_difference(record: Record, request: Request, replay: Replay) -> Difference | None:
    """Where log-probabilities that the request asks for besides those of the new tokens first part from the recorded ones."""
    num_tokens = len(request.prompt_token_ids) + len(record.token_ids)
    for key, canonical in zip(LOGPROB_KEYS, asked_logprobs(request, num_tokens, replay.likeliest), strict=True):
        recorded = [json.dumps(entry) for entry in record.asked.get(key, ())]  # as text, in which -0.0 is not 0.0
        pairs = itertools.zip_longest(recorded, map(json.dumps, as_json(canonical)), fillvalue="nothing")
        for position, (found, entry) in enumerate(pairs):
            if found != entry:
                what = f"recorded {found}, canonical {entry}"
                if key == "top_logprobs":
                    return Difference(record.name, position, f"{key}: {what}")
                return Difference(record.name, None, f"{key}: token {position} of the prompt: {what}")
    return None
