"""Implementations of the operations that have several, by the names of `Numerics.implementation`.

Nothing falls back to another one: what an implementation lacks raises. Kernels are imported when they are first called for.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from detspec.cache import KV
from detspec.config import ModelConfig
from detspec.ops import gathers
from detspec.ops.attention import int8_pages
from detspec.ops.attention import reference as reference_attention
from detspec.ops.experts import reference as reference_experts
from detspec.ops.linear import int8
from detspec.ops.linear import reference as reference_linear
from detspec.schedule import Numerics

LinearsFn = Callable[..., list[jax.Array]]  # (x [R, in], weights, used) -> float32 [R, out] of each weight
# (x [R, in] or [R, k, in], ids [R, k], weights [E, out, in], used) -> float32 [R, k, out] of each weight
ExpertsFn = Callable[..., list[jax.Array]]


class Operations(NamedTuple):
    """The functions of one implementation; the defaults are XLA's."""

    paged_attention: Callable[..., tuple[jax.Array, jax.Array | None]]  # see `attention.api.attention_and_lse`
    linears_f32: LinearsFn  # pinned products, see `linear.api.linears_fn`
    experts_f32: ExpertsFn  # the same products, with matrices that rows choose, see `experts.api.experts_fn`
    int8_linears_f32: LinearsFn = lambda x, weights, used: int8.linears_f32(x, weights)
    int8_experts_f32: ExpertsFn = lambda x, ids, weights, used: reference_experts.experts_f32(int8.linears_f32, x, ids, weights)
    append: Callable[..., KV] | None = None  # see `attention.api.append_fn`; None: by XLA
    append_int8: Callable[..., Any] = int8_pages.append
    copy_pages: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = gathers.copy_pages
    take: Callable[[jax.Array, jax.Array], jax.Array] = gathers.take
    draw: Callable[..., jax.Array] | None = None  # see `draws.draw`; None: as `sampler.draw` does it
    gated: Callable[..., jax.Array] | None = None  # see `gate.cpu_gated`; None: as `gate.gated` does it
    # (x, gate, up, activation, used), for experts with ids behind `x`: products and gate in one; None: one after the other
    gated_linears: Callable[..., jax.Array] | None = None
    gated_experts: Callable[..., jax.Array] | None = None
    leaves_out_rows: bool = False  # products and attention of rows that are not used take no time


def operations(numerics: Numerics) -> Operations:
    """The operations of the implementation that `numerics` names."""
    return IMPLEMENTATIONS[numerics.implementation](numerics)


def begin_kernels(cfg: ModelConfig, numerics: Numerics) -> None:
    """Begins to compile what a model's passes will need of an implementation that this machine's compiler makes."""
    if numerics.implementation != "cpu":
        return
    from detspec.native.library import begin

    if cfg.is_integer:
        begin("detspec_integer_product", numerics.cache_dtype)
    elif cfg.weights is not None:
        begin("detspec_int8_linear", cfg.dtype)
    elif numerics.linear == "pinned":
        begin("detspec_linear", cfg.dtype)
    begin("detspec_attention", numerics.cache_dtype)


def _reference(numerics: Numerics) -> Operations:
    linears_f32 = _of_each(reference_linear.linear_f32)
    return Operations(reference_attention.paged_attention, linears_f32, _of_linears(linears_f32))


def _cpu(numerics: Numerics) -> Operations:
    from detspec.native.processor import has_tiles
    from detspec.ops import draws, gate, moves
    from detspec.ops.attention import cpu as attention
    from detspec.ops.experts import cpu as experts
    from detspec.ops.linear import cpu as linear

    return Operations(
        attention.paged_attention,
        linear.linears_f32,
        experts.experts_f32,
        linear.int8_linears_f32,
        experts.int8_experts_f32,
        moves.append,
        moves.append_int8,
        moves.copy_pages,
        moves.take,
        partial(draws.draw, cache_dtype=numerics.cache_dtype),
        gate.cpu_gated,
        None if has_tiles() else linear.gated_linears,
        None if has_tiles() else experts.gated_experts,
        leaves_out_rows=True,
    )


def _pallas_tpu(numerics: Numerics) -> Operations:
    from detspec.ops.attention import pallas_tpu as attention
    from detspec.ops.experts import pallas_tpu as experts
    from detspec.ops.linear import pallas_tpu as linear

    interpret = numerics.interpret
    return Operations(
        attention.paged_attention,
        _of_each(partial(linear.linear_f32, interpret=interpret)),
        partial(experts.experts_f32, interpret=interpret),
    )


def _pallas_gpu(numerics: Numerics) -> Operations:
    from detspec.ops.attention import pallas_gpu as attention
    from detspec.ops.experts import pallas_gpu as experts
    from detspec.ops.linear import pallas_gpu as linear

    interpret = numerics.interpret
    return Operations(
        attention.paged_attention,
        lambda x, weights, used: linear.linears_f32(x, weights, interpret=interpret),
        partial(experts.experts_f32, interpret=interpret),
    )


def _of_each(linear_f32: Callable[[jax.Array, jax.Array], jax.Array]) -> LinearsFn:
    """Products with several weights, one after the other, of all rows."""
    return lambda x, weights, used: [linear_f32(x, weight) for weight in weights]


def _of_linears(linears_f32: LinearsFn) -> ExpertsFn:
    """Products with the weights of experts, made of products with one weight, of all rows."""

    def of_all(x: jax.Array, weights: Sequence[Any]) -> list[jax.Array]:
        return linears_f32(x, weights, None)

    return lambda x, ids, weights, used: reference_experts.experts_f32(of_all, x, ids, weights)


IMPLEMENTATIONS = {"reference": _reference, "cpu": _cpu, "pallas_tpu": _pallas_tpu, "pallas_gpu": _pallas_gpu}
