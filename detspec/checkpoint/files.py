"""The JSON and safetensors files of a model folder, read and written; problems are collected and reported together."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from detspec.checkpoint.folder import no_config, no_weights, write_json
from detspec.errors import InputError, shortened
from detspec.read_json import LFS_ADVICE, LFS_POINTER, parse_json, read_json_object

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
FILE_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # dtypes of weights that are stored as they are
# dtypes of tensors that hold quantized weights
QUANTIZED_DTYPES = {"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu"}
QUANTIZED_DTYPES |= {"I8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64"}
MAX_PROBLEMS = 6
MAX_PROBLEM = 300  # characters
COMPARED_BYTES = 1 << 20  # at a time
MAX_HEADER_BYTES = 16 << 20  # about 100,000 tensors in one file


@dataclasses.dataclass(frozen=True)
class Header:
    """File, shape, dtype and position of one tensor, known without reading it."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    begin: int  # byte of the file at which its numbers start
    size: int  # bytes of its numbers


class Problems(list[str]):
    """The problems of one folder, collected so that a user can mend all of them at once."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def raise_if_any(self) -> None:
        """Raises all of them as one `InputError` of one line."""
        if self:
            shown = [shortened(" ".join(problem.split()), MAX_PROBLEM) for problem in self[:MAX_PROBLEMS]]
            rest = [f"and {len(self) - MAX_PROBLEMS} more problems"] if len(self) > MAX_PROBLEMS else []
            raise InputError(f"{self.path}: {'; '.join(shown + rest)}")


def read_json(path: Path, problems: Problems) -> dict[str, Any] | None:
    """The JSON object in `path`, or None and a problem."""
    try:
        value = read_json_object(path, name=path.name)
    except InputError as error:
        problems.append(str(error))
        return None
    if value is None:
        problems.append(no_config(path.parent) if path.name == "config.json" else f"{path.name} is missing")
    return value


def read_headers(path: Path, problems: Problems) -> dict[str, Header]:
    """Headers of all tensors, from `model.safetensors` if there is one, else from the files that the index names.

    Where there are both, they must have the same tensors, which are compared to the last bit.
    """
    has_index = (path / INDEX_NAME).is_file()
    if not (path / WEIGHTS_NAME).is_file():
        if has_index:
            return read_indexed_headers(path, problems)
        problems.append(no_weights(path))
        return {}
    headers = read_file_headers(path, WEIGHTS_NAME, problems)
    if has_index and not problems:
        indexed = read_indexed_headers(path, problems)
        name = other_tensor(path, headers, indexed)
        if problems or name is not None:
            which = "whose files are not whole" if problems else f"and they differ in {name}"
            both = f"there are both {WEIGHTS_NAME} and {INDEX_NAME}, {which}"
            problems.insert(0, f"{both}: remove the one that is not of this model")
    return headers


def read_indexed_headers(path: Path, problems: Problems) -> dict[str, Header]:
    """Headers of all tensors in the files that the index names."""
    index = read_json(path / INDEX_NAME, problems)
    weight_map = (index or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        if index is not None:
            problems.append(f"{INDEX_NAME} has no weight_map of tensor names to file names")
        return {}
    listed: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        listed.setdefault(file, set()).add(name)
    headers: dict[str, Header] = {}
    for file, names in sorted(listed.items()):
        found = read_file_headers(path, file, problems)
        if found:
            problems.extend(
                f"{INDEX_NAME} places {name} in {file}, which has no such tensor" for name in sorted(names - set(found))
            )
        headers |= {name: header for name, header in found.items() if name in names or name not in weight_map}
    return headers


def read_file_headers(path: Path, file: str, problems: Problems) -> dict[str, Header]:
    """Headers of the tensors in one file of the folder; none and a problem if it is missing or damaged."""
    if Path(file).name != file or file in ("", "..") or "\0" in file:
        problems.append(f"{file!r} is not a file name in the folder")
        return {}
    try:
        if not (path / file).is_file():
            problems.append(f"{file} is missing")
            return {}
        if is_pointer(path / file):
            problems.append(f"{file} {LFS_ADVICE}")
            return {}
        length, entries = read_entries(path / file)
        with safe_open(path / file, "numpy"):  # checks that the file is whole
            return {
                name: Header(file, tuple(entry["shape"]), entry["dtype"], 8 + length + begin, end - begin)
                for name, entry in sorted(entries.items())
                if name != "__metadata__"
                for begin, end in [entry["data_offsets"]]
            }
    except (SafetensorError, OSError, InputError) as error:
        problems.append(f"{file} cannot be read, it is damaged or incomplete: {error}")
        return {}


def other_tensor(path: Path, ones: dict[str, Header], others: dict[str, Header]) -> str | None:
    """The name of a tensor that only one of both has, or that differs in shape, dtype or a bit; None if there is none."""
    for name in sorted(ones.keys() | others.keys()):
        one = ones.get(name)
        other = others.get(name)
        if one is None or other is None or (one.shape, one.dtype, one.size) != (other.shape, other.dtype, other.size):
            return name
        if one != other and not have_same_bytes(path, one, other):
            return name
    return None


def have_same_bytes(path: Path, one: Header, other: Header) -> bool:
    """Whether two tensors of the same size have the same bytes."""
    with (path / one.file).open("rb") as first, (path / other.file).open("rb") as second:
        first.seek(one.begin)
        second.seek(other.begin)
        for start in range(0, one.size, COMPARED_BYTES):
            count = min(COMPARED_BYTES, one.size - start)
            if first.read(count) != second.read(count):
                return False
    return True


def is_pointer(path: Path) -> bool:
    """Whether git-lfs has not fetched the file yet."""
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def read_entries(path: Path) -> tuple[int, dict[str, Any]]:
    """Bytes of the JSON that a safetensors file begins with, and the JSON; 8 bytes before it hold its length."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise InputError(f"its header has {length} bytes, accepted are up to {MAX_HEADER_BYTES >> 20} MiB")
        return length, parse_json(file.read(length))


def write_tensors(folder: Path, tensors: dict[str, jax.Array | np.ndarray], max_shard_bytes: int | None) -> None:
    """Writes `model.safetensors`, or shards of at most `max_shard_bytes` (one tensor at least) and their index."""
    shards = list(split_shards(tensors, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = WEIGHTS_NAME if max_shard_bytes is None else f"model-{number:05}-of-{len(shards):05}.safetensors"
        arrays = {name: np.ascontiguousarray(tensors[name]) for name in shard}
        save_file(arrays, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        weight_map |= dict.fromkeys(shard, file)
    if max_shard_bytes is not None:
        total = sum(tensor.nbytes for tensor in tensors.values())
        write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def split_shards(tensors: dict[str, jax.Array | np.ndarray], max_shard_bytes: int | None) -> Iterator[list[str]]:
    """Names in order, cut where a shard would outgrow `max_shard_bytes`."""
    shard: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if shard and max_shard_bytes is not None and size + tensor.nbytes > max_shard_bytes:
            yield shard
            shard = []
            size = 0
        shard.append(name)
        size += tensor.nbytes
    yield shard
