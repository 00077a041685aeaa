"""Families with experts in the names that transformers has in memory, which it writes on demand: the same weights."""

import pytest
from cases import OF_EXPERTS, write

import detspec as ds


@pytest.mark.parametrize("case", OF_EXPERTS)
def test_folder_in_the_names_of_memory_has_the_same_digest(case, tmp_path):
    theirs = write(case, tmp_path / "published")
    theirs.save_pretrained(tmp_path / "memory", save_original_format=False)
    assert ds.load(tmp_path / "memory").digest == ds.load(tmp_path / "published").digest
