"""How a sample ends: by a stop string that the host finds, and as the completion that goes out."""

import dataclasses

import numpy as np

from detspec.checkpoint.load import Model
from detspec.engine.request import FINISH_REASONS, Completion, Thought, completion_digest
from detspec.engine.sequence import SequenceState, asked_logprobs
from detspec.engine.text import find_stop
from detspec.state import STOP


@dataclasses.dataclass(frozen=True)
class Finished:
    """A sample that has ended; `text` is given where a stop string cut it. `keep`: its keys and values are sound."""

    sample: SequenceState
    reason: str
    text: str | None = None
    keep: bool = True


def stopped(sample: SequenceState, first: int, model: Model) -> Finished | None:
    """How `sample` ends if a stop string is in its text, completed by the new token number `first` or a later one.

    Tokens behind that one are void and are dropped.
    """
    sampling = sample.request.sampling
    if not sampling.stop or len(sample.new_tokens) < first:
        return None
    found = find_stop(model.decode, sample.new_tokens, sampling.stop, first=first, begin=sampling.min_tokens)
    if found is None:
        return None
    num_tokens, text = found
    sample.cut(num_tokens)
    return Finished(sample, FINISH_REASONS[STOP], text)


def complete(end: Finished, model: Model, context: str) -> Completion:
    """The completion of a sample that has ended; `context` is the digest of all that its bits depend on besides the request."""
    request, token_ids = end.sample.request, end.sample.new_tokens
    top_logprobs, prompt_logprobs, prompt_top_logprobs = asked_logprobs(end.sample)
    logprobs, thoughts = np.asarray(end.sample.logprobs, np.float32), end.sample.thoughts
    return Completion(
        id=request.id,
        index=request.index,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=token_ids,
        logprobs=tuple(end.sample.logprobs),
        text=model.decode(token_ids) if end.text is None else end.text,
        finish_reason=end.reason,
        digest=completion_digest(request, token_ids, logprobs, thoughts, context),
        stats=end.sample.stats,
        logprobs_mode=request.sampling.logprobs_mode,
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
        prompt_top_logprobs=prompt_top_logprobs,
        thoughts=tuple(read_thought(token_ids, model) for token_ids in thoughts),
    )


def read_thought(token_ids: list[int], model: Model) -> Thought:
    """A thought of `model` as it goes out."""
    assert model.cfg.thinking is not None
    ended = token_ids[-1] == model.cfg.thinking.end_id
    return Thought(model.decode(token_ids[:-1] if ended else token_ids), tuple(token_ids), is_cut=not ended)
