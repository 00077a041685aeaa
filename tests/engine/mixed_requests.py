"""Twelve requests of all kinds for the small model over bytes, and what an engine makes of them."""

import dataclasses

from detspec.engine.engine import Engine
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import facts, some_prompts, some_sampling

PREFIX = list(range(100, 135))  # two pages of 16 and 3 tokens
NUM = 12
SHUFFLED = [7, 2, 11, 0, 9, 4, 1, 10, 3, 6, 8, 5]


def mixed_requests(number: int = NUM) -> list[tuple[list[int], SamplingParams]]:
    """Some with a common prefix, two of them the same prompt; greedy, sampled, with filters and penalties; some stop early."""
    prompts = [PREFIX + prompt[:5] if i % 3 == 0 else prompt for i, prompt in enumerate(some_prompts(number))]
    prompts[6] = prompts[3]
    sampling = some_sampling(number)
    sampling[1] = dataclasses.replace(sampling[1], repetition_penalty=1.3, presence_penalty=0.5)
    sampling[4] = dataclasses.replace(sampling[4], stop_token_ids=(7, 8, 9), logit_bias={7: 4, 8: 4, 9: 4})
    sampling[5] = dataclasses.replace(sampling[5], top_p=0.9)
    sampling[9] = dataclasses.replace(sampling[9], n=3, seed=50, temperature=0.9)
    lengths = [min(16 + 20 * (i % 2), 60 - len(prompt)) for i, prompt in enumerate(prompts)]
    return [(p, dataclasses.replace(s, max_tokens=n)) for p, s, n in zip(prompts, sampling, lengths, strict=True)]


def run(engine: Engine, order=range(NUM), change=lambda sampling: sampling, held: int = 0) -> list:
    """Facts by request and sample, whatever the order they came in."""
    requests = mixed_requests()
    made = [engine.request(requests[i][0], change(requests[i][1]), id=str(i)) for i in order]
    completions = sorted(engine.run(iter(made)), key=lambda c: (int(c.id), c.index))
    assert engine.num_pages_held == held
    return [(c.id, c.index, *facts(c), c.digest) for c in completions]
