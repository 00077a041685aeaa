"""Our own folders: every bit comes back, to any sharding; a folder that is not whole or not ours is one clear error."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.hf import save_hf
from detspec.checkpoint.load import load
from detspec.checkpoint.orbax_folder import MANIFEST_NAME, load_orbax, save_orbax
from detspec.cli import main
from detspec.errors import InputError
from detspec.model.params import init_params
from tests.fakes import FAMILY_CFGS, RANDOM_CFG, random_model

CFG = FAMILY_CFGS["gemma3"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_orbax(tmp_path / "model", CFG, random_model(CFG)).result()


def edit_manifest(folder: Path, **changes) -> None:
    path = folder / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def load_error(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        load(folder)
    return str(caught.value)


def test_every_bit_and_the_config_come_back(folder):
    cfg, params, digest = load_orbax(folder)
    assert cfg == CFG
    assert jax.tree.structure(params) == jax.tree.structure(random_model(CFG))
    assert digest == digest_model(CFG, random_model(CFG)) == digest_model(cfg, params)
    assert digest != digest_model(CFG, init_params(CFG, jax.random.key(9)))


def test_manifest_names_config_digest_and_versions(folder):
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    assert manifest["digest"] == digest_model(CFG, random_model(CFG))
    assert manifest["config"]["sliding_layers"] == [True, False]
    assert {"jax", "jaxlib", "device_kind", "compiler"} <= manifest["written_with"].keys()


def test_restore_goes_straight_to_the_sharding_that_is_asked_for(folder):
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
    model = load(folder, sharding=sharding)
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(model.params))
    assert model.digest == load(folder).digest


LOAD_TO_FOUR = """
import sys, jax
import detspec as ds
mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
with jax.transfer_guard_device_to_device("disallow_explicit"):
    model = ds.load(sys.argv[1], sharding=rows)
try:
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        jax.device_put(jax.device_put(jax.numpy.ones(4), jax.devices()[0]), rows)
    raise SystemExit("the guard lets arrays move between devices")
except RuntimeError:
    pass
shards = model.params["embed"].addressable_shards
assert len(shards) == 4, shards
assert all(shard.data.shape[0] * 4 == model.cfg.vocab_size for shard in shards)
print(model.digest)
"""


@pytest.mark.parametrize("kind", ["orbax", "hf"])
def test_load_to_four_devices_cuts_every_array_on_its_way_from_the_host(tmp_path, kind):
    """212 rows of the embedding, 53 to a device; and the digest is that of one device."""
    cfg = dataclasses.replace(CFG, vocab_size=212)
    folder = tmp_path / "model"
    if kind == "orbax":
        save_orbax(folder, cfg, random_model(cfg)).result()
    else:
        save_hf(folder, cfg, random_model(cfg))
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    command = [sys.executable, "-c", LOAD_TO_FOUR, str(folder)]
    found = subprocess.run(command, env={**os.environ, "XLA_FLAGS": flags}, check=True, capture_output=True, text=True)
    assert found.stdout.split() == [digest_model(cfg, random_model(cfg))]


def test_folder_of_ours_is_replaced_and_nothing_else_is(folder, tmp_path):
    other = init_params(CFG, jax.random.key(9))
    save_orbax(folder, CFG, other).result()
    assert load(folder).digest == digest_model(CFG, other)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / "thesis").mkdir()
    with pytest.raises(InputError, match="not overwritten"):
        save_orbax(tmp_path / "thesis", CFG, other)


def test_write_that_breaks_off_leaves_the_old_folder(folder, monkeypatch):
    def full(*args):
        raise OSError("disk full")

    monkeypatch.setattr("detspec.checkpoint.orbax_folder.write_json", full)
    with pytest.raises(OSError, match="disk full"):
        save_orbax(folder, CFG, init_params(CFG, jax.random.key(9))).result()
    assert load(folder).digest == digest_model(CFG, random_model(CFG))


def test_folder_without_its_manifest_is_no_model(folder):
    (folder / MANIFEST_NAME).unlink()
    assert "config.json is missing" in load_error(folder)
    with pytest.raises(InputError, match="not written to its end"):
        load_orbax(folder)


def test_weights_that_are_damaged_or_missing_are_refused(folder):
    largest = max((path for path in (folder / "weights").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    whole = largest.read_bytes()
    name = largest.relative_to(folder / "weights").as_posix()
    largest.write_bytes(whole[: len(whole) // 2])
    assert f"damaged or incomplete: {name} has {len(whole) // 2} of {len(whole)} bytes" in load_error(folder)
    largest.unlink()
    assert f"damaged or incomplete: {name} has 0 of {len(whole)} bytes" in load_error(folder)


def test_weights_that_are_not_those_of_the_manifest_are_refused(folder):
    edit_manifest(folder, digest="0" * 64)
    assert "manifest.json says 0000" in load_error(folder)


def test_digest_of_a_folder_is_over_the_config_as_it_is_written_there(tmp_path):
    """An earlier version wrote `false` for each layer where none slides; today's config of the same model says nothing."""
    folder = save_orbax(tmp_path / "model", RANDOM_CFG, random_model(RANDOM_CFG)).result()
    config = json.loads((folder / MANIFEST_NAME).read_text())["config"]
    older = {**config, "sliding_layers": [False] * RANDOM_CFG.num_layers}
    digest = digest_model(RANDOM_CFG, random_model(RANDOM_CFG), stored=older)
    assert digest != digest_model(RANDOM_CFG, random_model(RANDOM_CFG))
    edit_manifest(folder, config=older, digest=digest)
    assert load(folder).digest == digest


def test_manifest_of_another_format_or_config_is_refused(folder):
    config = json.loads((folder / MANIFEST_NAME).read_text())["config"]
    edit_manifest(folder, config={**config, "moe_experts": 8})
    assert "moe_experts" in load_error(folder)
    edit_manifest(folder, config=config, format=2)
    assert "format 2 is not supported, only 1" in load_error(folder)
    (folder / MANIFEST_NAME).write_text("{")
    assert "cannot be read" in load_error(folder)


def test_convert_there_and_back_keeps_every_tensor_and_side_file(tmp_path, capsys):
    params = random_model(RANDOM_CFG)
    save_hf(tmp_path / "hf", RANDOM_CFG, params, eos_ids=(3, 4))
    side_files = {
        "chat_template.jinja": "{{ messages[0].content }}",
        "additional_chat_templates/tool_use.jinja": "{{ tools }}",
        "special_tokens_map.json": '{"eos_token": "</s>"}',
        "added_tokens.json": "{}",
        "tokenizer.model": "pieces",
    }
    (tmp_path / "hf" / "additional_chat_templates").mkdir()
    for name, content in side_files.items():
        (tmp_path / "hf" / name).write_text(content)
    assert main(["convert", "--model", str(tmp_path / "hf"), "--out", str(tmp_path / "ours")]) == 0
    assert main(["convert", "--model", str(tmp_path / "ours"), "--out", str(tmp_path / "again")]) == 0
    first, ours, again = (load(tmp_path / name) for name in ("hf", "ours", "again"))
    assert first.digest == ours.digest == again.digest
    assert first.digest in capsys.readouterr().out
    assert ours.eos_ids == again.eos_ids == (3, 4)
    assert again.chat_template is not None
    for kind in ("ours", "again"):
        assert {name: (tmp_path / kind / name).read_text() for name in side_files} == side_files
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "hf" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("generation", [None, {"do_sample": True, "temperature": 0.5}])
def test_convert_keeps_the_tokens_that_end_a_text_of_a_config_that_names_them_alone(tmp_path, generation):
    """Our folders have no `config.json`, where older folders name them."""
    save_hf(tmp_path / "hf", RANDOM_CFG, random_model(RANDOM_CFG), eos_ids=(3,))
    (tmp_path / "hf" / "generation_config.json").unlink()
    if generation is not None:
        (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(generation))
    assert main(["convert", "--model", str(tmp_path / "hf"), "--out", str(tmp_path / "ours")]) == 0
    first, ours = (load(tmp_path / name) for name in ("hf", "ours"))
    assert first.eos_ids == ours.eos_ids == (3,)
    assert first.sampling_defaults == ours.sampling_defaults


def test_convert_of_a_shipped_model_takes_its_tokenizer_along(tmp_path):
    assert main(["convert", "--model", "thinking_parity", "--to", "orbax", "--out", str(tmp_path / "ours")]) == 0
    shipped, ours = load("thinking_parity"), load(tmp_path / "ours")
    assert (ours.digest, ours.eos_ids) == (shipped.digest, shipped.eos_ids)
    assert ours.tokenizer.digest == shipped.tokenizer.digest


@pytest.mark.parametrize("save", [save_hf, save_orbax])
def test_saving_next_to_files_of_no_folder_is_refused_before_anything_is_written(save, tmp_path):
    with pytest.raises(InputError, match="side_files_from='no_model' is no folder: name the model folder"):
        save(tmp_path / "new", RANDOM_CFG, random_model(RANDOM_CFG), side_files_from="no_model")
    assert not any(tmp_path.iterdir())


def test_convert_leaves_a_folder_that_is_there_unless_it_is_to_be_fresh(tmp_path, capsys):
    save_hf(tmp_path / "hf", RANDOM_CFG, random_model(RANDOM_CFG))
    save_orbax(tmp_path / "kept", CFG, random_model(CFG)).result()
    command = ["convert", "--model", str(tmp_path / "hf"), "--out", str(tmp_path / "kept")]
    assert main(command) == 2
    assert "kept is there already: name another folder, or let --fresh delete it" in capsys.readouterr().err
    assert load(tmp_path / "kept").digest == digest_model(CFG, random_model(CFG))
    assert main([*command, "--fresh"]) == 0
    assert load(tmp_path / "kept").digest == load(tmp_path / "hf").digest


def test_convert_to_another_dtype_rounds_and_refuses_what_does_not_fit(tmp_path, capsys):
    """By the name that orbax folders had before, too: `--to native`."""
    cfg = FAMILY_CFGS["qwen3"]
    params = random_model(cfg)
    save_orbax(tmp_path / "model", cfg, params).result()
    args = ["convert", "--model", str(tmp_path / "model"), "--to", "orbax", "--out"]
    assert main([*args, str(tmp_path / "f32"), "--dtype", "float32"]) == 0
    older = ["native" if arg == "orbax" else arg for arg in args]
    assert main([*older, str(tmp_path / "older"), "--dtype", "float32"]) == 0
    assert load(tmp_path / "older").digest == load(tmp_path / "f32").digest
    wide = load(tmp_path / "f32")
    assert wide.cfg.dtype == "float32"
    np.testing.assert_array_equal(np.asarray(wide.params["embed"]), np.asarray(params["embed"]).astype(np.float32))
    huge = {**params, "embed": params["embed"] * 1e30}
    save_orbax(tmp_path / "huge", cfg, huge).result()
    args[2] = str(tmp_path / "huge")
    assert main([*args, str(tmp_path / "f16"), "--dtype", "float16"]) == 2
    assert "['embed'] hold numbers too large for float16" in capsys.readouterr().err
    assert not (tmp_path / "f16").exists()
