"""Requests of the parts, of all kinds, drawn from a seed."""

import random
from typing import Any

import detspec as ds

CODE = (
    "def fib(n):",
    "class A:\n    def __init__(self",
    "import os\n",
    "x = [",
    "for i in range(10):\n    print(i)\n" * 4,
    "    def is_active(self):\n        return self.active\n\n    def is_",
)
Asked = tuple[list[Any], list[ds.SamplingParams]]  # prompts, and how each goes on


def plain(vocab_size: int, number: int, *, seed: int = 0, longest: int = 90) -> Asked:
    """Prompts of token ids, some of which begin alike, greedy and sampled."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, vocab_size) for _ in range(longest)]
    prompts, sampling = [], []
    for index in range(number):
        own = [rng.randrange(3, vocab_size) for _ in range(rng.randrange(1, longest // 2))]
        prompts.append(shared[: rng.randrange(longest // 2)] + own)
        temperature = rng.choice([0, 0, 0.7, 1, 1e-3, 5])
        lengths = {"max_tokens": rng.randrange(8, 40), "ignore_eos": True}
        sampling.append(ds.SamplingParams(seed=index - 2, temperature=temperature, logprobs=index % 3, **lengths))
    return prompts, sampling


def code(tokenizer: Any, number: int, *, seed: int = 5) -> Asked:
    """Beginnings of code as texts and as tokens, that ask for each field of `SamplingParams`."""
    rng = random.Random(seed)
    prompts: list[Any] = []
    sampling = []
    for index in range(number):
        text = rng.choice(CODE)
        random_ids = [rng.randrange(3, 2000) for _ in range(rng.randrange(1, 90))]
        prompts.append(random_ids if index % 3 == 0 else text if index % 3 == 1 else list(tokenizer.encode(text))[:60])
        sampling.append(ds.SamplingParams(**_fields(rng, index)))
    return prompts, sampling


def _fields(rng: random.Random, index: int) -> dict[str, Any]:
    """Fields of one request; `index` decides which of them it has."""
    fields: dict[str, Any] = {
        "max_tokens": rng.randrange(1, 48),
        "seed": index,
        "temperature": rng.choice([0, 0, 0.7, 1, 1e-3]),
    }
    if index % 4 == 0:
        fields |= {"top_k": rng.choice([0, 5, 40]), "top_p": rng.choice([1, 0.9]), "min_p": rng.choice([0, 0.05])}
    if index % 5 == 0:
        fields |= {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": -0.2}
    if index % 5 == 1:
        fields |= {"logit_bias": {7: 2.5, 9: -100}, "min_tokens": min(4, fields["max_tokens"])}
    if index % 6 == 0:
        fields |= {"stop": ["\n", "self"]}
    if index % 7 == 0:
        fields |= {"logprobs": 2, "prompt_logprobs": 1}
    if index % 9 in (0, 4):
        fields |= {"logprobs_mode": rng.choice(["processed", "tempered"]), "logprobs": 1}
    if index % 11 == 0:
        fields |= {"stop_token_ids": [5, 17, 99]}
    if index % 13 == 0:
        fields |= {"n": 3, "temperature": 0.9}
    return fields
