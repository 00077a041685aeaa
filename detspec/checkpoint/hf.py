"""Hugging Face folders as parameter pytrees, and back.

1. `config.json` names a family and, through it, a `ModelConfig`.
2. The headers of the safetensors files are held against the names and shapes that the config asks for.
3. Weights are read one at a time into their shards, in the config's dtype, and checked for NaN and infinity.

All that is wrong is gathered and raised as one `InputError`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from detspec.checkpoint.blocks import check_cuts
from detspec.checkpoint.families import Family
from detspec.checkpoint.files import (
    FILE_DTYPES,
    Header,
    Problems,
    check_not_rounded,
    copy_side_files,
    new_folder,
    read_headers,
    read_json,
    write_json,
    write_tensors,
)
from detspec.checkpoint.hf_config import describe, family_of, find_family, read_fields
from detspec.checkpoint.shards import Source, Tensor, is_stored_as, read_arrays
from detspec.checkpoint.tensor_names import SKIPPED_SUFFIXES, TensorNames, leaf_at, tensor_places
from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.model.params import Params, param_shapes

PATIENCE_S = 2.0  # a progress bar appears when loading takes longer


def load_hf(path: str | Path, *, sharding: Any = None) -> tuple[ModelConfig, Params]:
    """Reads the Hugging Face folder at `path`; weights come in the config's dtype (without one, in the files').

    `sharding` says where each array goes: one `jax.sharding.Sharding` for all, or a pytree of them like the parameters; the
    default device if None. A process reads the shards of its own devices and nothing else, each straight to its device.

    Raises one `InputError` that names everything that is missing, damaged, unknown or unsupported.
    """
    path = Path(path)
    problems = Problems(path)
    family, fields = _read_family(path, problems)
    tensors = read_headers(path, problems)
    problems.raise_if_any()
    assert family is not None
    cfg = build_config(fields, tensors, path)
    shapes = param_shapes(cfg, sharding=sharding)
    check_cuts(shapes)
    check_tensors(family.names, shapes, tensors, problems)
    problems.raise_if_any()
    params = read_params(path, family.names, shapes, tensors, problems)
    problems.raise_if_any()
    return cfg, params


def save_hf(
    path: str | Path,
    cfg: ModelConfig,
    params: Params,
    *,
    tokenizer_json: str | None = None,
    eos_ids: Sequence[int] = (),
    max_shard_bytes: int | None = None,
    side_files_from: str | Path | None = None,
) -> None:
    """Writes a folder that `load_hf` and transformers read; an existing model folder is replaced when all of it is on disk.

    With `max_shard_bytes` the weights go to several files; tokenizer, chat template and generation config are taken along
    from the folder `side_files_from`. Raises `InputError` if `path` exists and is no model folder, the weights are rounded, or
    no family of Hugging Face has a model like `cfg`.
    """
    path = Path(path)
    check_not_rounded(path, cfg)
    family = family_of(cfg)
    if path.exists() and not (path / "config.json").is_file():
        raise InputError(f"{path} exists and holds no config.json; it is not overwritten")
    tokens = {"eos_token_id": list(eos_ids) if len(eos_ids) > 1 else eos_ids[0]} if eos_ids else {}
    with new_folder(path) as folder:
        write_json(folder / "config.json", {**describe(family, cfg), **tokens})
        write_json(folder / "generation_config.json", tokens)
        write_tensors(folder, named_tensors(family.names, params), max_shard_bytes)
        if tokenizer_json is not None:
            (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
            write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
        if side_files_from is not None:
            copy_side_files(Path(side_files_from), folder)


def named_tensors(names: TensorNames, params: Params) -> dict[str, jax.Array | np.ndarray]:
    """Every array of `params` under its Hugging Face name, in the order of the name table; stacked weights are split."""
    tensors = {}
    for name, (path, part) in tensor_places(names, params).items():
        leaf = leaf_at(params, path)
        tensors[name] = leaf if part is None else np.asarray(leaf)[part]
    return tensors


def read_hf_config(path: str | Path) -> ModelConfig:
    """The config of the Hugging Face folder at `path`, which needs no weights.

    Raises one `InputError` that names everything that is missing, damaged, unknown or unsupported, or that no dtype is named.
    """
    path = Path(path)
    problems = Problems(path)
    _, fields = _read_family(path, problems)
    problems.raise_if_any()
    return build_config(fields, {}, path)


def _read_family(path: Path, problems: Problems) -> tuple[Family | None, dict[str, Any]]:
    """The family and the fields of the config that `config.json` describes; where it describes none, there is a problem."""
    if not path.is_dir():
        raise InputError(f"{path}: no such folder")
    hf_config = read_json(path / "config.json", problems)
    family = find_family(hf_config, problems) if hf_config is not None else None
    return family, {} if hf_config is None or family is None else read_fields(hf_config, family, problems)


def build_config(fields: dict[str, Any], tensors: dict[str, Header], path: Path) -> ModelConfig:
    """The `ModelConfig`, with the files' dtype where the config names none; raises `InputError` if there is no such model."""
    if fields["dtype"] is None:
        found = sorted({FILE_DTYPES[header.dtype] for header in tensors.values()})
        if len(found) != 1:
            dtypes = " and ".join(found) or "none either"
            raise InputError(f"{path}: config.json names no dtype and its tensors have {dtypes}")
        fields = {**fields, "dtype": found[0]}
    try:
        return ModelConfig(**fields)
    except ValueError as error:
        raise InputError(f"{path}: config.json: {error}") from error


def check_tensors(names: TensorNames, shapes: Params, tensors: dict[str, Header], problems: Problems) -> None:
    """Compares the headers `tensors` with the weights that `shapes` asks for; each difference is a problem."""
    places = tensor_places(names, shapes)
    for name, (path, part) in places.items():
        leaf = leaf_at(shapes, path)
        shape = leaf.shape if part is None else leaf.shape[1:]
        if name not in tensors:
            problems.append(f"tensor {name} {list(shape)} is missing")
        elif tensors[name].shape != shape:
            problems.append(f"tensor {name} has shape {list(tensors[name].shape)}, the config asks for {list(shape)}")
    for name, header in tensors.items():
        if name not in places and not name.endswith(SKIPPED_SUFFIXES) and name != tied_head(names, shapes):
            tensor = f"{header.file}: tensor {name} {list(header.shape)}"
            problems.append(f"{tensor} is not part of the model that the config describes")


def tied_head(names: TensorNames, shapes: Params) -> str | None:
    """The name of the head if it is the embedding; some checkpoints store it twice."""
    return None if "head" in shapes else next((name for name, path in names.items() if path == ("head",)), None)


def read_params(folder: Path, names: TensorNames, shapes: Params, tensors: dict[str, Header], problems: Problems) -> Params:
    """Reads the weights one by one, each to its sharding in `shapes`.

    NaN, infinity, and a stored tied head that differs from the embedding are problems.
    """
    params = jax.tree.map(lambda leaf: leaf, shapes)
    places = tensor_places(names, shapes)
    parts_of: dict[tuple[str | int, ...], list[Tensor]] = {}  # path of a weight -> the tensors that it is made of
    for name in sorted(places, key=lambda name: (tensors[name].file, tensors[name].begin)):
        parts_of.setdefault(places[name].path, []).append(Tensor(name, tensors[name], places[name].part))
    sources = [Source(parts, leaf_at(shapes, path)) for path, parts in parts_of.items()]
    with tqdm(total=len(places), desc=f"loading {folder.name}", unit=" tensors", delay=PATIENCE_S, leave=False) as bar:
        for (path, parts), (array, infinite) in zip(parts_of.items(), read_arrays(folder, sources), strict=True):
            problems.extend(f"tensor {name} holds NaN or infinite weights as {array.dtype}" for name in infinite)
            *parents, last = path
            leaf_at(params, parents)[last] = array
            bar.update(len(parts))
    head = tied_head(names, shapes)
    if head in tensors and not is_stored_as(folder, tensors[head], params["embed"]):
        problems.append(f"tensor {head} differs from the embedding although tie_word_embeddings is true")
    return params
