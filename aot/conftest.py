"""Settings of the compilation tests, as strict as those of the other tests."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported: it must not look for the devices compiled for

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole programs first: they take longest, and short kernel tests fill the remaining time of each process."""
    items.sort(key=lambda item: item.path.stem == "test_kernels")
