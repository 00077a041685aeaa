"""Strictness for every test: no silent promotion of dtypes or ranks, no flaky deadlines, the CPU unless told otherwise."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported; JAX_PLATFORMS=cuda runs the same tests on a GPU

import gc

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A first example pays for a compilation, so time limits per example mean nothing.
hypothesis.settings.register_profile("local", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Drops compiled programs at the end of each folder of tests.

    A program takes dozens of memory mappings, and Linux allows a process 65530: the whole suite in one process runs into it,
    and the compiler then ends with a segmentation fault.
    """
    if nextitem is not None and nextitem.path.parent != item.path.parent:
        jax.clear_caches()
        gc.collect()
