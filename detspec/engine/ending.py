"""How a sequence ends: by the device, by a stop string that the host finds, or aborted; and the updates that go out."""

import numpy as np

from detspec.checkpoint.load import Model
from detspec.engine.request import FINISH_REASONS, Completion, Thought, Update, completion_digest
from detspec.engine.sequence import SequenceState, asked_logprobs
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


def update_of(sequence: SequenceState, model: Model, context: str) -> Update:
    """What is new of `sequence` since its last update; `context` digests all that bits depend on besides the request."""
    completion = None
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


def complete(sequence: SequenceState, text: str, context: str, model: Model) -> Completion:
    """The completion of a sequence that has ended with `text`."""
    request = sequence.request
    asked = asked_logprobs(request, len(sequence.tokens), sequence.replayed)
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
