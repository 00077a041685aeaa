"""`detspec convert`: model folders of Hugging Face to our own, and back."""

import argparse

KINDS = ("hf", "orbax")
SUMMARY = "convert a model folder"
DESCRIPTION = """Reads a model folder, Hugging Face's or our own (orbax weights and a manifest), and writes the other kind. No
weight changes a bit, unless --dtype asks for it. Files of the tokenizer, chat templates and the generation config are copied.
The folder appears only when all of it is on disk."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds its options."""
    add = parser.add_argument
    add("--model", metavar="DIR", required=True, help="the folder to read")
    add("--out", metavar="DIR", required=True, help="the folder to write")
    add("--to", choices=KINDS, type=kind_of, help="kind to write (default: the other one)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of the weights (default: as they are)")
    add("--max-shard-gb", type=float, default=5.0, metavar="GB", help="largest weights file of a Hugging Face folder")
    add("--fresh", action="store_true", help="delete a folder that is there already, once the new one is on disk")


def kind_of(name: str) -> str:
    """The kind called `name`; "native" is the name that "orbax" had."""
    return "orbax" if name == "native" else name


def run(args: argparse.Namespace) -> int:
    """Converts, and prints what was written."""
    from pathlib import Path

    from detspec.checkpoint.digest import digest_model
    from detspec.checkpoint.folder import find_folder
    from detspec.checkpoint.hf import save_hf
    from detspec.checkpoint.load import cast_params, load, say_loading
    from detspec.checkpoint.orbax_folder import is_orbax, save_orbax
    from detspec.errors import InputError
    from detspec.model.params import num_params, params_bytes

    if not args.max_shard_gb > 0:
        raise InputError(f"--max-shard-gb must be a positive number, got {args.max_shard_gb:g}")
    source = find_folder(args.model)
    out = Path(args.out)
    if not args.fresh and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"--out {out} is there already: name another folder, or let --fresh delete it")
    say_loading(source)
    model = load(source)
    cfg, params = cast_params(model.cfg, model.params, args.dtype or model.cfg.dtype)
    kind = args.to or ("hf" if is_orbax(source) else "orbax")
    if kind == "orbax":
        save_orbax(out, cfg, params, side_files_from=source).result()
    else:
        most = int(args.max_shard_gb * 1e9)
        max_shard_bytes = most if params_bytes(params) > most else None
        save_hf(out, cfg, params, eos_ids=model.eos_ids, max_shard_bytes=max_shard_bytes, side_files_from=source)
    print(f"{out}: {num_params(cfg) / 1e6:.1f} M parameters, {cfg.dtype}, digest {digest_model(cfg, params)}")
    return 0
