"""A policy that samples and learns: an engine, and master weights that it is given anew after every update."""

import dataclasses
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
import optax

from detspec.checkpoint.load import Model
from detspec.config import is_count
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.errors import InputError, shown
from detspec.mesh import check_one_chip, first_devices
from detspec.model.params import Params
from detspec.rl.advantages import advantages_of, checked_rewards
from detspec.rl.learner import Learner, leaves_of, masters, published
from detspec.rl.objectives import Objective
from detspec.rl.rollouts import Rollout, check_groups, sample_groups
from detspec.sampling_params import SamplingParams
from detspec.train.optimizer import with_promotion
from detspec.train.step import TrainState, init_state

WARN_AFTER = 5  # steps one after the other that had nothing to learn from


class Policy:
    """Weights that sample and learn by turns, exactly on-policy.

        policy = rl.Policy(ds.load(), ds.EngineConfig(max_requests=64), optimizer=optax.adam(1e-5))
        groups = policy.rollouts(["def add(a, b):"], samples=8, sampling=ds.SamplingParams(max_tokens=64, temperature=1.0))
        metrics = policy.update(groups, [[reward(each) for each in group] for group in groups], rl.grpo())

    What it becomes depends on the model, the prompts, the rewards, the objectives, `leaf`, the optimiser and `run` alone: not
    on the engine's places, pages or drafts, nor on how many chips the gradients are shared out to.

    Attributes:
        engine: samples; it has a copy of the weights in the model's dtype.
        state: master weights in float32, the optimiser's state, and how many steps were made.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        *,
        optimizer: optax.GradientTransformation,
        leaf: int = 4,
        chips: int = 1,
        run: str = "run",
    ) -> None:
        """Starts from the weights of `model`.

        Args:
            model: what is trained; on one device, in floats.
            config: of the engine.
            optimizer: makes an update of a gradient, on float32 masters.
            leaf: texts whose gradient is worked out together; it decides bits.
            chips: devices that leaves are shared out to; it decides none.
            run: names the seeds of rollouts, so two runs of one name sample alike.

        Raises `InputError` if the model cannot be trained, or config and model do not fit.
        """
        check_trainable(model)
        if not is_count(leaf):
            raise InputError(f"leaf must be a positive integer, got {shown(leaf)}")
        self.engine = Engine(model, config)
        self.reference = model.params
        self.run = run
        self.leaf = leaf
        self._chips = first_devices(chips, jax.local_devices())
        transform = optax.GradientTransformation(with_promotion(optimizer.init), with_promotion(optimizer.update))
        self._learner = cache(lambda objective: self._make_learner(transform, objective))
        self.state: TrainState = jax.device_put(init_state(masters(model.params), transform), self._chips[0])
        self._idle = Idle()
        self._publish()

    def _make_learner(self, transform: optax.GradientTransformation, objective: Objective) -> Learner:
        reference = self.reference if objective.kl else None
        return Learner(self.engine.model.cfg, self.engine.schedule, transform, objective, self._chips, reference=reference)

    @property
    def step(self) -> int:
        """How many steps were made."""
        return int(self.state.step)

    @property
    def version(self) -> str:
        """Names the weights that it has now."""
        return f"{self.run}:{self.step}"

    def rollouts(
        self, prompts: Sequence[str | Sequence[int]], *, samples: int, sampling: SamplingParams
    ) -> list[list[Rollout]]:
        """Samples `samples` texts of each prompt, a group a prompt; `sampling` without a seed, see `sample_groups`."""
        return sample_groups(
            self.engine,
            prompts,
            dataclasses.replace(sampling, logprobs_mode="tempered"),
            samples=samples,
            names=(self.run, self.step),
            version=self.version,
        )

    def update(
        self, groups: Sequence[Sequence[Rollout]], rewards: Sequence[Sequence[Any]], objective: Objective
    ) -> dict[str, float]:
        """Learns from `groups` with a reward for each text; None leaves a text out of the loss and of the baseline.

        A step whose advantages are all 0 is skipped, unless a reference counts: the weights stay as they are.

        Returns the metrics of `Learner.step`, "reward", and "skipped": 1 or 0.

        Raises `InputError` for what is no sample of these weights, and as `Learner.step` does; the policy stays as it was.
        """
        texts = [each for group in groups for each in group]
        if not texts:
            raise InputError("there is nothing to learn from: give at least one group of texts")
        given = checked_rewards([[each.id for each in group] for group in groups], rewards)
        check_groups(groups, compares=objective.compares, version=self.version, temperature=texts[0].sampling.temperature)
        self.state, metrics = learn(self._learner(objective), self.state, groups, given, leaf=self.leaf)
        self._idle.count(metrics)
        self._publish()
        return metrics

    def _publish(self) -> None:
        self.engine.update_params(published(self.state.params, self.engine.model.cfg), weight_version=self.version)

    def digest(self) -> str:
        """SHA-256 of the master weights."""
        return digest_weights(self.state.params)


class Idle:
    """Counts steps that learned nothing, and warns after `WARN_AFTER` of them one after the other."""

    def __init__(self) -> None:
        self._number = 0

    def count(self, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step into account."""
        self._number = self._number + 1 if metrics["skipped"] else 0
        if self._number == WARN_AFTER:
            warnings.warn(
                f"{WARN_AFTER} steps had groups of equal rewards alone, and learned nothing: vary prompts, or sample more",
                stacklevel=3,
            )


def learn(
    learner: Learner,
    state: TrainState,
    groups: Sequence[Sequence[Rollout]],
    rewards: Sequence[Sequence[float | None]],
    *,
    leaf: int,
    sampled_by: Params | None = None,
) -> tuple[TrainState, dict[str, float]]:
    """The state after a step on `groups`, and metrics; see `Learner.step`.

    The weights stay as they are where all advantages are 0, and no distance from a reference counts.
    """
    texts = [each for group in groups for each in group]
    advantages = np.concatenate(advantages_of(rewards, learner.objective.advantage))
    counted = [reward for group in rewards for reward in group if reward is not None]
    reward = {"reward": float(np.mean(counted)) if counted else float("nan")}
    if not np.nan_to_num(advantages).any() and not learner.objective.kl:
        return learner.skip(state), {**reward, "loss": 0.0, "grad_norm": 0.0, "skipped": 1.0}
    leaves = leaves_of(texts, advantages, learner.objective, leaf=leaf, max_position=learner.cfg.max_position)
    state, metrics = learner.step(state, leaves, sampled_by=sampled_by)
    return state, {**reward, **metrics, "skipped": 0.0}


def check_trainable(model: Model) -> None:
    """Raises `InputError` unless `detspec.logprobs` takes the model."""
    check_one_chip(model.params, "rl")
    if model.cfg.thinking is not None or model.cfg.weights is not None:
        what = "thinks" if model.cfg.thinking is not None else f"has weights in {model.cfg.weights}"
        raise InputError(f"a policy must be a model in floats without thoughts; this one {what}")


def digest_weights(params: Params) -> str:
    """SHA-256 of all weights, leaf by leaf in the order of `jax.tree.leaves`."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()
