"""Sampling parameters of one request, checked, and those of a batch as arrays."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from detspec.choices import LOGPROBS_MODES
from detspec.config import MAX_COUNT
from detspec.errors import InputError, ParameterError, shown
from detspec.plain import plain
from detspec.state import NO_TOKEN, SCALARS, SamplingArrays

MAX_N = 1024
MAX_LOGPROBS = 20
MAX_STOPS = 1024  # strings that the text is searched for with each new token
MAX_STOP_CHARS = 1 << 14  # characters of all of them
MAX_NAMED = 4096  # stop tokens, and biased tokens, of a request: programs have room for as many for all others, too
SMALLEST = float(np.finfo(np.float32).tiny)  # devices may take what is nearer to 0 for 0


def _between(low: float, high: float) -> Callable[[Any], bool]:
    return lambda x: low <= x <= high


def _any(x: Any) -> bool:
    return True


IS_ID = _between(0, MAX_COUNT)  # a vocabulary may be smaller, see `check_prompt`
PENALTY = (float, _between(-2, 2), "a number in -2 .. 2 (0 is off)")
# the type of each field, whether a value of it is accepted, and what is, in words; `min_tokens` depends on `max_tokens`, too
ACCEPTED: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "max_tokens": (int, _between(1, MAX_COUNT), "an integer in 1 .. 2**31-1"),
    "min_tokens": (int, _between(0, MAX_COUNT), "an integer in 0 .. max_tokens"),
    "n": (int, _between(1, MAX_N), f"an integer in 1 .. {MAX_N}"),
    "temperature": (float, _between(0, 1e6), "a number in 0 .. 1e6 (0 is greedy)"),
    "top_k": (int, _between(-1, MAX_COUNT), "an integer in -1 .. 2**31-1 (0 and -1 keep all tokens)"),
    "top_p": (float, lambda x: 0 < x <= 1, "a number in (0, 1]"),
    "min_p": (float, _between(0, 1), "a number in [0, 1]"),
    "repetition_penalty": (float, _between(1e-6, 1e6), "a number in 1e-6 .. 1e6 (1 is off)"),
    "frequency_penalty": PENALTY,
    "presence_penalty": PENALTY,
    "seed": (int, _between(-(2**63), 2**63 - 1), "an integer in -2**63 .. 2**63-1"),
    "ignore_eos": (bool, _any, "true or false"),
    "logprobs": (int, _between(0, MAX_LOGPROBS), f"an integer in 0 .. {MAX_LOGPROBS}"),
    "prompt_logprobs": (int, _between(0, MAX_LOGPROBS), f"None or an integer in 0 .. {MAX_LOGPROBS}"),
    "logprobs_mode": (str, lambda x: x in LOGPROBS_MODES, f"one of {LOGPROBS_MODES}"),
    "deterministic": (bool, _any, "true or false"),
    "thinking": (bool, _any, "None, true or false"),
}


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Names and meanings are vLLM's; the default is greedy.

    A field that is None has its default. Numbers and arrays of numpy, jax and their like become plain values at once.

    Attributes:
        max_tokens: largest number of new tokens, 1 .. 2**31-1.
        min_tokens: number of new tokens before which no stop token can be sampled, 0 .. `max_tokens`.
        n: number of samples, 1 .. 1024; sample `i` uses the seed `(seed + i) mod 2**32`.
        temperature: divides the logits; 0 is greedy. One whose quotients are too large for float32 is greedy, too, and the
            likeliest token has all of the probability.
        top_k: keep the `k` likeliest tokens; 0 and -1, which becomes 0, keep all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches `p`; 1 keeps all.
        min_p: keep tokens at least `min_p` times as likely as the likeliest; 0 keeps all.
        repetition_penalty: for tokens of the prompt or the new text, divides positive logits and multiplies others; 1 is off.
        frequency_penalty: subtracted from a token's logit for each of its occurrences in the new text, -2 .. 2.
        presence_penalty: subtracted from the logit of each token that occurs in the new text, -2 .. 2.
        logit_bias: maps token ids (also as strings of digits) to numbers in -100 .. 100 that are added to their logits; kept
            as sorted pairs.
        seed: sampling seed, -2**63 .. 2**63-1; noise depends only on the seed and the token position. Kept modulo 2**32, as
            `seed_of_noise` says: -1 is 2**32-1, and 2**32 is 0.
        stop: a string, or up to 1024 of them, that ends the request, at the first token whose settled text holds one: a
            character is settled with its last byte. The text ends before the string, the finish reason is "stop", and what ends
            within the first `min_tokens` new tokens does not count.
        stop_token_ids: tokens of the vocabulary that end the request, in addition to the model's end-of-sequence tokens. The
            stop token is kept.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        logprobs: number of likeliest tokens to report at each new position besides the chosen one, 0 .. 20.
        prompt_logprobs: number of likeliest tokens at each position of the prompt; None reports nothing for the prompt.
        logprobs_mode: distribution of the log-probabilities at new positions. "raw": the model's own. "processed": the one that
            the token is drawn from, after bias, minimum length, penalties and (unless greedy) temperature, min_p, top_k and
            top_p; excluded tokens have -inf. "tempered": log-softmax of the model's logits over the temperature, which trainers
            compute; raw for greedy requests. Log-probabilities of the prompt are always raw. No token depends on the mode.
        deterministic: verify every token by the canonical pass before it is committed. False commits the fast path's tokens.
        thinking: prefill with the thoughts of a model that thinks. None follows the model, True raises for models that do not
            think, False prefills without thoughts.
    """

    max_tokens: int = 64
    min_tokens: int = 0
    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = 0
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    deterministic: bool = True
    thinking: bool | None = None

    def __post_init__(self) -> None:
        """Checks every field, and makes its value plain, so that equal requests are equal as JSON."""
        for name in FIELDS:
            if getattr(self, name) is None:
                self._set(name, getattr(SamplingParams, name))
        for name, (kind, holds, sentence) in ACCEPTED.items():
            value = getattr(self, name)
            if value is not None:
                self._set(name, _checked(name, value, kind, holds, sentence))
        if self.min_tokens > self.max_tokens:
            raise ParameterError(
                "min_tokens", f"must be an integer in 0 .. max_tokens ({self.max_tokens}), got {self.min_tokens!r}"
            )
        self._set("top_k", max(self.top_k, 0))
        self._set("seed", seed_of_noise(self.seed))
        self._set("stop", _checked_stop(self.stop))
        self._set("stop_token_ids", _checked_ids(self.stop_token_ids))
        self._set("logit_bias", _checked_bias(self.logit_bias))

    @functools.cached_property
    def needs_processing(self) -> bool:
        """Whether a program has to process logits for it: for more than temperature and noise."""
        penalised = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)
        filtered = self.temperature > 0 and (self.top_k, self.top_p, self.min_p) != (0, 1, 0)
        tempered = self.logprobs_mode == "tempered" and self.temperature not in (0, 1)
        processed = self.logprobs_mode == "processed" or tempered
        return penalised or filtered or processed or self.min_tokens > 0 or bool(self.logit_bias)

    def facts(self) -> dict[str, Any]:
        """All fields by name, for digests and files. `dataclasses.asdict` has the same, and takes ten times as long."""
        return {name: getattr(self, name) for name in FIELDS}

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def seed_of_noise(seed: int) -> int:
    """The seed that noise is made of, 0 .. 2**32-1: `seed` modulo 2**32.

    Seeds that differ by a multiple of 2**32 give equal samples, and are equal in digests and answers. Sums stay what they are:
    sample `i` of the seed `s` is sample 0 of the seed `s + i`, for all of them.
    """
    return seed % 2**32


FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))


def _checked(name: str, given: Any, kind: type, holds: Callable[[Any], bool], sentence: str) -> Any:
    """`given` as `kind`, -0.0 as 0.0; a bool does not count as a number."""
    if type(given) is kind and holds(given):  # nearly always
        return given or kind()
    value = plain(given)
    kinds: Any = (int, float, np.floating) if kind is float else kind
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, kinds) or not holds(value):
        raise ParameterError(name, f"must be {sentence}, got {shown(given)}")
    return value[:] if kind is str else kind(value) or kind()  # `str` of an enum's member is its name


def _checked_ids(given: Any) -> tuple[int, ...]:
    ids = plain(given)
    if isinstance(ids, (str, bytes, Mapping)) or not isinstance(ids, Iterable):
        raise ParameterError("stop_token_ids", f"must be a list of token ids, got {shown(given)}")
    listed = tuple(_checked("stop_token_ids", token, int, IS_ID, "a list of token ids in 0 .. 2**31-1") for token in ids)
    return _counted("stop_token_ids", tuple(dict.fromkeys(listed)))


def _checked_stop(given: Any) -> tuple[str, ...]:
    strings = plain(given)
    strings = (strings,) if isinstance(strings, str) else strings
    if not isinstance(strings, (list, tuple)):
        raise ParameterError("stop", f"must be a string or a list of strings, got {shown(given)}")
    if len(strings) > MAX_STOPS:
        raise ParameterError("stop", f"must hold at most {MAX_STOPS} strings, got {len(strings)}")
    for string in strings:
        if not isinstance(string, str) or not string or "\ufffd" in string:
            raise ParameterError("stop", f"must hold strings, not empty and without U+FFFD, got {shown(string)}")
    if (length := sum(map(len, strings))) > MAX_STOP_CHARS:
        raise ParameterError("stop", f"must hold at most {MAX_STOP_CHARS} characters in all, got {length}")
    return tuple(string[:] for string in strings)


def _checked_bias(given: Any) -> tuple[tuple[int, float], ...]:
    """A mapping or a list of pairs as pairs sorted by token."""
    sentence = "a mapping from token ids to numbers in -100 .. 100"
    values = plain(given)
    items = tuple(values.items()) if isinstance(values, Mapping) else values
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, (list, tuple)) and len(item) == 2 for item in items):
        raise ParameterError("logit_bias", f"must be {sentence}, got {shown(given)}")
    bias: dict[int, float] = {}
    for key, value in items:
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10 else key
        token = _checked("logit_bias", token, int, IS_ID, f"{sentence}, token ids in 0 .. 2**31-1")
        if token in bias:
            raise ParameterError("logit_bias", f"names token {token} twice")
        bias[token] = _checked("logit_bias", value, float, _between(-100, 100), sentence)
    return _counted("logit_bias", tuple(sorted(bias.items())))


def _counted(name: str, given: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(given) > MAX_NAMED:
        raise ParameterError(name, f"must name at most {MAX_NAMED} tokens, got {len(given)}")
    return given


def all_stop_ids(params: SamplingParams, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """Tokens that end a request: its own stop tokens, and the model's end-of-sequence tokens unless it ignores them."""
    return tuple(dict.fromkeys((*params.stop_token_ids, *(() if params.ignore_eos else eos_ids))))


def sampling_arrays(
    params: Sequence[SamplingParams],
    prompt_lens: Sequence[int] | None = None,
    *,
    eos_ids: Sequence[int] = (),
    max_stop_ids: int | None = None,
    max_logit_bias: int | None = None,
) -> SamplingArrays:
    """Stacks the parameters of `B` requests into per-row arrays of numpy, which programs take as they are.

    `prompt_lens` are their numbers of prompt tokens, 0 if None. `max_stop_ids` and `max_logit_bias` are the room for stop
    tokens and biased tokens of one request, just enough if None. `eos_ids` are the model's end-of-sequence tokens.

    Raises `InputError` if a request has more stop tokens or biased tokens than there is room for.
    """
    stop_ids = [all_stop_ids(p, eos_ids) for p in params]
    bias_ids = [[token for token, _ in p.logit_bias] for p in params]
    bias_values = [[value for _, value in p.logit_bias] for p in params]
    lens = np.zeros(len(params), np.int32) if prompt_lens is None else np.asarray(prompt_lens, np.int32)
    made = {
        "temperature": [max(p.temperature, SMALLEST) if p.temperature else 0.0 for p in params],
        "prompt_len": lens,
        "min_len": lens + np.asarray([p.min_tokens for p in params], np.int32),
        "logprobs_mode": [LOGPROBS_MODES.index(_reported_mode(p)) for p in params],
    }
    scalars = []
    for name, dtype in SCALARS.items():
        values: np.ndarray = np.asarray(made[name] if name in made else [getattr(p, name) for p in params], dtype)
        if dtype is np.float32:
            values = _normal(values)
        scalars.append(values.view(np.int32))
    stops = _stacked(stop_ids, max_stop_ids, NO_TOKEN, np.int32, "stop tokens")
    biased = _stacked(bias_ids, max_logit_bias, NO_TOKEN, np.int32, "biased tokens")
    biases = _normal(_stacked(bias_values, max_logit_bias, 0.0, np.float32, "biased tokens"))
    packed: Any = np.concatenate([np.stack(scalars, axis=1), stops, biased, biases.view(np.int32)], axis=1)
    return SamplingArrays(packed, max_stop_ids=stops.shape[1])


def _reported_mode(params: SamplingParams) -> str:
    """The mode that programs report: "tempered" is "raw" where no temperature divides, whatever neighbours ask for."""
    divides = params.temperature > 0 and np.float32(params.temperature) != 1
    return "raw" if params.logprobs_mode == "tempered" and not divides else params.logprobs_mode


def _stacked(lists: Sequence[Sequence[Any]], room: int | None, fill: Any, dtype: Any, what: str) -> np.ndarray:
    """`lists` as one array `[B, room]`, each padded with `fill`."""
    longest = max((len(values) for values in lists), default=0)
    if room is not None and longest > room:
        raise InputError(f"a request has {longest} {what}, more than the {room} there is room for")
    stacked = np.full((len(lists), max(1, longest) if room is None else room), fill, dtype)
    for row, values in enumerate(lists):
        stacked[row, : len(values)] = values
    return stacked


def _normal(values: np.ndarray) -> np.ndarray:
    """`values`, float32, with 0 in place of subnormal numbers: some devices take them for 0, and some do not."""
    return np.where(np.abs(values) < SMALLEST, np.float32(0), values)
