"""Hugging Face folders: a bit-exact round trip, and one clear error for each way a folder can be wrong."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from detspec.checkpoint.families import FAMILIES
from detspec.checkpoint.families.dense import LLAMA
from detspec.checkpoint.families.family import LLAMA_NAMES, Rule
from detspec.checkpoint.families.inert import INERT_KEYS
from detspec.checkpoint.files import write_tensors
from detspec.checkpoint.hf import load_hf, save_hf
from detspec.checkpoint.hf_config import DTYPE_KEYS, read_fields
from detspec.checkpoint.tensors import named_tensors
from detspec.checkpoint.which_family import find_family
from detspec.config import RopeScaling, ThinkingConfig
from detspec.errors import InputError
from detspec.model.dense import dense_config, with_fields
from detspec.model.params import Params, init_params, num_params
from tests.fakes import FAMILY_CFGS

TINY = dense_config(
    vocab_size=32,
    d_model=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=24,
    rope_theta=5000.0,
    norm_eps=2e-6,
    max_position=64,
    dtype="float32",
)
Q_NAME = "model.layers.1.self_attn.q_proj.weight"


def bits(params: Params) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]


def make_folder(path: Path, **changes: Any) -> Path:
    cfg = with_fields(TINY, **changes)
    save_hf(path, cfg, init_params(cfg, jax.random.key(0)), eos_ids=(2,))
    return path


def edit_config(path: Path, *without: str, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config = {key: value for key, value in {**config, **changes}.items() if key not in without}
    (path / "config.json").write_text(json.dumps(config))


def edit_tensors(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def load_error(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_hf(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [False, True])
def test_round_trip_returns_every_bit(tmp_path: Path, dtype: str, tied: bool):
    cfg = dataclasses.replace(TINY, dtype=dtype, tie_embeddings=tied)
    params = init_params(cfg, jax.random.key(3))
    save_hf(tmp_path / "model", cfg, params)
    loaded_cfg, loaded = load_hf(tmp_path / "model")
    assert loaded_cfg == cfg
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    assert [leaf.dtype for leaf in jax.tree.leaves(loaded)] == [leaf.dtype for leaf in jax.tree.leaves(params)]
    assert bits(loaded) == bits(params)
    assert bits(loaded) != bits(init_params(cfg, jax.random.key(4)))


@pytest.mark.parametrize("family", FAMILY_CFGS)
def test_round_trip_of_every_family_returns_every_bit(tmp_path: Path, family: str):
    cfg = FAMILY_CFGS[family]
    leaves, treedef = jax.tree.flatten(init_params(cfg, jax.random.key(3)))
    keys = jax.random.split(jax.random.key(4), len(leaves))  # no two leaves alike: norms and biases are, as they come
    leaves = [jax.random.normal(key, leaf.shape).astype(leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    params = jax.tree.unflatten(treedef, leaves)
    save_hf(tmp_path / "model", cfg, params)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"].removesuffix("_text") == family
    loaded_cfg, loaded = load_hf(tmp_path / "model")
    assert loaded_cfg == cfg
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    assert bits(loaded) == bits(params)


def test_model_that_no_family_has_is_not_written(tmp_path: Path):
    cfg = with_fields(TINY, post_norms=True, activation="silu", qk_norm=False)
    with pytest.raises(InputError, match="no family of Hugging Face"):
        save_hf(tmp_path / "model", cfg, init_params(cfg, jax.random.key(0)))
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_encoding": "alibi"}, "by linear biases.*Attention.positions 'alibi': convert to our own folders"),
        (
            {"thinking": ThinkingConfig(chunk=8, in_layer=1, out_layer=2, max_thought=4, end_id=3)},
            "convert to our own folders, which keep the thinker and the compressor",
        ),
    ],
    ids=["alibi", "thinking"],
)
def test_model_that_folders_of_hugging_face_have_no_key_for_is_refused_by_name(tmp_path: Path, changes: dict, message: str):
    cfg = with_fields(TINY, **changes)
    with pytest.raises(InputError, match=message):
        save_hf(tmp_path / "model", cfg, init_params(cfg, jax.random.key(0)))
    assert not (tmp_path / "model").exists()


def read(model_type: str, **config: Any) -> tuple[dict[str, Any], list[str]]:
    """The fields that one `config.json` gives, and what is wrong with it."""
    problems: list[str] = []
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 8}
    hf_config = {"model_type": model_type, **sizes, **config}
    family = find_family(hf_config, problems)
    assert family is not None
    return read_fields(hf_config, family, problems), problems


@pytest.mark.parametrize(
    ("model_type", "config", "layers", "window"),
    [
        ("mistral", {"sliding_window": 8}, (True,) * 4, 8),
        ("mistral", {}, (True,) * 4, 4096),
        ("mistral", {"sliding_window": None}, None, None),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 2}, None, None),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, (False, False, True, True), 8),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4}, None, None),
        ("gemma2", {"sliding_window": 8}, (True, False, True, False), 8),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}, (True, False, True, False), 8),
        ("gemma3_text", {"sliding_window": 8}, (True,) * 4, 8),
        ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"] * 2}, (False, True) * 2, 4096),
    ],
)
def test_sliding_layers_are_those_of_the_family_or_of_layer_types(model_type, config, layers, window):
    fields, problems = read(model_type, **config)
    assert problems == []
    assert (fields.get("sliding_layers"), fields.get("sliding_window")) == (layers, window)


def test_layer_types_that_do_not_fit_are_refused():
    for types in (["full_attention"] * 3, ["full_attention"] * 3 + ["chunked_attention"], "full_attention"):
        assert "layer_types must name each of the 4 layers" in read("gemma2", layer_types=types)[1][0]


@pytest.mark.parametrize(
    ("model_type", "config", "culprit"),
    [
        ("gemma3_text", {"rope_parameters": {"full_attention": 3}}, "not a JSON object"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": False}}, "not a JSON object"),
        (
            "gemma3_text",
            {"sliding_window_pattern": "six"},
            'sliding_window_pattern must be a whole number of at least 0, got "six"',
        ),
        ("gemma2", {"layer_types": [["full_attention"]] * 4}, "layer_types must name each"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": "2"}, "max_window_layers must be a whole number"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": "1", "mscale_all_dim": 1}}, "must be numbers"),
        ("qwen2", {"rope_scaling": {"type": ["yarn"], "factor": 2.0}}, "is not supported"),
    ],
)
def test_config_values_of_the_wrong_kind_are_one_clear_problem(model_type, config, culprit):
    assert culprit in "; ".join(read(model_type, **config)[1])


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeScaling("linear", 2.0)),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            RopeScaling("yarn", 4.0, 32768, attention_factor=1.1386294361119891),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 99, "attention_factor": 1.5}},
            RopeScaling("yarn", 4.0, 99, attention_factor=1.5),
        ),
        ({"rope_parameters": {"rope_type": "default"}}, None),
        ({"rope_scaling": None}, None),
    ],
)
def test_rope_scalings_are_read_from_either_key(config, scaling):
    """YaRN's attention factor is 0.1 ln(4) + 1 where it is not given."""
    fields, problems = read("qwen2", **config)
    assert problems == []
    assert fields["rope_scaling"] == scaling
    assert fields["rope_theta"] == 10000.0


def test_gemma3_has_a_base_for_sliding_layers_and_one_for_the_others():
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    full = {"rope_theta": 5e5, "rope_type": "linear", "factor": 8.0}
    new = {"rope_parameters": {"full_attention": full, "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"}}}
    for config in (old, new):
        fields, problems = read("gemma3_text", **config)
        assert problems == []
        assert (fields["rope_theta"], fields["sliding_rope_theta"]) == (5e5, 2e4)
        assert fields["rope_scaling"] == RopeScaling("linear", 8.0)
    fields, _ = read("gemma3_text")
    assert (fields["rope_theta"], fields["sliding_rope_theta"]) == (1e6, 1e4)


def test_sharded_folder_loads_the_same_bits(tmp_path: Path):
    params = init_params(TINY, jax.random.key(3))
    save_hf(tmp_path / "single", TINY, params)
    save_hf(tmp_path / "sharded", TINY, params, max_shard_bytes=4000)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert not (tmp_path / "sharded" / "model.safetensors").exists()
    assert load_hf(tmp_path / "sharded")[0] == load_hf(tmp_path / "single")[0]
    assert bits(load_hf(tmp_path / "sharded")[1]) == bits(load_hf(tmp_path / "single")[1])


def test_every_tensor_has_the_name_that_transformers_gives_it():
    names = named_tensors(LLAMA_NAMES, init_params(TINY, jax.random.key(0)))
    assert list(names)[:2] == ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"]
    assert list(names)[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert names["model.layers.1.mlp.down_proj.weight"].shape == (16, 24)
    assert names["model.layers.0.self_attn.k_proj.weight"].shape == (16, 16)
    assert len(names) == 3 + 9 * 2


def test_saving_replaces_a_model_folder_and_nothing_else(tmp_path: Path):
    folder = make_folder(tmp_path / "model")
    make_folder(tmp_path / "model", rope_theta=123.0)
    assert load_hf(folder)[0].layer(0).mixer.rope.theta == 123.0
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("precious")
    with pytest.raises(InputError, match="not overwritten"):
        make_folder(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "precious"


def test_config_of_transformers_4_is_read(tmp_path: Path):
    folder = make_folder(tmp_path / "model")
    edit_config(
        folder,
        "rope_parameters",
        "dtype",
        torch_dtype="float32",
        rope_theta=700.0,
        rope_scaling=None,
        use_cache=True,
        transformers_version="4.40.0",
        attention_dropout=0.0,
        pretraining_tp=1,
        _name_or_path="x",
    )
    assert load_hf(folder)[0] == with_fields(TINY, rope_theta=700.0)


def test_keys_that_change_nothing_are_passed_over(tmp_path: Path):
    """Each with a value that is no default of anything; those of which some values matter have the one that does not."""
    folder = make_folder(tmp_path / "model")
    inert = dict.fromkeys(INERT_KEYS.keys() - {"model_type", "architectures"}, "something")
    neutral = {
        "pruned_heads": {},
        "is_encoder_decoder": False,
        "tie_encoder_decoder": False,
        "cross_attention_hidden_size": None,
    }
    edit_config(folder, **inert, **neutral, key_of_the_future=None)
    assert load_hf(folder)[0] == TINY
    edit_config(folder, pruned_heads=[], architectures=[])
    assert load_hf(folder)[0] == TINY
    edit_config(folder, key_of_the_future=False)
    assert 'unknown keys {"key_of_the_future": false}' in load_error(folder)


def test_every_key_that_transformers_leaves_in_old_configs_is_known():
    """Keys of `PretrainedConfig` in 4.x, of its generation settings, and what published folders are known to have."""
    published = "_commit_hash _model_name_or_path _name_or_path auto_map do_sample max_length max_sequence_length "
    published += "temperature top_p transformers.js_config unk_token_id _attn_implementation unsloth_version"
    settings = "min_length early_stopping num_beams num_beam_groups diversity_penalty top_k typical_p repetition_penalty "
    settings += "length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    settings += "output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values "
    settings += "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens"
    common = "return_dict output_hidden_states output_attentions torchscript torch_dtype use_bfloat16 tf_legacy_loss "
    common += "pruned_heads tie_word_embeddings chunk_size_feed_forward is_encoder_decoder is_decoder "
    common += "cross_attention_hidden_size add_cross_attention tie_encoder_decoder architectures finetuning_task id2label "
    common += "label2id tokenizer_class prefix bos_token_id pad_token_id eos_token_id sep_token_id decoder_start_token_id "
    common += "task_specific_params problem_type transformers_version"
    for family in FAMILIES:
        known = {*INERT_KEYS, *family.fixed, *family.fields, *DTYPE_KEYS}
        assert set(f"{published} {settings} {common}".split()) - known == set(), family.model_type
        assert not set(INERT_KEYS) & {*family.fixed, *family.fields}


def test_qwen2_has_biases_whatever_the_config_says():
    for value in (True, False):
        fields, problems = read("qwen2", attention_bias=value)
        assert problems == []
        assert (fields["qkv_bias"], fields.get("o_bias")) == (True, None)
        assert read("qwen3", attention_bias=value)[0]["qkv_bias"] is value


def test_first_configs_of_gemma2_name_the_window_twice():
    fields, problems = read("gemma2", sliding_window_size=4096)
    assert problems == []
    assert fields["sliding_window"] == 4096  # where there is no sliding_window, transformers takes that
    assert read("gemma2", sliding_window=16, sliding_window_size=16)[1] == []
    for config in ({"sliding_window_size": 2048}, {"sliding_window": 16, "sliding_window_size": 4096}):
        assert "contradict each other" in "; ".join(read("gemma2", **config)[1])


def test_config_of_transformers_5_is_read(tmp_path: Path):
    folder = make_folder(tmp_path / "model")
    edit_config(folder, "rope_theta", rope_parameters={"rope_theta": 900.0, "rope_type": "default"}, pad_token_id=None)
    assert load_hf(folder)[0] == with_fields(TINY, rope_theta=900.0)


def test_config_keys_left_out_take_the_defaults_of_llama(tmp_path: Path):
    folder = make_folder(tmp_path / "model", num_kv_heads=4, head_dim=4)
    left_out = ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings")
    edit_config(folder, "rope_theta", "rope_parameters", "dtype", *left_out)
    defaults = {"num_kv_heads": 4, "head_dim": 4, "norm_eps": 1e-6, "max_position": 2048, "rope_theta": 10000.0}
    assert load_hf(folder)[0] == with_fields(TINY, **defaults)


def test_weights_come_in_the_dtype_of_the_config(tmp_path: Path):
    folder = make_folder(tmp_path / "model")
    edit_config(folder, dtype="bfloat16")
    cfg, params = load_hf(folder)
    exact = init_params(TINY, jax.random.key(0))
    assert cfg.dtype == "bfloat16"
    assert bits(params) == bits(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), exact))


def test_stored_copy_of_a_tied_head_is_accepted_only_when_it_is_one(tmp_path: Path):
    folder = make_folder(tmp_path / "model", tie_embeddings=True)

    def add_head(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    edit_tensors(folder, add_head)
    assert "head" not in load_hf(folder)[1]
    edit_tensors(folder, lambda tensors: tensors["lm_head.weight"].__setitem__((0, 0), 7.0))
    assert "lm_head.weight differs from the embedding" in load_error(folder)


def test_family_whose_layers_differ_is_a_value(tmp_path, monkeypatch):
    """Every second layer rotates nothing, as in SmolLM3: a rule reads it from a key."""

    def read_unrotated(hf_config: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        return {"unrotated_layers": tuple(not rotates for rotates in hf_config["no_rope_layers"])}

    rule = Rule(frozenset({"no_rope_layers"}), read_unrotated, lambda flat: {})
    family = dataclasses.replace(LLAMA, model_type="odd", architecture="Odd", rules=(rule,))
    folder = make_folder(tmp_path / "model", num_layers=2, qkv_bias=False, qk_norm=False, post_norms=False, o_bias=False)
    edit_config(folder, model_type="odd", architectures=["Odd"], no_rope_layers=[1, 0])
    with pytest.raises(InputError, match="unsupported model_type 'odd'"):
        load_hf(folder)
    monkeypatch.setattr("detspec.checkpoint.which_family.FAMILIES", (family,))
    cfg, params = load_hf(folder)
    assert [layer.mixer.positions for layer in cfg.layers] == ["rope", "none"]
    assert num_params(cfg) == sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "contradict each other"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be a number of at least 1, got 0.5"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, '{"type": "dynamic", "factor": 2.0} is not supported'),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 4}}, "unsupported keys beta_fast"),
        ({"rope_parameters": {"rope_theta": 5000.0, "rope_type": "yarn"}}, "lacks factor"),
        ({"rope_parameters": {"rope_theta": 5000.0, "partial_rotary_factor": 0.5}}, '"partial_rotary_factor": 0.5'),
        ({"rope_parameters": 5000.0}, "not JSON objects"),
        ({"rope_parameters": {"rope_theta": 6000.0, "rope_type": "default"}}, "5000.0 and 6000.0"),
        ({"attention_bias": True}, "self_attn.q_proj.bias [32] is missing"),
        ({"pruned_heads": {"0": [1]}}, 'pruned_heads = {"0": [1]} is not supported'),
        ({"pruned_heads": [1]}, "pruned_heads = [1] is not supported"),
        ({"is_encoder_decoder": []}, "is_encoder_decoder = [] is not supported"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder = true"),
        ({"cross_attention_hidden_size": 8}, "cross_attention_hidden_size = 8"),
        ({"sliding_window_size": 8}, "sliding_window_size = 8"),
        ({"mlp_bias": True}, "mlp_bias = true"),
        ({"hidden_act": "quick_gelu"}, 'hidden_act = "quick_gelu" is not supported'),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quant_method null is not supported"),
        ({"new_trick": [1]}, 'unknown keys {"new_trick": [1]}'),
        ({"model_type": "phi3"}, "'phi3'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"dtype": "int8"}, 'dtype = "int8"'),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "two"}, "num_layers must be a positive integer, at most 2**31-1, got 'two'"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_kv_heads (3)"),
        ({"rms_norm_eps": -1}, "norm_eps must be a positive number, got -1"),
        ({"rope_theta": "big", "rope_parameters": None}, 'rope_theta must be a positive number, got "big"'),
        ({"tie_word_embeddings": "no"}, "tie_embeddings must be True or False"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_config_that_would_change_the_computation_is_refused(tmp_path: Path, changes: dict[str, Any], culprit: str):
    folder = make_folder(tmp_path / "model")
    load_hf(folder)
    edit_config(folder, **changes)
    assert culprit in load_error(folder)


BUFFERS = {
    "model.layers.1.self_attn.rotary_emb.inv_freq": True,
    "model.layers.0.self_attn.rotary_emb.cos_cached": True,
    "model.rotary_emb.inv_freq": True,
    "model.rotary_emb.original_inv_freq": True,
    "model.rotary_emb_local.inv_freq": True,
    "model.rotary_emb.sliding_attention_inv_freq": True,
    "model.embed_tokens.embed_scale": True,
    "model.layers.1.self_attn.rotary_emb.weight": False,
    "model.inv_freq": False,
    "model.layers.1.self_attn.q_proj.inv_freq": False,
    "rotary_emb.inv_freq": False,
}


@pytest.mark.parametrize(("name", "is_constant"), BUFFERS.items())
def test_buffers_that_the_config_decides_are_passed_over(tmp_path: Path, name: str, is_constant: bool):
    folder = make_folder(tmp_path / "model")
    edit_tensors(folder, lambda tensors: tensors.update({name: np.full(4, 7, np.float32)}))
    if is_constant:
        assert bits(load_hf(folder)[1]) == bits(init_params(TINY, jax.random.key(0)))
    else:
        assert f"tensor {name} [4] is not part of the model" in load_error(folder)


def remove_tensor(tensors: dict[str, np.ndarray]) -> None:
    del tensors[Q_NAME]


def add_tensor(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = np.ones((24, 16), np.float32)


def reshape_tensor(tensors: dict[str, np.ndarray]) -> None:
    tensors[Q_NAME] = np.ascontiguousarray(tensors[Q_NAME].T)


def retype_tensor(tensors: dict[str, np.ndarray]) -> None:
    tensors[Q_NAME] = tensors[Q_NAME].astype(np.int32)


def put_nan(tensors: dict[str, np.ndarray]) -> None:
    tensors[Q_NAME][3, 2] = np.nan


def put_infinity(tensors: dict[str, np.ndarray]) -> None:
    tensors[Q_NAME][0, 0] = -np.inf


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        (remove_tensor, f"tensor {Q_NAME} [32, 16] is missing"),
        (add_tensor, "tensor model.layers.2.mlp.up_proj.weight [24, 16] is not part of the model"),
        (reshape_tensor, f"tensor {Q_NAME} has shape [16, 32], the config asks for [32, 16]"),
        (retype_tensor, f"{Q_NAME} has the unsupported dtype I32"),
        (put_nan, f"tensor {Q_NAME} holds NaN or infinite weights"),
        (put_infinity, f"tensor {Q_NAME} holds NaN or infinite weights"),
    ],
)
def test_tensors_unlike_the_config_are_refused(tmp_path: Path, change: Callable[[dict[str, np.ndarray]], None], culprit: str):
    folder = make_folder(tmp_path / "model")
    edit_tensors(folder, change)
    assert culprit in load_error(folder)


def test_weights_that_overflow_the_dtype_of_the_config_are_refused(tmp_path: Path):
    folder = make_folder(tmp_path / "model")
    edit_tensors(folder, lambda tensors: tensors[Q_NAME].__setitem__((0, 0), 1e6))
    load_hf(folder)
    edit_config(folder, dtype="float16")
    assert f"tensor {Q_NAME} holds NaN or infinite weights as float16" in load_error(folder)


@pytest.mark.parametrize("size", [0, 5, 100, 3000])
def test_truncated_weights_are_refused(tmp_path: Path, size: int):
    folder = make_folder(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    assert "model.safetensors cannot be read, it is damaged or incomplete" in load_error(folder)


@pytest.mark.parametrize(
    ("name", "culprit"),
    [
        ("config.json", "config.json is missing"),
        ("model.safetensors", "neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_missing_file_is_named(tmp_path: Path, name: str, culprit: str):
    folder = make_folder(tmp_path / "model")
    (folder / name).unlink()
    assert culprit in load_error(folder)


@pytest.mark.parametrize(("content", "culprit"), [("{", "config.json cannot be read"), ("[]", "no JSON object but list")])
def test_damaged_config_is_named(tmp_path: Path, content: str, culprit: str):
    folder = make_folder(tmp_path / "model")
    (folder / "config.json").write_text(content)
    assert culprit in load_error(folder)


def test_missing_folder_is_named(tmp_path: Path):
    assert "no such folder" in load_error(tmp_path / "nowhere")


def make_shards(path: Path) -> tuple[Path, dict[str, str]]:
    save_hf(path, TINY, init_params(TINY, jax.random.key(0)), max_shard_bytes=4000)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    return path, index["weight_map"]


def test_missing_shard_is_named(tmp_path: Path):
    folder, weight_map = make_shards(tmp_path / "model")
    (folder / weight_map[Q_NAME]).unlink()
    assert f"{weight_map[Q_NAME]} is missing" in load_error(folder)


def test_truncated_shard_is_named(tmp_path: Path):
    folder, weight_map = make_shards(tmp_path / "model")
    shard = folder / weight_map[Q_NAME]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"{shard.name} cannot be read" in load_error(folder)


@pytest.mark.parametrize(
    ("weight_map", "culprit"),
    [
        ({Q_NAME: "../model.safetensors"}, "'../model.safetensors' is not a file name in the folder"),
        (None, "has no weight_map"),
        ({Q_NAME: 3}, "has no weight_map"),
    ],
)
def test_damaged_index_is_named(tmp_path: Path, weight_map: dict[str, str] | None, culprit: str):
    folder, good = make_shards(tmp_path / "model")
    index = {"weight_map": {**good, **weight_map} if weight_map else weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert culprit in load_error(folder)


def test_tensor_that_is_not_in_the_shard_of_the_index_is_named(tmp_path: Path):
    folder, weight_map = make_shards(tmp_path / "model")
    wrong = weight_map["model.embed_tokens.weight"]
    index = {"weight_map": {**weight_map, Q_NAME: wrong}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"places {Q_NAME} in {wrong}, which has no such tensor" in load_error(folder)


INDEX = "model.safetensors.index.json"


def make_both(path: Path) -> Path:
    """Shards and their index, next to a single file of the same weights."""
    folder, _ = make_shards(path)
    write_tensors(folder, named_tensors(LLAMA_NAMES, init_params(TINY, jax.random.key(0))), None)
    return folder


def test_single_file_next_to_an_index_loads_where_both_have_the_same_weights(tmp_path: Path):
    folder = make_both(tmp_path / "model")
    assert bits(load_hf(folder)[1]) == bits(init_params(TINY, jax.random.key(0)))
    (folder / "consolidated.safetensors").write_bytes(b"Mistral's folders have another copy under this name")
    load_hf(folder)
    names = load_file(folder / "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    load_hf(folder)


def flip_bit(tensors: dict[str, np.ndarray]) -> None:
    tensors[Q_NAME].view(np.uint32)[31, 15] ^= 1


@pytest.mark.parametrize("change", [remove_tensor, retype_tensor, flip_bit])
def test_single_file_next_to_an_index_of_other_weights_is_refused(tmp_path: Path, change: Callable):
    folder = make_both(tmp_path / "model")
    edit_tensors(folder, change)
    assert f"there are both model.safetensors and {INDEX}, and they differ in {Q_NAME}: remove" in load_error(folder)
    (folder / "model.safetensors").unlink()
    load_hf(folder)


def test_single_file_next_to_the_index_of_files_that_are_gone_is_refused(tmp_path: Path):
    folder = make_both(tmp_path / "model")
    for shard in folder.glob("model-*.safetensors"):
        shard.unlink()
    assert f"there are both model.safetensors and {INDEX}, whose files are not whole" in load_error(folder)
    (folder / INDEX).unlink()
    load_hf(folder)


def test_all_problems_are_told_at_once(tmp_path: Path):
    folder = make_folder(tmp_path / "model")
    edit_config(folder, mlp_bias=True, hidden_act="tanh", surprise=1)
    (folder / "model.safetensors").write_bytes(b"")
    message = load_error(folder)
    for culprit in ("mlp_bias", "hidden_act", "surprise", "model.safetensors cannot be read"):
        assert culprit in message


def test_many_problems_are_counted_rather_than_listed(tmp_path: Path):
    folder = make_folder(tmp_path / "model")
    edit_config(folder, num_hidden_layers=4)
    assert "and 12 more problems" in load_error(folder)
