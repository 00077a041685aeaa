"""Response bodies of `/v1/completions` and `/v1/chat/completions`, made of completions.

Equal requests to engines of equal fingerprints get equal bodies: `id` is a digest of the request, `created` is the caller's.
A log-probability is written as the shortest decimal of its float32 value as a float64; one that is not finite is -9999.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from detspec.checkpoint.detokenizer import Detokenizer
from detspec.checkpoint.load import Model
from detspec.engine.request import GIVEN, Completion
from detspec.openai.bodies import Parsed
from detspec.openai.fields import BodyError
from detspec.openai.logprobs import TokenTexts, logprobs_of, prompt_logprobs

HEX = 32  # digits of a digest in an id
FINGERPRINT_HEX = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Answerer:
    """Facts that bodies state besides the completions.

    Attributes:
        model: decodes tokens.
        name: the model's name, for requests that give none.
        facts: all that choices depend on besides the request: the engine's fingerprint, how text becomes tokens and back, and
            `max_len`, which bounds the answer to a chat that does not say how long it may be.
        system_fingerprint: a name of `facts`, see `system_fingerprint`.
        created: seconds since 1970.
        token_texts: texts of the model's tokens.
    """

    model: Model
    name: str
    facts: Mapping[str, Any]
    system_fingerprint: str
    created: int
    token_texts: TokenTexts


def make_answerer(model: Model, fingerprint: Mapping[str, Any], *, max_len: int, name: str, created: int) -> Answerer:
    """Gathers what answers state of an engine of `model` with this `fingerprint()` and room for `max_len` tokens."""
    facts = {**fingerprint, "text": model.text_facts(), "max_len": max_len}
    return Answerer(model, name, facts, system_fingerprint(facts), created, TokenTexts(model.tokenizer))


def answer_body(parsed: Parsed, completions: Sequence[Completion], answerer: Answerer) -> dict[str, Any]:
    """The body that answers `parsed` with the `completions` of all its choices, in order: prompt by prompt."""
    is_chat = parsed.kind == "chat"
    choices = [choice_of(parsed, index, completion, answerer) for index, completion in enumerate(completions)]
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    return {
        **head(parsed, answerer, "chat.completion" if is_chat else "text_completion"),
        "choices": choices,
        "usage": usage(parsed, num_tokens),
        "seed": parsed.sampling[0].seed,
        "system_fingerprint": answerer.system_fingerprint,
    }


def choice_of(parsed: Parsed, index: int, completion: Completion, answerer: Answerer) -> dict[str, Any]:
    """Choice number `index` of an answer."""
    if parsed.kind == "chat":
        said: dict[str, Any] = {"message": {"role": "assistant", "content": completion.text, "refusal": None}}
    else:
        said = {"text": (prompt_text(parsed, index // parsed.n, answerer) if parsed.echo else "") + completion.text}
    logprobs = logprobs_of(parsed, completion, answerer.token_texts)
    ends = ending(parsed, index, completion, answerer)
    return {"index": index, **said, "logprobs": logprobs, **ends, **extras(parsed, completion, answerer)}


def head(parsed: Parsed, answerer: Answerer, kind: str) -> dict[str, Any]:
    """The fields before the choices, also of a chunk of a stream; `kind` is its `object`."""
    model = answerer.name if parsed.body.model is None else parsed.body.model
    return {"id": response_id(parsed), "object": kind, "created": answerer.created, "model": model}


def usage(parsed: Parsed, num_tokens: int) -> dict[str, int]:
    """Counts of tokens, of which `num_tokens` are new; a prompt counts once for all its samples."""
    num_prompt_tokens = sum(map(len, parsed.prompts))
    total = num_prompt_tokens + num_tokens
    return {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens, "total_tokens": total}


def ending(parsed: Parsed, index: int, completion: Completion, answerer: Answerer) -> dict[str, Any]:
    """Why choice `index` ended: `stop_reason` is the stop string or stop token of the request; None for the model's own."""
    reason = stop_reason(parsed, index, completion, answerer)
    return {"finish_reason": completion.finish_reason, "stop_reason": reason}


def extras(parsed: Parsed, completion: Completion, answerer: Answerer) -> dict[str, Any]:
    """Fields of a choice that OpenAI's has not: always its digest, the rest if it is asked for or there."""
    found: dict[str, Any] = {"digest": completion.digest}
    if parsed.body.return_token_ids:
        found |= {"prompt_token_ids": list(completion.prompt_token_ids), "token_ids": list(completion.token_ids)}
    if parsed.body.return_weight_versions:
        found["weight_versions"] = weight_versions(completion, answerer)
    if parsed.body.prompt_logprobs is not None:
        found["prompt_logprobs"] = prompt_logprobs(parsed, completion, answerer.token_texts)
    if completion.thoughts:
        found["thoughts"] = [
            {"token_ids": list(thought.token_ids), "text": thought.text, "is_cut": thought.is_cut}
            for thought in completion.thoughts
        ]
    return found


def weight_versions(completion: Completion, answerer: Answerer) -> list[dict[str, Any]]:
    """Which new tokens come from which weights, in vLLM's shape: all from the same, named by their version or their digest."""
    version = answerer.facts.get("weight_version", answerer.facts["model"])
    number = len(completion.token_ids)
    return [{"start": 0, "end": number, "version": version}] if number else []


def stop_reason(parsed: Parsed, index: int, completion: Completion, answerer: Answerer) -> str | int | None:
    """The stop string or the stop token of the request that ended choice `index`; None if neither did."""
    if completion.finish_reason != "stop":
        return None
    sampling = parsed.sampling[index // parsed.n]
    after = ""
    if sampling.stop:
        detokenizer = Detokenizer(answerer.token_texts.tokens, after=completion.prompt_token_ids)
        after = detokenizer.read(completion.token_ids)[len(completion.text) :]
    for string in sampling.stop:
        if after.startswith(string):
            return string
    last = completion.token_ids[-1]
    return last if last in sampling.stop_token_ids else None


def prompt_text(parsed: Parsed, place: int, answerer: Answerer) -> str:
    """Prompt number `place` as it was given, or the text of its token ids: as far as it is settled if more tokens follow."""
    text = parsed.texts[place]
    if text is None:
        detokenizer = Detokenizer(answerer.token_texts.tokens)
        text = detokenizer.read(parsed.prompts[place]) + (detokenizer.rest if parsed.is_score else "")
    return text


def response_id(parsed: Parsed) -> str:
    """The `id` of the answer: a digest of the request."""
    return f"{'cmpl' if parsed.kind == 'completion' else 'chatcmpl'}-{parsed.digest[:HEX]}"


def system_fingerprint(facts: Mapping[str, Any]) -> str:
    """The name of an answerer's `facts`, and of its version or an integer model's arithmetic, in answers.

    Equal names and equal requests mean equal choices, to the bit.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return f"detspec-{facts.get('arithmetic') or facts['detspec']}-{digest[:FINGERPRINT_HEX]}"


def scored(completion: Completion, prompt: Sequence[int]) -> Completion:
    """Turns the scores of a text into a completion without new tokens after the whole text as its prompt."""
    given = completion.finish_reason == GIVEN
    is_read = completion.finish_reason not in ("abort", "error")
    return dataclasses.replace(
        completion,
        prompt_token_ids=tuple(prompt),
        token_ids=(),
        logprobs=(),
        text="",
        top_logprobs=(),
        finish_reason="length" if is_read else completion.finish_reason,
        prompt_logprobs=(None, *(completion.logprobs if given else ())) if is_read else (),
        prompt_top_logprobs=((), *completion.top_logprobs) if given and completion.top_logprobs else (),
    )


def error_body(error: BodyError) -> dict[str, Any]:
    """The body that refuses a request, for status 400."""
    return {"error": {"message": str(error), "type": "invalid_request_error", "param": error.param, "code": error.code}}
