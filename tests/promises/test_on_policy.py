"""A policy ends with the same weights however its rollouts were batched, drafted and placed, whoever is faster, and if killed.

Rewards, advantages and updates follow from bits of rollouts, so one other bit would be another policy. The controls take the
ordinary forward pass, change one bit of a log-probability, name another run, or take rollouts of later weights.
"""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detspec.rl as rl
from detspec import environment
from detspec.checkpoint.hf import save_hf
from detspec.errors import DivergenceError, InputError
from detspec.model.transformer import forward_sequences
from detspec.rl import learner
from detspec.rl.audit import audit_step
from detspec.rl.objectives import Objective
from detspec.rl.policy import digest_weights
from detspec.rl.rollouts import Rollout, digest_rollouts
from detspec.rl.run import ROLLOUTS, Sampler
from detspec.train.experiment import load_config
from detspec.train.run import read_log, run_experiment
from tests.engine.byte_model import byte_tokenizer
from tests.rl.small_policy import CFG, SAMPLING, make_policy, rewards_of, small_model
from tests.train.small_runs import RUN

pytestmark = pytest.mark.optimised

PROMPTS = ([5, 17, 9], list(range(3, 24)))  # the second is longer than a page
STEPS = 3
EXACT = {"logprob_bits_differ": 0, "logprob_diff_max": 0, "k3": 0, "ratio_min": 1, "ratio_max": 1, "clipped": 0, "skipped": 0}


SMALL = """
from detspec import environment

# Pages and passes of few positions, whose programs compile fast.
small = environment.DEFAULT_SCHEDULES["cpu"].with_numerics(page=16).with_budget(8, 4)
environment.DEFAULT_SCHEDULES["cpu"] = small
"""


@pytest.fixture(scope="module", autouse=True)
def small_schedule():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "DEFAULT_SCHEDULES", {**environment.DEFAULT_SCHEDULES})
        exec(SMALL)
        yield


def sampled(policy: rl.Policy) -> list[list[Rollout]]:
    return policy.rollouts(PROMPTS, samples=4, sampling=SAMPLING)


def trained(policy: rl.Policy) -> list[tuple[str, str]]:
    """SHA-256 of the rollouts of each step, and of the weights after it."""
    found = []
    for _ in range(STEPS):
        groups = sampled(policy)
        metrics = policy.update(groups, rewards_of(groups), rl.grpo())
        assert {name: metrics[name] for name in EXACT} == EXACT
        assert metrics["grad_norm"] > 0
        found.append((digest_rollouts([each for group in groups for each in group]), policy.digest()))
    return found


@pytest.fixture(scope="module")
def plain(small_schedule) -> list[tuple[str, str]]:
    return trained(make_policy())


@pytest.mark.parametrize(
    "engine",
    [
        {"max_requests": 3, "method": "ngram", "num_pages": 5, "prefix_sharing": False},
        pytest.param({"max_requests": 16, "method": "auto"}, marks=pytest.mark.sweep),
        pytest.param({"max_requests": 4, "method": "self", "num_pages": 4}, marks=pytest.mark.sweep),
        pytest.param({"max_requests": 1, "method": "none"}, marks=pytest.mark.sweep),
        pytest.param({"max_requests": 8, "method": "none", "prefix_sharing": False}, marks=pytest.mark.sweep),
    ],
)
def test_weights_are_those_of_any_places_drafts_pages_and_prefixes(engine, plain):
    assert trained(make_policy(**engine)) == plain


def test_control_another_run_has_other_weights(plain):
    assert not {*trained(make_policy(run="other"))} & {*plain}


def test_control_ordinary_log_probabilities_are_not_those_of_the_sampler(monkeypatch):
    def ordinary(params, cfg, tokens, lengths, *, temperature, schedule, remat):
        of_model = jax.tree.map(lambda leaf: leaf.astype(cfg.jax_dtype), params)
        logits_f32, _ = forward_sequences(of_model, cfg, tokens)
        of_all = jax.nn.log_softmax(logits_f32 / temperature[:, None, None])
        of_next = jnp.take_along_axis(of_all[:, :-1], tokens[:, 1:, None], axis=2)[..., 0]
        return jnp.pad(of_next, ((0, 0), (1, 0)))

    monkeypatch.setattr(learner, "logprobs", ordinary)
    policy = make_policy()
    groups = sampled(policy)
    before = policy.digest()
    with pytest.raises(DivergenceError, match="the policy is not the one that sampled"):
        policy.update(groups, rewards_of(groups), rl.grpo())
    assert policy.digest() == before


def test_control_one_flipped_bit_is_found_by_its_place_and_the_policy_goes_on_as_if_nothing_had_been(plain):
    """A loss that is not finite changes nothing, either."""
    policy = make_policy()
    before = policy.digest()
    groups = sampled(policy)
    logprobs = groups[1][2].logprobs.copy()
    logprobs.view(np.uint32)[5] ^= 1
    spoilt = [groups[0], [*groups[1][:2], dataclasses.replace(groups[1][2], logprobs=logprobs), groups[1][3]]]
    place = len(groups[1][2].prompt_token_ids) + 5
    with pytest.raises(DivergenceError, match=rf"text 6 at position {place} \(5 tokens after the prompt\)"):
        policy.update(spoilt, rewards_of(groups), rl.grpo())
    with pytest.raises(FloatingPointError, match="the weights are those before it"):
        policy.update(groups, [[3e38] * 4] * 2, Objective("plain", (0.2, 0.2), "sequence"))
    assert (policy.digest(), policy.step) == (before, 0)
    assert trained(policy) == plain


def test_distance_from_the_reference_is_exactly_zero_at_first_and_not_later():
    policy = make_policy()
    for step in range(2):
        groups = sampled(policy)
        metrics = policy.update(groups, rewards_of(groups), rl.grpo(kl=0.1))
        assert (metrics["kl"] == 0) == (step == 0)


# Runs with a lag, and killed ------------------------------------------------------------------------------------------------

CONFIG = """
import dataclasses
from detspec.rl.config import RLConfig
from detspec.rl.objectives import grpo
from detspec.train.optimizer import OptimizerConfig

@dataclasses.dataclass(frozen=True)
class Letters:
    def draw(self, rng, number):
        return [(chr(97 + int(rng.integers(26))) * 3, None) for _ in range(number)]

    def reward(self, known, prompt, text):
        return float(len(set(text)))

def get_config(arm):
    lag, _, emulated = arm.partition("-")
    return RLConfig(
        model={folder!r}, task=Letters(), prompts=2, samples=4, max_tokens=14, num_steps=5, leaf=4, temperature=0.9,
        objective=grpo(), optimizer=OptimizerConfig(peak_lr=1e-2, final_lr=1e-3, warmup_steps=1), lag=int(lag),
        overlap=not emulated, checkpoint_every=2, max_len=48, max_requests=8, method="none",
    )
"""


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("on_policy")
    save_hf(root / "model", CFG, small_model().params, tokenizer_json=byte_tokenizer().to_str())
    path = root / "config.py"
    path.write_text(CONFIG.replace("{folder!r}", repr(str(root / "model"))))
    return path


def run(config_path: Path, arm: str, workdir: Path, **changes: Any) -> tuple[str, list[dict[str, Any]], bytes]:
    """SHA-256 of the last weights, the log without times, and the file of rollouts, of a run that is begun or goes on."""
    workdir.mkdir(exist_ok=True)
    settings = dataclasses.replace(load_config(f"{config_path}:{arm}"), **changes)
    experiment = settings.experiment(workdir)
    digests = []

    def finish(params):
        digests.append(digest_weights(params))
        return experiment.finish(params)

    run_experiment(dataclasses.replace(experiment, finish=finish), workdir=workdir, progress=False)
    log = [{name: value for name, value in line.items() if name != "tok_per_s"} for line in read_log(workdir / "log.jsonl")]
    return digests[0], log, (workdir / ROLLOUTS).read_bytes()


@pytest.fixture(scope="module")
def finished(config_path: Path) -> dict[str, Any]:
    """Whole runs by their lag."""
    return {arm: run(config_path, arm, config_path.parent / arm) for arm in ("0", "1")}


def versions(rollouts: bytes) -> list[tuple[int, str]]:
    """Steps from 0 on, and the weights that sampled their texts."""
    lines = [json.loads(line) for line in rollouts.splitlines()]
    return sorted({(line["step"] - 1, line["version"]) for line in lines})


@pytest.mark.parametrize("lag", [1, pytest.param(2, marks=pytest.mark.sweep)])
def test_run_that_samples_while_it_learns_is_the_run_that_takes_turns(lag, config_path, tmp_path):
    overlapped, emulated = (run(config_path, arm, tmp_path / arm) for arm in (str(lag), f"{lag}-emulated"))
    assert overlapped == emulated
    assert versions(overlapped[2]) == [(step, f"rl-0:{max(0, step - lag)}") for step in range(5)]


def test_control_lag_decides_weights(finished):
    assert finished["0"][0] != finished["1"][0]


def test_control_rollouts_of_later_weights_than_the_lag_says_are_refused(config_path, tmp_path, monkeypatch):
    groups = Sampler.groups

    def early(self, step, weights):
        found = groups(self, step, weights)
        return [[dataclasses.replace(each, version=f"rl-0:{step}") for each in group] for group in found]

    monkeypatch.setattr(Sampler, "groups", early)
    with pytest.raises(InputError, match="was sampled by the weights 'rl-0:1', this step learns from 'rl-0:0'"):
        run(config_path, "1-emulated", tmp_path / "run")


@pytest.mark.parametrize(
    ("arm", "after"), [("1", 31), *[pytest.param(arm, n, marks=pytest.mark.sweep) for arm in "01" for n in (3, 9, 18, 27, 40)]]
)
def test_killed_run_goes_on_to_the_same_weights_log_and_rollouts(arm, after, config_path, finished, tmp_path):
    """A step writes nine lines: eight texts, then the line of the log."""
    workdir = tmp_path / "run"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", SMALL + RUN, f"{config_path}:{arm}", str(workdir), str(after)]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert len(read_log(workdir / "log.jsonl")) == after // 9
    assert run(config_path, arm, workdir) == finished[arm]


def test_run_goes_on_with_the_settings_of_its_start_alone(config_path, finished, tmp_path):
    optimizer = dataclasses.replace(load_config(f"{config_path}:0").optimizer, peak_lr=0.5)
    for changes, name in [
        ({"leaf": 2}, "leaf"),
        ({"lag": 1}, "lag"),
        ({"remat": True}, "remat"),
        ({"temperature": 1.0}, "temperature"),
        ({"optimizer": optimizer}, "optimizer.peak_lr"),
    ]:
        with pytest.raises(InputError, match=rf"differing: {name}; "):
            run(config_path, "0", config_path.parent / "0", **changes)
    other = tmp_path / "other.py"
    other.write_text(config_path.read_text().replace("len(set(text))", "len(text)"))
    with pytest.raises(InputError, match="differing: task_source; "):
        run(other, "0", config_path.parent / "0")


def test_audit_of_a_step_reproduces_it_and_names_what_was_changed(config_path: Path, finished: dict[str, Any], tmp_path: Path):
    config = load_config(f"{config_path}:0")
    assert audit_step(config, config_path.parent / "0", 1).differences == ()
    shutil.copytree(config_path.parent / "0", tmp_path / "run")
    lines = read_log(tmp_path / "run" / ROLLOUTS)
    lines[0]["reward"] += 1
    lines[1]["seed"] += 1
    lines[2]["token_ids"][0] = (lines[2]["token_ids"][0] + 1) % 256
    (tmp_path / "run" / ROLLOUTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = audit_step(config, tmp_path / "run", 1).differences
    for number, what in enumerate(("reward", "seed", "token 0")):
        assert any(lines[number]["id"] in each and what in each for each in found), what
    assert any("digest" in each for each in found)
    with pytest.raises(InputError, match="another config; differing: leaf"):
        audit_step(dataclasses.replace(config, leaf=1), config_path.parent / "0", 1)
