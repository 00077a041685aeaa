"""Compilation for devices that are not here, as strict as the other tests."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported: what is compiled for is not what is here

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole programs first: they take longest, and single kernels fill what is left."""
    items.sort(key=lambda item: item.path.stem == "test_kernels")
