"""Seeds of many samples: stable, and different wherever a name is."""

import pytest

from detspec.seeds import seed_of


def test_seed_depends_on_every_name_and_their_order():
    seeds = [
        seed_of(run, step, prompt, sample) for run in (0, 1) for step in (0, 1) for prompt in ("a", "b") for sample in (0, 1)
    ]
    assert len(set(seeds)) == 16
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert seed_of(1, 2) != seed_of(2, 1)
    assert seed_of("1", 2) != seed_of(1, 2) != seed_of("12")


def test_seed_stays_what_it_is():
    """Recorded results name it; a change moves every sample."""
    assert seed_of(0, "def f(é):\n", 3) == 3240969758


def test_seed_of_something_else_is_a_type_error():
    with pytest.raises(TypeError):
        seed_of(0.5)
