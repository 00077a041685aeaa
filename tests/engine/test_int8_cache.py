"""Keys and values in int8: batches, drafts, few pages, shared beginnings and scoring change no bit of an engine's results."""

import numpy as np

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.load import Model
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.generation.score import score
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Numerics, Schedule
from tests.fakes import RANDOM_CFG, random_model

SHARED = np.random.default_rng(9).integers(0, RANDOM_CFG.vocab_size, 18).tolist()  # a page of 16 slots and more
PROMPTS = [SHARED + np.random.default_rng(i).integers(0, RANDOM_CFG.vocab_size, 1 + 5 * i).tolist() for i in range(3)]
SAMPLING = [SamplingParams(max_tokens=20, temperature=t, seed=3, ignore_eos=True) for t in (0.0, 1.0, 0.7)]


def engine_of(cache_dtype: str = "int8", **changes) -> Engine:
    params = random_model(RANDOM_CFG)
    numerics = Numerics(page=16, implementation="cpu", linear="pinned", cache_dtype=cache_dtype)
    plain = {"max_requests": 3, "max_len": 64, "method": "none", "num_speculative_tokens": 3, "compile_cache": False}
    config = EngineConfig(**{**plain, "schedule": Schedule(numerics, Budget(16, 4)), **changes})
    return Engine(Model(RANDOM_CFG, params, None, (), digest_model(RANDOM_CFG, params)), config)


def facts(engine: Engine) -> list[tuple]:
    found = engine.generate(PROMPTS, SAMPLING)
    return [(one.token_ids, np.asarray(one.logprobs, np.float32).tobytes(), one.digest) for one in found]


def test_tokens_bits_and_digests_do_not_depend_on_batch_draft_or_pages():
    alone = engine_of(max_requests=1)
    expected = facts(alone)
    crowded = engine_of(method="self", num_pages=5)
    assert facts(crowded) == expected
    assert crowded.num_preemptions > 0
    in_floats = facts(engine_of("bfloat16", max_requests=1))
    assert all(one[1:] != other[1:] for one, other in zip(expected, in_floats, strict=True))
    texts = [[*prompt, *tokens] for prompt, (tokens, _, _) in zip(PROMPTS, expected, strict=True)]
    scored = score(alone.model.params, RANDOM_CFG, texts, schedule=alone.schedule, max_len=64)
    again = [np.asarray(one[len(prompt) :], np.float32).tobytes() for one, prompt in zip(scored, PROMPTS, strict=True)]
    assert again == [logprobs for _, logprobs, _ in expected]
