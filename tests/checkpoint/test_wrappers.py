"""Text parts of models that see images: folders as published and as transformers 5 writes them; towers and image tokens."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

import detspec as ds
from detspec.checkpoint.families import FAMILIES, WRAPPERS
from detspec.checkpoint.families.unsupported import MISSING, MISSING_PARTS
from detspec.checkpoint.hf import load_hf, read_hf_config, save_hf
from detspec.checkpoint.load import Model
from detspec.engine.intake import request_of, to_score
from detspec.errors import InputError
from detspec.model.params import init_params
from detspec.presets import preset
from tests.checkpoint.test_hf import FAMILY_CFGS, bits
from tests.checkpoint.test_load import letters_tokenizer

IMAGE_ID, BEGIN_ID, END_ID = 20, 21, 22
OUTER: dict[str, dict[str, Any]] = {
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": BEGIN_ID,
        "eoi_token_index": END_ID,
        "image_token_index": IMAGE_ID,
        "mm_tokens_per_image": 256,
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 4},
    },
    "mistral3": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": IMAGE_ID,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "vision_config": {"model_type": "pixtral", "hidden_size": 4},
    },
}
TEXT = {"gemma3": "gemma3", "mistral3": "mistral"}
PREFIXES = {wrapper.model_type: wrapper.prefixes for wrapper in WRAPPERS}
TOWERS = ("vision_tower.encoder.weight", "multi_modal_projector.weight")


def make_wrapped(folder: Path, kind: str, spelling: int) -> tuple[ds.ModelConfig, Any]:
    """The folder of a text part with towers around it; returns the config and the weights of the text part."""
    cfg = FAMILY_CFGS[TEXT[kind]]
    params = init_params(cfg, jax.random.key(1))
    save_hf(folder, cfg, params, eos_ids=(2,))
    text = json.loads((folder / "config.json").read_text())
    outer = {**OUTER[kind], "model_type": kind, "torch_dtype": text.pop("dtype"), "eos_token_id": text.pop("eos_token_id")}
    outer["tie_word_embeddings"] = text.pop("tie_word_embeddings")
    del text["architectures"]
    (folder / "config.json").write_text(json.dumps({**outer, "text_config": text}))
    prefixes = PREFIXES[kind][spelling]

    def spelled(name: str) -> str:
        old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        return prefixes.get(old, "") + name.removeprefix(old)

    tensors = {spelled(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    prefix = "model." if spelling == 0 else ""
    towers = {prefix + name: np.full(7, np.nan, np.float16) for name in TOWERS}  # they are not read
    save_file({**tensors, **towers}, folder / "model.safetensors")
    return cfg, params


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("spelling", [0, 1], ids=["transformers 5", "published"])
@pytest.mark.parametrize("kind", OUTER)
def test_text_part_has_its_bits_and_towers_are_named(tmp_path: Path, kind: str, spelling: int, capsys):
    cfg, params = make_wrapped(tmp_path / "model", kind, spelling)
    loaded_cfg, loaded = load_hf(tmp_path / "model")
    assert loaded_cfg == cfg
    assert bits(loaded) == bits(params)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "the text part is read, multi_modal_projector and vision_tower are left out (2 tensors, 0.00 GB)" in said
    assert read_hf_config(tmp_path / "model") == cfg


def test_text_part_is_converted_to_a_folder_of_its_own(tmp_path: Path):
    cfg, params = make_wrapped(tmp_path / "model", "gemma3", 1)
    save_hf(tmp_path / "text", *load_hf(tmp_path / "model"), side_files_from=tmp_path / "model")
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert ds.load(tmp_path / "text").eos_ids == (2,)
    assert load_hf(tmp_path / "text")[0] == cfg
    assert bits(load_hf(tmp_path / "text")[1]) == bits(params)


GEMMA3_TEXTS = {
    "gemma3_4b": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    "gemma3_27b": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
    },
}


@pytest.mark.parametrize("name", GEMMA3_TEXTS)
def test_published_config_is_that_of_the_preset(tmp_path: Path, name: str):
    """Published folders leave out what `Gemma3TextConfig` has by default."""
    rope = {"factor": 8.0, "rope_type": "linear"}
    text = {**GEMMA3_TEXTS[name], "model_type": "gemma3_text", "rope_scaling": rope, "sliding_window": 1024}
    config = {**OUTER["gemma3"], "model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": [1, 106], "initializer_range": 0.02}))
    assert read_hf_config(tmp_path) == preset(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"audio_config": {}}, 'unknown keys {"audio_config": {}} next to text_config'),
        ({"text_config": None}, "text_config must be a JSON object, got null"),
        ({"text_config": {"model_type": "qwen3_next"}}, "such models have recurrent layers, which is missing here"),
        ({"text_config": {"model_type": "gemma9"}}, "unsupported model_type 'gemma9'; accepted: llama"),
        (
            {"architectures": ["Gemma3ForSequenceClassification"]},
            "unsupported architectures ['Gemma3ForSequenceClassification']",
        ),
        ({"dtype": "int4"}, 'dtype = "int4" is not supported'),
    ],
    ids=str,
)
def test_wrapper_that_is_wrong_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str):
    make_wrapped(tmp_path / "model", "gemma3", 1)
    edit(tmp_path / "model", **changes)
    with pytest.raises(InputError) as caught:
        load_hf(tmp_path / "model")
    assert message in str(caught.value)


def test_tensor_that_is_neither_text_nor_tower_is_refused(tmp_path: Path):
    make_wrapped(tmp_path / "model", "gemma3", 1)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    save_file({**tensors, "audio_tower.weight": np.zeros(3, np.float32)}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(InputError, match=r"audio_tower\.weight \[3\] is not part of the model"):
        load_hf(tmp_path / "model")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model whose tokenizer has one of the texts that stand for images under an id of its own, 25."""
    folder = tmp_path_factory.mktemp("wrapped") / "model"
    make_wrapped(folder, "mistral3", 1)
    tokenizer = tokenizers.Tokenizer.from_str(letters_tokenizer("abcdefghijklmnopqrstuvwxy"))
    tokenizer.add_special_tokens(["[IMG_END]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return ds.load(folder)


@pytest.mark.parametrize("prompt", [(3, IMAGE_ID, 4), (25, 3), "a[IMG_END]b"], ids=str)
def test_image_tokens_in_a_prompt_are_refused(model: Model, prompt: Any):
    config = ds.EngineConfig(max_len=16)
    with pytest.raises(InputError, match="which stands for an image, and only the text part of this model was read"):
        request_of(model, config, prompt, ds.SamplingParams(max_tokens=1))
    with pytest.raises(InputError, match="which stands for an image"):
        to_score(model, config, 0, prompt, 1, ds.SamplingParams(max_tokens=1))
    plain = dataclasses.replace(model, image_ids=frozenset())
    assert request_of(plain, config, prompt, ds.SamplingParams(max_tokens=1)).prompt_token_ids


def test_model_without_towers_takes_every_token(model: Model):
    assert model.image_ids == {IMAGE_ID, 25}
    assert ds.load().image_ids == frozenset()


def test_what_is_called_unsupported_is_not_supported():
    named = [model_type for model_types in MISSING.values() for model_type in model_types.split()]
    assert len(named) == len(MISSING_PARTS)
    assert not MISSING_PARTS.keys() & {one.model_type for one in FAMILIES}
    assert not MISSING_PARTS.keys() & {one.model_type for one in WRAPPERS}
