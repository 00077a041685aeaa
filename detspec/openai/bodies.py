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
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from detspec.checkpoint.load import Model
from detspec.engine.engine_config import EngineConfig
from detspec.engine.intake import check_request, request_of
from detspec.engine.request import Request
from detspec.errors import InputError, ParameterError
from detspec.openai.fields import (
    INVALID,
    MISSING,
    TOO_LONG,
    BodyError,
    ChatBody,
    CompletionBody,
    StreamOptions,
    read_fields,
    sampling_of,
    stream_options,
)
from detspec.openai.prompts import Prompt, chat_prompt, prompt_list, token_ids
from detspec.sampling_params import SamplingParams, seed_of_noise

COMPLETION_TOKENS = 16  # `max_tokens` of a completion that does not say
DEFAULTS = SamplingParams(max_tokens=COMPLETION_TOKENS, temperature=1.0)


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A body that was checked.

    Attributes:
        body: fields of the body.
        prompts: token ids of each prompt; chat has one.
        texts: each prompt as text if it was given as such, else None.
        sampling: parameters for each prompt, of `n` samples. With `is_score`, `max_tokens` is 1, though nothing is generated.
        seed: the seed; None if the body gives none, and `sampling` then holds the default's.
        logprobs: how many likeliest tokens to report at each position besides the chosen one; None for no log-probabilities.
        options: usage that a stream reports.
        is_score: `max_tokens` is 0: only log-probabilities of the prompt are wanted.
        echo: the text of the answer begins with the prompt.
    """

    body: CompletionBody | ChatBody
    prompts: tuple[Prompt, ...]
    texts: tuple[str | None, ...]
    sampling: tuple[SamplingParams, ...]
    seed: int | None
    logprobs: int | None
    options: StreamOptions
    is_score: bool = False
    echo: bool = False

    @property
    def kind(self) -> Literal["completion", "chat"]:
        """Which of the two the body is."""
        return "chat" if isinstance(self.body, ChatBody) else "completion"

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
        body = self.body
        shape = [self.kind, self.is_score, self.echo, self.logprobs, body.prompt_logprobs, body.return_tokens_as_token_ids]
        returned = [body.return_token_ids, body.return_weight_versions]
        facts = [shape, returned, self.prompts, [sampling.facts() for sampling in self.sampling]]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def with_seed(self, seed: int) -> "Parsed":
        """Copies it with `seed`, which the body does not give."""
        return dataclasses.replace(self, seed=seed, sampling=seeded(self.sampling[0], seed, self.prompts))


def parse_completion(value: Any, model: Model, *, max_len: int, defaults: SamplingParams = DEFAULTS) -> Parsed:
    """Checks the JSON `value`, a body of `/v1/completions`, for engines of `model` with room for `max_len` tokens of a request.

    `defaults` are for fields that the body does not give. Raises `BodyError`.
    """
    body = read_fields(value, CompletionBody)
    if body.prompt is None:
        raise BodyError(
            "the body needs a prompt: a text, a list of texts, token ids or a list of lists of them", "prompt", MISSING
        )
    is_score = body.max_tokens == 0
    if is_score and not body.echo:
        raise BodyError("max_tokens 0 scores the prompt, which needs echo: true; else it must be at least 1", "max_tokens")
    if is_score and body.n not in (None, 1):
        raise BodyError(f"n is {body.n}, but max_tokens 0 generates nothing: omit n", "n")
    given = msgspec.structs.asdict(body)
    sampling = sampling_of({**given, "max_tokens": 1} if is_score else given, defaults)
    if body.echo and body.logprobs is not None:
        sampling = dataclasses.replace(sampling, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    listed = prompt_list(body.prompt)
    add_special = body.add_special_tokens is not False
    prompts = tuple(token_ids(prompt, model, max_len=max_len, add_special=add_special) for prompt in listed)
    return Parsed(
        body=body,
        prompts=prompts,
        texts=tuple(prompt if isinstance(prompt, str) else None for prompt in listed),
        sampling=seeded(sampling, sampling.seed, prompts),
        seed=body.seed,
        logprobs=body.logprobs,
        options=stream_options(body),
        is_score=is_score,
        echo=body.echo,
    )


def parse_chat(value: Any, model: Model, *, max_len: int, defaults: SamplingParams = DEFAULTS, now: Any = None) -> Parsed:
    """Checks a body of `/v1/chat/completions`; see `parse_completion`.

    An answer may have as many tokens as there is room for, unless the body says how many. `now` is the time that the chat
    template prints, the clock's if None.
    """
    body = read_fields(value, ChatBody)
    if body.messages is None:
        raise BodyError("the body needs messages: a list of objects with role and content", "messages", MISSING)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise BodyError("max_tokens and max_completion_tokens differ: give one of them", "max_completion_tokens")
    if body.top_logprobs and not body.logprobs:
        raise BodyError("top_logprobs needs logprobs: true", "top_logprobs")
    prompt = chat_prompt(body, model, max_len=max_len, now=now)
    given = {**msgspec.structs.asdict(body), "logprobs": None}  # a switch, and no parameter
    sampling = sampling_of(given, dataclasses.replace(defaults, max_tokens=max(1, max_len - len(prompt))))
    return Parsed(
        body=body,
        prompts=(prompt,),
        texts=(None,),
        sampling=(sampling,),
        seed=body.seed,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        options=stream_options(body),
    )


def requests_of(parsed: Parsed, model: Model, config: EngineConfig, *, id: str) -> list[Request]:
    """Makes for each prompt a request of `n` samples, or one that scores it; `id` and the prompt's number are its id, as `a/0`.

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


def scoring(request: Request) -> Request:
    """Makes of a `request` for log-probabilities of its prompt one that scores all tokens after the first."""
    first, *rest = request.prompt_token_ids
    if not rest:
        return request  # there is nothing to score: one token is generated, and not shown
    sampling = dataclasses.replace(
        request.sampling, prompt_logprobs=None, logprobs=request.sampling.prompt_logprobs or 0, thinking=None
    )
    return dataclasses.replace(request, prompt_token_ids=(first,), sampling=sampling, given_token_ids=tuple(rest))
