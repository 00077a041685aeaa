"""A process of two, with two devices each, which hold a model together; prints what came of it as JSON.

Its arguments are the number of the process, the address of process 0 and a folder with a model in each of `hf`, `ours`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.hf import load_hf
from detspec.checkpoint.orbax_folder import load_orbax, read_orbax_config, save_orbax
from detspec.errors import InputError
from tests.checkpoint.on_eight_devices import bytes_read, matrices


def main(process: int, address: str, root: Path) -> None:
    jax.distributed.initialize(address, num_processes=2, process_id=process)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    cfg = read_orbax_config(root / "ours")
    found: dict[str, Any] = {}
    for name, spec in {"rows": PartitionSpec("x"), "columns": PartitionSpec(None, "x")}.items():
        sharding = matrices(cfg, mesh, spec)
        num_read, (_, params) = bytes_read(load_hf, root / "hf", sharding)
        embed = params["embed"]
        parts = [-shard.data if shard.device == jax.devices()[3] else shard.data for shard in embed.addressable_shards]
        negated = jax.make_array_from_single_device_arrays(embed.shape, embed.sharding, parts)
        found[name] = {
            "read": num_read,
            "held": sum(local_bytes(leaf) for leaf in jax.tree.leaves(params)),
            "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
            "digest": digest_model(cfg, params),
            "digest of one shard negated": digest_model(cfg, {**params, "embed": negated}),
        }
    found["ours"] = {"digest": load_orbax(root / "ours", sharding=sharding)[2]}
    try:
        save_orbax(root / "refused", cfg, params)
    except InputError as error:
        found["save"] = str(error)
    print(json.dumps(found))


def local_bytes(array: jax.Array) -> int:
    """Bytes of the different shards that this process holds."""
    return sum({str(shard.index): shard.data.nbytes for shard in array.addressable_shards}.values())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
