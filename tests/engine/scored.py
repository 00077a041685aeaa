"""Requests that report their log-probabilities, and what is compared of completions and of scores of the same texts."""

import dataclasses

import numpy as np

from detspec.engine.request import Completion
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import some_prompts, some_sampling

PROMPTS = some_prompts()
SAMPLING = [dataclasses.replace(s, logprobs=1) for s in some_sampling()]
SCORE = SamplingParams(logprobs=1)


def texts_of(completions: list[Completion]) -> tuple[list[list[int]], list[int]]:
    """Whole texts, and where what was written begins."""
    texts = [[*c.prompt_token_ids, *c.token_ids] for c in completions]
    return texts, [len(c.prompt_token_ids) for c in completions]


def bits(completions: list[Completion]) -> list[tuple]:
    """Ids, log-probability bits and likeliest tokens."""
    return [(c.token_ids, np.asarray(c.logprobs, np.float32).tobytes(), c.top_logprobs) for c in completions]
