"""Requests of all kinds, as lines of a job; some begin alike, some need logits to be processed, some have several samples."""

import argparse
import dataclasses
import inspect
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

FILTERS: tuple[dict[str, Any], ...] = ({}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05})

Line = dict[str, Any]  # "id", "prompt_token_ids" and "sampling", as in a file of prompts


@dataclasses.dataclass(frozen=True)
class Material:
    """Parts that requests are made of.

    Attributes:
        texts: three texts as token ids, which prompts are cut from.
        most_prompt: most tokens of a prompt.
        most_new: most new tokens of a sample.
        stops: strings that end some of the requests; () for models without a tokenizer.
    """

    texts: tuple[list[int], ...]
    most_prompt: int
    most_new: int
    stops: tuple[str, ...] = ()


def python_texts(tokenizer: Any) -> tuple[list[int], ...]:
    """Source code from Python's library."""
    return tuple(tokenizer.encode(inspect.getsource(module)) for module in (argparse, dataclasses, json))


def random_texts(vocab_size: int, num_tokens: int) -> tuple[list[int], ...]:
    """Random token ids below `vocab_size`."""
    return tuple(np.random.default_rng(0).integers(0, vocab_size, (3, num_tokens)).tolist())


def some_lines(material: Material, number: int, seed: int) -> list[Line]:
    """`number` requests; each third begins with a piece of text that others begin with, too."""
    rng = np.random.default_rng(seed)
    texts = material.texts
    most = material.most_prompt
    common = [token for token, _ in Counter(token for ids in texts for token in ids).most_common(6)]
    lines = []
    for i in range(number):
        ids = texts[int(rng.integers(3))]
        length = 1 + int((most - 1) * rng.random() ** 3)
        begin = int(rng.integers(max(1, len(ids) - length)))
        prompt = ids[begin : begin + length]
        if i % 3 == 0:
            prompt = (texts[int(rng.integers(3))][: most * 3 // 4] + prompt)[:most]
        sampling: dict[str, Any] = {"max_tokens": int(rng.integers(4, material.most_new + 1)), "seed": 1000 * seed + i}
        if i % 2:
            sampling["temperature"] = float(rng.choice([0.3, 0.8, 1.2]))
            sampling |= FILTERS[int(rng.integers(4))]
        lines.append({"id": f"r{i}", "prompt_token_ids": prompt, "sampling": sampling | further(i, common, material.stops)})
    return lines


def further(i: int, common: Sequence[int], stops: tuple[str, ...]) -> dict[str, Any]:
    """Further wishes of request `i`: stop tokens, penalties, stop strings, several samples, processed log-probabilities."""
    asked: dict[str, Any] = {}
    if i % 5 == 0:
        asked["stop_token_ids"] = list(common[:2])
    if i % 7 == 0:
        penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
        asked |= {**penalties, "logit_bias": {str(common[5]): 2.0}, "min_tokens": 3}
    if i % 11 == 0 and stops:
        asked["stop"] = list(stops)
    if i % 13 == 0:
        asked["logprobs_mode"] = "processed"
    if i % 25 == 1:
        asked["n"] = 3
    return asked
