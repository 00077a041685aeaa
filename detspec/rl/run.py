"""The steps of a run: which weights sample the texts of a step, what is kept of them, and who waits for whom.

Rollouts of step `s` are sampled by the weights of step `max(0, s - lag)`, also where sampling takes longer than learning:

    lag 1      engine      rollouts 0 and 1 by w0 | rollouts 2 by w1 | rollouts 3 by w2
               trainer                   w0 -> w1 |         w1 -> w2 |         w2 -> w3

So a run with a lag is a pure function of its config, too. The last `lag` versions are part of the state and of checkpoints;
rollouts in flight are not: a run that goes on samples them again, to the same bits.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax

from detspec.checkpoint.load import Model
from detspec.config import ModelConfig
from detspec.model.params import Params
from detspec.rl.learner import Learner, published
from detspec.rl.policy import Idle, learn
from detspec.rl.rollouts import Rollout, check_groups, digest_rollouts, sample_groups
from detspec.train.run import Log
from detspec.train.step import TrainState, init_state

ROLLOUTS = "rollouts.jsonl"
Groups = list[list[Rollout]]
Config = Any  # a `detspec.rl.config.RLConfig`, whose file imports this one


class Kept(NamedTuple):
    """State besides weights: that of the optimiser, and the weights of the last `lag` steps in the model's dtype."""

    optimizer: Any
    earlier: tuple[Params, ...]  # the oldest first


def first_state(params: Params, optimizer: optax.GradientTransformation, cfg: ModelConfig, lag: int) -> TrainState:
    """The state before the first step."""
    state = init_state(params, optimizer)
    return state.replace(opt_state=Kept(state.opt_state, (published(params, cfg),) * lag))


class OnPolicyRun:
    """An engine and a learner that take turns, or work side by side."""

    def __init__(
        self, config: Config, model: Model, optimizer: optax.GradientTransformation, chips: Sequence[jax.Device], workdir: Path
    ) -> None:
        """Allocates the engine's cache; gradients are shared out to `chips`, texts are recorded in `workdir`."""
        self._config = config
        self._cfg = model.cfg
        self._file = workdir / ROLLOUTS
        self._engine = config.engine(model)
        reference = model.params if config.objective.kl else None
        schedule = self._engine.schedule
        self._learner = Learner(model.cfg, schedule, optimizer, config.objective, chips, config.remat, reference)
        self._sampler = Sampler(self._sample, config)
        self._idle = Idle()
        self._first_step: int | None = None

    def step(self, state: TrainState, slices: Sequence[int]) -> tuple[TrainState, dict[str, Any]]:
        """Learns from the texts of the step that all `slices` name; errors as of `Learner.step`."""
        config = self._config
        step = slices[0]
        if self._first_step is None:
            self._first_step = step
        versions = (*state.opt_state.earlier, published(state.params, self._cfg))
        groups = self._sampler.groups(step, versions)
        version = max(0, step - config.lag)
        check_groups(
            groups, compares=config.objective.compares, version=config.version(version), temperature=config.temperature
        )
        rewards = config.rewards(step, groups)
        plain, metrics = learn(
            self._learner,
            state.replace(opt_state=state.opt_state.optimizer),
            groups,
            rewards,
            leaf=config.leaf,
            sampled_by=None if version == step else versions[0],
        )
        self._idle.count(metrics)
        self._record(step, groups, rewards)
        state = plain.replace(opt_state=Kept(plain.opt_state, versions[1:]))
        return state, {**metrics, "rollouts": digest_rollouts([each for group in groups for each in group])}

    def _record(self, step: int, groups: Groups, rewards: Sequence[Sequence[float | None]]) -> None:
        """Adds the texts of `step` to the file; what a killed run wrote after its last checkpoint is dropped first."""
        with Log(self._file, keep_steps=step if step == self._first_step else None) as log:
            for group, given in zip(groups, rewards, strict=True):
                for each, reward in zip(group, given, strict=True):
                    log.append(line_of(step + 1, each, reward))
            log.sync()

    def _sample(self, step: int, version: int, params: Params) -> Groups:
        """The texts of `step`, by the weights `version`."""
        config = self._config
        name = config.version(version)
        self._engine.update_params(params, weight_version=name)
        prompts, _ = config.draw(step)
        names = (config.name, step)
        return sample_groups(self._engine, prompts, config.sampling, samples=config.samples, names=names, version=name)


class Sampler:
    """Samples the texts of steps in their order, ahead of them where the lag allows it."""

    def __init__(self, sample: Callable[[int, int, Params], Groups], config: Config) -> None:
        self._sample = sample
        self._config = config
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sampler") if config.lag and config.overlap else None
        self._begun: dict[int, Future[Groups]] = {}

    def groups(self, step: int, versions: Sequence[Params]) -> Groups:
        """The texts of `step`; those of later steps begin whose weights are among `versions`, the last of which are the newest.

        `versions` are those after `step - lag`, .. `step` steps; what would be before the first step are the first weights.
        """
        lag = self._config.lag
        last = step if self._thread is None else min(step + lag, self._config.num_steps - 1)
        for later in range(step, last + 1):
            if later not in self._begun:
                version = max(0, later - lag)
                self._begun[later] = self._begin(later, version, versions[version - (step - lag)])
        return self._begun.pop(step).result()

    def _begin(self, step: int, version: int, params: Params) -> Future[Groups]:
        if self._thread is not None:
            return self._thread.submit(self._sample, step, version, params)
        found: Future[Groups] = Future()
        found.set_result(self._sample(step, version, params))
        return found


def line_of(step: int, rollout: Rollout, reward: float | None) -> dict[str, Any]:
    """A text and its reward as a line of the file of rollouts."""
    return {
        "step": step,
        "id": rollout.id,
        "version": rollout.version,
        "seed": rollout.sampling.seed,
        "prompt_token_ids": list(rollout.prompt_token_ids),
        "token_ids": list(rollout.token_ids),
        "logprobs": rollout.logprobs.tolist(),
        "text": rollout.text,
        "finish_reason": rollout.finish_reason,
        "reward": reward,
    }
