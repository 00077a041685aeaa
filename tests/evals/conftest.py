"""All that tests of `detspec eval` need: no network, compiled programs shared with the other tests, small tasks."""

import os

os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"  # before the harness is imported

from pathlib import Path

import pytest

from tests.engine.byte_model import write_folder
from tests.evals.local_tasks import write_tasks


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small tasks."""
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a small model of bytes, in which texts begin with token 0."""
    path = write_folder(tmp_path_factory.mktemp("models") / "bytes")
    (path / "tokenizer_config.json").write_text('{"bos_token": "!"}')  # the first of the byte alphabet
    return path
