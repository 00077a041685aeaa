"""Hugging Face folders as parameter pytrees, and back.

1. `config.json` names a family and, through it, a `ModelConfig`.
2. The headers of the safetensors files are held against the names and shapes that the config asks for. The tensors of a
   quantized matrix count as one.
3. Weights are read one at a time into their shards, in the config's dtype, and checked for NaN and infinity.

All that is wrong is gathered and raised as one `InputError`.
"""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from detspec.checkpoint.blocks import check_cuts
from detspec.checkpoint.families.family import Family, HfConfig, TensorNames
from detspec.checkpoint.files import FILE_DTYPES, Header, Problems, read_headers, read_json, write_tensors
from detspec.checkpoint.folder import (
    ADAPTER_NAME,
    MERGE,
    check_not_rounded,
    check_path,
    copy_side_files,
    find_side_files,
    new_folder,
    no_folder,
    write_json,
)
from detspec.checkpoint.hf_config import describe, family_of, find_family, read_fields
from detspec.checkpoint.quantization_config import read_quantization
from detspec.checkpoint.quantized import Format, Quantized, gather_quantized
from detspec.checkpoint.shards import Source, Tensor, holds, is_stored_as, read_arrays
from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.model.dense import dense_config
from detspec.model.params import Params, param_shapes

Tensors = dict[str, Header | Quantized]  # by the names of weights

# Buffers that the config decides: rotary frequencies and tables, of a layer or of the model (Gemma 3 has some for each kind of
# layers), and Gemma's scale of embeddings. Some programs store them, and they are not read.
CONSTANT = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb(_local)?\.(\w+_)?(inv_freq|cos_cached|sin_cached)|model\.embed_tokens\.embed_scale"
)
PATIENCE_S = 2.0  # a progress bar appears when loading takes longer


class TensorPath(NamedTuple):
    """The leaf of the parameters that a tensor of a checkpoint is, or is a part of."""

    path: tuple[str | int, ...]  # keys and indices from the root of the pytree
    part: int | None  # index on the first axis of a stacked weight; None if the tensor is the whole weight


def load_hf(path: str | Path, *, sharding: Any = None) -> tuple[ModelConfig, Params]:
    """Reads the Hugging Face folder at `path`; weights come in the config's dtype (without one, in the files').

    Quantized matrices (fp8, compressed-tensors, awq and gptq) are dequantized while they are read, a piece at a time.
    `sharding` says where each array goes: one `jax.sharding.Sharding` for all, or a pytree of them like the parameters; the
    default device if None. A process reads the shards of its own devices and nothing else, each straight to its device.

    Raises one `InputError` that names everything that is missing, damaged, unknown or unsupported.
    """
    path = Path(path)
    problems = Problems(path)
    family, hf_config, format = _read_family(path, problems)
    fields = read_fields(hf_config, family, problems) if family is not None else {}
    headers = read_headers(path, problems)
    problems.raise_if_any()
    assert family is not None
    cfg = build_config(family, hf_config, fields, headers, path)
    shapes = param_shapes(cfg, sharding=sharding)
    check_cuts(shapes)
    wanted = tensor_shapes(family.names, shapes)
    tensors: Tensors = dict(headers) if format is None else gather_quantized(format, wanted, headers, problems)
    check_tensors(family.names, shapes, tensors, problems)
    problems.raise_if_any()
    check_constants(path, tensors, problems)
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
    from the folder `side_files_from`, or the shipped model of that name. Raises `InputError` if `path` exists and is no model
    folder, `side_files_from` is no folder, the weights are rounded, or no family of Hugging Face has a model like `cfg`.
    """
    path = Path(path)
    check_not_rounded(path, cfg)
    family = family_of(cfg)
    source = find_side_files(side_files_from)
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
        if source is not None:
            copy_side_files(source, folder)


def fitting_family(cfg: ModelConfig) -> Family | None:
    """The family whose folders say all of `cfg` and have a name for each of its weights; None if there is no such family."""
    try:
        family = family_of(cfg)
        tensor_paths(family.names, param_shapes(cfg))
    except InputError:
        return None
    return family


def named_tensors(names: TensorNames, params: Params) -> dict[str, jax.Array | np.ndarray]:
    """Every array of `params` under its Hugging Face name, in the order of the name table; stacked weights are split."""
    tensors = {}
    for name, (path, part) in tensor_paths(names, params).items():
        leaf = leaf_at(params, path)
        tensors[name] = leaf if part is None else np.asarray(leaf)[part]
    return tensors


def read_hf_config(path: str | Path) -> ModelConfig:
    """The config of the Hugging Face folder at `path`, which needs no weights.

    Raises one `InputError` that names everything that is missing, damaged, unknown or unsupported, or that no dtype is named.
    """
    path = Path(path)
    problems = Problems(path)
    family, hf_config, _ = _read_family(path, problems)
    fields = read_fields(hf_config, family, problems) if family is not None else {}
    problems.raise_if_any()
    assert family is not None
    return build_config(family, hf_config, fields, {}, path)


def _read_family(path: Path, problems: Problems) -> tuple[Family | None, HfConfig, Format | None]:
    """The family, the keys of `config.json`, and the format of quantized matrices that they describe.

    Where it describes no family, or a format that is not supported, there is a problem.
    """
    check_path(path)
    if not path.is_dir():
        raise InputError(no_folder(path))
    hf_config = read_json(path / "config.json", problems)
    if hf_config is not None and (path / ADAPTER_NAME).exists():
        problems.append(f"{ADAPTER_NAME} is there, too: it {MERGE}, or remove it if the weights are merged already")
    family = find_family(hf_config, problems) if hf_config is not None else None
    if hf_config is None or family is None:
        return None, {}, None
    return family, hf_config, read_quantization(hf_config, problems)


def build_config(
    family: Family, hf_config: HfConfig, fields: dict[str, Any], tensors: dict[str, Header], path: Path
) -> ModelConfig:
    """The `ModelConfig` of a `family` and the `fields` of its dense model, with the files' dtype where the config names none.

    Raises `InputError` if there is no such model.
    """
    if fields["dtype"] is None:
        found = sorted({FILE_DTYPES[header.dtype] for header in tensors.values() if header.dtype in FILE_DTYPES})
        if len(found) != 1:
            dtypes = " and ".join(found) or "none either"
            raise InputError(f"{path}: config.json names no dtype and its tensors have {dtypes}")
        fields = {**fields, "dtype": found[0]}
    try:
        return family.layers(dense_config(**fields), hf_config)
    except ValueError as error:
        raise InputError(f"{path}: config.json: {error}") from error


def tensor_paths(names: TensorNames, params: Params) -> dict[str, TensorPath]:
    """Tensor name -> its path in `params`, layers in ascending order; `params` may hold shapes instead of arrays.

    Raises `InputError` if `names` lacks a weight of `params`.
    """
    paths: dict[str, TensorPath] = {}
    for layered, group in itertools.groupby(names.items(), key=lambda item: "{}" in item[1]):
        templates = list(group)
        for index in range(len(params["layers"])) if layered else (0,):
            for name, template in templates:
                path = tuple(index if key == "{}" else key for key in template)
                leaf = leaf_at(params, path)
                if leaf is None:
                    continue
                numbers = (index,) * layered
                if name.count("{}") == len(numbers):
                    paths[name.format(*numbers)] = TensorPath(path, None)
                else:
                    paths |= {name.format(*numbers, part): TensorPath(path, part) for part in range(leaf.shape[0])}
    named = {".".join(map(str, found.path)) for found in paths.values()}
    for path, _ in jax.tree.leaves_with_path(params):
        weight = jax.tree_util.keystr(path, simple=True, separator=".")
        if weight not in named:
            raise InputError(f"no tensor name for the weight {weight}: the table of names has {', '.join(names)}")
    return paths


def leaf_at(tree: Any, path: Sequence[str | int]) -> Any:
    """`tree[path[0]][path[1]]...`, or None if there is no such entry."""
    for key in path:
        if isinstance(tree, dict) and key not in tree:
            return None
        tree = tree[key]
    return tree


def tensor_shapes(names: TensorNames, shapes: Params) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that the weights `shapes` are made of."""
    paths = tensor_paths(names, shapes).items()
    return {name: leaf_at(shapes, path).shape[0 if part is None else 1 :] for name, (path, part) in paths}


def check_tensors(names: TensorNames, shapes: Params, tensors: Tensors, problems: Problems) -> None:
    """Compares the headers `tensors` with the weights that `shapes` asks for; each difference is a problem."""
    wanted = tensor_shapes(names, shapes)
    for name, shape in wanted.items():
        if name not in tensors:
            problems.append(f"tensor {name} {list(shape)} is missing")
            continue
        if tensors[name].shape != shape:
            problems.append(f"tensor {name} has shape {list(tensors[name].shape)}, the config asks for {list(shape)}")
        check_dtype(name, tensors[name], problems)
    head = tied_head(names, shapes)
    for name, header in tensors.items():
        if name == head:
            check_dtype(name, header, problems)
        elif name not in wanted and not CONSTANT.fullmatch(name):
            tensor = f"{header.file}: tensor {name} {list(header.shape)}"
            problems.append(f"{tensor} is not part of the model that the config describes")


def check_dtype(name: str, header: Header | Quantized, problems: Problems) -> None:
    """A weight that is stored as it is must have a dtype of weights."""
    if isinstance(header, Header) and header.dtype not in FILE_DTYPES:
        accepted = ", ".join(FILE_DTYPES)
        problems.append(f"{header.file}: {name} has the unsupported dtype {header.dtype}; accepted: {accepted}")


def check_constants(folder: Path, tensors: Tensors, problems: Problems) -> None:
    """Reads what must be the same in every quantized matrix of its shape, as GPTQ's `g_idx`; another value is a problem."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Quantized):
            for suffix, header in tensor.constants.items():
                expected = tensor.format.constants[suffix](tensor.shape)
                if not holds(folder, header, expected):
                    layer = name.removesuffix("weight")
                    problems.append(
                        f"tensor {layer}{suffix} {list(header.shape)} of dtype {header.dtype} must hold the {expected.size} "
                        f"numbers {expected[0]} to {expected[-1]} that belong to consecutive groups and the shape of the config"
                    )


def tied_head(names: TensorNames, shapes: Params) -> str | None:
    """The name of the head if it is the embedding; some checkpoints store it twice."""
    return None if "head" in shapes else next((name for name, path in names.items() if path == ("head",)), None)


def read_params(folder: Path, names: TensorNames, shapes: Params, tensors: Tensors, problems: Problems) -> Params:
    """Reads the weights one by one, each to its sharding in `shapes`.

    NaN, infinity, and a stored tied head that differs from the embedding are problems.
    """
    params = jax.tree.map(lambda leaf: leaf, shapes)
    paths = tensor_paths(names, shapes)
    parts_of: dict[tuple[str | int, ...], list[Tensor]] = {}  # path of a weight -> the tensors that it is made of
    for name in sorted(paths, key=lambda name: (tensors[name].file, tensors[name].begin)):
        parts_of.setdefault(paths[name].path, []).append(Tensor(name, tensors[name], paths[name].part))
    sources = [Source(parts, leaf_at(shapes, path)) for path, parts in parts_of.items()]
    with tqdm(total=len(paths), desc=f"loading {folder.name}", unit=" tensors", delay=PATIENCE_S, leave=False) as bar:
        for (path, parts), (array, infinite) in zip(parts_of.items(), read_arrays(folder, sources), strict=True):
            problems.extend(f"tensor {name} holds NaN or infinite weights as {array.dtype}" for name in infinite)
            *parents, last = path
            leaf_at(params, parents)[last] = array
            bar.update(len(parts))
    head = tied_head(names, shapes)
    stored_head = None if head is None else tensors.get(head)
    if isinstance(stored_head, Header) and not is_stored_as(folder, stored_head, params["embed"]):
        problems.append(f"tensor {head} differs from the embedding although tie_word_embeddings is true")
    return params
