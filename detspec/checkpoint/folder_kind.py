"""Names what a path holds that is no folder of a model as they are read here, and says what to do about it."""

import re
from pathlib import Path

from detspec.errors import InputError, shortened

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
