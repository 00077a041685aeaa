"""From a prompt to a request that an engine takes: tokens, and whether all that is asked for fits."""

import dataclasses
from collections.abc import Sequence

from detspec.checkpoint.load import Model
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Request
from detspec.environment import default_schedule
from detspec.errors import InputError
from detspec.generate.checks import check_prompt, thinks
from detspec.sampling_params import SamplingParams, all_stop_ids


def request_of(
    model: Model, config: EngineConfig, prompt: str | Sequence[int], sampling: SamplingParams, *, id: str = "0"
) -> Request:
    """Tokenizes and checks one prompt for engines of `model` and `config`; raises `InputError` as `check_request` does."""
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise InputError("the checkpoint has no tokenizer.json, so prompts must be token ids, not text")
        prompt = model.tokenizer.encode(prompt)
    return check_request(model, config, Request(id, tuple(prompt), sampling))


def check_request(model: Model, config: EngineConfig, request: Request) -> Request:
    """`request` as engines of `model` and `config` take it: where models think, `thinking` says whether this prompt is read so.

    Raises `InputError` if the prompt is empty, too long, needs more pages than there are, or holds ids outside the vocabulary;
    stop strings without a tokenizer; more stop tokens or biased tokens than there is room for.
    """
    ids = request.prompt_token_ids
    sampling = request.sampling
    check_prompt(ids, sampling, model.cfg, max_len=config.max_len)
    if sampling.stop and model.tokenizer is None:
        raise InputError("the checkpoint has no tokenizer.json, so there is no text to look for stop strings in")
    if len(all_stop_ids(sampling, model.eos_ids)) > config.max_stop_ids:
        raise InputError(f"more stop tokens than EngineConfig.max_stop_ids ({config.max_stop_ids}) has room for")
    if len(sampling.logit_bias) > config.max_logit_bias:
        raise InputError(f"more biased tokens than EngineConfig.max_logit_bias ({config.max_logit_bias}) has room for")
    if config.num_pages is not None:  # else there are enough for any request of `max_len`
        numerics = (config.schedule or default_schedule(model.cfg)).numerics
        needed = numerics.num_pages(len(ids) + sampling.max_tokens)
        if needed > config.num_pages:
            raise InputError(
                f"the prompt has {len(ids)} tokens and max_tokens is {sampling.max_tokens}: {needed} pages of {numerics.page}, "
                f"more than num_pages ({config.num_pages}): shorten one or raise num_pages"
            )
    if model.cfg.thinking is None or sampling.thinking is not None:
        return request
    thinking = thinks(model.cfg, sampling)
    return dataclasses.replace(request, sampling=dataclasses.replace(sampling, thinking=thinking))
