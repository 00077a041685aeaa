"""Continuous thoughts: against whole passes that read one more latent each, and the rows that take a chain away."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.checkpoint.orbax_folder import save_orbax
from detspec.errors import InputError
from detspec.model.dense import dense_config
from detspec.model.params import Params, init_params
from detspec.model.rows import training_ops
from detspec.model.transformer import forward_sequences
from detspec.state import Injected
from detspec.train.problems.problem import Problem
from detspec.train.problems.tasks import Parity, tokenizer_of
from detspec.train.reasoning import ReasoningConfig
from detspec.train.run import run_experiment
from scripts.replications.thinking_states.coconut import LatentRows, forward_latent
from scripts.replications.thinking_states.curriculum import CurriculumConfig, LatentBatch, Rows, latent_loss
from scripts.replications.thinking_states.runs import QUICK, get_config

CFG = dense_config(
    vocab_size=64,
    d_model=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    d_ff=16,
    dtype="float32",
    tie_embeddings=True,
    position_encoding="alibi",
)
LENGTHS, LATENTS = (5, 3), (2, 3)
forward = jax.jit(forward_latent, static_argnums=1)


@pytest.fixture(scope="module")
def params() -> Params:
    return jax.jit(init_params, static_argnums=0)(CFG, jax.random.key(0))


@pytest.fixture(scope="module")
def rows() -> LatentRows:
    rng = np.random.default_rng(0)
    has_token = np.arange(6)[None, :] < np.array(LENGTHS)[:, None]
    has_latent = np.arange(4)[None, :] < np.array(LATENTS)[:, None]
    prompt = np.where(has_token, rng.integers(2, 64, (2, 6)), 0).astype(np.int32)
    return LatentRows(prompt, has_token, has_latent, rng.integers(2, 64, (2, 3)).astype(np.int32))


@partial(jax.jit, static_argnames="num_latents")
def read_row(params: Params, tokens: jax.Array, length: jax.Array, num_latents: int) -> jax.Array:
    """Logits of `tokens [1, T]` with latents from `length` on: a whole pass for each, embedded as the output before it."""
    # Vectors go in after no layer: they make up for the embedding of the token that stands there.
    inject = jnp.zeros((1, tokens.shape[1], CFG.d_model), jnp.float32)
    for place in range(num_latents):
        _, tapped = forward_sequences(params, CFG, tokens, inject=Injected(0, inject), tap_layer=CFG.num_layers)
        output = training_ops(CFG).norm(tapped[:, length + place - 1], params["final_norm"])
        inject = inject.at[:, length + place].set(output - params["embed"][:1])
    return forward_sequences(params, CFG, tokens, inject=Injected(0, inject))[0]


def expected_logits(params: Params, rows: LatentRows, b: int, num_latents: int) -> np.ndarray:
    """Logits of what follows the latents of row `b`, padded to one shape for all rows."""
    length = LENGTHS[b]
    tokens = [*rows.prompt[b, :length], *[0] * num_latents, *rows.rest[b]]
    tokens = np.array([tokens + [0] * (12 - len(tokens))], np.int32)
    logits = read_row(params, tokens, np.int32(length), num_latents)
    return np.asarray(logits)[0, length + num_latents :][: rows.rest.shape[1]]


def test_latents_are_the_outputs_before_them_in_rows_of_any_length(params: Params, rows: LatentRows):
    found = np.asarray(forward(params, CFG, rows))
    for b in range(2):
        # The same sums over other shapes: XLA may add them in another order.
        assert np.abs(found[b] - expected_logits(params, rows, b, LATENTS[b])).max() < 1e-4
        assert np.abs(found[b] - expected_logits(params, rows, b, LATENTS[b] - 1)).max() > 1e-2


def test_without_latents_it_reads_the_text_alone(params: Params, rows: LatentRows):
    found = np.asarray(forward(params, CFG, rows._replace(has_latent=rows.has_latent[:, :0])))
    for b in range(2):
        assert np.abs(found[b] - expected_logits(params, rows, b, 0)).max() < 1e-4


def test_gradients_run_through_the_latents(params: Params, rows: LatentRows):
    """A small step along the gradient changes the logit as the gradient says; one along what misses the latents does not."""

    def logit(embed: jax.Array, rows: LatentRows) -> jax.Array:
        return forward_latent({**params, "embed": embed}, CFG, rows)[0, 0, 7]

    value_and_grad = jax.jit(jax.value_and_grad(logit))
    embed = np.asarray(params["embed"])
    grad = np.asarray(value_and_grad(embed, rows)[1])
    step = 1e-3 * grad / np.linalg.norm(grad)
    rise = float(value_and_grad(embed + step, rows)[0] - value_and_grad(embed - step, rows)[0]) / 2
    expected = 1e-3 * float(np.linalg.norm(grad))
    assert abs(rise - expected) < 0.05 * expected  # the rest is curvature, and rounding of the difference
    without = value_and_grad(embed, rows._replace(has_latent=np.zeros_like(rows.has_latent)))[1]
    assert abs(float((np.asarray(without) * step).sum()) - expected) > 0.05 * expected


PROBLEM = Problem("Bob flips. What's the state?", ("heads", "tails", "tails"), (9, 9, 9), "tails")


@pytest.mark.parametrize(
    ("stage", "latents", "rest"), [(0, 0, "heads tails tails A: tails"), (2, 4, "tails A: tails"), (9, 6, "A: tails")]
)
def test_a_stage_puts_latents_in_the_place_of_the_first_steps(stage: int, latents: int, rest: str):
    tokenizer = tokenizer_of(Parity())
    rows = Rows(2, tokenizer, vocab_size=64)
    widths = rows.widths([PROBLEM], stage)
    made = rows.make([PROBLEM], stage, [3], widths._replace(prompt=widths.prompt + 3))
    question = tokenizer.encode(PROBLEM.question).ids
    assert made.rows.prompt.tolist() == [[1, 1, 1, *question, rows.begin]]
    assert made.rows.has_latent.sum() == latents
    assert made.rows.rest.tolist() == [[rows.end, *tokenizer.encode(rest).ids, 0]]
    assert made.weights.tolist() == [[1.0] * (made.rows.rest.shape[1] - 1)]


def test_rows_with_fewer_steps_have_fewer_latents_and_padding_counts_nothing(params: Params):
    rows = Rows(1, tokenizer_of(Parity()), vocab_size=64)
    short = dataclasses.replace(PROBLEM, steps=PROBLEM.steps[:1], marks=PROBLEM.marks[:1])
    widths = rows.widths([PROBLEM, short], 1)
    made = rows.make([PROBLEM, short], 1, [0, 0], widths)
    assert made.rows.has_latent.tolist() == [[True], [True]]
    assert made.weights.sum(1).tolist() == [2 + 4, 4]
    there = np.pad(made.weights > 0, ((0, 0), (1, 0)), constant_values=True)
    assert there.sum(1).tolist() == [7, 5]
    loss = {fill: float(latent_loss(params, CFG, filled(made, there, fill))[0]) for fill in (0, 9)}
    assert loss[0] == loss[9]
    assert loss[9] != float(latent_loss(params, CFG, filled(made, there & (there.cumsum(1) != 3), 9))[0])


def filled(batch: LatentBatch, there: np.ndarray, fill: int) -> LatentBatch:
    """`batch` with the token `fill` in the rest wherever nothing is `there`."""
    return batch._replace(rows=batch.rows._replace(rest=np.where(there, batch.rows.rest, fill)))


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"latents need two ids besides the \d+ words, but the model has 30 in all"):
        Rows(1, tokenizer_of(Parity()), vocab_size=30)
    rows = Rows(1, tokenizer_of(Parity()), vocab_size=64)
    with pytest.raises(InputError, match=r"a row of 10 tokens does not fit 4: raise ReasoningConfig\.seq_len"):
        rows.make([PROBLEM], 0, [0], rows.widths([PROBLEM], 0)._replace(prompt=4))


@pytest.fixture
def chain(params: Params, tmp_path: Path) -> Path:
    """The folder of an untrained model that could write a chain of thought."""
    save_orbax(tmp_path / "export", CFG, params).result()
    return tmp_path / "export"


@pytest.mark.slow
@pytest.mark.parametrize("latents", [0, 2])
def test_a_run_takes_the_chain_away_and_is_tested_without_it(latents: int, chain: Path, tmp_path: Path):
    base = dataclasses.replace(get_config(f"{QUICK}parity-cot-0"), backbone=str(chain), num_steps=3, seq_len=64)
    config = CurriculumConfig(base, latents=latents, stage_steps=1)
    experiment = config.experiment(tmp_path)
    lengths = [int((experiment.batch_at(step).weights > 0).sum(1).max()) for step in range(3)]
    assert lengths[-1] <= lengths[0]
    assert all(config.stage(step) == step + 1 for step in range(3))
    result = run_experiment(experiment, workdir=tmp_path, progress=False)
    assert set(result.metrics) == {"accuracy at 1", "accuracy at 2"}
    assert (tmp_path / "accuracy.json").is_file()


def test_a_run_that_goes_on_from_nothing_is_refused(tmp_path: Path):
    base = get_config("parity-cot-0")
    assert isinstance(base, ReasoningConfig)
    with pytest.raises(InputError, match="must be the folder of a model that writes its chain of thought"):
        CurriculumConfig(base, latents=1, stage_steps=1).experiment(tmp_path)
    with pytest.raises(InputError, match='must have the arm "cot"'):
        CurriculumConfig(dataclasses.replace(base, arm="no_cot"), latents=1, stage_steps=1)
    with pytest.raises(InputError, match="latents must be an integer of at least 0, got -1"):
        CurriculumConfig(base, latents=-1, stage_steps=1)
