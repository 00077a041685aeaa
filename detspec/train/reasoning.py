"""Training models that reason: Thinking States, chain of thought or neither, on one backbone and one task."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from detspec.checkpoint.folder import write_json
from detspec.checkpoint.load import load, load_config
from detspec.config import ModelConfig, ThinkingConfig, check_counts, is_count
from detspec.environment import chosen_schedule
from detspec.errors import InputError
from detspec.model.params import Params, init_params, with_thinking
from detspec.riders.rider import Capacity
from detspec.thinking.reading import init_reading
from detspec.train.accuracy import Trained, accuracy_by_operations, longest
from detspec.train.data_parallel import cut
from detspec.train.experiment import Experiment, Result, require_seed, settings_of
from detspec.train.export import EXPORT, describe_own, export_own
from detspec.train.optimizer import OptimizerConfig
from detspec.train.problems.chunks import Batch, encode, make_batch
from detspec.train.problems.problem import Problem, require_arm
from detspec.train.problems.tasks import Task, tokenizer_of
from detspec.train.problems.traces import Traces
from detspec.train.problems.words import FILLER
from detspec.train.reasoning_loss import count, reasoning_loss, taught_loss
from detspec.train.step import divided
from detspec.viz.figures import draw_curves


@dataclasses.dataclass(frozen=True)
class ReasoningConfig:
    """Settings of a run of a model that reasons."""

    # shape of a model trained from scratch, without thinking layers. `dtype` must be "float32" (master weights); `vocab_size`
    # is raised to the task's words. Or a folder, of Hugging Face or ours: the run starts from its weights in float32, and the
    # task must use its tokenizer. A model that thinks must do so as `thinking` says; its thinker and compressor go on, too.
    backbone: ModelConfig | str
    thinking: ThinkingConfig  # settings of thinking in the arm "thinking"; the other arms train the backbone alone
    task: Task  # draws the problems
    arm: str  # "thinking", "cot" (the model writes the steps after the question) or "no_cot" (it writes only the answer)
    max_ops: int  # problems have 1 .. `max_ops` operations
    seq_len: int  # `T`, tokens of a row; the longest problem with its continuation must fit
    num_steps: int  # optimiser steps
    batch_size: int  # problems per step, all new
    optimizer: OptimizerConfig  # settings of the optimiser
    # draws the problems of evaluations, such as a held-out file. It must use the words of `task`. None means `task` itself.
    eval_task: Task | None = None
    eval_ops: tuple[int, ...] = (5, 10, 20, 40, 70, 100)  # numbers of operations that the final evaluation tests
    eval_problems: int = 128  # problems for each of `eval_ops`
    eval_every: int = 100  # steps between teacher-forced evaluations during training
    checkpoint_every: int = 100  # steps between checkpoints
    seed: int = 0  # decides the initial weights and all problems

    def __post_init__(self) -> None:
        require_arm(self.arm)
        counts = "max_ops", "seq_len", "num_steps", "batch_size", "eval_problems", "eval_every", "checkpoint_every"
        check_counts(self, *counts)
        require_seed(self)
        backbone = self.backbone
        if not isinstance(backbone, ModelConfig | str):
            raise InputError(f"ReasoningConfig.backbone must be a ModelConfig or the path of a model folder, got {backbone!r}")
        if not isinstance(self.thinking, ThinkingConfig):
            raise InputError(f"ReasoningConfig.thinking must be a ThinkingConfig in every arm, got {self.thinking!r}")
        shape = self.backbone_cfg
        if shape.dtype != "float32" or (isinstance(backbone, ModelConfig) and shape.thinking is not None):
            raise InputError(
                "ReasoningConfig.backbone must have dtype 'float32' (master weights) and no thinking of its own, got "
                f"{shape.dtype!r} and {shape.thinking}"
            )
        if shape.thinking is not None and (self.arm != "thinking" or shape.thinking != self.thinking):
            raise InputError(
                f"the model in {backbone} thinks: it goes on only with arm='thinking' and thinking={shape.thinking}, got "
                f"arm={self.arm!r} and {self.thinking}"
            )
        if not self.eval_ops or not all(map(is_count, self.eval_ops)):
            raise InputError(f"ReasoningConfig.eval_ops must be positive integers, got {self.eval_ops!r}")
        if self.seq_len > shape.max_position:
            raise InputError(f"ReasoningConfig.seq_len ({self.seq_len}) exceeds the backbone's {shape.max_position} positions")
        self.optimizer.require_warmup_within(self.num_steps)

    @property
    def backbone_cfg(self) -> ModelConfig:
        """Shape of the backbone; `InputError` if it is a folder without a valid config."""
        if isinstance(self.backbone, ModelConfig):
            return self.backbone
        return dataclasses.replace(load_config(self.backbone), dtype="float32")

    def model(self, tokenizer: tokenizers.Tokenizer) -> ModelConfig:
        """The model of this arm, with room for all words of `tokenizer`; `InputError` if a loaded model has too little."""
        shape = self.backbone_cfg
        words = tokenizer.get_vocab_size(with_added_tokens=True)
        if words > shape.vocab_size and not isinstance(self.backbone, ModelConfig):
            raise InputError(
                f"the task's tokenizer has {words} tokens, the model in {self.backbone} only {shape.vocab_size}: take the "
                "tokenizer of that folder"
            )
        thinking = self.thinking if self.arm == "thinking" else None
        return dataclasses.replace(shape, vocab_size=max(shape.vocab_size, words), thinking=thinking)

    def init_params(self, cfg: ModelConfig, weights: Params | None) -> Params:
        """Random weights, or the backbone's `weights` in float32. Where these have no thinker, its layers are copied."""
        if weights is None:
            return init_params(cfg, jax.random.key(self.seed))
        params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), weights)
        if cfg.thinking is None or self.backbone_cfg.thinking is not None:
            return params
        return with_thinking(dataclasses.replace(cfg, thinking=None), params, cfg.thinking)[1]

    def experiment(self, workdir: Path) -> Experiment:
        """The run. Raises `InputError` if a problem exceeds `seq_len` or a thought exceeds `max_thought`.

        Problems of a file are checked here, others when they are drawn. Problems too long for the final evaluation raise here,
        and so does a model that no folder can hold.
        """
        tokenizer = tokenizer_of(self.task)
        cfg = self.model(tokenizer)
        exports = describe_own(workdir, cfg)
        end_id = self.thinking.end_id
        loaded = None if isinstance(self.backbone, ModelConfig) else load(self.backbone)
        weights = None if loaded is None else jax.device_get(loaded.params)  # the trained copy is on the device
        filler_id = tokenizer.token_to_id(FILLER)
        filler_id = end_id if filler_id is None else filler_id  # as if another text ended right before
        eval_task = self.eval_task or self.task
        self.task.draw(np.random.default_rng(0), self.max_ops)
        for n in self.eval_ops:
            needed = longest([eval_task.draw(np.random.default_rng(0), n)], tokenizer, self.arm)
            if needed > cfg.max_position:
                raise InputError(
                    f"a problem of {n} operations takes {needed} tokens, but the backbone has {cfg.max_position} positions: "
                    "lower ReasoningConfig.eval_ops, or raise max_position"
                )
        if cfg.thinking is not None:
            init_reading(cfg, Capacity(1, 1, 1, 1, chosen_schedule(None, cfg)))

        def batch_of(problems: Sequence[Problem], phases: Sequence[int]) -> Batch:
            encoded = encode(problems, tokenizer, self.arm, end_id=end_id)
            return make_batch(encoded, self.seq_len, cfg.thinking, phases, filler_id=filler_id)

        def draw(task: Task, rng: np.random.Generator) -> Batch:
            number_of_ops = rng.integers(1, self.max_ops + 1, self.batch_size)
            problems = [task.draw(rng, int(n)) for n in number_of_ops]
            # All arms see shifted positions, although only "thinking" has chunks that the shift moves.
            return batch_of(problems, rng.integers(self.thinking.chunk, size=self.batch_size).tolist())

        for task in [self.task] if self.eval_task is None else [self.task, self.eval_task]:
            if isinstance(task, Traces):
                task.check(lambda problem: batch_of([problem] * self.thinking.chunk, range(self.thinking.chunk)))

        def evaluate(params: Params, step: int) -> dict[str, float]:
            _, metrics = taught_loss(params, cfg, draw(eval_task, np.random.default_rng((self.seed, self.num_steps + step))))
            return {f"heldout_{name}": float(value) for name, value in divided(metrics).items()}

        def finish(params: Params) -> Result:
            export_own(workdir, cfg, params, tokenizer, end_id)
            curve = accuracy_by_operations(
                Trained(params, cfg, tokenizer, self.arm, end_id),
                eval_task,
                num_ops=self.eval_ops,
                num_problems=self.eval_problems,
                seed=self.seed,
            )
            write_json(workdir / "accuracy.json", {"arm": self.arm, "max_ops": self.max_ops, "accuracy": curve})
            try:
                draw_curves(
                    workdir / "accuracy.png",
                    {self.arm: list(curve.items())},
                    title=f"{type(self.task).__name__}, trained on up to {self.max_ops} operations",
                    x_label="operations",
                    y_label="correct answers",
                    marked_x=self.max_ops,
                )
            except InputError as error:
                print(f"detspec: no picture of the accuracy: {error}", file=sys.stderr)
            return Result({f"accuracy at {n}": value for n, value in curve.items()}, workdir / EXPORT)

        return Experiment(
            num_steps=self.num_steps,
            eval_every=self.eval_every,
            checkpoint_every=self.checkpoint_every,
            optimizer=self.optimizer,
            record={
                "config": settings_of(self),
                "task": type(self.task).__name__,
                "words": tokenizer.to_str(),
                "data": self.task.digest if isinstance(self.task, Traces) else None,
                "weights": None if loaded is None else loaded.digest,
            },
            init_params=lambda: self.init_params(cfg, weights),
            loss_fn=lambda params, part: reasoning_loss(params, cfg, part.rows, part.counts),
            batch_at=lambda step: draw(self.task, np.random.default_rng((self.seed, step))),
            tokens_at=lambda step: self.batch_size * self.seq_len,
            evaluate=evaluate,
            finish=finish,
            cut=lambda batch: cut(batch, count),
            exports=exports,
        )
