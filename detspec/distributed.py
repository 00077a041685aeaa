"""Several processes, one a host, that share one mesh of chips: how they find each other, and how they exchange bytes.

All of them run the same programs in the same order. If one ends, the others cannot go on: they end, too, and the same commands
start again from the journal.
"""

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from detspec.errors import InputError

COORDINATOR = "JAX_COORDINATOR_ADDRESS"  # host and port of process 0; jax reads it, too
NUM_PROCESSES = "JAX_NUM_PROCESSES"
PROCESS_ID = "JAX_PROCESS_ID"
HEARTBEAT_S = 30  # a process that is silent for so long has died
SHUTDOWN_S = 10  # a process that ends waits so long for the others to end
FRAME_BYTES = 1024  # contents up to this length are exchanged at once
LENGTH_BYTES = 8
TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")  # how many hosts its pod has only the machine's metadata server knows


def initialize(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> int:
    """Joins the other processes of this run; returns how many there are. Call it before jax looks for devices.

    Slurm, Open MPI and TPU pods are found by jax. Elsewhere give the address of process 0, how many processes there are, and
    which of them this is: as arguments, or in JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. Does nothing in a
    process that is alone; JAX_NUM_PROCESSES=1 says that it is.

    Raises `InputError` if some of the three are missing.
    """
    coordinator = coordinator or os.environ.get(COORDINATOR)
    num_processes = _number(NUM_PROCESSES) if num_processes is None else num_processes
    process_id = _number(PROCESS_ID) if process_id is None else process_id
    given = (coordinator, num_processes, process_id)
    is_found = given == (None, None, None) and _has_launcher()
    if num_processes == 1 or (given == (None, None, None) and not is_found):
        return 1
    if not is_found and None in given:
        raise InputError(
            f"to join other processes {COORDINATOR}, {NUM_PROCESSES} and {PROCESS_ID} are needed, got {coordinator}, "
            f"{num_processes} and {process_id}: give all three, or none where Slurm, Open MPI or a TPU pod starts the processes"
        )
    jax.config.update("jax_enable_preemption_service", False)  # jax's handler of SIGTERM would replace ours
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        cluster_detection_method=None if is_found else "deactivate",
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=SHUTDOWN_S,
    )
    return jax.process_count()


def exchange(content: bytes) -> list[bytes]:
    """The `content` of all processes, in their order; each of them must call this, and waits for the others."""
    frame = np.zeros(FRAME_BYTES, np.uint8)
    frame[:LENGTH_BYTES] = np.frombuffer(len(content).to_bytes(LENGTH_BYTES, "little"), np.uint8)
    begin = content[: FRAME_BYTES - LENGTH_BYTES]
    frame[LENGTH_BYTES : LENGTH_BYTES + len(begin)] = np.frombuffer(begin, np.uint8)
    frames = _gather(frame)
    lengths = [int.from_bytes(each[:LENGTH_BYTES].tobytes(), "little") for each in frames]
    rest = max(lengths) - (FRAME_BYTES - LENGTH_BYTES)
    if rest > 0:  # every process knows all lengths, so all come here or none
        size = 1 << (rest - 1).bit_length()  # few sizes, few programs
        more = np.zeros(size, np.uint8)
        end = content[FRAME_BYTES - LENGTH_BYTES :]
        more[: len(end)] = np.frombuffer(end, np.uint8)
        frames = np.concatenate([frames, _gather(more)], axis=1)
    return [each[LENGTH_BYTES : LENGTH_BYTES + length].tobytes() for each, length in zip(frames, lengths, strict=True)]


def _gather(row: np.ndarray) -> np.ndarray:
    """The rows `[n]` of all processes, `[processes, n]`."""
    mesh, copy = _gathering()
    (own,) = [device for device in mesh.devices if device.process_index == jax.process_index()]
    rows = NamedSharding(mesh, PartitionSpec("processes"))
    shape = (mesh.size, len(row))
    return np.asarray(copy(jax.make_array_from_single_device_arrays(shape, rows, [jax.device_put(row[None], own)])))


@functools.cache
def _gathering() -> tuple[Mesh, Any]:
    """The first device of each process, and the program that copies to all of them what each has."""
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.asarray([firsts[process] for process in sorted(firsts)]), ("processes",))
    return mesh, jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _number(variable: str) -> int | None:
    """The whole number in an environment variable; None if it is not set."""
    value = os.environ.get(variable)
    if value is None:
        return None
    if not value.isdecimal():
        raise InputError(f"{variable} must be a whole number, got {value!r}")
    return int(value)


def _has_launcher() -> bool:
    """Whether Slurm, Open MPI or a TPU pod has started several processes of this run."""
    if "SLURM_STEP_NODELIST" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        return True
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return True
    if os.environ.get("JAX_PLATFORMS", "tpu").split(",")[0] != "tpu":
        return False
    has_tpus = any(Path(name).exists() for name in TPU_DEVICES) and importlib.util.find_spec("libtpu") is not None
    return has_tpus or "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
