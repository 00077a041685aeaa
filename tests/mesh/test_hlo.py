"""Optimised programs for 8 simulated chips exchange what the formula says: no float is added, no weight gathered."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from detspec.config import ModelConfig
from detspec.mesh import COPIES, STATE, make_mesh, over_chips
from detspec.model.dense import dense_config, with_fields
from detspec.ops.collectives import CHIPS
from detspec.planning.exchanges import Exchange, Exchanges, added_floats, found_in, gathered_weights
from detspec.planning.programs import PROGRAMS, Deployment, expected, program_args
from detspec.schedule import Budget, Schedule
from detspec.targets import target

# Sizes all different, and no weight has as many elements as the values of 48 or 5 rows.
CFG = dense_config(
    vocab_size=160,
    d_model=64,
    num_layers=3,
    num_heads=16,
    num_kv_heads=8,
    head_dim=8,
    d_ff=192,
    dtype="float32",
    max_position=64,
)
FEW_KV_HEADS = with_fields(CFG, num_kv_heads=2)
SCHEDULE = Schedule(budget=Budget(48, 8))


def deployment_of(cfg: ModelConfig) -> Deployment:
    return Deployment(cfg, target("v6e:2x4"), SCHEDULE, max_requests=5, max_len=64)  # the target is not asked


def optimised(name: str, cfg: ModelConfig, chips: int) -> Exchanges:
    """Exchanges of a program on `chips` CPU devices."""
    mesh = make_mesh(cfg, chips)
    args = program_args(name, deployment_of(cfg), mesh)
    program = over_chips(partial(PROGRAMS[name], cfg, SCHEDULE), mesh, args, STATE)
    return found_in(jax.jit(program, donate_argnums=(1,)).lower(*args).compile().as_text())


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(("cfg", "chips"), [(CFG, 8), (CFG, 2), (FEW_KV_HEADS, 4)], ids=["8 x 1", "2 x 1", "2 x 2"])
def test_program_exchanges_what_the_formula_says_and_adds_no_float(name: str, cfg: ModelConfig, chips: int):
    found = optimised(name, cfg, chips)
    assert found == expected(name, deployment_of(cfg), chips)
    assert added_floats(found) == []
    assert gathered_weights(found, cfg) == []


def exchanged_by(program, *shapes: tuple[tuple[int, ...], jax.sharding.PartitionSpec]) -> Exchanges:
    """Exchanges of `program` on 8 chips, whose float32 arguments have `shapes` and lie as given; its result is on all."""
    mesh = make_mesh(CFG, 8)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for shape, spec in shapes]
    return found_in(jax.jit(over_chips(program, mesh, tuple(args), COPIES)).lower(*args).compile().as_text())


def test_product_cut_along_its_inputs_is_found_as_a_sum_of_floats():
    """`down` cut along its inputs, as others do: each chip has sums of an eighth of them, which are added across chips."""
    P = jax.sharding.PartitionSpec

    def down(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.einsum("RF,DF->RD", x, weight), CHIPS)

    found = exchanged_by(down, ((48, 192), P(None, CHIPS)), ((64, 192), P(None, CHIPS)))
    assert added_floats(found) == [Exchange("all-reduce", "f32", 48 * 64, 8)]


def test_product_with_a_gathered_weight_is_found():
    def down(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.einsum("RF,DF->RD", x, jax.lax.all_gather(weight, CHIPS, tiled=True))

    found = exchanged_by(down, ((48, 192), COPIES), ((64, 192), jax.sharding.PartitionSpec(CHIPS)))
    assert added_floats(found) == []
    assert gathered_weights(found, CFG) == [Exchange("all-gather", "f32", 64 * 192, 8)]
