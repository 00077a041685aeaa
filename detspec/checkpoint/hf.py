"""Hugging Face folders as parameter pytrees, and back.

1. `config.json` names a family and, through it, a `ModelConfig`.
2. The headers of the safetensors files are held against the names and shapes that the config asks for.
3. Tensors are read one at a time, brought to the config's dtype and checked for NaN and infinity.

All that is wrong is gathered and raised as one `InputError`.
"""

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from detspec.checkpoint.families import SKIPPED_SUFFIXES, Family, describe, family_of, find_family, read_fields, tensor_paths
from detspec.checkpoint.files import (
    FILE_DTYPES,
    Header,
    Problems,
    copy_side_files,
    read_headers,
    read_json,
    read_tensor,
    write_json,
    write_tensors,
)
from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.model.params import Params, param_shapes

READERS = 2  # threads; reading and checking let each other run
PATIENCE_S = 2.0  # a progress bar appears when loading takes longer


def load_hf(path: str | Path) -> tuple[ModelConfig, Params]:
    """Reads the Hugging Face folder at `path`; weights come in the config's dtype (without one, in the files').

    Raises one `InputError` that names everything that is missing, damaged, unknown or unsupported.
    """
    path = Path(path)
    problems = Problems(path)
    family, fields = _read_family(path, problems)
    tensors = read_headers(path, problems)
    problems.raise_if_any()
    assert family is not None
    assert fields is not None
    cfg = build_config(fields, tensors, problems)
    problems.raise_if_any()
    assert cfg is not None
    wanted = tensor_paths(family, cfg)
    check_tensors(family, cfg, wanted, tensors, problems)
    problems.raise_if_any()
    params = read_params(path, family, cfg, wanted, tensors, problems)
    problems.raise_if_any()
    return cfg, params


def save_hf(
    path: str | Path,
    cfg: ModelConfig,
    params: Params,
    *,
    tokenizer_json: str | None = None,
    bos_id: int | None = None,
    eos_ids: Sequence[int] = (),
    max_shard_bytes: int | None = None,
    side_files_from: str | Path | None = None,
) -> None:
    """Writes a folder that `load_hf` and transformers read; an existing model folder is replaced when all of it is on disk.

    With `max_shard_bytes` the weights go to several files; tokenizer, chat template and generation config are taken along
    from the folder `side_files_from`. Raises `InputError` if `path` exists and is no model folder, or no family of
    Hugging Face has a model like `cfg`.
    """
    path = Path(path)
    family = family_of(cfg)
    if path.exists() and not (path / "config.json").is_file():
        raise InputError(f"{path} exists and holds no config.json; it is not overwritten")
    temporary = path.with_name(path.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)

    tokens: dict[str, Any] = {} if bos_id is None else {"bos_token_id": bos_id}
    if eos_ids:
        tokens["eos_token_id"] = list(eos_ids) if len(eos_ids) > 1 else eos_ids[0]
    write_json(temporary / "config.json", {**describe(family, cfg), **tokens})
    write_json(temporary / "generation_config.json", tokens)
    write_tensors(temporary, named_tensors(family, cfg, params), max_shard_bytes)
    if tokenizer_json is not None:
        (temporary / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
        write_json(temporary / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    if side_files_from is not None:
        copy_side_files(Path(side_files_from), temporary)

    if path.exists():
        old = path.with_name(path.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(path, old)
        os.replace(temporary, path)
        shutil.rmtree(old)
    else:
        os.replace(temporary, path)


def named_tensors(family: Family, cfg: ModelConfig, params: Params) -> dict[str, jax.Array]:
    """Every array of `params` under its Hugging Face name, in the order of the name table."""
    return {name: leaf_at(params, path) for name, path in tensor_paths(family, cfg).items()}


def leaf_at(tree: Any, path: Sequence[str | int]) -> Any:
    """`tree[path[0]][path[1]]...`"""
    for part in path:
        tree = tree[part]
    return tree


def read_hf_config(path: str | Path) -> ModelConfig:
    """The config of the Hugging Face folder at `path`, which needs no weights.

    Raises one `InputError` that names everything that is missing, damaged, unknown or unsupported, or that no dtype is named.
    """
    problems = Problems(Path(path))
    _, fields = _read_family(Path(path), problems)
    cfg = None if fields is None else build_config(fields, {}, problems)
    problems.raise_if_any()
    assert cfg is not None
    return cfg


def _read_family(path: Path, problems: Problems) -> tuple[Family | None, dict[str, Any] | None]:
    """The family and the fields of the config that `config.json` describes, None and a problem where it does not."""
    if not path.is_dir():
        problems.append("no such folder")
        problems.raise_if_any()
    hf_config = read_json(path / "config.json", problems)
    family = find_family(hf_config, problems) if hf_config is not None else None
    fields = read_fields(hf_config, family, problems) if hf_config is not None and family is not None else None
    return family, fields


def build_config(fields: dict[str, Any], tensors: dict[str, Header], problems: Problems) -> ModelConfig | None:
    """The `ModelConfig`, with the files' dtype where the config names none."""
    if fields["dtype"] is None:
        found = sorted({FILE_DTYPES[header.dtype] for header in tensors.values()})
        if len(found) != 1:
            problems.append(f"config.json names no dtype and its tensors have {' and '.join(found) or 'none either'}")
            return None
        fields = {**fields, "dtype": found[0]}
    try:
        return ModelConfig(**fields)
    except ValueError as error:
        problems.append(f"config.json: {error}")
        return None


def check_tensors(
    family: Family,
    cfg: ModelConfig,
    wanted: dict[str, tuple[str | int, ...]],
    tensors: dict[str, Header],
    problems: Problems,
) -> None:
    """Holds the headers against the tensors that the config asks for."""
    shapes = param_shapes(cfg)
    for name, path in wanted.items():
        shape = leaf_at(shapes, path).shape
        if name not in tensors:
            problems.append(f"tensor {name} {list(shape)} is missing")
        elif tensors[name].shape != shape:
            problems.append(f"tensor {name} has shape {list(tensors[name].shape)}, the config asks for {list(shape)}")
    for name, header in tensors.items():
        if name not in wanted and not name.endswith(SKIPPED_SUFFIXES) and name != tied_head(family, cfg):
            problems.append(
                f"{header.file}: tensor {name} {list(header.shape)} is not part of the model that the config describes"
            )


def tied_head(family: Family, cfg: ModelConfig) -> str | None:
    """Name of the head that some checkpoints store although it is the embedding again."""
    return next(name for name, path in family.names.items() if path == ("head",)) if cfg.tie_embeddings else None


def read_params(
    path: Path,
    family: Family,
    cfg: ModelConfig,
    wanted: dict[str, tuple[str | int, ...]],
    tensors: dict[str, Header],
    problems: Problems,
) -> Params:
    """Reads the tensors one by one; those with NaN or infinity, and a stored tied head unlike the embedding, are problems."""
    params = param_shapes(cfg)
    in_file_order = sorted(wanted, key=lambda name: (tensors[name].file, tensors[name].begin))

    def read(name: str) -> tuple[np.ndarray, bool]:
        with np.errstate(over="ignore"):  # what overflows is found to be infinite
            array = read_tensor(path, tensors[name]).astype(cfg.jax_dtype, copy=False)
        return array, all_finite(array)

    with ThreadPoolExecutor(max_workers=READERS) as pool:
        bar = tqdm(total=len(wanted), desc=f"loading {path.name}", unit=" tensors", delay=PATIENCE_S, leave=False)
        for name, (array, finite) in zip(in_file_order, pool.map(read, in_file_order), strict=True):
            if not finite:
                problems.append(f"tensor {name} holds NaN or infinite weights as {cfg.dtype}")
            *parents, last = wanted[name]
            leaf_at(params, parents)[last] = jax.device_put(array, may_alias=True)
            bar.update()
        bar.close()
    head = tied_head(family, cfg)
    if head in tensors and not np.array_equal(read(head)[0], np.asarray(params["embed"])):
        problems.append(f"tensor {head} differs from the embedding although tie_word_embeddings is true")
    return params


def all_finite(array: np.ndarray) -> bool:
    """Whether no number in `array` is nan or infinite; by bit pattern, ten times as fast as `np.isfinite` in bfloat16."""
    infinity = np.asarray(np.inf, array.dtype)
    unsigned = np.dtype(f"uint{8 * infinity.itemsize}")
    magnitudes = np.bitwise_and(array.view(unsigned), np.iinfo(unsigned).max >> 1)
    return bool(magnitudes.max(initial=0) < infinity.view(unsigned))
