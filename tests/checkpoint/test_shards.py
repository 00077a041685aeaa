"""Loading into shards: the bits and the digest of one device, on 1 to 8 devices and in two processes; no byte is read twice.

Everything that needs several devices runs once, in processes of their own: `on_eight_devices.py`, `on_two_processes.py`.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from detspec.checkpoint import shards
from detspec.checkpoint.arena import Arena
from detspec.checkpoint.files import Header
from detspec.checkpoint.hf import load_hf, save_hf
from detspec.checkpoint.shards import READERS, Source, Tensor, read_arrays
from tests.checkpoint.on_eight_devices import CFG, DOWN, HEAD, IN_OUR_FOLDERS, QUANTIZED_LAYOUTS, make_params

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
LAYOUTS = ("none", "second device", "rows 1", "rows 2", "rows 4", "rows 8", "columns 2", "columns 8")
OTHER_LAYOUTS = ("replicas", "tiles", "norms too", "whole")


def start(script: str, num_devices: int, *args: object) -> subprocess.Popen[str]:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices), "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / script), *map(str, args)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-4000:]
    return dict(json.loads(out.splitlines()[-1]))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def found(root: Path) -> dict[str, Any]:
    return result(start("on_eight_devices.py", 8, root))


@pytest.fixture(scope="module")
def of_two(root: Path, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Reports of two processes about the folders that `found` left."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [start("on_two_processes.py", 2, number, address, root) for number in range(2)]
    try:
        return [result(process) for process in processes]
    finally:
        for process in processes:
            process.kill()


def judge(run: dict[str, Any], expected: dict[str, Any]) -> None:
    assert run["bits"] == expected["bits"]
    assert run["digest"] == expected["digest"]
    assert run["placed"]


@pytest.mark.parametrize("layout", LAYOUTS + OTHER_LAYOUTS)
def test_hugging_face_folder_has_equal_bits_and_digest_on_every_mesh(found, layout):
    judge(found["hf"][layout], found["expected"])
    assert found["exchanged"]["bits"] != found["expected"]["bits"]
    assert found["exchanged"]["digest"] != found["expected"]["digest"]


@pytest.mark.parametrize("layout", LAYOUTS + OTHER_LAYOUTS)
def test_hugging_face_folder_is_brought_to_the_dtype_of_the_config_shard_by_shard(found, layout):
    judge(found["half"][layout], found["half expected"])
    assert found["half expected"]["digest"] != found["expected"]["digest"]


@pytest.mark.parametrize("layout", IN_OUR_FOLDERS)
def test_folder_of_ours_has_equal_bits_and_digest_on_every_mesh(found, layout):
    judge(found["ours"][layout], found["expected"])


@pytest.mark.parametrize("name", ["fp8", "awq"])
@pytest.mark.parametrize("layout", QUANTIZED_LAYOUTS)
def test_quantized_folder_has_equal_bits_and_digest_on_every_mesh(found, name, layout):
    runs = found["quantized"][name]
    judge(runs[layout], runs["none"])
    assert found["quantized"]["fp8"]["none"]["digest"] != found["quantized"]["awq"]["none"]["digest"]


def test_folder_of_ours_that_was_saved_from_shards_is_the_same_model(found):
    judge(found["from shards"], found["expected"])


@pytest.mark.parametrize(
    ("layout", "shape", "devices"),
    [
        ("none", [64, 16], 1),
        ("rows 2", [32, 16], 2),
        ("rows 8", [8, 16], 8),
        ("columns 8", [64, 2], 8),
        ("replicas", [16, 16], 8),
        ("tiles", [16, 8], 8),
        ("whole", [64, 16], 8),
    ],
)
def test_embedding_is_cut_as_asked(found, layout, shape, devices):
    for kind in ("hf", "half", "ours") if layout in found["ours"] else ("hf", "half"):
        assert (found[kind][layout]["embedding"], found[kind][layout]["devices"]) == (shape, devices)


@pytest.mark.parametrize("layout", LAYOUTS + OTHER_LAYOUTS)
def test_every_byte_is_read_once_however_many_devices_hold_it(found, layout):
    """Files of bfloat16 models in float32 have twice the bytes."""
    assert found["hf"][layout]["read"] == found["half"][layout]["read"] == found["expected"]["bytes"]


@pytest.mark.parametrize("cut", ["experts", "rows", "columns", "both"])
def test_stacked_experts_have_equal_bits_wherever_they_are_cut(found, cut):
    assert found["experts"][cut]


@pytest.mark.parametrize("cut", ["outputs", "inputs", "first alone"])
@pytest.mark.parametrize("form", ["rows", "turned rows", "heads in turns", "turned experts in turns"])
def test_weights_that_share_a_tensor_have_equal_bits_wherever_they_are_cut(found, form, cut):
    """Each byte is read once, unless shards of two chips lie in one period, or weights in turns are cut in different ways."""
    is_same, read = found["layouts"][form][cut]
    assert is_same
    several = {
        ("heads in turns", "outputs"): 2,
        ("heads in turns", "first alone"): 4,  # twice for the first, once for each of the others
        ("turned experts in turns", "first alone"): 2,
    }
    assert read == several.get((form, cut), 1)


def test_weights_without_a_sharding_go_to_the_default_device_of_the_caller(found):
    assert found["default device"] == [1]


def test_nan_in_several_shards_of_a_tensor_is_one_problem(found):
    down, norm = (f"tensor {name} holds NaN or infinite weights as float32" for name in (DOWN, "model.norm.weight"))
    assert found["faults"]["nan"].endswith(f"nan: {down}; {norm}")


def test_stored_head_that_differs_in_the_last_shard_is_refused(found):
    assert found["faults"]["same head"] == ""
    assert f"tensor {HEAD} differs from the embedding" in found["faults"]["other head"]


@pytest.mark.parametrize("kind", ["hf", "ours"])
def test_sharding_that_does_not_divide_the_weights_is_refused(found, kind):
    """3 devices divide no matrix of the model but those with 24 rows."""
    message = found["faults"][f"uneven {kind}"]
    assert "weights cannot be cut into equal blocks as `sharding` asks; give a mesh whose axes divide theirs" in message
    assert "The first one is ['embed'] [64, 16]" in message


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_two_processes_take_the_digest_of_one(found, of_two, layout):
    digests = {run[layout]["digest"] for run in of_two} | {run["ours"]["digest"] for run in of_two}
    assert digests == {found["expected"]["digest"]}
    (other,) = {run[layout]["digest of one shard negated"] for run in of_two}
    assert other not in digests


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_process_reads_the_bytes_of_its_shards_alone(of_two, layout):
    for run in of_two:
        assert run[layout]["read"] == run[layout]["held"]
        assert run[layout]["held"] < 0.6 * run[layout]["bytes"]


def test_weights_of_several_processes_are_not_written_to_a_folder_of_ours(root, of_two):
    assert all(
        "devices of 2 processes hold the weights, but a folder of ours is written by one" in run["save"] for run in of_two
    )
    assert not (root / "refused").exists()


def test_reading_waits_for_blocks_to_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """While one of 8 blocks is taken, `READERS` others are read; none is begun after them until the next one is taken."""
    begun = threading.Semaphore(0)

    def read(folder: Path, source: Source, block: Any, arena: Arena) -> tuple[list[np.ndarray], list[str]]:
        begun.release()
        return [np.zeros(2, np.float32)], []

    monkeypatch.setattr(shards, "read_block", read)
    like = jax.ShapeDtypeStruct((2,), np.float32)
    arrays = read_arrays(tmp_path, [Source([Tensor(str(i), Header("", (2,), "F32", 0, 8), None)], (like,)) for i in range(8)])
    next(arrays)
    assert all(begun.acquire(timeout=300) for _ in range(1 + READERS))
    assert not begun.acquire(timeout=0.2)
    assert len(list(arrays)) == 7
    assert all(begun.acquire(timeout=300) for _ in range(7 - READERS))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only devices of a CPU use memory of the host")
def test_array_on_a_cpu_is_the_memory_that_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    places = []

    def noting(arena: Arena, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        array = empty(arena, shape, dtype)
        places.append(array.ctypes.data)
        return array

    empty = Arena.empty
    monkeypatch.setattr(Arena, "empty", noting)
    save_hf(tmp_path / "model", CFG, make_params(CFG))
    params = load_hf(tmp_path / "model")[1]
    assert sorted(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)) == sorted(places)
    assert jax.device_put(params["embed"] + 1).unsafe_buffer_pointer() not in places
