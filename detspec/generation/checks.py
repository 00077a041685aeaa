"""What a prompt must be before it goes into a state."""

from collections.abc import Sequence

import numpy as np

from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.sampling_params import SamplingParams


def check_prompt(prompt: Sequence[int], sampling: SamplingParams, cfg: ModelConfig, *, max_len: int) -> None:
    """Raises `InputError` if `prompt` is empty, new tokens do not fit, or it, stop tokens or bias hold ids that are none."""
    if len(prompt) == 0:
        raise InputError("the prompt is empty: give at least one token")
    check_ids(prompt, cfg, "the prompt")
    for name, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", [token for token, _ in sampling.logit_bias])):
        if ids and max(ids) >= cfg.vocab_size:
            raise InputError(f"{name} names token id {max(ids)}; accepted are integers in 0 .. {cfg.vocab_size - 1}")
    if sampling.thinking and cfg.thinking is None:
        raise InputError("sampling parameter thinking is true, but the model has no thinker and no compressor")
    if thinks(cfg, sampling) and sampling.prompt_logprobs is not None:
        raise InputError("prompt_logprobs are not reported of prompts that are read thinking: omit them, or set thinking false")
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
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < cfg.vocab_size:
            raise InputError(f"{what} holds token id {token!r}; accepted are integers in 0 .. {cfg.vocab_size - 1}")


def thinks(cfg: ModelConfig, sampling: SamplingParams) -> bool:
    """Whether the prompt of such a request is read thinking."""
    return cfg.thinking is not None and sampling.thinking is not False
