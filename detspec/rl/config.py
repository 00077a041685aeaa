"""Settings of a run of reinforcement learning, for `detspec train`; `detspec.rl.run` has its steps."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from detspec.checkpoint.folder import find_folder
from detspec.checkpoint.load import Model, cast_params, load
from detspec.config import check_choice, check_counts, check_flags, check_numbers
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.errors import InputError
from detspec.model.params import Params
from detspec.rl.advantages import checked_rewards
from detspec.rl.learner import masters, published
from detspec.rl.objectives import GRPO, Objective
from detspec.rl.policy import check_trainable
from detspec.rl.rollouts import Rollout
from detspec.rl.run import OnPolicyRun, first_state
from detspec.rl.tasks import RewardedTask, source_digest
from detspec.sampling_params import SamplingParams
from detspec.train.experiment import Experiment, Result, require_seed
from detspec.train.export import EXPORT, export_like
from detspec.train.optimizer import OptimizerConfig

# Fields that decide no bit of a step.
SPEED_ALONE = ("max_len", "max_requests", "num_pages", "method", "overlap", "checkpoint_every", "keep_checkpoints")
MAX_LAG = 16  # versions of the weights that are kept


@dataclasses.dataclass(frozen=True)
class RLConfig:
    """Settings of a run. On one kind of device, they and the model decide every bit of the result; fields of speed decide none.

    Attributes:
        model: folder of the model that is trained, or the name of a shipped one; None is the shipped one.
        task: draws prompts and rewards texts.
        prompts: prompts of a step.
        samples: texts of each prompt.
        max_tokens: most new tokens of a text.
        num_steps: optimiser steps.
        optimizer: settings of the optimiser.
        objective: what is maximised.
        temperature: at which texts are sampled, and at which log-probabilities are taken.
        dtype: in which the model samples: "float32", "bfloat16" or "float16"; None is the folder's. Masters are float32.
        leaf: texts whose gradient is worked out together.
        lag: how many steps older than the weights that learn those are that sampled.
        remat: gradients work out the inside of each layer once more, instead of keeping it; it decides bits of gradients.
        seed: decides prompts and the noise of texts.
        checkpoint_every: steps between checkpoints.
        keep_checkpoints: how many of them are kept; `detspec audit --rl` starts from one.
        max_len: positions of a text, prompt included; at most the model's.
        max_requests: speed alone: texts that are sampled at once.
        num_pages: speed alone: cache pages that they share; None is as many as they can take.
        method: speed alone: drafts, see `EngineConfig`.
        overlap: speed alone: with a lag, texts are sampled while the weights learn.
    """

    model: str | None
    task: RewardedTask
    prompts: int
    samples: int
    max_tokens: int
    num_steps: int
    optimizer: OptimizerConfig
    objective: Objective = GRPO
    temperature: float = 1.0
    dtype: str | None = None
    leaf: int = 4
    lag: int = 0
    remat: bool = False
    seed: int = 0
    checkpoint_every: int = 50
    keep_checkpoints: int = 2
    max_len: int = 1024
    max_requests: int = 32
    num_pages: int | None = None
    method: str | tuple[str, ...] = "auto"
    overlap: bool = True

    def __post_init__(self) -> None:
        counts = ("prompts", "samples", "max_tokens", "num_steps", "leaf", "checkpoint_every", "keep_checkpoints", "max_len")

        check_counts(self, *counts, "max_requests")
        check_numbers(self, "temperature")
        check_flags(self, "remat", "overlap")
        check_choice(self, "dtype", ("float32", "bfloat16", "float16"), optional=True)
        require_seed(self)
        if not isinstance(self.lag, int) or isinstance(self.lag, bool) or not 0 <= self.lag <= MAX_LAG:
            raise InputError(f"RLConfig.lag must be an integer in 0 .. {MAX_LAG}, got {self.lag!r}")
        if self.prompts * self.samples % self.leaf:
            raise InputError(
                f"RLConfig.leaf ({self.leaf}) must divide prompts * samples ({self.prompts * self.samples}), its texts"
            )
        if self.objective.compares and self.samples < 2:
            raise InputError(f"RLConfig.samples must be 2 or more where texts of a prompt are compared, got {self.samples}")
        self.optimizer.require_warmup_within(self.num_steps)

    @property
    def name(self) -> str:
        """Names seeds and versions of weights."""
        return f"rl-{self.seed}"

    @property
    def sampling(self) -> SamplingParams:
        """How texts are sampled, but for their seeds."""
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, logprobs_mode="tempered")

    def load(self) -> Model:
        """The model before the first step; `InputError` if it cannot be trained."""
        model = load(self.model)
        check_trainable(model)
        cfg, params = cast_params(model.cfg, model.params, self.dtype or model.cfg.dtype)
        return dataclasses.replace(model, cfg=cfg, params=params)

    def engine(self, model: Model) -> Engine:
        """The engine that samples texts."""
        max_len = min(self.max_len, model.cfg.max_position)
        return Engine(model, EngineConfig(self.max_requests, max_len, self.num_pages, method=self.method))

    def draw(self, step: int) -> tuple[list[str], list[Any]]:
        """The prompts of `step`, and what is known of each."""
        drawn = self.task.draw(np.random.default_rng((self.seed, step)), self.prompts)
        if len(drawn) != self.prompts:
            raise InputError(f"{type(self.task).__name__}.draw must give {self.prompts} prompts, got {len(drawn)}")
        return [prompt for prompt, _ in drawn], [known for _, known in drawn]

    def rewards(self, step: int, groups: Sequence[Sequence[Rollout]]) -> list[list[float | None]]:
        """The rewards of `groups`, which answer the prompts of `step`; `InputError` for one that is no number."""
        prompts, known = self.draw(step)
        given = [
            [self.task.reward(knows, prompt, each.text) for each in group]
            for knows, prompt, group in zip(known, prompts, groups, strict=True)
        ]
        return checked_rewards([[each.id for each in group] for group in groups], given)

    def record(self, model: Model) -> dict[str, Any]:
        """All that decides the bits of a step, JSON-like: a run that goes on must have the same."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if name not in SPEED_ALONE}
        return {**fields, "task_source": source_digest(self.task), "weights": model.digest}

    def experiment(self, workdir: Path) -> Experiment:
        """The run. Raises `InputError` if the model cannot be trained."""
        model = self.load()
        start = masters(model.params)

        def finish(params: Params) -> Result:
            export_like(workdir, model.cfg, published(params, model.cfg), find_folder(self.model))
            return Result({"steps": self.num_steps}, workdir / EXPORT)

        num_leaves = self.prompts * self.samples // self.leaf
        return Experiment(
            num_steps=self.num_steps,
            eval_every=self.num_steps + 1,
            checkpoint_every=self.checkpoint_every,
            keep_checkpoints=self.keep_checkpoints,
            optimizer=self.optimizer,
            record=self.record(model),
            init_params=lambda: start,
            loss_fn=lambda params, part: (jnp.float32(0), {}),
            batch_at=lambda step: step,
            tokens_at=lambda step: self.prompts * self.samples * self.max_tokens,
            evaluate=lambda params, step: {},
            finish=finish,
            cut=lambda step: [step] * num_leaves,
            exports=f"the model will be exported to {workdir / EXPORT}",
            make_step=lambda loss_fn, optimizer, chips: OnPolicyRun(self, model, optimizer, chips, workdir).step,
            init_state=lambda params, optimizer: first_state(params, optimizer, model.cfg, self.lag),
        )

    def version(self, step: int) -> str:
        """Names the weights after `step` steps."""
        return f"{self.name}:{step}"
