"""Our own model folders: weights by orbax, and a manifest that is written last.

    model/
      weights/           orbax; one process writes it, and any number of devices read their shards
      tokenizer.json ... copies of the original files
      manifest.json      config, digest of the weights, sizes of their files, versions; a folder without it is no model

A folder is written under a temporary name and renamed when all of it is on disk. So a folder under its own name is whole.
"""

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from detspec.checkpoint.blocks import check_cuts
from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.files import MAX_PROBLEMS
from detspec.checkpoint.folder import check_not_rounded, check_path, copy_side_files, find_side_files, new_folder, write_json
from detspec.config import ModelConfig
from detspec.environment import fingerprint
from detspec.errors import InputError
from detspec.model.dense import KINDS, config_from_json, config_to_json, own_kinds
from detspec.model.params import Params, param_shapes, params_bytes
from detspec.read_json import read_json_object

MANIFEST_NAME = "manifest.json"
WEIGHTS_FOLDER = "weights"
FORMAT = 1
MAX_COMPRESSION = 1000  # bytes of weights for each byte on disk


def save_orbax(
    path: str | Path, cfg: ModelConfig, params: Params, *, side_files_from: str | Path | None = None
) -> Future[Path]:
    """Writes `params` to the folder `path` in the background; an existing folder of ours is replaced when all is on disk.

    Arrays are immutable, so generation and training may go on. Tokenizer, chat templates and generation config are taken along
    from the folder `side_files_from`, or the shipped model of that name. Returns a future of the path; its `result()` waits,
    and raises what went wrong. The interpreter waits for it at its end.

    Raises `InputError` if `path` exists and is no folder of ours, `side_files_from` is no folder, devices of other processes
    hold some of the weights, they are rounded, or the manifest cannot say what a kind of layers is.
    """
    path = Path(path).resolve()
    check_not_rounded(path, cfg)
    check_written(cfg)
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(params)):
        raise InputError(
            f"{path}: devices of {jax.process_count()} processes hold the weights, but a folder of ours is written by one: "
            "load the weights in one process, or run `detspec convert` on the folder that they come from"
        )
    if path.exists() and not (path / MANIFEST_NAME).is_file():
        raise InputError(f"{path} exists and holds no {MANIFEST_NAME}; it is not overwritten")
    source = find_side_files(side_files_from)
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
    future = executor.submit(_write, path, cfg, params, source)
    executor.shutdown(wait=False)
    return future


def _write(path: Path, cfg: ModelConfig, params: Params, side_files_from: Path | None) -> Path:
    import orbax.checkpoint as ocp  # not with the package, because that takes long

    with new_folder(path) as folder:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / WEIGHTS_FOLDER, params)
        if side_files_from is not None:
            copy_side_files(side_files_from, folder)
        manifest = {
            "format": FORMAT,
            "config": config_to_json(cfg),
            "digest": digest_model(cfg, params),
            "files": _file_sizes(folder / WEIGHTS_FOLDER),
            "written_with": fingerprint(),
        }
        write_json(folder / MANIFEST_NAME, manifest)
    return path


def load_orbax(path: str | Path, *, sharding: Any = None, kinds: Sequence[type[Any]] = ()) -> tuple[ModelConfig, Params, str]:
    """Reads the folder at `path`: config, weights and their digest, which is checked.

    `kinds` are classes of layers that the manifest may name besides this package's.

    `sharding` says where each array goes, straight from disk: one `jax.sharding.Sharding` for all, or a pytree of them like the
    parameters; the first device if None.

    Raises `InputError` for no manifest, a damaged one or one of a later format, for weights that are missing, damaged, or not
    those of the manifest, and for a sharding that does not cut them into equal blocks.
    """
    import orbax.checkpoint as ocp  # not with the package, because that takes long

    check_path(Path(path))
    path = Path(path).resolve()
    manifest, cfg = _read_manifest(path, kinds)
    stored_bytes = _check_files(path / WEIGHTS_FOLDER, manifest.get("files"))
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = param_shapes(cfg, sharding=sharding)
    check_cuts(target)
    if params_bytes(target) > MAX_COMPRESSION * stored_bytes:
        raise InputError(f"{path}: the config asks for {params_bytes(target)} bytes of weights, on disk are {stored_bytes}")
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            _check_shapes(target, checkpointer.metadata(path / WEIGHTS_FOLDER).item_metadata.tree)
            params = checkpointer.restore(path / WEIGHTS_FOLDER, target)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except Exception as error:  # orbax, tensorstore and the file system raise errors of many kinds
        raise InputError(f"{path / WEIGHTS_FOLDER} cannot be read, it is damaged or incomplete: {error}") from error
    digest = digest_model(cfg, params, stored=manifest["config"])
    if digest != manifest.get("digest"):
        raise InputError(f"{path}: the weights have digest {digest}, {MANIFEST_NAME} says {manifest.get('digest')}")
    return cfg, params, digest


def read_orbax_config(path: str | Path, *, kinds: Sequence[type[Any]] = ()) -> ModelConfig:
    """The config of the folder at `path`; `kinds` and errors for an unsound manifest as in `load_orbax`."""
    check_path(Path(path))
    return _read_manifest(Path(path).resolve(), kinds)[1]


def check_written(cfg: ModelConfig) -> None:
    """Raises `InputError` unless a manifest and the classes of its own kinds of layers would give `cfg` again."""
    own = own_kinds(cfg)
    try:
        if not own or config_from_json(json.loads(json.dumps(config_to_json(cfg))), kinds=own) == cfg:
            return
        why = "they would not come back as they are"
    except (TypeError, ValueError) as error:
        why = str(error)
    names = ", ".join(kind.__name__ for kind in own)
    raise InputError(
        f"no folder can hold layers of kind {names}: {why}; give each kind a name other than {' and '.join(KINDS)}, and fields "
        "that are numbers, texts, booleans or None"
    )


def is_orbax(path: Path) -> bool:
    """Whether `path` is a whole folder of ours; `InputError` if the file system takes no such path."""
    check_path(path)
    return (path / MANIFEST_NAME).is_file()


def _file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file under `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _check_files(folder: Path, expected: Any) -> int:
    """Bytes of all files. Raises `InputError` that names those that are missing or cut short, which orbax does not."""
    found = _file_sizes(folder)
    if not isinstance(expected, dict):
        raise InputError(f"{folder.parent / MANIFEST_NAME} names no files")
    wrong = [f"{name} has {found.get(name, 0)} of {size} bytes" for name, size in expected.items() if found.get(name) != size]
    if wrong:
        more = [f"and {len(wrong) - MAX_PROBLEMS} more files"] if len(wrong) > MAX_PROBLEMS else []
        raise InputError(f"{folder} is damaged or incomplete: {'; '.join([*wrong[:MAX_PROBLEMS], *more])}")
    return sum(found.values())


def _check_shapes(asked: Params, stored: Any) -> None:
    """Raises `InputError` if the config asks for other weights than are stored; nothing of their size is allocated before."""
    wanted, found = (
        {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (asked, stored)
    )
    for name in sorted(wanted.keys() | found.keys()):
        has, needs = (f"shape {of[name]}" if name in of else "no such weight" for of in (found, wanted))
        if has != needs:
            raise InputError(f"weight {name}: the folder has {has}, the config asks for {needs}")


def _read_manifest(path: Path, kinds: Sequence[type[Any]]) -> tuple[dict[str, Any], ModelConfig]:
    """The manifest of the folder at `path`, and the config in it."""
    manifest = read_json_object(path / MANIFEST_NAME)
    if manifest is None:
        raise InputError(f"{path} has no {MANIFEST_NAME}: it is no model folder, or was not written to its end")
    if manifest.get("format") != FORMAT:
        raise InputError(f"{path / MANIFEST_NAME}: format {manifest.get('format')!r} is not supported, only {FORMAT}")
    if not isinstance(config := manifest.get("config"), dict):
        raise InputError(f"{path / MANIFEST_NAME}: config must be a JSON object, got {config!r}")
    try:
        return manifest, config_from_json(config, kinds=kinds)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path / MANIFEST_NAME}: config is none of this version: {error}") from error
