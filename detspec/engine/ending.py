"""How a sequence ends: by the device, by a stop string that the host finds, or aborted; and the updates that go out."""

from collections.abc import Sequence

import numpy as np

from detspec.checkpoint.load import Model
from detspec.engine.request import FAILED, FINISH_REASONS, GIVEN, Completion, Request, Thought, Update, completion_digest
from detspec.engine.sequence import SequenceState, asked_logprobs
from detspec.engine.text import text_of
from detspec.generation.commit import ending
from detspec.sampling_params import all_stop_ids
from detspec.state import RUNNING, STOP


def end_if_done(sequence: SequenceState) -> None:
    """Sets `finish_reason` if the device ended `sequence`, or if its text holds a stop string.

    New tokens must have been fetched if there are stop strings. Those after the one that completes a stop string are void and
    are dropped.
    """
    if sequence.finish != RUNNING:
        sequence.finish_reason = FINISH_REASONS[sequence.finish]
    if sequence.request.sampling.stop:
        sequence.read_text()
        if sequence.text.is_stopped:
            sequence.cut(sequence.text.num_tokens)
            sequence.finish_reason = FINISH_REASONS[STOP]


def ending_of(
    request: Request, token_ids: Sequence[int], targets: np.ndarray, logprobs: np.ndarray, model: Model
) -> tuple[int, str | None, str]:
    """Finds where the canonical text of `request` ends that begins with `token_ids`, `n` of them.

    Args:
        request: one sample, or given tokens that are scored.
        token_ids: new tokens, or those that are given.
        targets: `[n + 1]` int32, canonical tokens there and after them; `[n]` if there is no room for more.
        logprobs: float32, their log-probabilities.
        model: the model.

    Returns:
        How many of `token_ids` the text has, its finish reason (None if it goes on after them), and what it says.
    """
    most = request.sampling.max_tokens
    length = min(len(token_ids), most)
    text = text_of(request, model.token_bytes)
    finish_reason: str | None
    if request.given_token_ids:
        finish_reason = FAILED if np.isnan(logprobs).any() else GIVEN
        finish_reason = finish_reason if length == most else None
    else:
        is_stop = np.isin(targets, all_stop_ids(request.sampling, model.eos_ids))
        offered = np.asarray([min(len(targets), most)], np.int32)
        num_taken, finish = ending(is_stop[None, :], logprobs[None, :], offered, np.asarray([most], np.int32))
        is_over = num_taken[0] <= len(token_ids)  # else by the token that follows
        finish_reason = FINISH_REASONS.get(int(finish[0])) if is_over else None
        length = min(length, int(num_taken[0]))
    text.read(token_ids[:length])
    if text.is_stopped:
        return text.num_tokens, FINISH_REASONS[STOP], text.text
    return length, finish_reason, text.whole


def update_of(sequence: SequenceState, model: Model, context: str) -> Update:
    """What is new of `sequence` since its last update; `context` digests all that bits depend on besides the request."""
    completion = None
    if sequence.replay is not None:
        return Update(sequence.request, (), (), "", replayed(sequence))
    sequence.read_text()
    if sequence.finish_reason:
        shown = sequence.text.whole
        completion = complete(sequence, shown, context, model)
    else:
        shown = sequence.text.shown
    start = sequence.num_sent
    tokens = tuple(sequence.tokens[sequence.prompt_len + start :])
    piece = shown[sequence.num_shown :]
    sequence.num_sent = sequence.num_new
    sequence.num_shown = max(sequence.num_shown, len(shown))
    return Update(sequence.request, tokens, tuple(sequence.logprobs[start:]), piece, completion)


def replayed(sequence: SequenceState) -> Completion:
    """The completion of a sequence that only replays a record."""
    request = sequence.request
    return Completion(
        id=request.id,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=(),
        logprobs=(),
        text="",
        finish_reason=sequence.finish_reason,
        digest="",
        stats=sequence.stats,
        index=request.index,
        replay=sequence.replay,
    )


def complete(sequence: SequenceState, text: str, context: str, model: Model) -> Completion:
    """The completion of a sequence that has ended with `text`."""
    request = sequence.request
    asked = asked_logprobs(request, len(sequence.tokens), sequence.likeliest)
    logprobs = np.asarray(sequence.logprobs, np.float32)
    return Completion(
        id=request.id,
        index=request.index,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=sequence.new_tokens,
        logprobs=tuple(sequence.logprobs),
        text=text,
        finish_reason=sequence.finish_reason,
        digest=completion_digest(request, sequence.new_tokens, logprobs, sequence.thoughts, context),
        stats=sequence.stats,
        logprobs_mode=request.sampling.logprobs_mode,
        top_logprobs=asked[0],
        prompt_logprobs=asked[1],
        prompt_top_logprobs=asked[2],
        thoughts=tuple(decode_thought(token_ids, model) for token_ids in sequence.thoughts),
    )


def decode_thought(token_ids: list[int], model: Model) -> Thought:
    """A thought of `model` as it goes out."""
    assert model.cfg.thinking is not None
    ended = token_ids[-1] == model.cfg.thinking.end_id
    return Thought(model.decode(token_ids[:-1] if ended else token_ids), tuple(token_ids), is_cut=not ended)
