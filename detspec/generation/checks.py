"""Checks of a prompt before it goes into a state."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from detspec.config import ModelConfig
from detspec.errors import InputError, ParameterError, shown
from detspec.model.params import Params
from detspec.plain import plain_list
from detspec.sampling_params import SamplingParams
from detspec.thinking.rider import check_thinking

DIFFERENTIABLE = "take detspec.model.transformer.forward_sequences, which gives logits"


def listed_prompts(given: Any, what: str = "prompts") -> list[Any]:
    """The prompts in a list, a tuple or an array with a prompt in each row; a text alone is one of them.

    Raises `InputError`, which calls them `what`, for anything else, such as the token ids of one prompt.
    """
    if isinstance(given, str):
        return [given]
    sentence = f"{what} must be a text, or a list of texts and of lists of token ids"
    listed = plain_list(given, sentence)
    for one in listed:
        if isinstance(one, int | float) or (getattr(one, "ndim", 1) == 0 and not isinstance(one, str)):
            raise InputError(f"{sentence}, got {shown(one)} among them: the token ids of one prompt are a list in that list")
    return listed


def each_sampling(given: Any, number: int) -> list[SamplingParams]:
    """The sampling parameters of each of `number` prompts: `given` for all of them, or one each; `InputError` for others."""
    if isinstance(given, SamplingParams):
        return [given] * number
    listed = plain_list(given, "sampling must be SamplingParams, for all or one each")
    if len(listed) != number:
        raise InputError(f"{number} prompts but {len(listed)} sampling parameters: give one for all, or one each")
    for one in listed:
        check_type(one)
    return listed


def check_type(sampling: Any) -> None:
    """Raises `InputError` for anything but `SamplingParams`."""
    if not isinstance(sampling, SamplingParams):
        raise InputError(f"sampling must be SamplingParams, got {shown(sampling)}")


def check_core(sampling: SamplingParams) -> None:
    """Raises `InputError` if `sampling` asks for what engines alone give: samples, stop strings, likeliest tokens."""
    plain = SamplingParams()
    asked = [name for name in ("n", "stop", "logprobs", "prompt_logprobs") if getattr(sampling, name) != getattr(plain, name)]
    if asked:
        raise InputError(
            f"detspec.generate gives tokens of one sample and their log-probabilities: leave out {', '.join(asked)}, or use "
            "detspec.Engine"
        )


def is_traced(tree: Any) -> bool:
    """Whether `tree` holds values of a jax transform, which are known only when its program runs."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def check_known(prompts: Any, what: str) -> None:
    """Raises `InputError` if the prompts of `what` are traced: their lengths decide shapes."""
    if is_traced(prompts):
        raise InputError(
            f"prompts of {what} must be known before a program is made: let jax.jit and jax.vmap take params alone"
        )


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def without_derivative(params: Params, what: str) -> Params:
    """`params`, with which `what` cannot be differentiated: jax.grad raises `InputError`."""
    return params


@without_derivative.defjvp
def _refuse(what: str, primals: Any, tangents: Any) -> Any:
    raise InputError(f"{what} has no derivative: {DIFFERENTIABLE}")


def check_prompt(prompt: Sequence[int], sampling: SamplingParams, cfg: ModelConfig, *, max_len: int) -> None:
    """Raises `InputError` if `prompt` is empty, new tokens do not fit, or it, stop tokens or bias hold ids that are none."""
    if len(prompt) == 0:
        raise InputError("the prompt is empty: give at least one token")
    check_ids(prompt, cfg, "the prompt")
    for name, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", [token for token, _ in sampling.logit_bias])):
        if ids and max(ids) >= cfg.vocab_size:
            raise ParameterError(name, f"names token id {max(ids)}; accepted are integers in 0 .. {cfg.vocab_size - 1}")
    check_thinking(cfg, sampling)
    if len(prompt) + sampling.max_tokens > max_len:
        raise InputError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {sampling.max_tokens}, together more than the cache's "
            f"max_len of {max_len}: shorten one or raise max_len"
        )


def check_ids(ids: Sequence[int], cfg: ModelConfig, what: str) -> None:
    """Raises `InputError`, which calls them `what`, if `ids` are not all in the vocabulary."""
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < cfg.vocab_size:  # nearly always
        return
    for token in ids:
        if type(token) is not int or not 0 <= token < cfg.vocab_size:
            raise InputError(f"{what} holds token id {shown(token)}; accepted are integers in 0 .. {cfg.vocab_size - 1}")
