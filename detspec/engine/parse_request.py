"""Reading a request: a prompt as text or token ids, and what is asked of it, checked against what an engine has room for."""

import dataclasses
from collections.abc import Sequence

from detspec.checkpoint.load import Model
from detspec.config import ModelConfig
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Request
from detspec.environment import default_schedule
from detspec.errors import InputError
from detspec.generate.insert import check_prompt, thinks
from detspec.sampling_params import SamplingParams, all_stop_ids


def read_request(
    model: Model, config: EngineConfig, prompt: str | Sequence[int], sampling: SamplingParams, *, id: str = "0"
) -> Request:
    """Tokenizes and checks one prompt for engines of `model` and `config`; settles whether it is read thinking.

    Raises:
        InputError: the prompt is empty, too long, needs more pages than there are, or holds ids outside the vocabulary; text or
            stop strings without a tokenizer; more stop tokens or biased tokens than there is room for.
    """
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise InputError("the checkpoint has no tokenizer.json, so prompts must be token ids, not text")
        ids = tuple(model.tokenizer.encode(prompt))
    else:
        ids = tuple(prompt)
    check_prompt(ids, sampling, model.cfg, max_len=config.max_len)
    if sampling.stop and model.tokenizer is None:
        raise InputError("the checkpoint has no tokenizer.json, so there is no text to look for stop strings in")
    if len(all_stop_ids(sampling, model.eos_ids)) > config.max_stop_ids:
        raise InputError(f"more stop tokens than EngineConfig.max_stop_ids ({config.max_stop_ids}) has room for")
    if len(sampling.logit_bias) > config.max_logit_bias:
        raise InputError(f"more biased tokens than EngineConfig.max_logit_bias ({config.max_logit_bias}) has room for")
    if config.num_pages is not None:  # else there are enough for any request of `max_len`
        page = (config.schedule or default_schedule(model.cfg)).numerics.page
        needed = -(-(len(ids) + sampling.max_tokens) // page)
        if needed > config.num_pages:
            raise InputError(
                f"the prompt has {len(ids)} tokens and max_tokens is {sampling.max_tokens}: {needed} pages of {page}, more "
                f"than num_pages ({config.num_pages}): shorten one or raise num_pages"
            )
    return settled(Request(id, ids, sampling), model.cfg)


def settled(request: Request, cfg: ModelConfig) -> Request:
    """`request` as models of `cfg` read it: where they think, its `thinking` says whether its prompt is read thinking."""
    if cfg.thinking is None or request.sampling.thinking is not None:
        return request
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, thinking=thinks(cfg, request.sampling)))


def check_ordinary(request: Request) -> Request:
    """`request` as it is; raises `InputError` if it is deterministic."""
    if request.sampling.deterministic:
        raise InputError(
            f"request {request.id!r} is deterministic, but the run was started with deterministic=False: start it without"
        )
    return request
