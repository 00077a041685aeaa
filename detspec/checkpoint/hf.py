"""Hugging Face folders as parameter pytrees, and back.

1. `config.json` names a family and, through it, a `ModelConfig`.
2. The headers of the safetensors files are held against the names and shapes that the config asks for. The tensors of a
   quantized matrix count as one.
3. Weights are read one at a time into their shards, in the config's dtype, and checked for NaN and infinity.

All that is wrong is gathered and raised as one `InputError`.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
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
from detspec.checkpoint.hf_config import describe, family_of, read_fields
from detspec.checkpoint.layout import Layout
from detspec.checkpoint.quantization_config import read_quantization
from detspec.checkpoint.quantized import Format, Quantized, gather_quantized
from detspec.checkpoint.shards import Source, Tensor, holds, is_stored_as, read_arrays
from detspec.checkpoint.tensors import Stored, WeightPath, leaf_at, named_tensors, stored_tensors, tied_head
from detspec.checkpoint.which_family import find_family, find_wrapper
from detspec.config import MAX_LAYERS, ModelConfig, is_count
from detspec.errors import InputError
from detspec.model.dense import dense_config
from detspec.model.params import Params, param_shapes, params_bytes
from detspec.say import say

Tensors = dict[str, Header | Quantized]  # by the names of weights

PATIENCE_S = 2.0  # a progress bar appears when loading takes longer
QUICK_BYTES = 1 << 28  # fewer are read before that, and making a bar takes 50 ms: it imports multiprocessing for a lock


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
    beyond = layers_beyond(family, hf_config, fields["num_layers"])
    left_out = {name: header for name, header in headers.items() if family.is_of_tower(name) or name.startswith(beyond)}
    headers = {name: header for name, header in headers.items() if name not in left_out}
    cfg = build_config(fields, headers, path)
    shapes = param_shapes(cfg, sharding=sharding)
    check_cuts(shapes)
    names, wanted = fitting_names(family, cfg, shapes, headers)
    head = tied_head(names, shapes)
    tensors: Tensors = dict(headers)
    if format is not None:
        tensors = gather_quantized(format, {name: stored.shape_of_rows for name, stored in wanted.items()}, headers, problems)
    check_tensors(wanted, tensors, problems, head=head, is_buffer=family.is_buffer)
    problems.raise_if_any()
    say_left_out(path, left_out)
    check_constants(path, tensors, problems)
    problems.raise_if_any()
    params = read_params(path, wanted, shapes, tensors, problems)
    check_tied_head(path, head, tensors, params, problems)
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
        write_tensors(folder, named_tensors(family.tensor_names(cfg), params), max_shard_bytes)
        if tokenizer_json is not None:
            (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
            write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
        if source is not None:
            copy_side_files(source, folder)


def fitting_family(cfg: ModelConfig) -> Family | None:
    """The family whose folders say all of `cfg` and have a name for each of its weights; None if there is no such family."""
    try:
        family = family_of(cfg)
        stored_tensors(family.tensor_names(cfg), param_shapes(cfg))
    except InputError:
        return None
    return family


def read_hf_config(path: str | Path) -> ModelConfig:
    """The config of the Hugging Face folder at `path`, which needs no weights, unless they alone say the dtype.

    Raises one `InputError` that names everything that is missing, damaged, unknown or unsupported, or that no dtype is named.
    """
    path = Path(path)
    problems = Problems(path)
    family, hf_config, _ = _read_family(path, problems)
    fields = read_fields(hf_config, family, problems) if family is not None else {}
    problems.raise_if_any()
    assert family is not None
    headers = read_headers(path, Problems(path)) if fields["dtype"] is None else {}
    return build_config(fields, headers, path)


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
    if hf_config is None:
        return None, {}, None
    wrapper = find_wrapper(hf_config)
    if wrapper is not None:
        hf_config = wrapper.text_part(hf_config, problems)
    family = find_family(hf_config, problems) if hf_config else None
    if family is None:
        return None, {}, None
    return family if wrapper is None else wrapper.around(family), hf_config, read_quantization(hf_config, problems)


def build_config(fields: dict[str, Any], tensors: dict[str, Header], path: Path) -> ModelConfig:
    """The `ModelConfig` of the `fields` that a config gives, with the files' dtype where it names none.

    Raises `InputError` if there is no such model.
    """
    if fields["dtype"] is None:
        found = sorted({FILE_DTYPES[header.dtype] for header in tensors.values() if header.dtype in FILE_DTYPES})
        if len(found) != 1:
            dtypes = " and ".join(found) or "none either"
            raise InputError(f"{path}: config.json names no dtype and its tensors have {dtypes}")
        fields = {**fields, "dtype": found[0]}
    try:
        return dense_config(**fields)
    except ValueError as error:
        raise InputError(f"{path}: config.json: {error}") from error


def fitting_names(
    family: Family, cfg: ModelConfig, shapes: Params, tensors: dict[str, Header]
) -> tuple[TensorNames, dict[str, Stored]]:
    """The table of names of the family that most tensors of the folder are in, and the tensors that it asks for."""
    names = family.tensor_names(cfg)
    tables = [(table, stored_tensors(table, shapes)) for table in (names, *(variant(names) for variant in family.variants))]
    return max(tables, key=lambda table: sum(name in tensors for name in table[1]))


def check_tensors(
    wanted: dict[str, Stored],
    tensors: Tensors,
    problems: Problems,
    *,
    head: str | None = None,
    is_buffer: Callable[[str], bool] = lambda name: False,
) -> None:
    """Compares the headers `tensors` with the `wanted` ones; each difference is a problem.

    A tied `head` may be there, too, and buffers.
    """
    for name, stored in wanted.items():
        if name not in tensors:
            problems.append(f"tensor {name} {list(stored.shape)} is missing")
            continue
        if isinstance(tensors[name], Header) and tensors[name].shape != stored.shape:
            problems.append(f"tensor {name} has shape {list(tensors[name].shape)}, the config asks for {list(stored.shape)}")
        check_dtype(name, tensors[name], problems)
    for name, header in tensors.items():
        if name == head:
            check_dtype(name, header, problems)
        elif name not in wanted and not is_buffer(name):
            tensor = f"{header.file}: tensor {name} {list(header.shape)}"
            problems.append(f"{tensor} is not part of the model that the config describes")


def layers_beyond(family: Family, hf_config: HfConfig, num_layers: Any) -> tuple[str, ...]:
    """How names of tensors begin that belong to layers after the last one, which predict further tokens."""
    count: Any = hf_config.get(family.predicted or "")
    if not (is_count(count) and is_count(num_layers)):
        return ()
    return tuple(f"model.layers.{num_layers + i}." for i in range(min(count, MAX_LAYERS)))


def say_left_out(folder: Path, tensors: dict[str, Header]) -> None:
    """Says which parts of the folder are no text, or predict further tokens, and how large they are, if there are any."""
    if tensors:
        parts = (name.removeprefix("model.").split(".") for name in tensors)
        towers = sorted({" ".join(part[:2]) if part[0] == "layers" else part[0] for part in parts})
        size = sum(header.size for header in tensors.values()) / 1e9
        say(f"{folder}: the text part is read, {' and '.join(towers)} are left out ({len(tensors)} tensors, {size:.2f} GB)")


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
                expected = tensor.format.constants[suffix](tensor.matrix)
                if not holds(folder, header, expected):
                    layer = name.removesuffix("weight")
                    problems.append(
                        f"tensor {layer}{suffix} {list(header.shape)} of dtype {header.dtype} must hold the {expected.size} "
                        f"numbers {expected[0]} to {expected[-1]} that belong to consecutive groups and the shape of the config"
                    )


def read_params(folder: Path, wanted: dict[str, Stored], shapes: Params, tensors: Tensors, problems: Problems) -> Params:
    """Reads the weights one by one, each to its sharding in `shapes`; NaN and infinity are problems."""
    params = jax.tree.map(lambda leaf: leaf, shapes)
    made_of: dict[tuple[WeightPath, ...], list[Tensor]] = {}  # paths of weights that are read together -> their tensors
    # Paths of weights in the same tensors -> those that are read together and where they lie, the same in all tensors.
    alike: dict[tuple[WeightPath, ...], Any] = {}
    for name in sorted(wanted, key=lambda name: (tensors[name].file, tensors[name].begin)):
        layout, paths, part, lengths = wanted[name]
        if paths not in alike:
            cuts = layout.cuts(lengths)
            chosen = together(layout, [leaf_at(shapes, path) for path in paths])
            alike[paths] = [(tuple(paths[i] for i in each), tuple(cuts[i] for i in each)) for each in chosen]
        for weights, places in alike[paths]:
            made_of.setdefault(weights, []).append(Tensor(name, tensors[name], part, layout, places))
    sources = [Source(made, tuple(leaf_at(shapes, path) for path in paths)) for paths, made in made_of.items()]
    read: Iterable[Any] = zip(made_of, read_arrays(folder, sources), strict=True)
    if params_bytes(shapes) >= QUICK_BYTES:
        desc = f"loading {folder.name}"
        read = tqdm(read, desc, total=len(sources), unit=" weights", delay=PATIENCE_S, leave=False)
    for paths, (arrays, infinite) in read:
        problems.extend(f"tensor {name} holds NaN or infinite weights as {arrays[0].dtype}" for name in infinite)
        for (*parents, last), array in zip(paths, arrays, strict=True):
            leaf_at(params, parents)[last] = array
    return params


def together(layout: Layout, likes: Sequence[jax.ShapeDtypeStruct]) -> list[list[int]]:
    """Which weights of a tensor are read in one go: those that lie in turns, if their shards are alike."""
    is_one = layout.turn is not None and all(like == likes[0] for like in likes)
    return [[*range(len(likes))]] if is_one else [[i] for i in range(len(likes))]


def check_tied_head(folder: Path, head: str | None, tensors: Tensors, params: Params, problems: Problems) -> None:
    """A stored tied head that differs from the embedding is a problem."""
    header = None if head is None else tensors.get(head)
    if isinstance(header, Header) and not is_stored_as(folder, header, params["embed"]):
        problems.append(f"tensor {head} differs from the embedding although tie_word_embeddings is true")
