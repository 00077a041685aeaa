"""Presets: their sizes, and the refusal of unknown names."""

import dataclasses
import json

import pytest

from detspec.checkpoint.folder import find_folder
from detspec.checkpoint.hf import load_hf
from detspec.checkpoint.hf_config import describe, family_of, read_fields
from detspec.errors import InputError
from detspec.model.dense import dense_config
from detspec.model.params import num_params
from detspec.presets import PRESETS, preset


def test_preset_tiny_python_has_the_shape_of_the_shipped_model():
    shipped, _ = load_hf(find_folder(None))
    assert dataclasses.replace(preset("tiny_python"), tie_embeddings=True) == shipped


# Weights as the models' own safetensors count them, the tied head once; Gemma 3's 4b and 27b without their vision parts.
PUBLISHED = {
    "llama3_2_1b": 1_235_814_400,
    "llama3_1_8b": 8_030_261_248,
    "llama3_3_70b": 70_553_706_496,
    "mistral_7b": 7_248_023_552,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_0_6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "gemma2_2b": 2_614_341_888,
    "gemma3_1b": 999_885_952,
    "phi4": 14_659_507_200,
    "glm4_9b": 9_400_279_040,
    "smollm3_3b": 3_075_098_624,
    "olmo2_7b": 7_298_617_344,
    "gpt2": 124_439_808,
    "pythia_6_9b": 6_857_302_016,
    "qwen3_30b_a3b": 30_532_122_624,
    "mixtral_8x7b": 46_702_792_704,
    "gpt_oss_20b": 20_914_757_184,
    "olmoe_1b_7b": 6_919_161_856,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_of_a_published_model_has_its_number_of_weights(name: str):
    assert num_params(preset(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_preset_is_what_some_hugging_face_config_says(name: str):
    """The family's own words say all of it, and are read back."""
    cfg = preset(name)
    family = family_of(cfg)
    problems: list[str] = []
    described = json.loads(json.dumps(describe(family, cfg)))
    assert dense_config(**read_fields(described, family, problems)) == cfg
    assert not problems
    expected = {
        "llama": "llama",
        "mistral": "llama",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
        "gemma2": "gemma2",
        "gemma3": "gemma3_text",
        "glm4": "glm4",
        "smollm3": "smollm3",
        "granite3": "granite",
        "olmo2": "olmo2",
        "gpt2": "gpt2",
        "pythia": "gpt_neox",
        "mixtral": "mixtral",
        "olmoe": "olmoe",
        "gpt_oss_20b": "gpt_oss",
        "qwen3_30b_a3b": "qwen3_moe",
        "random_moe_300m": "qwen3_moe",
    }
    short = name.split("_")[0].replace("llama3", "llama")
    assert family.model_type == expected.get(name, expected.get(short, "llama"))


def test_preset_unknown_name_is_refused_naming_those_known():
    with pytest.raises(InputError, match=r"'huge'; accepted are gemma2_2b, .*, random_100m, .*, tiny_python"):
        preset("huge")
