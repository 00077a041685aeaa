"""A model and three engines for the tests of the engine and of jobs: compiling is what takes the time."""

import pytest

from detspec.checkpoint.load import Model
from detspec.engine.engine import Engine
from tests.engine.byte_model import load_folder, make_engine


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_folder(tmp_path_factory.mktemp("model") / "bytes")


@pytest.fixture(scope="session")
def one_row(model: Model) -> Engine:
    """Engine of a canonical row at a time."""
    return make_engine(model, 1, "none")


@pytest.fixture(scope="session")
def three_rows(model: Model) -> Engine:
    """Windows of four tokens, drafted by the fast path."""
    return make_engine(model, 3, "self")


@pytest.fixture(scope="session")
def eight_rows(model: Model) -> Engine:
    """Whatever is faster."""
    return make_engine(model, 8, "auto")
