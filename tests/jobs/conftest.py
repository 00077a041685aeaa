"""One model and one engine for all tests of this folder: compiling is what takes the time."""

import pytest

from detspec.checkpoint.load import Model
from detspec.engine.engine import Engine
from tests.engine.byte_model import load_folder
from tests.engine.conftest import make_engine


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_folder(tmp_path_factory.mktemp("model") / "bytes")


@pytest.fixture(scope="session")
def one_row(model: Model) -> Engine:
    """One canonical row at a time."""
    return make_engine(model, 1, "none")
