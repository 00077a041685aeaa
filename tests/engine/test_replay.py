"""Recorded completions replay to the bits that the engine gave, in any number of rows and in large passes."""

import dataclasses

import numpy as np
import pytest

from detspec.engine import policy
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import large_passes
from detspec.engine.request import Request
from detspec.errors import InputError
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Schedule
from tests.engine.byte_model import SCHEDULE, ordinary, some_prompts, some_sampling

LARGE_ROWS = 64
CONFIG = EngineConfig(max_requests=3, max_len=64, schedule=SCHEDULE, method="none")


@pytest.fixture(autouse=True, scope="module")
def smaller_passes():
    """Larger than the schedule's, and soon compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "LARGE_ROWS", LARGE_ROWS)
        yield


@pytest.fixture(scope="module")
def replaying(model) -> Engine:
    return Engine(model, CONFIG)


def records(completions, each=None) -> list[tuple[Request, tuple[int, ...]]]:
    pairs = zip(completions, each or some_sampling(), strict=True)
    return [(Request(c.id, c.prompt_token_ids, sampling), c.token_ids) for c, sampling in pairs]


def agreeing(replays, completions) -> list[bool]:
    """Whether each completion has the tokens and the bits that its replay says."""
    return [
        replay.targets[: len(c.token_ids)].tolist() == list(c.token_ids)
        and replay.logprobs[: len(c.token_ids)].tobytes() == np.asarray(c.logprobs, np.float32).tobytes()
        for replay, c in zip(replays, completions, strict=True)
    ]


def test_replay_of_completions_has_their_tokens_and_bits(three_rows, replaying):
    """Eight records go through three rows in three batches, in large passes, sampled ones apart."""
    completions = three_rows.generate(some_prompts(), some_sampling())
    replays = list(replaying.replay(iter(records(completions))))
    assert replaying.replicas[0].large.budget.rows == LARGE_ROWS
    assert agreeing(replays, completions) == [True] * 8
    assert [len(replay.targets) for replay in replays] == [len(c.token_ids) + 1 for c in completions]


def test_replay_of_ordinary_completions_differs(request, replaying):
    """The inverse control. Which batches differ depends on the device and on jax's version."""
    for name in ("three_rows", "one_row"):
        completions = request.getfixturevalue(name).generate(some_prompts(), [ordinary(each) for each in some_sampling()])
        if not all(agreeing(replaying.replay(records(completions)), completions)):
            return
    pytest.fail("ordinary generation gave the canonical bits in every batch: the comparisons of this file show nothing")


def test_replay_of_prompts_that_begin_alike_has_the_bits_of_each(three_rows, replaying, monkeypatch):
    """Two samples of one prompt and one that leaves it after a page; the control shares what is not alike."""
    long = np.random.default_rng(3).integers(0, 2048, 35).tolist()
    prompts = [long, long, [*long[:17], *long[:10]]]
    each = [SamplingParams(max_tokens=8, temperature=1.0, seed=seed) for seed in range(3)]
    completions = three_rows.generate(prompts, each)
    assert agreeing(replaying.replay(records(completions, each)), completions) == [True] * 3
    others = [[*long[:5], 7, *long[6:]], [*long[:5], 8, *long[6:]], long]
    completions = three_rows.generate(others, each)
    monkeypatch.setattr("detspec.engine.scheduler.prefix_keys", lambda root, tokens, page: [b"any"] * (len(tokens) // page))
    assert not all(agreeing(replaying.replay(records(completions, each)), completions))


def test_replays_stay_at_the_schedule_asked_for_where_larger_passes_differ(model, three_rows, monkeypatch):
    def spoilt(self: Schedule, rows: int, window: int) -> Schedule:
        return dataclasses.replace(self, budget=Budget(rows, window)).with_numerics(reductions="native")

    completions = three_rows.generate(some_prompts(), some_sampling())
    monkeypatch.setattr(Schedule, "with_budget", spoilt)
    replaying = Engine(model, CONFIG)
    assert all(agreeing(replaying.replay(records(completions)), completions))
    assert replaying.replicas[0].large == SCHEDULE


def test_large_passes_keep_aligned_windows_and_short_caches():
    assert large_passes(SCHEDULE, 64) == SCHEDULE.with_budget(LARGE_ROWS, 16)
    aligned = SCHEDULE.with_numerics(alignment="window")
    assert large_passes(aligned, 64) == aligned.with_budget(LARGE_ROWS, aligned.budget.window)
    assert large_passes(SCHEDULE, 8) == SCHEDULE


def test_texts_that_do_not_fit_and_unknown_tokens_are_refused(model, replaying):
    request = Request("a", (1, 2), SamplingParams())
    for token_ids, message in [([3] * 63, "'a' has 65 tokens with its prompt"), ([2048], "'a': .*token id 2048")]:
        with pytest.raises(InputError, match=message):
            list(replaying.replay([(request, token_ids)]))
    assert len(next(replaying.replay([(request, [3] * 62)])).targets) == 62  # the text fills the row: nothing can follow
    with pytest.raises(InputError, match="'a' asks for 2 samples: replay each"):
        list(replaying.replay([(Request("a", (1, 2), SamplingParams(n=2)), [3])]))
    with pytest.raises(InputError, match="'a' has 40 tokens with its prompt: 3 pages of 16, more than num_pages"):
        list(Engine(model, dataclasses.replace(CONFIG, max_requests=2, num_pages=2)).replay([(request, [3] * 38)]))
    with pytest.raises(InputError, match="max_len 129 exceeds the 128 positions"):
        Engine(model, EngineConfig(max_len=129, schedule=SCHEDULE))
