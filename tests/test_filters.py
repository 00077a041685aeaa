"""Filters: the token that is drawn and looked at afterwards is the one drawn from what the filters leave."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec import filters
from detspec.filters import first_kept, narrowed
from detspec.ops.row_sum import first_largest
from detspec.sampling_params import SamplingParams, sampling_arrays
from detspec.state import SamplingArrays

R, V = 64, 1000
draw = jax.jit(first_kept)
leave = jax.jit(narrowed)


def some_rows(rng: np.random.Generator) -> SamplingArrays:
    """Every mixture of filters, greedy rows among them."""
    choices: dict[str, Sequence[float]] = {
        "temperature": (0.0, 0.4, 0.8, 1.5),
        "top_k": (0, 0, 1, 5, 40, V - 1, V + 7),
        "top_p": (1.0, 1.0, 0.99, 0.5, 1e-6),
        "min_p": (0.0, 0.0, 0.05, 0.5, 1.0),
    }
    params = [SamplingParams(**{name: rng.choice(values).item() for name, values in choices.items()}) for _ in range(R)]
    return sampling_arrays(params, max_stop_ids=1, max_logit_bias=1)


def some_logits(rng: np.random.Generator, kind: str) -> np.ndarray:
    logits = rng.choice([0.3, 3.0, 12.0]) * rng.standard_normal((R, V))
    if kind == "tied":
        logits = np.round(logits)
    if kind == "banned":
        logits[rng.random((R, V)) < 0.3] = -np.inf
    return logits.astype(np.float32)


def kept_by_sorting(scaled: np.ndarray, params: SamplingArrays, row: int) -> np.ndarray:
    """Which tokens of a row are kept, worked out in float64 from the likeliest on; all of a tie or none."""
    x = scaled[row].astype(np.float64)
    k, top_p, min_p = (np.asarray(getattr(params, name))[row].item() for name in ("top_k", "top_p", "min_p"))
    p = np.exp(x - x.max())
    kept = (p >= min_p) if min_p > 0 else np.ones(V, bool)
    if k:
        kept &= (x[None, :] > x[:, None]).sum(1) < k
    if top_p < 1:
        likelier = np.where(x[None, :] > x[:, None], np.where(kept, p, 0)[None, :], 0).sum(1)
        kept &= likelier < top_p * p[kept].sum()
    return kept


@pytest.mark.parametrize("kind", ["plain", "tied", "banned"])
def test_token_that_is_drawn_is_the_first_of_those_that_filters_leave(kind):
    for seed in range(8):
        rng = np.random.default_rng(seed)
        scaled = some_logits(rng, kind)
        rows = some_rows(rng)
        chosen_by = np.round(scaled + rng.gumbel(size=(R, V)), 1).astype(np.float32)  # ties here, too
        left = np.asarray(leave(scaled, rows, np.ones(R, bool)))
        expected = np.where((left > -np.inf) | (np.asarray(rows.temperature) == 0)[:, None], chosen_by, -np.inf).argmax(-1)
        assert np.asarray(draw(chosen_by, scaled, rows)).tolist() == expected.tolist()
        assert expected.tolist() != chosen_by.argmax(-1).tolist()  # the control: filters matter


@pytest.mark.parametrize("kind", ["plain", "tied"])
def test_what_filters_leave_is_what_sorting_finds(kind):
    """In a few rows in a thousand, rounding to float32 moves a token over a border: their sets may differ by one logit."""
    differing = 0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        scaled = some_logits(rng, kind)
        rows = some_rows(rng)
        left = np.asarray(leave(scaled, rows, np.ones(R, bool))) > -np.inf
        for row in np.flatnonzero(np.asarray(rows.temperature) > 0):
            apart = left[row] != kept_by_sorting(scaled, rows, row)
            differing += bool(apart.any())
            assert len(set(scaled[row][apart].tolist())) <= 1
    assert differing <= 2


@pytest.mark.parametrize("of_one", [0.0, 1e-3])
def test_likeliest_token_is_kept_by_min_p_of_one_with_any_logarithm(monkeypatch, of_one):
    scaled = some_logits(np.random.default_rng(2), "plain")
    rows = sampling_arrays([SamplingParams(temperature=1.0, min_p=1.0)] * R, max_stop_ids=1, max_logit_bias=1)
    monkeypatch.setattr(filters.jnp, "log", lambda x: jnp.full_like(x, of_one))
    left = np.asarray(narrowed(scaled, rows, np.ones(R, bool)))
    assert ((left > -np.inf) == (scaled == scaled.max(-1, keepdims=True))).all()


def test_rows_that_are_not_asked_for_stay_whole():
    rng = np.random.default_rng(0)
    scaled = some_logits(rng, "plain")
    asked = np.arange(R) % 2 == 0
    left = np.asarray(leave(scaled, some_rows(rng), asked))
    assert (left[~asked] == scaled[~asked]).all()
    assert (left[asked] != scaled[asked]).any()


def test_rows_without_a_finite_maximum_end_and_leave_their_neighbours():
    rng = np.random.default_rng(1)
    scaled = some_logits(rng, "plain")
    rows = some_rows(rng)
    expected = np.asarray(draw(scaled, scaled, rows))
    spoilt = scaled.copy()
    spoilt[0, 3] = np.nan
    spoilt[1, 4] = np.inf
    spoilt[2] = -np.inf
    assert np.asarray(draw(spoilt, spoilt, rows))[3:].tolist() == expected[3:].tolist()


def test_share_too_small_for_float32_keeps_the_likeliest_token():
    rng = np.random.default_rng(3)
    scaled = some_logits(rng, "plain")
    rows = sampling_arrays([SamplingParams(temperature=1.0, top_p=1e-44)] * R, max_stop_ids=1, max_logit_bias=1)
    chosen_by = (scaled + rng.gumbel(size=(R, V))).astype(np.float32)
    assert np.asarray(draw(chosen_by, scaled, rows)).tolist() == scaled.argmax(-1).tolist()
    assert chosen_by.argmax(-1).tolist() != scaled.argmax(-1).tolist()


def test_few_draws_are_needed(monkeypatch):
    """A thousand tokens are about as likely, and one in twenty is left out: few rows are drawn a second time."""
    draws: list[None] = []

    def counted(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: draws.append(None))
        return first_largest(x)

    monkeypatch.setattr(filters, "first_largest", counted)
    rng = np.random.default_rng(2)
    scaled = (0.3 * rng.standard_normal((R, V))).astype(np.float32)
    rows = sampling_arrays([SamplingParams(temperature=1.0, top_p=0.95)] * R, max_stop_ids=1, max_logit_bias=1)
    draw_counted = jax.jit(lambda *args: first_kept(*args))
    for _ in range(10):
        draw_counted((scaled + rng.gumbel(size=(R, V))).astype(np.float32), scaled, rows)
    jax.effects_barrier()
    assert 10 < len(draws) <= 40
