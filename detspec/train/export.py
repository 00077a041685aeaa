"""The folder of a trained model: what it will be is said before the first step, and it is written after the last one."""

from pathlib import Path

import tokenizers

from detspec.checkpoint.folder import GENERATION_CONFIG, write_json
from detspec.checkpoint.hf import fitting_family, save_hf
from detspec.checkpoint.load import cast_params
from detspec.checkpoint.orbax_folder import check_written, save_orbax
from detspec.config import ModelConfig
from detspec.model.dense import own_kinds
from detspec.model.params import Params

EXPORT = "export"  # name of the folder in the work folder


def describe_export(workdir: Path, cfg: ModelConfig) -> str:
    """Says what `export` will write of a model like `cfg`; raises `InputError` if no folder can hold one."""
    family = fitting_family(cfg)
    if family is None:
        return f"{describe_own(workdir, cfg)}, because no family of Hugging Face has such a model"
    return f"the model will be exported to {workdir / EXPORT}: a Hugging Face folder ({family.model_type}), in bfloat16"


def describe_own(workdir: Path, cfg: ModelConfig) -> str:
    """Says what `export_own` will write of a model like `cfg`; raises `InputError` if no folder can hold one."""
    check_written(cfg)
    folder = workdir / EXPORT
    classes = "".join(f"{kind.__name__}, " for kind in own_kinds(cfg)).strip()
    call = f"detspec.load({str(folder)!r}{f', kinds=({classes})' if classes else ''})"
    return f"the model will be exported to {folder}: a folder of detspec's own, for {call}"


def export(workdir: Path, cfg: ModelConfig, params: Params, tokenizer: tokenizers.Tokenizer, end_id: int) -> None:
    """Writes the model in bfloat16 with its tokenizer to `workdir/export`: a Hugging Face folder, or our own if none fits."""
    cfg, params = cast_params(cfg, params, "bfloat16")
    if fitting_family(cfg) is None:
        export_own(workdir, cfg, params, tokenizer, end_id)
    else:
        save_hf(workdir / EXPORT, cfg, params, tokenizer_json=tokenizer.to_str(pretty=True), eos_ids=(end_id,))


def export_own(workdir: Path, cfg: ModelConfig, params: Params, tokenizer: tokenizers.Tokenizer, end_id: int) -> None:
    """Writes the model with its tokenizer as a folder of our own, `workdir/export`."""
    side_files = workdir / "tokenizer"
    side_files.mkdir(exist_ok=True)
    tokenizer.save(str(side_files / "tokenizer.json"), pretty=True)
    write_json(side_files / GENERATION_CONFIG, {"eos_token_id": end_id})
    save_orbax(workdir / EXPORT, cfg, params, side_files_from=side_files).result()


def export_like(workdir: Path, cfg: ModelConfig, params: Params, source: Path) -> None:
    """Writes the model in its own dtype to `workdir/export`, with the tokenizer and whatever else is next to it in `source`."""
    if fitting_family(cfg) is None:
        save_orbax(workdir / EXPORT, cfg, params, side_files_from=source).result()
    else:
        save_hf(workdir / EXPORT, cfg, params, side_files_from=source)
