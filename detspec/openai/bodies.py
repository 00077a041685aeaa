"""Request bodies of `/v1/completions` and `/v1/chat/completions` as prompts with sampling parameters.

1. `parse_completion` or `parse_chat` checks the fields, and turns each prompt into token ids.
2. Without a seed in the body the caller chooses one: `parsed.with_seed(seed)`.
3. `requests_of` makes a request of each prompt for the engine; `responses.py` makes the answer of the completions.

Sample `i` of a prompt has the seed `seed + i`, or `seed + n * k + i` if the same prompt came `k` times before in the list. So
what a prompt gets does not depend on the others in its body, and a repeated prompt gets other samples each time.
"""

import dataclasses
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from detspec.checkpoint.load import Model
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Request, check_request, request_of
from detspec.errors import InputError, ParameterError
from detspec.openai.fields import (
    CHAT,
    COMPLETION,
    INVALID,
    MISSING,
    TOO_LONG,
    BodyError,
    given_fields,
    sampling_of,
    stream_options,
)
from detspec.openai.prompts import Prompt, chat_prompt, prompt_list, token_ids
from detspec.openai.scores import scoring
from detspec.sampling_params import SamplingParams, seed_of_noise

COMPLETION_TOKENS = 16  # `max_tokens` of a completion that does not say
DEFAULTS = SamplingParams(max_tokens=COMPLETION_TOKENS, temperature=1.0)


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A body that was checked.

    Attributes:
        kind: which of the two it is.
        model: the name of a model that it gives; None if it gives none.
        prompts: token ids of each prompt; chat has one.
        texts: each prompt as text if it was given as such, else None.
        sampling: parameters for each prompt, of `n` samples. With `is_score`, `max_tokens` is 1, though nothing is generated.
        seed: the seed; None if the body gives none, and `sampling` then holds the default's.
        is_score: `max_tokens` is 0: only log-probabilities of the prompt are wanted.
        echo: the text of the answer begins with the prompt.
        logprobs: how many likeliest tokens to report at each position besides the chosen one; None for no log-probabilities.
        prompt_logprobs: the same for the prompt, under that name; None if it is not asked for.
        return_token_ids: answer with token ids, too.
        return_weight_versions: say of each choice which weights its tokens come from.
        tokens_as_ids: tokens are named `token_id:5` in log-probabilities.
        stream, include_usage, continuous_usage: answer piece by piece; end with a chunk of usage; usage in each chunk.
        request_id: the client's own name for the request.
    """

    kind: Literal["completion", "chat"]
    model: str | None
    prompts: tuple[Prompt, ...]
    texts: tuple[str | None, ...]
    sampling: tuple[SamplingParams, ...]
    seed: int | None
    is_score: bool = False
    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    return_weight_versions: bool = False
    tokens_as_ids: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    request_id: str | None = None

    @property
    def n(self) -> int:
        """Samples of each prompt; choice `prompt * n + sample` is sample number `sample` of prompt number `prompt`."""
        return self.sampling[0].n

    @property
    def num_choices(self) -> int:
        """Choices of the whole answer."""
        return self.n * len(self.prompts)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 in hex of everything that decides the answer, the seed included; equal requests have equal digests."""
        shape = (self.kind, self.is_score, self.echo, self.logprobs, self.prompt_logprobs, self.tokens_as_ids)
        returned = [self.return_token_ids, self.return_weight_versions]
        facts = [shape, returned, self.prompts, [sampling.facts() for sampling in self.sampling]]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def with_seed(self, seed: int) -> "Parsed":
        """Copies it with `seed`, which the body does not give."""
        return dataclasses.replace(self, seed=seed, sampling=seeded(self.sampling[0], seed, self.prompts))


def parse_completion(body: Any, model: Model, *, max_len: int, defaults: SamplingParams = DEFAULTS) -> Parsed:
    """Checks a body of `/v1/completions`, the JSON value, for engines of `model` whose requests have room for `max_len` tokens.

    `defaults` are for fields that the body does not give. Raises `BodyError`.
    """
    given = given_fields(body, COMPLETION)
    if "prompt" not in given:
        raise BodyError(
            "the body needs a prompt: a text, a list of texts, token ids or a list of lists of them", "prompt", MISSING
        )
    is_score = given.get("max_tokens") == 0
    echo = given.get("echo", False)
    if is_score:
        if not echo:
            raise BodyError("max_tokens 0 scores the prompt, which needs echo: true; else it must be at least 1", "max_tokens")
        if given.get("n", 1) != 1:
            raise BodyError(f"n is {given['n']}, but max_tokens 0 generates nothing: omit n", "n")
        given["max_tokens"] = 1
    logprobs = given.get("logprobs")
    sampling = sampling_of(given, defaults)
    if echo and logprobs is not None:
        wanted = max(logprobs, given.get("prompt_logprobs", 0))
        sampling = dataclasses.replace(sampling, prompt_logprobs=wanted)
    add_special = given.get("add_special_tokens", True)
    listed = prompt_list(given["prompt"])
    prompts = tuple(token_ids(prompt, model, max_len=max_len, add_special=add_special) for prompt in listed)
    texts = tuple(prompt if isinstance(prompt, str) else None for prompt in listed)
    asked = {"is_score": is_score, "echo": echo, "logprobs": logprobs}
    return _parsed("completion", given, prompts, texts, sampling, asked)


def parse_chat(body: Any, model: Model, *, max_len: int, defaults: SamplingParams = DEFAULTS, now: Any = None) -> Parsed:
    """Checks a body of `/v1/chat/completions`; see `parse_completion`.

    An answer may have as many tokens as there is room for, unless the body says how many. `now` is the time that the chat
    template prints, the clock's if None.
    """
    given = given_fields(body, CHAT)
    if "messages" not in given:
        raise BodyError("the body needs messages: a list of objects with role and content", "messages", MISSING)
    if "max_tokens" in given and given.get("max_completion_tokens", given["max_tokens"]) != given["max_tokens"]:
        raise BodyError("max_tokens and max_completion_tokens differ: give one of them", "max_completion_tokens")
    wants_logprobs = given.pop("logprobs", False)
    if given.get("top_logprobs") and not wants_logprobs:
        raise BodyError("top_logprobs needs logprobs: true", "top_logprobs")
    prompt = chat_prompt(given, model, max_len=max_len, now=now)
    room = max(1, max_len - len(prompt))
    sampling = sampling_of(given, dataclasses.replace(defaults, max_tokens=room))
    asked = {"logprobs": given.get("top_logprobs", 0) if wants_logprobs else None}
    return _parsed("chat", given, (prompt,), (None,), sampling, asked)


def requests_of(parsed: Parsed, model: Model, config: EngineConfig, *, id: str) -> list[Request]:
    """One request of `n` samples for each prompt, or one that scores it, with `id` and the prompt's number as its id, as `a/0`.

    They are checked for engines of `model` and `config`. Raises `BodyError` if one does not fit.
    """
    requests = []
    for place, (prompt, sampling) in enumerate(zip(parsed.prompts, parsed.sampling, strict=True)):
        try:
            request = request_of(model, config, prompt, sampling, id=f"{id}/{place}")
            requests.append(check_request(model, config, scoring(request)) if parsed.is_score else request)
        except ParameterError as error:
            raise BodyError(str(error), error.name) from error
        except InputError as error:
            code = TOO_LONG if len(prompt) + sampling.max_tokens > config.max_len else INVALID
            raise BodyError(str(error), "prompt" if parsed.kind == "completion" else "messages", code) from error
    return requests


def seeded(sampling: SamplingParams, seed: int, prompts: Sequence[Prompt]) -> tuple[SamplingParams, ...]:
    """`sampling` for each of `prompts`: the `k`-th repetition of one has the seed `seed + n * k`, modulo 2**32.

    prompts a b a a, n = 2, seed 7   ->   seeds 7 7 9 11: samples 7 8 | 7 8 | 9 10 | 11 12
    """
    before: Counter[Prompt] = Counter()
    each = []
    for prompt in prompts:
        own_seed = seed_of_noise(seed + sampling.n * before[prompt])
        each.append(sampling if own_seed == sampling.seed else dataclasses.replace(sampling, seed=own_seed))
        before[prompt] += 1
    return tuple(each)


def _parsed(
    kind: Literal["completion", "chat"],
    given: Mapping[str, Any],
    prompts: tuple[Prompt, ...],
    texts: tuple[str | None, ...],
    sampling: SamplingParams,
    asked: Mapping[str, Any],
) -> Parsed:
    include_usage, continuous_usage = stream_options(given)
    return Parsed(
        kind=kind,
        model=given.get("model"),
        prompts=prompts,
        texts=texts,
        sampling=seeded(sampling, sampling.seed, prompts),
        seed=given.get("seed"),
        prompt_logprobs=given.get("prompt_logprobs"),
        return_token_ids=given.get("return_token_ids", False),
        return_weight_versions=given.get("return_weight_versions", False),
        tokens_as_ids=given.get("return_tokens_as_token_ids", False),
        stream=given.get("stream", False),
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        request_id=given.get("request_id"),
        **asked,
    )
