"""Tests of replications run as strictly as those of the package: importing these settings makes them."""

from tests.conftest import pytest_unconfigure

__all__ = ["pytest_unconfigure"]
