"""The models that ablations compare, and text that the shipped one was not trained on."""

import dataclasses
import math
import sys
import tempfile
from pathlib import Path

import jax
import tokenizers

import detspec as ds
from detspec.bench.bench import bench_prompts, random_model
from detspec.checkpoint.folder import find_folder
from detspec.model.params import quantized
from detspec.train.batches import cut_rows, encode_documents
from detspec.train.corpus import STDLIB, read_corpus
from detspec.train.run import run_experiment
from scripts.ablations.table import Options
from scripts.replications.thinking_states.tasks import PARITY

TINY = ds.dense_config(256, 64, 1, 4, 2, 16, 128, dtype="float32")
HOLDOUT_ONE_IN = 25  # as in configs/tiny_python.py
TEXTS, TEXT_LEN = (32, 511)
NUM_STEPS = 250
PEAK_LR = 5e-3


def model_of(options: Options) -> ds.Model:
    """The shipped model of Python source code, or a small one with random weights at the size "tiny"."""
    return random_model(TINY, options.seed) if options.size == "tiny" else ds.load()


def with_weights(model: ds.Model, weights: str) -> ds.Model:
    """`model` with weights in another dtype; with "int8" activations keep theirs."""
    if weights == "int8":
        rounded = quantized(model.params, model.cfg)
        return dataclasses.replace(model, cfg=dataclasses.replace(model.cfg, weights=weights), params=rounded)
    params = jax.tree.map(lambda leaf: leaf.astype(weights), model.params)
    return dataclasses.replace(model, cfg=dataclasses.replace(model.cfg, dtype=weights), params=params)


def heldout_texts(model: ds.Model, options: Options) -> list[list[int]]:
    """Beginnings of held-out files of Python's standard library, cut to one length; made-up texts at the size "tiny"."""
    if options.size == "tiny":
        return [list(prompt) for prompt in bench_prompts(model, 4, 60)]
    tokenizer = tokenizers.Tokenizer.from_file(str(find_folder(None) / "tokenizer.json"))
    documents = encode_documents(tokenizer, read_corpus(STDLIB, HOLDOUT_ONE_IN).heldout)
    return cut_rows(documents, TEXT_LEN)[:TEXTS].tolist()


def thinker(chunk: int, max_ops: int, seed: int, options: Options) -> tuple[ds.Model, float]:
    """A model that thinks after every `chunk` tokens about up to `max_ops` coin flips, and its right answers in percent.

    At the size "tiny" the shipped one, whose chunks have 8 tokens; its answers are not counted, nan.
    """
    if options.size == "tiny":
        return ds.load("thinking_parity"), math.nan
    config = dataclasses.replace(
        PARITY,  # a thought holds the steps of all operations that end in its chunk
        thinking=dataclasses.replace(PARITY.thinking, chunk=chunk, max_thought=chunk // 4 + 2),
        seq_len=56 + max(chunk, 8),
        max_ops=max_ops,
        eval_ops=(max_ops,),
        num_steps=NUM_STEPS,
        optimizer=dataclasses.replace(PARITY.optimizer, peak_lr=PEAK_LR),
        eval_every=NUM_STEPS,
        checkpoint_every=NUM_STEPS,
        seed=seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        result = run_experiment(config.experiment(Path(folder)), workdir=Path(folder), progress=sys.stderr.isatty())
        return ds.load(result.export), 100 * result.metrics[f"accuracy at {max_ops}"]
