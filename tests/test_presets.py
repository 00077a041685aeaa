"""Presets: their sizes, and the refusal of unknown names."""

import dataclasses

import pytest

from detspec.checkpoint.hf import load_hf
from detspec.checkpoint.load import shipped_folder
from detspec.errors import InputError
from detspec.presets import PRESETS, preset


def test_preset_random_100m_has_about_100_million_weights():
    assert 95e6 < preset("random_100m").num_params < 105e6


def test_preset_tiny_python_has_the_shape_of_the_shipped_model():
    shipped, _ = load_hf(shipped_folder())
    assert dataclasses.replace(preset("tiny_python"), tie_embeddings=True) == shipped


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_preset_head_is_untied(name: str):
    assert not preset(name).tie_embeddings


def test_preset_unknown_name_is_refused_naming_those_known():
    with pytest.raises(InputError, match=r"'huge'; there are random_100m, tiny_python"):
        preset("huge")
