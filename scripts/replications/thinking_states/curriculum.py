"""Training that takes a chain of thought away, step by step from the left: Coconut and stepwise internalisation (iCoT).

max_ops 3, latents 2, by stage:

    0    question BOT                EOT tails heads tails A: tails          the chain, as the model it starts from writes it
    1    question BOT - -            EOT heads tails A: tails                each step becomes two continuous thoughts
    2    question BOT - - - -        EOT tails A: tails
    3    question BOT - - - - - -    EOT A: tails                            tested in this form

Coconut (Hao et al., arXiv 2412.06769) has at least one latent for each step. Without latents this is iCoT (Deng et al., arXiv
2405.14838), but whole steps are taken away, not tokens, in equal stages. Both papers begin each stage with a fresh optimiser;
here one runs through.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers

from detspec.checkpoint.folder import write_json
from detspec.checkpoint.load import load
from detspec.config import ModelConfig, check_counts
from detspec.errors import InputError
from detspec.model.params import Params
from detspec.state import PAD_ID
from detspec.train.accuracy import EVAL_SEED
from detspec.train.data_parallel import cut
from detspec.train.experiment import Experiment, Result
from detspec.train.export import export_own
from detspec.train.problems.chunks import encode
from detspec.train.problems.problem import Problem
from detspec.train.problems.tasks import tokenizer_of
from detspec.train.problems.words import FILLER_ID
from detspec.train.reasoning import ReasoningConfig
from detspec.train.step import Mean, StepMetrics, divided
from scripts.replications.thinking_states.coconut import LatentRows, forward_latent

EVAL_ROWS = 32  # read together in the final evaluation


class LatentBatch(NamedTuple):
    """The input of one training step."""

    rows: LatentRows
    weights: np.ndarray  # [B, T - 1] float32, 1 where the target in rows.rest[:, 1:] is a token


class Widths(NamedTuple):
    """Columns of a batch's arrays."""

    prompt: int
    latents: int
    rest: int


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
    """A run that goes on from a model that writes its chain of thought."""

    # task, optimiser, seed, steps and evaluation; its arm is "cot", and its backbone the folder of a trained model of that arm
    base: ReasoningConfig
    latents: int  # continuous thoughts in place of each step; 0 is iCoT
    stage_steps: int  # optimiser steps of a stage; the last one, without a chain, gets all that are left

    def __post_init__(self) -> None:
        check_counts(self, "stage_steps")
        if self.base.arm != "cot":
            raise InputError(f'CurriculumConfig.base must have the arm "cot", whose chain is taken away; got {self.base.arm!r}')
        if not isinstance(self.latents, int) or self.latents < 0:
            raise InputError(f"CurriculumConfig.latents must be an integer of at least 0, got {self.latents!r}")

    def experiment(self, workdir: Path) -> Experiment:
        """The run; `InputError` if the backbone's folder is missing."""
        base = self.base
        if isinstance(base.backbone, ModelConfig):
            raise InputError("CurriculumConfig.base.backbone must be the folder of a model that writes its chain of thought")
        loaded = load(base.backbone)
        tokenizer = tokenizer_of(base.task)
        cfg = base.model(tokenizer)
        weights = jax.device_get(loaded.params)
        rows = Rows(self.latents, tokenizer, cfg.vocab_size)
        task = base.eval_task or base.task
        longest = [base.task.draw(np.random.default_rng(0), base.max_ops)]
        num_steps = len(longest[0].steps)
        # One shape for all stages: compiling a program takes longer than the latents that early stages mask.
        widths = Widths(base.seq_len, self.latents * num_steps, rows.widths(longest, 0).rest)

        def draw(step: int, seed: tuple[int, ...]) -> LatentBatch:
            rng = np.random.default_rng(seed)
            problems = [base.task.draw(rng, int(n)) for n in rng.integers(1, base.max_ops + 1, base.batch_size)]
            phases = rng.integers(base.thinking.chunk, size=base.batch_size).tolist()
            return rows.make(problems, min(self.stage(step), num_steps), phases, widths)

        def evaluate(params: Params, step: int) -> dict[str, float]:
            _, metrics = latent_loss(params, cfg, draw(step, (base.seed, base.num_steps + step)))
            return {f"heldout_{name}": float(value) for name, value in divided(metrics).items()}

        def accuracy(params: Params, n: int) -> float:
            rng = np.random.default_rng((base.seed, EVAL_SEED, n))
            problems = [task.draw(rng, n) for _ in range(base.eval_problems)]
            stage = max(len(problem.steps) for problem in problems)
            widths = rows.widths(problems, stage)
            right = 0.0
            for start in range(0, len(problems), EVAL_ROWS):
                some = problems[start : start + EVAL_ROWS]
                batch = rows.make(some, stage, [0] * len(some), widths)
                answers = latent_loss(params, cfg, batch)[1]["answers"]
                assert isinstance(answers, Mean)
                right += float(answers.total)
            return right / len(problems)

        def finish(params: Params) -> Result:
            export_own(workdir, cfg, params, tokenizer, base.thinking.end_id)
            curve = {n: accuracy(params, n) for n in base.eval_ops}
            write_json(workdir / "accuracy.json", {"arm": base.arm, "max_ops": base.max_ops, "accuracy": curve})
            return Result({f"accuracy at {n}": value for n, value in curve.items()}, workdir / "export")

        return Experiment(
            num_steps=base.num_steps,
            eval_every=base.eval_every,
            checkpoint_every=base.checkpoint_every,
            optimizer=base.optimizer,
            record={"config": dataclasses.asdict(self), "words": tokenizer.to_str(), "weights": loaded.digest},
            init_params=lambda: jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), weights),
            loss_fn=lambda params, part: _loss(params, cfg, part.rows, part.counts),
            batch_at=lambda step: draw(step, (base.seed, step)),
            tokens_at=lambda step: base.batch_size * base.seq_len,
            evaluate=evaluate,
            finish=finish,
            cut=lambda batch: cut(batch, _count),
        )

    def stage(self, step: int) -> int:
        """How many steps are taken away in 0-based `step` of the run: one more every `stage_steps`, from 1 on."""
        return step // self.stage_steps + 1


class Rows:
    """Makes rows of problems, with two ids that no word has around the latents."""

    def __init__(self, latents: int, tokenizer: tokenizers.Tokenizer, vocab_size: int) -> None:
        words = tokenizer.get_vocab_size(with_added_tokens=True)
        if words + 2 > vocab_size:
            raise InputError(f"latents need two ids besides the {words} words, but the model has {vocab_size} in all")
        self.latents = latents
        self.tokenizer = tokenizer
        self.begin = words
        self.end = words + 1

    def ids(self, problems: Sequence[Problem], stage: int) -> tuple[list[list[int]], list[int], list[list[int]]]:
        """Prompts, numbers of latents, and what follows them, of `problems` without their first `stage` steps."""
        kept = [dataclasses.replace(one, steps=one.steps[stage:], marks=one.marks[stage:]) for one in problems]
        encoded = encode(kept, self.tokenizer, "cot")
        prompts = [[*one.prompt, self.begin] for one in encoded]
        numbers = [self.latents * min(stage, len(problem.steps)) for problem in problems]
        return prompts, numbers, [[self.end, *one.continuation] for one in encoded]

    def widths(self, problems: Sequence[Problem], stage: int) -> Widths:
        """The least columns that hold `problems`."""
        prompts, numbers, rests = self.ids(problems, stage)
        return Widths(max(map(len, prompts)), max(numbers), max(map(len, rests)))

    def make(self, problems: Sequence[Problem], stage: int, phases: Sequence[int], widths: Widths) -> LatentBatch:
        """Rows of `problems` without their first `stage` steps, each with `phases[b]` fillers in front."""
        prompts, numbers, rests = self.ids(problems, stage)
        prompts = [[FILLER_ID] * phase + prompt for phase, prompt in zip(phases, prompts, strict=True)]
        has_latent = np.arange(widths.latents)[None, :] < np.array(numbers)[:, None]
        rest, has_rest = padded(rests, widths.rest)
        return LatentBatch(LatentRows(*padded(prompts, widths.prompt), has_latent, rest), has_rest[:, 1:].astype(np.float32))


def padded(rows: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as int32 `[B, width]`, PAD_ID behind them, and bool `[B, width]` where there are ids."""
    if (longest := max(map(len, rows))) > width:
        raise InputError(f"a row of {longest} tokens does not fit {width}: raise ReasoningConfig.seq_len")
    ids = np.full((len(rows), width), PAD_ID, np.int32)
    there = np.arange(width)[None, :] < np.array([len(row) for row in rows])[:, None]
    ids[there] = [id for row in rows for id in row]
    return ids, there


def _count(batch: LatentBatch) -> np.ndarray:
    """Number of targets of `batch`, float32."""
    return batch.weights.sum(dtype=np.float32)


def _loss(params: Params, cfg: ModelConfig, batch: LatentBatch, count: jax.Array) -> tuple[jax.Array, StepMetrics]:
    """Cross entropy of what follows the latents, over `count` tokens, and the share of rows without a wrong token."""
    logits = forward_latent(params, cfg, batch.rows)[:, :-1]
    targets = jnp.asarray(batch.rows.rest)[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    right = ~((jnp.argmax(logits, -1) != targets) & (batch.weights > 0)).any(-1)
    answers = Mean(right.sum(dtype=jnp.float32), jnp.float32(right.shape[0]))
    return (losses * batch.weights).sum() / count, {"answers": answers}


@partial(jax.jit, static_argnums=1)
def latent_loss(params: Params, cfg: ModelConfig, batch: LatentBatch) -> tuple[jax.Array, StepMetrics]:
    """The loss of a whole batch. A row is right exactly if generating it greedily, token by token, would give it."""
    return _loss(params, cfg, batch, jnp.asarray(batch.weights).sum())
