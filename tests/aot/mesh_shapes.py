"""Programs for several chips that are compiled ahead of time: models at full width, few layers, the slices they run on."""

import math
from typing import Any, NamedTuple

import jax
from hlo import calls_over_pool, kernel_calls, pool_moves

from detspec.config import ModelConfig
from detspec.model.dense import with_fields
from detspec.planning.exchanges import added_floats, as_gathers, found_in, gathered_weights, received_bytes
from detspec.planning.programs import Deployment, compile_program, expected, program_args
from detspec.presets import preset
from detspec.target_compilers import Compiled
from detspec.targets import canonical_schedule, target

ROOM = {"max_requests": 32, "max_len": 1024}  # 257 pages, which no other array's size is a multiple of
LAYERS = 2


class MeshProgram(NamedTuple):
    """A program on a slice."""

    preset: str
    target: str
    chips: int
    program: str  # one of `programs.PROGRAMS`
    linear: str = "xla"

    @property
    def name(self) -> str:
        """As tests and tables call it."""
        return f"{self.preset}/{self.target}x{self.chips}/{self.program.replace(' ', '-')}/{self.linear}"

    def cfg(self, layers: int = LAYERS, **changes: Any) -> ModelConfig:
        """The model with few layers."""
        return with_fields(preset(self.preset), num_layers=layers, **changes)

    def deployment(self, cfg: ModelConfig) -> Deployment:
        """Requests for `cfg` on the slice."""
        device = target(self.target)
        return Deployment(cfg, device, canonical_schedule(device, cfg).with_numerics(linear=self.linear), **ROOM)

    def compiled(self, cfg: ModelConfig) -> Compiled:
        """The program by the vendor's compiler."""
        return compile_program(self.program, self.deployment(cfg), self.chips)

    def report(self, cfg: ModelConfig) -> dict[str, Any]:
        """Facts of the optimised program, ready for JSON."""
        deployed = self.deployment(cfg)
        platform = deployed.target.platform
        program = self.compiled(cfg)
        hlo = program.hlo
        by_formula = expected(self.program, deployed, self.chips)
        found = as_gathers(found_in(hlo), by_formula)
        state = program_args(self.program, deployed)[1]
        pools = [
            own_part(pool, math.gcd(cfg.layer(0).mixer.num_kv_heads, self.chips)) for pool in jax.tree.leaves(state.cache.pools)
        ]
        return {
            **self._asdict(),
            "layers": cfg.num_layers,
            "attention_kernels": calls_over_pool(hlo, platform, pools[0]),
            "kernels": kernel_calls(hlo, platform),
            "exchanges": [{**exchange._asdict(), "count": count} for exchange, count in found.items()],
            "received_bytes": received_bytes(found),
            "formula_bytes": received_bytes(by_formula),
            "equals_formula": found == by_formula,
            "added_floats": len(added_floats(found)),
            "gathered_weights": len(gathered_weights(found, cfg)),
            "moved_pools": len(pool_moves(hlo, tuple(pools))),
            "pool_bytes": sum(pool.size * pool.dtype.itemsize for pool in pools),
            **program.numbers(),
            "peak_bytes": program.peak_bytes,
        }


def own_part(pool: jax.ShapeDtypeStruct, kv_chips: int) -> jax.ShapeDtypeStruct:
    """The part of a page pool `[num_pages, K, ...]` that one chip holds."""
    num_pages, K, *rest = pool.shape
    return jax.ShapeDtypeStruct((num_pages, K // kv_chips, *rest), pool.dtype)


SLICES = (
    ("llama3_1_8b", "v5e:2x2", 4),
    ("llama3_1_8b", "v6e:2x4", 8),
    ("llama3_1_8b", "v5p:2x2x1", 4),
    ("llama3_1_8b", "tpu7x:2x2x1", 8),
    ("llama3_1_8b", "h200", 8),
    ("llama3_3_70b", "v6e:2x4", 8),
    ("llama3_3_70b", "v5p:2x2x2", 8),
    ("llama3_3_70b", "h200", 8),
)
SWEEP = [MeshProgram(*of, program) for of in SLICES for program in ("canonical pass", "draft step", "prefill")]
SWEEP += [MeshProgram(*of, "prefill", "pinned") for of in SLICES]
# TPUs' compiler takes 15 s for prefill, 25 s for a draft step and 50 s for a canonical pass, whatever the widths.
TESTED = [
    MeshProgram("llama3_3_70b", "v6e:2x4", 8, "canonical pass"),
    MeshProgram("llama3_1_8b", "v5e:2x2", 4, "draft step"),
    MeshProgram("llama3_1_8b", "v6e:2x4", 8, "prefill", "pinned"),
    MeshProgram("llama3_1_8b", "h200", 8, "canonical pass", "pinned"),
    MeshProgram("llama3_3_70b", "h200", 8, "draft step"),
]
DEEPER = MeshProgram("llama3_3_70b", "h200", 8, "prefill")  # tested at several depths
