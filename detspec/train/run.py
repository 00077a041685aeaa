"""One training run from config to exported folder.

1. Read the corpus, split it by name, and train its tokenizer (or take the one in `workdir`).
2. Restore the newest checkpoint in `workdir`, or start from the seed; cut the log back to that step.
3. Step, log, evaluate, checkpoint. A batch depends on (seed, step) alone, so a killed run continues bit for bit.
4. Evaluate on all held-out text and export a Hugging Face folder to `workdir/export`.
"""

import dataclasses
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tqdm import tqdm

from detspec.checkpoint.hf import save_hf
from detspec.checkpoint.store import Store
from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.model.params import Params
from detspec.train.batches import Batches, cut_rows, digest_documents, encode_documents
from detspec.train.config import Phase, TrainConfig, load_config
from detspec.train.corpus import EOS_ID, Document, read_corpus, train_tokenizer
from detspec.train.step import TrainState, init_state, lr_schedule, make_train_step, token_losses

LOG_NAME = "log.jsonl"


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a finished run reports.

    Attributes:
        steps: optimiser steps done in all.
        tokens: tokens trained on in all.
        heldout_loss: nats per token over all held-out rows.
        heldout_tokens: how many tokens that is.
        export: the Hugging Face folder.
    """

    steps: int
    tokens: int
    heldout_loss: float
    heldout_tokens: int
    export: Path


def train(config_path: str | Path, *, workdir: str | Path, resume: bool = True, progress: bool = True) -> TrainResult:
    """Trains what the config file at `config_path` describes, in `workdir`; continues a run found there unless `resume` is off.

    Raises `InputError` if the config is bad or `workdir` holds a run of another config or corpus (without `resume`: any run).
    """
    config = load_config(config_path)
    workdir = Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    logging.getLogger("absl").setLevel(logging.WARNING)

    corpus = read_corpus(config.corpus, config.holdout_one_in)
    tokenizer = obtain_tokenizer(workdir / "tokenizer.json", corpus.train, config.model.vocab_size)
    documents = encode_documents(tokenizer, corpus.train)
    heldout = encode_documents(tokenizer, corpus.heldout)
    record = {"config": jsonable(config), "corpus": digest_documents([*documents, *heldout])}

    with Store(workdir / "checkpoints") as store:
        state = restore_or_init(store, config, record, resume=resume)
        with Log(workdir / LOG_NAME, keep_steps=int(state.step)) as log:
            state = run_steps(config, state, Batches(config, documents), heldout, store, log, record, progress=progress)
            heldout_loss, heldout_tokens = evaluate(config.model, state.params, heldout, config.phases[-1])
            log.append({"step": config.num_steps, "final_heldout_loss": heldout_loss, "heldout_tokens": heldout_tokens})

    export_cfg, export_params = as_bfloat16(config.model, state.params)
    save_hf(
        workdir / "export",
        export_cfg,
        export_params,
        tokenizer_json=tokenizer.to_str(pretty=True),
        bos_id=EOS_ID,
        eos_ids=(EOS_ID,),
    )
    return TrainResult(
        steps=config.num_steps,
        tokens=config.num_tokens,
        heldout_loss=heldout_loss,
        heldout_tokens=heldout_tokens,
        export=workdir / "export",
    )


def obtain_tokenizer(path: Path, documents: tuple[Document, ...], vocab_size: int) -> tokenizers.Tokenizer:
    """The tokenizer of this run, trained once and then read back from `path`."""
    if not path.is_file():
        temporary = path.with_suffix(".tmp")
        train_tokenizer(documents, vocab_size).save(str(temporary))
        os.replace(temporary, path)
    return tokenizers.Tokenizer.from_file(str(path))


def restore_or_init(store: Store, config: TrainConfig, record: dict[str, Any], *, resume: bool) -> TrainState:
    """The state of the newest checkpoint if there is one, else the initial state."""
    step = store.latest_step()
    if step is None:
        return init_state(config)
    if not resume:
        raise InputError(f"{store.folder} already holds a run (step {step}); resume it or choose another workdir")
    saved = store.record(step)
    if saved["config"] != record["config"]:
        differing = sorted(key for key in record["config"] if saved["config"].get(key) != record["config"][key])
        raise InputError(f"{store.folder}: the run was started with another config; differing: {', '.join(differing)}")
    if saved["corpus"] != record["corpus"]:
        raise InputError(f"{store.folder}: the run was started on another corpus or tokenizer (other Python version?)")
    return store.restore(step, jax.eval_shape(lambda: init_state(config)))


def run_steps(
    config: TrainConfig,
    state: TrainState,
    batches: Batches,
    heldout: Sequence[np.ndarray],
    store: Store,
    log: "Log",
    record: dict[str, Any],
    *,
    progress: bool,
) -> TrainState:
    """Steps from `state.step` to `config.num_steps`; the log is on disk before the checkpoint that it leads to."""
    train_step = make_train_step(config)
    lr_at = lr_schedule(config)
    first_step = int(state.step)
    bar = tqdm(total=config.num_steps, initial=first_step, disable=not progress, unit="step", desc="train", smoothing=0.05)
    with bar:
        for step in range(first_step, config.num_steps):
            phase, _ = config.phase_at(step)
            began = time.perf_counter()
            state, metrics = train_step(state, jnp.asarray(batches.at(step)))
            loss, grad_norm = float(metrics["loss"]), float(metrics["grad_norm"])
            if not np.isfinite(loss):
                raise FloatingPointError(f"training diverged: loss {loss} at step {step + 1}; lower peak_lr or clip_norm")
            tok_per_s = phase.batch_size * phase.seq_len / (time.perf_counter() - began)
            done = step + 1
            log.append({"step": done, "loss": loss, "lr": float(lr_at(step)), "grad_norm": grad_norm, "tok_per_s": tok_per_s})
            if done % config.eval_every == 0:
                heldout_loss, _ = evaluate(config.model, state.params, heldout, phase, max_tokens=config.eval_tokens)
                log.append({"step": done, "heldout_loss": heldout_loss})
            if done % config.checkpoint_every == 0 or done == config.num_steps:
                log.sync()
                store.save(done, state, record)
            bar.set_postfix(loss=f"{loss:.3f}", tok_per_s=f"{tok_per_s:.0f}", refresh=False)
            bar.update()
    return state


def evaluate(
    cfg: ModelConfig, params: Params, documents: Sequence[np.ndarray], phase: Phase, *, max_tokens: int | None = None
) -> tuple[float, int]:
    """Mean loss in nats per token over rows cut as in `phase`, and how many tokens that is."""
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


def as_bfloat16(cfg: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The same model with its weights rounded to bfloat16."""
    return dataclasses.replace(cfg, dtype="bfloat16"), jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)


def jsonable(config: TrainConfig) -> dict[str, Any]:
    """`config` as it reads after a round trip through JSON."""
    return dict(json.loads(json.dumps(dataclasses.asdict(config))))


class Log:
    """One JSON object a line, appended; opening it drops what a killed run wrote after its last checkpoint."""

    def __init__(self, path: Path, *, keep_steps: int) -> None:
        kept = [line for line in read_log(path) if line["step"] <= keep_steps and "final_heldout_loss" not in line]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(temporary, path)
        self.file = path.open("a")

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.file.close()

    def append(self, line: dict[str, Any]) -> None:
        """Writes one line and hands it to the operating system."""
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def sync(self) -> None:
        """Returns when all lines are on disk."""
        os.fsync(self.file.fileno())


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; a last line that a kill tore is left out."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
