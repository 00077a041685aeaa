"""Gumbel noise has the bits of `jax.random`, whatever jax is told to use, and a row's depend on its seed and position alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.ops.gumbel import gumbel, threefry2x32
from tests.fakes import bits

pytestmark = pytest.mark.optimised

R, V = 6, 37
SEEDS = np.array([0, 1, -1, 7, 2**31 - 1, -(2**31)], np.int32)
POSITIONS = np.array([0, 5, 2**20, 5, 1, 2**31 - 1], np.int32)
encrypted = jax.jit(threefry2x32)


def noise_of(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Noise of a program that is traced anew, so that it sees the settings of the moment."""
    return np.asarray(jax.jit(lambda seeds, positions: gumbel(seeds, positions, V))(seeds, positions))


def noise_of_jax(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Noise by `jax.random`."""

    def row_noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (V,), jnp.float32)

    return np.asarray(jax.jit(jax.vmap(row_noise))(seeds, positions))


def test_threefry_of_the_known_answers_of_its_authors():
    """Vectors of Random123 (`kat_vectors`, threefry2x32 of 20 rounds)."""
    zeros, ones = np.uint32(0), np.uint32(0xFFFFFFFF)
    known = {
        ((zeros, zeros), (zeros, zeros)): (0x6B200159, 0x99BA4EFE),
        ((ones, ones), (ones, ones)): (0x1CB996FC, 0xBB002BE7),
        ((np.uint32(0x13198A2E), np.uint32(0x03707344)), (np.uint32(0x243F6A88), np.uint32(0x85A308D3))): (
            0xC4923A9C,
            0x483DF7A0,
        ),
    }
    for (key, block), expected in known.items():
        assert tuple(int(x) for x in encrypted(key, block)) == expected


def test_noise_has_the_bits_of_jax_random():
    assert (bits(noise_of(SEEDS, POSITIONS)) == bits(noise_of_jax(SEEDS, POSITIONS))).all()


@pytest.mark.parametrize("setting", [("jax_default_prng_impl", "rbg"), ("jax_random_seed_offset", 5)])
def test_noise_does_not_depend_on_settings_of_jax(setting):
    expected = noise_of(SEEDS, POSITIONS)
    before = getattr(jax.config, setting[0])
    jax.config.update(*setting)
    try:
        assert (bits(noise_of(SEEDS, POSITIONS)) == bits(expected)).all()
        assert (bits(noise_of_jax(SEEDS, POSITIONS)) != bits(expected)).any()  # the control: jax.random does
    finally:
        jax.config.update(setting[0], before)


def test_noise_of_other_seeds_and_positions_is_other_noise():
    noise = noise_of(np.int32([3, 3, 4, 4, 5, 6]), np.int32([8, 9, 8, 9, 8, 8]))
    assert len({row.tobytes() for row in noise}) == R
    assert np.isfinite(noise).all()
