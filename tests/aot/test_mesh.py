"""Programs compile for several chips that are not here: kernels over their own heads, only finished values exchanged.

`tests/aot/compile_mesh.py` compiles all slices and programs; these are a part, with a small vocabulary.
"""

import pytest
from mesh_shapes import DEEPER, LAYERS, TESTED, MeshProgram

from detspec.targets import GIB

SMALL = {"vocab_size": 8192}


def check(program: MeshProgram, layers: int = LAYERS) -> int:
    """Checks what is true of every program at a depth; returns its bytes at the peak."""
    cfg = program.cfg(layers, **SMALL)
    report = program.report(cfg)
    attended = cfg.num_layers - (program.program == "prefill")  # nothing reads what the last layer of prefill attends to
    assert report["attention_kernels"] == attended
    # Prefill ends with the last layer's keys and values, others with the head. On GPUs weights of the same rows share a kernel.
    of_layer, of_keys = (4, 1) if program.target == "h200" else (7, 2)
    products = of_layer * attended + (of_keys if program.program == "prefill" else 1)
    assert report["kernels"] == attended + products * (program.linear == "pinned")
    assert report["equals_formula"], report["exchanges"]
    assert report["received_bytes"] == report["formula_bytes"]
    assert (report["added_floats"], report["gathered_weights"], report["moved_pools"]) == (0, 0, 0)
    assert report["alias_bytes"] >= report["pool_bytes"]
    return report["peak_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("program", TESTED, ids=lambda program: program.name)
def test_program_on_chips_exchanges_finished_values_only_and_moves_no_pool(program: MeshProgram):
    assert check(program) < 2 * GIB


@pytest.mark.slow
def test_memory_of_many_layers_follows_from_that_of_few():
    """70B on 8 H200s: layers 2 and 4 say what 8 layers need."""
    two, four, eight = (check(DEEPER, layers) for layers in (2, 4, 8))
    assert two < 2 * GIB
    assert two + 3 * (four - two) == pytest.approx(eight, rel=0.02)
