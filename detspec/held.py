"""XLA's products on GPUs, held still: options of a program by which no clock chooses its kernels, and no sum is cut.

Left alone, XLA cuts the inputs of a product into parts whose number depends on the number of rows, and each process times
several kernels for what is left. A canonical program whose attention or products are XLA's is compiled with options against
both. Each product is then one kernel of tiles of 64 x 64, for any number of rows. It adds up blocks of 64 inputs, ascending:

    inputs     0 .. 63 | 64 .. 127 | 128 .. 191 | ...     one accumulator

GPUs of a compute capability below 8.0 have no such kernels. cuBLAS runs there: untuned, but it chooses by the number of rows.
Programs that commit ordinary tokens are left to XLA.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from detspec.errors import InputError
from detspec.schedule import Numerics

P = ParamSpec("P")
T = TypeVar("T")

HELD: Mapping[str, Any] = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_experimental_force_split_k": 1,
    "xla_gpu_triton_gemm_any": True,  # for float32, too
    "xla_gpu_cublas_fallback": False,
    # Rows of a small batch and of a large one fit as well; three buffers of float32 fit into the 99 KiB of an L4's blocks.
    "xla_gpu_override_gemm_autotuner": ("block_m: 64 block_n: 64 block_k: 64 num_stages: 3 num_warps: 4 num_ctas: 1"),
}


def compiler_options(numerics: Numerics, platform: str) -> dict[str, Any]:
    """The options of a program on `platform`: `HELD` on a GPU where attention or products of canonical passes are XLA's.

    Passes with native sums are those of ordinary decoding, which has none.
    """
    has_kernels = numerics.implementation == "pallas_gpu" and numerics.linear == "pinned"
    return dict(HELD) if platform == "gpu" and numerics.reductions == "fixed" and not has_kernels else {}


class Jitted(Generic[P, T]):
    """Jits a function so that its programs are compiled with `compiler_options`.

    Attributes:
        plain: as `jax.jit` makes it without options.
        held: with `HELD`.
    """

    def __init__(
        self,
        fn: Callable[P, T],
        numerics_of: Callable[[Mapping[str, Any]], Numerics | None] = lambda named: named["schedule"].numerics,
        **settings: Any,
    ) -> None:
        """Jits `fn` with `settings` of `jax.jit`.

        `numerics_of` takes the arguments that are given by name, and says the numerics of the canonical passes in the program;
        None if it has none.
        """
        functools.update_wrapper(self, fn)
        self.plain = jax.jit(fn, **settings)
        self.held = jax.jit(fn, compiler_options=dict(HELD), **settings)
        self._numerics_of = numerics_of

    def __call__(self, *args: P.args, **named: P.kwargs) -> T:
        """Runs the program of these arguments; `InputError` if it needs options and is to be part of another program."""
        jitted = self._jitted(args, named)
        if jitted is self.held and any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, named))):
            raise InputError(
                "on a GPU, a program whose attention or products are XLA's needs compiler options, which jax does not take "
                "inside another jax.jit: call it outside, or on a Hopper GPU with the numerics "
                'implementation="pallas_gpu" and linear="pinned", which need no options'
            )
        return jitted(*args, **named)

    def lower(self, *args: P.args, **named: P.kwargs) -> Any:
        """Traces the function, as `jax.jit` does, for the platform that the shardings of `args` name."""
        return self._jitted(args, named).lower(*args, **named)

    def options(self, args: Any, named: Mapping[str, Any]) -> dict[str, Any]:
        """The options that the program of these arguments is compiled with."""
        numerics = self._numerics_of(named)
        return {} if numerics is None else compiler_options(numerics, _platform_of(args))

    def clear_cache(self) -> None:
        """Forgets all programs."""
        for jitted in (self.plain, self.held):
            jitted.clear_cache()  # type: ignore[attr-defined]  # missing in jax's stub

    def _jitted(self, args: Any, named: Mapping[str, Any]) -> Any:
        return self.held if self.options(args, named) else self.plain


def _platform_of(args: Any) -> str:
    """The platform of the devices that arrays or shapes among `args` lie on; this process's own where they name none."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))
    placed = next((sharding for sharding in shardings if sharding is not None), None)
    if placed is None:
        return jax.default_backend()
    platform = next(iter(placed.device_set)).platform
    return "gpu" if platform == "cuda" else platform
