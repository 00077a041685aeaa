"""Attention that goes wrong far into the cache, or at drafts alone, is found out when an engine starts."""

import jax.numpy as jnp
import pytest

from detspec.engine.certify import certify
from detspec.engine.policy import Drafting, canonical_plans
from detspec.ops.attention import reference
from tests.engine.test_certify import FAR, engine_of_many_pages


@pytest.mark.slow
@pytest.mark.parametrize(("first_wrong_page", "max_requests"), [(2, 1), (4, 3)])
def test_attention_that_goes_wrong_far_into_the_cache_is_caught_at_engine_start(first_wrong_page, max_requests, monkeypatch):
    """It is wrong in passes of single rows alone, so that these part from the anchor; 40 tokens of prompt would not show it.

    With three places, three probes are prefilled and replayed at once, and the program of one steps each of them.
    """
    sound = reference.paged_attention

    def spoilt(q, k_pages, v_pages, page_tables, positions, *, scores, numerics):
        attended, lse = sound(q, k_pages, v_pages, page_tables, positions, scores=scores, numerics=numerics)
        wrong = positions >= first_wrong_page * 64 if q.shape[1] == 1 else positions < 0
        return attended * jnp.where(wrong, 1.01, 1.0)[:, :, None, None], lse

    monkeypatch.setattr(reference, "paged_attention", spoilt)
    engine = engine_of_many_pages("none", 318 - first_wrong_page, max_requests)
    certificate = certify(engine.device, canonical_plans(1, FAR.budget.rows)[0])
    assert certificate.status == "differs"
    position = int(certificate.why.split("position ")[1].split()[0])
    assert position >= first_wrong_page * 64


@pytest.mark.slow
def test_attention_that_goes_wrong_at_guesses_alone_is_caught_because_probes_find_their_texts(monkeypatch):
    """Only the second place of windows of two is wrong: no row that reads a last committed token is, nor is the anchor."""
    sound = reference.paged_attention

    def spoilt(q, k_pages, v_pages, page_tables, positions, *, scores, numerics):
        attended, lse = sound(q, k_pages, v_pages, page_tables, positions, scores=scores, numerics=numerics)
        factor = jnp.asarray([1.0, 1.01] if q.shape[1] == 2 else [1.0] * q.shape[1], jnp.float32)
        return attended * factor[None, :, None, None], lse

    monkeypatch.setattr(reference, "paged_attention", spoilt)
    engine = engine_of_many_pages("ngram", 311)
    certificate = certify(engine.device, canonical_plans(1, FAR.budget.rows, Drafting("ngram", 2, 3, skips=True))[0])
    assert certificate.status == "differs"
    assert "without guesses it is" in certificate.why
