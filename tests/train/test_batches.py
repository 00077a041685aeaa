"""Batches: pure functions of the step, each token predicted once an epoch."""

import numpy as np
import pytest

from detspec.errors import InputError
from detspec.train.batches import Phase, batch_fn, cut_rows, digest_documents, phase_at

DOCUMENTS = [np.arange(start, start + size, dtype=np.int32) for start, size in ((0, 20), (100, 33), (200, 7), (300, 41))]


def test_cut_rows_share_one_token_and_drop_the_rest():
    rows = cut_rows([np.array([0, 7, 8]), np.array([0, 5, 6, 9, 4, 2])], seq_len=3)
    assert rows.tolist() == [[0, 7, 8, 0], [0, 5, 6, 9]]


def test_cut_rows_of_too_little_text_is_refused():
    with pytest.raises(InputError, match="3 tokens make no row of 3"):
        cut_rows([np.array([1, 2, 3])], seq_len=3)


def test_phase_that_is_no_count_is_refused():
    with pytest.raises(InputError, match=r"Phase\.batch_size must be a positive integer, .*got 0"):
        Phase(num_steps=1, batch_size=0, seq_len=8)


def test_batch_depends_on_seed_and_step_alone():
    phases = (Phase(20, 3, 8),)
    in_order = [batch_fn(phases, DOCUMENTS, seed=0)(step) for step in range(20)]
    batch_at = batch_fn(phases, DOCUMENTS, seed=0)
    backwards = [batch_at(step) for step in reversed(range(20))]
    assert all(np.array_equal(a, b) for a, b in zip(in_order, reversed(backwards), strict=True))
    other = batch_fn(phases, DOCUMENTS, seed=1)
    assert any(not np.array_equal(in_order[step], other(step)) for step in range(20))


def test_epoch_predicts_each_token_at_most_once_and_epochs_differ():
    batch_at = batch_fn((Phase(8, 3, 8),), DOCUMENTS, seed=0)  # 101 tokens: 12 rows of 8 targets, 4 steps an epoch
    epochs = [np.concatenate([batch_at(step) for step in range(start, start + 4)]) for start in (0, 4)]
    for rows in epochs:
        targets = rows[:, 1:].ravel()
        assert len(set(targets.tolist())) == targets.size == 96
    assert not np.array_equal(epochs[0], epochs[1])


def test_phases_follow_each_other_in_their_own_shapes():
    phases = (Phase(2, 3, 8), Phase(3, 1, 32))
    batch_at = batch_fn(phases, DOCUMENTS, seed=0)
    assert [batch_at(step).shape for step in range(5)] == [(3, 9)] * 2 + [(1, 33)] * 3
    assert [phase_at(phases, step) for step in (1, 2, 4)] == [(phases[0], 1), (phases[1], 0), (phases[1], 2)]
    with pytest.raises(IndexError, match="step 5 is beyond the 5 steps"):
        phase_at(phases, 5)


def test_digest_tells_documents_apart_and_where_they_end():
    joined = [np.concatenate(DOCUMENTS)]
    assert digest_documents(DOCUMENTS) == digest_documents([document.copy() for document in DOCUMENTS])
    assert len({digest_documents(DOCUMENTS), digest_documents(joined), digest_documents(DOCUMENTS[::-1])}) == 3
