"""Draft sources that the engine does not know: weights, caches, and when "auto" takes them. No bit depends on them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.checkpoint.load import Model
from detspec.draft.ngram import ngram
from detspec.draft.source import Drafter
from detspec.engine.certify import CERTIFIED, NOT_TRIED
from detspec.engine.decide import Load
from detspec.engine.device import Device
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.planner import Planner
from detspec.engine.policy import Drafting, Needs, canonical_plans
from detspec.errors import InputError
from detspec.model.params import param_shapes
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule
from tests.engine.byte_model import SCHEDULE, facts
from tests.engine.fake_device import FakeDevice
from tests.engine.fixed_times import FixedTimes
from tests.engine.test_step_times import chosen_by
from tests.fakes import TABLE_CFG

CIRCLE = [*range(16), *range(16)]


def circling_model(size: int = 2048, circle: int = 16) -> Model:
    """The next token after `t` is `t + 1` within its circle of 16, as in `table_model`; reading the head is most of a step."""
    cfg = dataclasses.replace(TABLE_CFG, vocab_size=size, d_model=size, dtype="bfloat16")
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), param_shapes(cfg))
    token = np.arange(size)
    params["embed"][token, token] = 1
    params["head"][token - token % circle + (token + 1) % circle, token] = 1
    for norm in (params["final_norm"], params["layers"][0]["attn_norm"], params["layers"][0]["mlp_norm"]):
        norm[:] = 1
    return Model(cfg, jax.tree.map(jnp.asarray, params), None, (), "counts in circles")


def test_name_of_a_drafter_that_is_taken_or_unknown_is_refused(model):
    with pytest.raises(InputError, match="the name 'self' is taken"):
        Engine(model, EngineConfig(max_len=64, schedule=SCHEDULE), drafters={"self": Drafter(ngram())})
    with pytest.raises(InputError, match="must be one of auto, none, ngram, int8, self, mine, got 'model'"):
        Engine(model, EngineConfig(max_len=64, schedule=SCHEDULE, method="model"), drafters={"mine": Drafter(ngram())})


@pytest.mark.slow
def test_auto_tries_prompt_lookup_here_and_takes_it_for_a_text_that_repeats_itself():
    """Self-drafting cannot win on a CPU and is not tried; lookup costs nothing, and the model counts in circles."""
    model = circling_model()
    config = EngineConfig(max_requests=1, max_len=320, segment_steps=16, schedule=SCHEDULE.with_numerics(page=64))
    engine = Engine.over(Device(model, config), FixedTimes())
    plain = Engine(model, EngineConfig(max_requests=1, max_len=320, method="none", schedule=config.schedule))
    sampling = SamplingParams(max_tokens=256)
    expected = [facts(c) for c in plain.generate([CIRCLE], sampling)]
    engine.prepare(1, Needs.of([sampling]))  # all drafts: they are not needed for a first answer
    found = engine.generate([CIRCLE], sampling)
    assert [facts(c) for c in found] == expected
    statuses = {plan.draft: certificate.status for plan, certificate in engine.certificates.items() if not plan.ordinary}
    assert (statuses["none"], statuses["ngram"]) == (CERTIFIED, CERTIFIED)
    assert statuses["self"] in (CERTIFIED, NOT_TRIED)
    assert found[0].stats.mean_acceptance_length > 3  # of the 4 rows that one request gets


def test_auto_leaves_a_free_draft_when_its_guesses_fail_and_takes_it_back_when_they_hold():
    """Decoding takes 10 ms and a window of 16 takes 25, whatever is in it: 2.5 tokens a window are the break-even."""
    decoding = canonical_plans(1, 64)[0]
    drafted = canonical_plans(1, 64, Drafting("ngram", 4, 15, skips=True))[0]
    device = FakeDevice(Schedule(), EngineConfig(max_requests=1, max_len=64))
    planner = Planner(device)
    planner.prepare([1], Needs(processing=False))
    for plan in planner.certificates:
        planner.step_times.measured({plan: 1.0})
    planner.step_times.measured({decoding: 0.010, drafted: 0.025})

    def share(accepted: int, segments: int) -> float:
        """How often the draft runs in so many segments of 8 windows, each with so many accepted tokens."""
        chosen = []
        for _ in range(segments):
            load = Load(1, 0, (), ready_deterministic=1, num_ready=1, waiting=False, processing=False)
            plan = chosen_by(planner, load)
            planner.step_times.observed(plan, 0.010 if plan == decoding else 0.025, 64)
            planner.acceptance.observed(plan, 8, 8 * accepted if plan == drafted else 0)
            chosen.append(plan == drafted)
        return float(np.mean(chosen[-50:]))

    assert share(accepted=12, segments=400) > 0.9
    assert share(accepted=0, segments=400) < 0.1
    assert share(accepted=12, segments=800) > 0.9
