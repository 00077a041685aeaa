"""Language models on a corpus: tokenizer, held-out documents, export."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers

from detspec.config import ModelConfig, check_counts
from detspec.errors import InputError
from detspec.model.params import Params, init_params
from detspec.model.transformer import forward_sequences
from detspec.train.batches import Phase, batch_fn, cut_rows, digest_documents, encode_documents, phase_at
from detspec.train.corpus import EOS_ID, Document, read_corpus, train_tokenizer
from detspec.train.data_parallel import Slice, cut
from detspec.train.experiment import Experiment, Result, require_seed, settings_of
from detspec.train.export import EXPORT, describe_export, export
from detspec.train.optimizer import OptimizerConfig
from detspec.train.step import StepMetrics


@dataclasses.dataclass(frozen=True)
class LanguageConfig:
    """Settings of a run of a language model. On one kind of device, config and corpus determine every bit of the result."""

    model: ModelConfig  # shape of the model; `dtype` is that of the master weights and must be "float32"
    corpus: str  # "python_stdlib", or a folder whose `*.py` and `*.txt` files are the documents
    # parts of the run, in order. Short rows come first, since they are cheap; long ones last train late positions.
    phases: tuple[Phase, ...]
    optimizer: OptimizerConfig  # settings of the optimiser
    holdout_one_in: int = 25  # a document is held out when the SHA-256 of its name is a multiple of this
    seed: int = 0  # decides the initial weights and the order of rows
    eval_every: int = 250  # steps between held-out evaluations
    eval_tokens: int = 16384  # held-out tokens of an evaluation during training; the final one takes all
    checkpoint_every: int = 250  # steps between checkpoints

    def __post_init__(self) -> None:
        check_counts(self, "holdout_one_in", "eval_every", "eval_tokens", "checkpoint_every")
        require_seed(self)
        if not self.phases:
            raise InputError("LanguageConfig.phases must name at least one phase")
        if self.model.dtype != "float32":
            raise InputError(f"LanguageConfig.model.dtype must be 'float32' (master weights), got {self.model.dtype!r}")
        longest = max(phase.seq_len for phase in self.phases)
        if longest > self.model.max_position:
            raise InputError(f"LanguageConfig: seq_len {longest} exceeds model.max_position {self.model.max_position}")
        self.optimizer.require_warmup_within(self.num_steps)

    @property
    def num_steps(self) -> int:
        """Optimiser steps of all phases."""
        return sum(phase.num_steps for phase in self.phases)

    @property
    def num_tokens(self) -> int:
        """Tokens trained on in all phases."""
        return sum(phase.num_steps * phase.batch_size * phase.seq_len for phase in self.phases)

    def experiment(self, workdir: Path) -> Experiment:
        """Reads the corpus, splits it by name, and trains a tokenizer or takes the one in `workdir`.

        Raises `InputError` if no folder can hold the model, the corpus is missing or too small for a row, or one side of the
        split is empty.
        """
        exports = describe_export(workdir, self.model)
        corpus = read_corpus(self.corpus, self.holdout_one_in)
        tokenizer = obtain_tokenizer(workdir / "tokenizer.json", corpus.train, self.model.vocab_size)
        documents = encode_documents(tokenizer, corpus.train)
        heldout = encode_documents(tokenizer, corpus.heldout)

        def loss_fn(params: Params, part: Slice) -> tuple[jax.Array, StepMetrics]:
            return token_losses(params, self.model, part.rows).sum() / part.counts, {}

        def tokens_at(step: int) -> int:
            phase, _ = phase_at(self.phases, step)
            return phase.batch_size * phase.seq_len

        def evaluate(params: Params, step: int) -> dict[str, float]:
            phase, _ = phase_at(self.phases, step)
            loss, _ = heldout_loss(params, self.model, heldout, phase, max_tokens=self.eval_tokens)
            return {"heldout_loss": loss}

        def finish(params: Params) -> Result:
            loss, heldout_tokens = heldout_loss(params, self.model, heldout, self.phases[-1])
            export(workdir, self.model, params, tokenizer, EOS_ID)
            metrics = {"train_tokens": self.num_tokens, "heldout_loss": loss, "heldout_tokens": heldout_tokens}
            return Result(metrics, workdir / EXPORT)

        return Experiment(
            num_steps=self.num_steps,
            eval_every=self.eval_every,
            checkpoint_every=self.checkpoint_every,
            optimizer=self.optimizer,
            record={"config": settings_of(self), "corpus": digest_documents([*documents, *heldout])},
            init_params=lambda: init_params(self.model, jax.random.key(self.seed)),
            loss_fn=loss_fn,
            batch_at=batch_fn(self.phases, documents, self.seed),
            tokens_at=tokens_at,
            evaluate=evaluate,
            finish=finish,
            cut=lambda rows: cut(rows, num_predicted),
            exports=exports,
        )


def obtain_tokenizer(path: Path, documents: tuple[Document, ...], vocab_size: int) -> tokenizers.Tokenizer:
    """The run's tokenizer: trained once, then read back from `path`."""
    if not path.is_file():
        temporary = path.with_suffix(".tmp")
        train_tokenizer(documents, vocab_size).save(str(temporary))
        os.replace(temporary, path)
    return tokenizers.Tokenizer.from_file(str(path))


def num_predicted(rows: np.ndarray) -> np.float32:
    """Number of tokens that are predicted in `rows [B, T + 1]`."""
    return np.float32(rows[:, 1:].size)


def token_losses(params: Params, cfg: ModelConfig, rows: jax.Array) -> jax.Array:
    """Cross entropy in nats, float32 `[B, T]`, of every next token in `rows [B, T + 1]`."""
    logits, _ = forward_sequences(params, cfg, rows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])


def heldout_loss(
    params: Params, cfg: ModelConfig, documents: Sequence[np.ndarray], phase: Phase, *, max_tokens: int | None = None
) -> tuple[float, int]:
    """Mean loss in nats per token over rows cut as in `phase`, and the number of tokens."""
    rows = cut_rows(documents, phase.seq_len)
    if max_tokens is not None:
        rows = rows[: max(1, max_tokens // phase.seq_len)]
    total = 0.0
    for start in range(0, len(rows), phase.batch_size):
        batch = rows[start : start + phase.batch_size]
        filler = np.repeat(rows[:1], phase.batch_size - len(batch), axis=0)
        losses = jitted_token_losses(params, cfg, jnp.asarray(np.concatenate([batch, filler])))
        total += float(np.asarray(losses)[: len(batch)].sum(dtype=np.float64))
    return total / rows[:, 1:].size, rows[:, 1:].size


jitted_token_losses = jax.jit(token_losses, static_argnums=1)
