"""Damaged or malicious model folders: whatever is wrong with a file, the folder loads or is one `InputError`."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from detspec.checkpoint.chat import read_chat_template
from detspec.checkpoint.folder import find_folder, read_eos_ids, read_sampling_defaults
from detspec.checkpoint.hf import load_hf, save_hf
from detspec.checkpoint.load import load, load_config
from detspec.checkpoint.orbax_folder import MANIFEST_NAME, load_orbax, save_orbax
from detspec.checkpoint.tokenizer import Tokenizer
from detspec.errors import InputError
from detspec.model.dense import config_from_json, config_to_json
from detspec.model.params import init_params
from tests.checkpoint.test_hf import TINY, make_folder
from tests.fakes import FAMILY_CFGS
from tests.hostile import RAW, as_bytes, damaged, outcome, refusal, values

DEEP = RAW.index("[" * 200_000 + "]" * 200_000)
FILES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
MANY = settings(FILES, max_examples=400)

HF_CONFIGS = {}


def hf_config(family: str, path: Path) -> dict[str, Any]:
    """The `config.json` of a small model of that family."""
    if family not in HF_CONFIGS:
        cfg = FAMILY_CFGS[family]
        save_hf(path / family, cfg, init_params(cfg, jax.random.key(0)))
        HF_CONFIGS[family] = json.loads((path / family / "config.json").read_text())
    return HF_CONFIGS[family]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A sound folder of Hugging Face's kind; each test writes one of its files anew and puts it back."""
    return make_folder(tmp_path_factory.mktemp("hostile") / "model")


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    return save_orbax(tmp_path_factory.mktemp("hostile") / "ours", TINY, init_params(TINY, jax.random.key(0))).result()


def with_file(path: Path, content: bytes, read: Callable[[], Any]) -> Any:
    """Returns what `read` returns or raises while `path` holds `content`."""
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(content)
    try:
        return outcome(read)
    finally:
        path.unlink() if before is None else path.write_bytes(before)


def check_configs(family: str, content: bytes, folder: Path) -> None:
    found = with_file(folder / "config.json", content, lambda: load_config(folder))
    if not isinstance(found, InputError):
        assert hash(found) is not None  # jax's programs are found by it
        assert config_from_json(json.loads(json.dumps(config_to_json(found)))) == found
    with_file(folder / "config.json", content, lambda: load_hf(folder))


@pytest.mark.parametrize("family", FAMILY_CFGS)
@FILES
@given(data=st.data())
def test_any_config_loads_or_is_one_error(family, data, folder, tmp_path):
    check_configs(family, data.draw(damaged(hf_config(family, tmp_path))), folder)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.slow if name in ("qwen2", "gemma3") else pytest.mark.sweep) for name in FAMILY_CFGS],
)
@MANY
@given(data=st.data())
def test_any_of_many_configs_loads_or_is_one_error(family, data, folder, tmp_path):
    check_configs(family, data.draw(damaged(hf_config(family, tmp_path))), folder)


CONFIG_CASES = [
    ({"num_hidden_layers": 10**9}, "num_layers must be at most 1000, got 1000000000"),
    ({"num_hidden_layers": 10**9, "model_type": "mistral", "architectures": None}, "num_layers must be at most 1000"),
    ({"num_hidden_layers": 1000}, "and 8976 more problems"),
    ({"num_hidden_layers": 10**40}, "num_layers must be a positive integer, at most 2**31-1"),
    ({"vocab_size": 2**31}, "vocab_size must be a positive integer, at most 2**31-1"),
    ({"hidden_size": 2**31 - 1, "intermediate_size": 2**31 - 1}, "the config asks for"),
    ({"rms_norm_eps": float("nan")}, "norm_eps must be a positive number, got nan"),
    ({"rope_theta": float("inf"), "rope_parameters": None}, "rope_theta must be a positive number, got Infinity"),
    ({"rope_theta": 10**400, "rope_parameters": None}, "rope_theta must be a positive number"),
    ({"hidden_act": ["silu"]}, 'hidden_act = ["silu"] is not supported'),
    ({"hidden_act": {"silu": 1}}, "is not supported"),
    ({"new": "x" * 10**6}, "unknown keys"),
    ({"new": f"@raw {DEEP}@"}, "nested more than 100 levels deep"),
    ({f"new{i}": i for i in range(100_000)}, "unknown keys"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 1e300, "mscale": -1, "mscale_all_dim": -1}}, "at least 0"),
    ({"layer_types": ["full_attention"] * 10**6}, "layer_types"),
]


@pytest.mark.parametrize(("changes", "message"), CONFIG_CASES, ids=[str(sorted(case))[:40] for case, _ in CONFIG_CASES])
def test_hostile_config_is_one_error(changes, message, folder):
    config = json.loads((folder / "config.json").read_text())
    found = with_file(folder / "config.json", as_bytes({**config, **changes}), lambda: load(folder))
    assert message in str(found)
    assert isinstance(found, InputError)


@FILES
@given(damaged({"eos_token_id": [1, 2], "do_sample": True, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1}))
def test_any_generation_config_loads_or_is_one_error(folder, content):
    for read in (read_eos_ids, read_sampling_defaults):
        found = with_file(folder / "generation_config.json", content, lambda read=read: read(folder))
        if not isinstance(found, InputError):
            json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    "content", [b'{"eos_token_id": [true]}', b'{"eos_token_id": 1e400}', b'{"eos_token_id": [%d]}' % 10**30]
)
def test_hostile_eos_id_is_one_error(folder, content):
    assert "eos_token_id must be" in str(with_file(folder / "generation_config.json", content, lambda: read_eos_ids(folder)))


# Weights ----------------------------------------------------------------------------------------------------------------------

NAME = "model.safetensors"
SOUND_HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]},
}


def tensors_file(header: bytes, data: bytes = bytes(32)) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def test_sound_header_is_found_and_its_tensors_are_not_those_of_the_model(folder):
    """Else the fuzz below would test the refusal of every header."""
    found = with_file(folder / NAME, tensors_file(as_bytes(SOUND_HEADER)), lambda: load_hf(folder))
    assert "tensor model.embed_tokens.weight [32, 16] is missing" in str(found)
    before = json.loads((folder / NAME).read_bytes()[8:].split(b"}}")[0] + b"}}")
    assert len(before) == 22


@FILES
@given(header=st.one_of(damaged(SOUND_HEADER), values.map(as_bytes)), data=st.binary(max_size=40) | st.just(bytes(32)))
def test_any_header_of_weights_is_read_or_is_one_error(folder, header, data):
    assert isinstance(with_file(folder / NAME, tensors_file(header, data), lambda: load_hf(folder)), InputError)


@FILES
@given(data=st.data())
def test_real_weights_with_any_header_load_or_are_one_error(folder, data):
    raw = (folder / NAME).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = data.draw(damaged(json.loads(raw[8 : 8 + length])))
    with_file(folder / NAME, tensors_file(header, raw[8 + length :]), lambda: load_hf(folder))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (struct.pack("<Q", 2**63) + b"{}", "its header has 9223372036854775808 bytes"),
        (struct.pack("<Q", 99_000_000) + b" " * 10**6, "its header has 99000000 bytes"),
        (tensors_file(b"[" * 200_000), "nested more than 100 levels deep"),
        (
            tensors_file(as_bytes({**SOUND_HEADER, "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 32]}})),
            "cannot be",
        ),
        (tensors_file(as_bytes({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 32]}})), "cannot be read"),
        (tensors_file(as_bytes({"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 2**63]}})), "cannot be read"),
        (tensors_file(as_bytes({"a": {"dtype": "F32", "shape": [8], "data_offsets": [-8, 24]}})), "cannot be read"),
        (
            tensors_file(b'{"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32], "shape": [8]}}'),
            "names the key 'shape' twice",
        ),
        (
            tensors_file(as_bytes({"model.embed_tokens.weight": {"dtype": "F8_E4M3", "shape": [32], "data_offsets": [0, 32]}})),
            "model.embed_tokens.weight has the unsupported dtype F8_E4M3",
        ),
    ],
    ids=["length", "unread", "deep", "overlap", "product", "offset", "negative", "twice", "dtype"],
)
def test_hostile_weights_are_one_error(folder, content, message):
    found = with_file(folder / NAME, content, lambda: load_hf(folder))
    assert isinstance(found, InputError)
    assert message in str(found)


def test_header_of_a_hundred_thousand_tensors_is_refused_in_time(folder):
    header = as_bytes({f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(100_000)})
    assert "and 100" in str(with_file(folder / NAME, tensors_file(header, b""), lambda: load_hf(folder)))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "sharded"
    save_hf(path, TINY, init_params(TINY, jax.random.key(0)), max_shard_bytes=4000)
    (path.parent / "model.safetensors").write_bytes(b"outside the folder")
    return path


INDEX = "model.safetensors.index.json"


@FILES
@given(data=st.data())
def test_any_index_loads_or_is_one_error(sharded, data):
    content = data.draw(damaged(json.loads((sharded / INDEX).read_text())))
    with_file(sharded / INDEX, content, lambda: load_hf(sharded))


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../model.safetensors", "/etc/passwd", "a/b", "a\0b", "a" * 300, "a" * 5000, "pipe"]
)
def test_index_that_names_a_file_outside_the_folder_or_none_is_one_error(sharded, name):
    if not (sharded / "pipe").exists():
        os.mkfifo(sharded / "pipe")  # opening it waits for a writer
    index = {"weight_map": {"x": name}}
    found = with_file(sharded / INDEX, json.dumps(index).encode(), lambda: load_hf(sharded))
    assert isinstance(found, InputError)
    assert "tensor " not in str(found)


def test_index_of_many_files_is_refused_in_time(sharded):
    index = {"weight_map": {f"t{i}": f"f{i}.safetensors" for i in range(30_000)}}
    assert "more problems" in str(with_file(sharded / INDEX, json.dumps(index).encode(), lambda: load_hf(sharded)))


@pytest.mark.parametrize("name", ["config.json", INDEX, "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_pipe_or_folder_in_the_place_of_a_file_is_one_error(tmp_path, name):
    path = make_folder(tmp_path / "model")
    if name == INDEX:
        (path / NAME).unlink()
    for make in (os.mkfifo, os.mkdir):
        (path / name).unlink(missing_ok=True)
        make(path / name)
        refusal(lambda: load(path))


# Our own folders --------------------------------------------------------------------------------------------------------------


def check_manifest(ours: Path, content: bytes) -> None:
    found = with_file(ours / MANIFEST_NAME, content, lambda: load_config(ours))
    if not isinstance(found, InputError):
        assert hash(found) is not None
        json.dumps(config_to_json(found), allow_nan=False)
    with_file(ours / MANIFEST_NAME, content, lambda: load_orbax(ours))


@FILES
@given(data=st.data())
def test_any_manifest_loads_or_is_one_error(ours, data):
    check_manifest(ours, data.draw(damaged(json.loads((ours / MANIFEST_NAME).read_text()))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 2**31 - 1, "d_model": 2**31 - 1}, "bytes of weights, on disk are"),
        ({"vocab_size": 33}, "weight ['embed']: the folder has shape (32, 16), the config asks for shape (33, 16)"),
        ({"num_layers": 10**9}, "num_layers must be at most 1000"),
        ({"num_layers": 3}, "['attn_norm']: the folder has no such weight, the config asks for shape (16,)"),
        ({"sliding_layers": [[], []]}, "sliding_layers must be True or False for each layer"),
        ({"sliding_window": {}}, "sliding_window"),
        (
            {"rope_scaling": {"kind": "yarn", "factor": 2, "original_max_position": 8, "truncate": []}},
            "truncate must be True or False",
        ),
        ({"dtype": []}, "none of this version"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_hostile_manifest_is_one_error(ours, changes, message):
    manifest = json.loads((ours / MANIFEST_NAME).read_text())
    content = json.dumps({**manifest, "config": {**manifest["config"], **changes}}).encode()
    found = with_file(ours / MANIFEST_NAME, content, lambda: load_orbax(ours))
    assert isinstance(found, InputError)
    assert message in str(found)


def test_sound_folders_load(folder, sharded, ours):
    """The control: what is damaged above loads as it is."""
    arrays = [np.asarray(load(path).params["embed"]) for path in (folder, sharded, ours)]
    assert all(np.array_equal(array, arrays[0]) for array in arrays)


# Tokenizers -------------------------------------------------------------------------------------------------------------------

TOKENIZER = json.loads((find_folder("thinking_parity") / "tokenizer.json").read_text())
TEXT = "A coin's state is heads."


def use_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer(path)
    tokenizer.decode([*tokenizer.encode(TEXT)[:100], 0, 10**6])
    assert tokenizer.vocab_size >= 0


@FILES
@given(damaged(TOKENIZER))
def test_any_tokenizer_loads_and_encodes_or_is_one_error(tmp_path, content):
    with_file(tmp_path / "tokenizer.json", content, lambda: use_tokenizer(tmp_path / "tokenizer.json"))


def test_tokenizer_that_pads_or_cuts_is_told_not_to(tmp_path):
    """transformers ignores both settings too."""
    path = tmp_path / "tokenizer.json"
    pads = {
        "strategy": {"Fixed": 10**12},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    cuts = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(TOKENIZER))
    plain = Tokenizer(path).encode(TEXT)
    path.write_text(json.dumps({**TOKENIZER, "padding": pads, "truncation": cuts}))
    assert Tokenizer(path).encode(TEXT) == plain
    assert len(plain) > 1


@FILES
@given(
    damaged(
        {
            "bos_token": "<s>",
            "eos_token": {"content": "</s>"},
            "chat_template": [{"name": "default", "template": "{{ bos_token }}"}],
        }
    )
)
def test_any_tokenizer_config_gives_a_template_or_is_one_error(tmp_path, content):
    def render() -> str | None:
        template = read_chat_template(tmp_path)
        return template and template.render([{"role": "user", "content": "x"}])

    found = with_file(tmp_path / "tokenizer_config.json", content, render)
    assert isinstance(found, str | InputError | None)
