"""Model folders of every kind: what a path holds that is none, files next to the weights, and how one is written whole."""

import contextlib
import importlib.resources
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from detspec.config import MAX_COUNT, ModelConfig, is_number
from detspec.errors import InputError, shortened
from detspec.read_json import read_json_object

# What comes with the package: a small model of Python source code, and one that thinks about coin flips.
SHIPPED_MODELS = ("tiny_python", "thinking_parity")
ADAPTER_NAME = "adapter_config.json"
HUB_NAME = re.compile(r"(?:https?:/+huggingface\.co/)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/?")
MERGE = (
    "is the LoRA adapter of another model: merge it (peft: AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload()"
    ".save_pretrained(DIR)) and give DIR"
)
GGUF = "GGUF files are not read: give the folder with safetensors that they were made from"
RESAVE = "save the model as safetensors (transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(DIR))"
# What weights are stored as elsewhere: pattern of the files -> what to do.
OTHER_WEIGHTS = {
    "adapter_model.*": f"it {MERGE}",
    "model-*-of-*.safetensors": "the index of these shards is missing: fetch model.safetensors.index.json, too",
    "consolidated*.safetensors": "Mistral's own programs name weights so: fetch the files named model*.safetensors, too",
    "*.bin": f"pickles are not read, because they may run code: {RESAVE}",
    "*.pt": f"pickles are not read, because they may run code: {RESAVE}",
    "*.pth": f"pickles are not read, because they may run code: {RESAVE}",
    "*.gguf": GGUF,
    "*.safetensors": "these names are not read: call a single file model.safetensors",
}
# Files of tokenizers that tokenizer.json is made from; the last needs the file next to it, too.
OTHER_TOKENIZERS = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt")
GENERATION_CONFIG = "generation_config.json"
TEMPLATE_FOLDER = "additional_chat_templates"
# Files next to the weights that are the same in folders of every kind.
SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    *OTHER_TOKENIZERS,  # other programs read them
    "merges.txt",
    "chat_template.jinja",
    GENERATION_CONFIG,
)
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p")
MAX_PATH = 200  # characters that errors show


def check_path(path: Path) -> None:
    """Raises `InputError` if the file system takes no such path; one where there is nothing passes."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{shortened(ascii(str(path)), MAX_PATH)} is no path of a folder that can be read: {why}") from error


def no_folder(path: Path) -> str:
    """Why `path`, which is no folder, is none of a model."""
    if path.is_file():
        if path.suffix == ".gguf":
            return f"{path} is a file; {GGUF}"
        return f"{path} is a file: give the folder that it lies in"
    name = HUB_NAME.fullmatch(path.as_posix())
    if name is None or Path(name[1]).parent.is_dir():
        return f"{path}: no such folder"
    return (
        f"{path}: no such folder; if this is a model's name on the Hugging Face hub: nothing is downloaded here, so fetch it "
        f"(hf download {name[1]} --local-dir DIR) and give DIR"
    )


def no_config(path: Path) -> str:
    """Why there is no `config.json` in the folder `path`."""
    if not any(path.iterdir()):
        return "the folder is empty"
    if (path / ADAPTER_NAME).exists():
        return f"it {MERGE}"
    if any(path.glob("*.gguf")):
        return f"config.json is missing; {GGUF}"
    deeper = sorted([*path.glob("*/config.json"), *path.glob("snapshots/*/config.json")])
    if deeper:
        return f"config.json is missing; there is one in {deeper[-1].parent}: give that folder"
    return "config.json is missing"


def no_weights(path: Path) -> str:
    """Why the folder `path` has neither `model.safetensors` nor an index."""
    if (path / "model.safetensors").is_symlink():
        return "model.safetensors is a link to a file that is not there: fetch the model again"
    for pattern, advice in OTHER_WEIGHTS.items():
        if found := sorted(path.glob(pattern)):
            return f"its weights are {found[0].name}{' and others' * (len(found) > 1)}: {advice}"
    return "neither model.safetensors nor model.safetensors.index.json is there"


def no_tokenizer(path: Path) -> str:
    """Why texts cannot be read with the folder `path`, which has no `tokenizer.json`."""
    lacks = "the checkpoint has no tokenizer.json"
    found = next((name for name in OTHER_TOKENIZERS if (path / name).is_file()), None)
    if found is None:
        return lacks
    return f"{lacks}, and {found} is not read (transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) makes one)"


def read_eos_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a text, from `generation_config.json`, else from `config.json`; empty if neither names any."""
    for name in (GENERATION_CONFIG, "config.json"):
        config = read_json_object(folder / name) or {}
        text = config.get("text_config")  # of a model with parts for images
        value = config.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token <= MAX_COUNT for token in ids):
                raise InputError(f"{folder / name}: eos_token_id must be a token id or a list of them, got {value!r}")
            return tuple(ids)
    return ()


def read_sampling_defaults(folder: Path) -> dict[str, float]:
    """Temperature, top_k, top_p and min_p of `generation_config.json`; none if it does not sample, which is greedy.

    Where it samples and names no temperature, that is 1. Keys that `SamplingParams` does not have are left out.
    """
    config = read_json_object(folder / GENERATION_CONFIG) or {}
    if not config.get("do_sample"):
        return {}
    found = {key: config[key] for key in SAMPLING_KEYS if config.get(key) is not None}
    wrong = {key: value for key, value in found.items() if not is_number(value)}
    if wrong:
        raise InputError(f"{folder / GENERATION_CONFIG}: {json.dumps(wrong)} must be finite numbers")
    return {"temperature": 1.0, **found}


def find_folder(path: str | Path | None) -> Path:
    """`path`, or where the shipped model of that name lies in the installed package; that of the first if None."""
    path = SHIPPED_MODELS[0] if path is None else path
    if not is_shipped(path):
        return Path(path)
    return Path(str(importlib.resources.files("detspec") / "assets" / str(path)))


def is_shipped(path: str | Path) -> bool:
    """Whether `path` names a model that comes with the package: there is no such folder."""
    return str(path) in SHIPPED_MODELS and not Path(path).exists()


def find_side_files(path: str | Path | None) -> Path | None:
    """The folder that files next to weights are taken from, if any is; `InputError` if there is none."""
    folder = None if path is None else find_folder(path)
    if folder is not None and not folder.is_dir():
        raise InputError(f"side_files_from={str(path)!r} is no folder: name the model folder that has the tokenizer")
    return folder


def copy_side_files(source: Path, target: Path) -> None:
    """Copies tokenizer, chat templates and generation config, as far as there are any, and which tokens end a text."""
    for name in SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    for path in sorted((source / TEMPLATE_FOLDER).glob("*.jinja")):
        (target / TEMPLATE_FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(path, target / TEMPLATE_FOLDER / path.name)
    eos_ids = read_eos_ids(source)
    if eos_ids and not read_eos_ids(target):  # they were in `config.json`, which folders of another kind have not
        generation = read_json_object(target / GENERATION_CONFIG) or {}
        write_json(target / GENERATION_CONFIG, {**generation, "eos_token_id": list(eos_ids)})


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of `path` when the block ends; an old one there is deleted then."""
    temporary = path.with_name(f".{path.name}.writing")
    old = path.with_name(f".{path.name}.replaced")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.replace(path, old)
    os.replace(temporary, path)
    shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def check_not_rounded(path: Path, cfg: ModelConfig) -> None:
    """Raises `InputError` if weights of `cfg` are rounded, which folders do not hold."""
    if cfg.weights is not None:
        raise InputError(
            f"{path}: folders hold weights in float dtypes, and those of this model are in {cfg.weights}: save the model that "
            f'they were rounded from, and load it with weights="{cfg.weights}"'
        )
