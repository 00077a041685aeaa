"""Products with the weights of experts compile for the targets, in layers of published shapes, and copy none of the weights."""

import re

import jax
import jax.numpy as jnp
import pytest
from compile_proof import TARGETS
from hlo import kernel_calls, pool_moves
from prove_stages.experts import numerics_of, shapes_of
from prove_stages.programs import Setting
from prove_stages.sizes import FULL, Experts

from detspec.ops.experts.api import experts_fn
from detspec.target_compilers import compile_for
from detspec.targets import target

MIXTRAL = Experts("Mixtral 8x7B", 8, 2, 4096, 14336)
ROWS = (1, 32, 256)
CASES = [(size, rows) for size in (*FULL.experts, MIXTRAL) for rows in ROWS if size is FULL.experts[0] or rows == ROWS[-1]]


@pytest.mark.parametrize("name", [name for name in TARGETS if target(name).platform == "gpu"])
@pytest.mark.parametrize(("size", "rows"), CASES, ids=lambda value: getattr(value, "name", value))
def test_experts_compile_for_target_without_a_copy_of_their_weights(name: str, size: Experts, rows: int, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    multiply = experts_fn(numerics_of(Setting.of_target(FULL, target(name))))
    gate, up, down = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes_of(size))
    ids = jax.ShapeDtypeStruct((rows, size.active), jnp.int32)
    for x, weights in (((rows, size.d_model), (gate, up)), ((rows, size.active, size.d_ff), (down,))):
        compiled = compile_for(target(name), multiply, jax.ShapeDtypeStruct(x, jnp.bfloat16), ids, *weights)
        hlo = compiled.program.as_text()
        assert kernel_calls(hlo, target(name).platform) == 1
        assert pool_moves(hlo, weights) == []
        assert compiled.temp_bytes < 2 * weights[0].size / 10
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", capfd.readouterr().out)
    assert {*spilled} <= {("0", "0")}
