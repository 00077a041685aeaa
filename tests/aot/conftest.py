"""Settings of the compilation tests, next to those of all tests: no devices, no cache of programs, long tests first."""

import jax
import pytest

jax.config.update("jax_platforms", "cpu")  # it must not look for the devices compiled for
# A program that was read from the cache has no text to be examined.
jax.config.update("jax_enable_compilation_cache", False)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole programs first: they take longest, and short kernel tests fill the remaining time of each process."""
    items.sort(key=lambda item: item.path.stem == "test_kernels")
