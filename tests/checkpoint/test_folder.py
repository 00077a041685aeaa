"""Paths that people give in the place of a model folder: the error says what they are and what to do."""

from collections.abc import Callable
from pathlib import Path

import pytest

from detspec.checkpoint.hf import load_hf, read_hf_config
from detspec.checkpoint.load import load, load_config
from detspec.checkpoint.orbax_folder import load_orbax, read_orbax_config
from detspec.errors import InputError
from detspec.read_json import LFS_POINTER
from tests.checkpoint.test_hf import INDEX, make_folder, make_shards

POINTER = LFS_POINTER + b"v1\noid sha256:4d7a\nsize 4976698672\n"


def error_of(path: Path | str) -> str:
    with pytest.raises(InputError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-1B", "https://huggingface.co/Qwen/Qwen3-0.6B", "org/name.v1_2"])
def test_name_on_the_hub_is_recognised(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"nothing is downloaded here, so fetch it .hf download [a-zA-Z]") as caught:
        load(name)
    assert f"hf download {'/'.join(name.split('/')[-2:])} --local-dir" in str(caught.value)


@pytest.mark.parametrize("name", ["models/qwen", "gpt", "../a/b", "/a/b/c", "a/b/c"])
def test_path_that_is_none_on_the_hub_is_no_such_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"no such folder$"):
        load(name)
    with pytest.raises(InputError, match=r"no such folder$"):
        load_config(name)


@pytest.mark.parametrize("name", ["x" * 5000, "a/" * 3000, "a\0b", "\ud800"], ids=["long", "deep", "nul", "surrogate"])
@pytest.mark.parametrize("read", [load, load_config, load_hf, load_orbax, read_hf_config, read_orbax_config])
def test_path_that_no_file_can_have_is_one_short_error(name: str, read: Callable[[str], object]):
    with pytest.raises(InputError, match="is no path of a folder that can be read: ") as caught:
        read(name)
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


def test_file_in_the_place_of_its_folder_is_named(tmp_path: Path):
    folder = make_folder(tmp_path / "model")
    assert "is a file: give the folder that it lies in" in error_of(folder / "model.safetensors")
    (folder / "model.gguf").write_bytes(b"GGUF")
    assert "is a file; GGUF files are not read" in error_of(folder / "model.gguf")
    load_hf(folder)


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        ((), "the folder is empty"),
        (("adapter_config.json", "adapter_model.safetensors"), "it is the LoRA adapter of another model: merge it"),
        (("model-Q4_K_M.gguf",), "config.json is missing; GGUF files are not read"),
        (("snapshots/0123/config.json",), "there is one in {folder}/snapshots/0123: give that folder"),
        (("model.safetensors",), "config.json is missing"),
    ],
    ids=["empty", "lora", "gguf", "cache", "none"],
)
def test_folder_without_a_config_is_named_for_what_it_is(tmp_path: Path, files: tuple[str, ...], advice: str):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert error_of(tmp_path).startswith(f"{tmp_path}: ")
    assert advice.format(folder=tmp_path) in error_of(tmp_path)


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        (("pytorch_model.bin",), "its weights are pytorch_model.bin: pickles are not read, because they may run code: save"),
        (("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"), "00001-of-00002.bin and others: pickles"),
        (("consolidated.00.pth",), "consolidated.00.pth: pickles are not read"),
        (("adapter_model.safetensors",), "its weights are adapter_model.safetensors: it is the LoRA adapter of another model"),
        (("model.gguf",), "its weights are model.gguf: GGUF files are not read"),
        (("consolidated.safetensors",), "Mistral's own programs name weights so"),
        (("model-00001-of-00002.safetensors",), "the index of these shards is missing"),
        (("weights.safetensors",), "call a single file model.safetensors"),
        ((), "neither model.safetensors nor model.safetensors.index.json is there"),
    ],
)
def test_folder_with_other_weights_is_named_for_what_it_is(tmp_path: Path, files: tuple[str, ...], advice: str):
    folder = make_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    for name in files:
        (folder / name).write_bytes(b"")
    assert advice in error_of(folder)


def test_link_to_weights_that_are_gone_is_named(tmp_path: Path):
    folder = make_folder(tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    load_hf(folder)
    (tmp_path / "blob").unlink()
    assert "model.safetensors is a link to a file that is not there" in error_of(folder)


def test_adapter_next_to_weights_is_refused(tmp_path: Path):
    """transformers would add it to another model, the one that its file names."""
    folder = make_folder(tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    assert "adapter_config.json is there, too: it is the LoRA adapter of another model" in error_of(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", INDEX, "model-00001", "tokenizer.json", "tokenizer_config.json"]
)
def test_pointer_of_git_lfs_is_named(tmp_path: Path, name: str):
    has_shards = name in (INDEX, "model-00001")
    folder = make_shards(tmp_path / "model")[0] if has_shards else make_folder(tmp_path / "model")
    path = next(folder.glob(f"{name}*")) if name == "model-00001" else folder / name
    path.write_bytes(POINTER)
    with pytest.raises(InputError) as caught:
        load(folder)
    assert f"{path.name} is a pointer of git-lfs, not the file itself: fetch that with `git lfs pull`" in str(caught.value)
    assert "damaged" not in str(caught.value)
