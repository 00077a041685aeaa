"""The harness's generation arguments as sampling parameters: mapped, or refused by name."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from detspec.errors import InputError, shown
from detspec.plain import plain
from detspec.sampling_params import SamplingParams
from detspec.seeds import seed_of

SAME: tuple[str, ...] = (
    "top_k",
    "top_p",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
)
SAME += ("stop_token_ids", "ignore_eos", "thinking")  # names and meanings that are ours, too
MAPPED = ("do_sample", "temperature", "max_gen_toks", "until", "stop", "seed")
WITHOUT_EFFECT = {"num_beams": 1, "num_return_sequences": 1}  # the only value that is accepted of each


def sampling_of(
    given: Mapping[str, Any], prompt: str, occurrence: int, *, seed: int, max_gen_toks: int, deterministic: bool
) -> SamplingParams:
    """The sampling parameters of one request.

    Args:
        given: generation arguments after the harness's `normalize_gen_kwargs`. Arguments that are None are not given. Without
            `do_sample`, texts are sampled if there is a temperature.
        prompt: the context.
        occurrence: how many equal requests of the same document came before; each gets noise of its own.
        seed: what the seed is made of if `given` has none.
        max_gen_toks: most new tokens if `given` has no number.
        deterministic: whether what is generated is verified.

    Raises:
        InputError: an argument is unknown, or has a value that is not accepted.
    """
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name in WITHOUT_EFFECT and (isinstance(value, bool) or plain(value) != WITHOUT_EFFECT[name]):
            raise InputError(f"generation argument {name} must be {WITHOUT_EFFECT[name]}, got {shown(value)}: leave it out")
        if name not in (*SAME, *MAPPED, *WITHOUT_EFFECT):
            accepted = ", ".join((*MAPPED, *SAME))
            raise InputError(f"the model detspec does not take the generation argument {name!r}; accepted are {accepted}")
    stops = [*_texts("until", given.get("until", [])), *_texts("stop", given.get("stop", []))]
    sampled = SamplingParams(
        max_tokens=_whole("max_gen_toks", given.get("max_gen_toks", max_gen_toks), least=1),
        temperature=given.get("temperature", 1.0),
        seed=seed_of(_whole("seed", given.get("seed", seed)), prompt, occurrence),
        stop=tuple(dict.fromkeys(stop for stop in stops if stop)),
        deterministic=deterministic,
        **{name: given[name] for name in SAME if name in given},
    )
    do_sample = given.get("do_sample", "temperature" in given)
    if not isinstance(do_sample, bool):
        raise InputError(f"generation argument do_sample must be true or false, got {shown(do_sample)}")
    return sampled if do_sample else dataclasses.replace(sampled, temperature=0.0)


def _whole(name: str, value: Any, *, least: float = -math.inf) -> int:
    """An integer of any kind as a plain one."""
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        sentence = f"an integer of at least {least}" if least > -math.inf else "an integer"
        raise InputError(f"generation argument {name} must be {sentence}, got {shown(value)}")
    return number


def _texts(name: str, value: Any) -> list[str]:
    """One text or several as a list."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"generation argument {name} must be a text or a list of texts, got {shown(value)}")
    return list(texts)
