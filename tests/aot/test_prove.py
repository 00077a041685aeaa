"""All stages of `scripts/prove_on_device.py` compile for an H100, and for a v6e where they apply, one layer deep."""

import dataclasses

import pytest
from compile_proof import TARGETS, compiled, programs_of
from held_products import Held, held_products
from jax.sharding import SingleDeviceSharding
from prove_stages import kernels, passes
from prove_stages.plan import different
from prove_stages.programs import Program, Setting
from prove_stages.sizes import FULL, Size
from prove_stages.stages import STAGES, stage_of

from detspec.model.dense import with_fields
from detspec.target_compilers import device_of
from detspec.targets import target

# Programs of a stage that are compiled; `compile_proof.py` compiles all. Other stages have the doctor's programs, or jax's.
CHOSEN = {
    "environment": 2,
    "ceilings": 1,
    "kernels": 2,
    "doctor": 1,
    "passes": 1,
    "whole": 1,
    "generation": 1,
    "completions": 1,
    "attention": 4,
    "products": 3,
    "experts": 2,
    "doctor again": 1,
}
JAXS = ("vendor",)  # attention of jax itself, which does not keep to strict promotion
# Their programs for TPUs are those of other stages, or of engines, which tests/aot/test_notebooks.py compiles for TPUs.
SWEPT = {("v6e:2x2", stage) for stage in ("doctor again", "whole", "generation", "completions")}
SLOW = {("v6e:2x2", "doctor"), ("h100", "doctor")}
PAIRS = [
    pytest.param(
        name, stage, marks=[pytest.mark.sweep] * ((name, stage) in SWEPT) + [pytest.mark.slow] * ((name, stage) in SLOW)
    )
    for name in TARGETS
    if name != "h200"  # which runs an H100's programs
    for stage in CHOSEN
    if target(name).platform in stage_of(stage).platforms
]


def cut(size: Size) -> Size:
    """The layers of `size`, but one of them, and fewer tokens: compilers take long for wide heads."""
    short = with_fields(size.cfg, num_layers=1, vocab_size=512)
    examined = with_fields(size.examined, num_layers=1, vocab_size=512)
    return dataclasses.replace(size, cfg=short, layers=1, whole_layers=1, examined=examined)


@pytest.mark.parametrize(("name", "stage"), PAIRS)
def test_programs_of_stage_compile_for_target(name: str, stage: str):
    programs = [*programs_of(stage_of(stage), cut(FULL), target(name))]
    seen: dict[str, dict[str, float]] = {}
    rows = [compiled(program, target(name), seen) for program in programs[:: -(-len(programs) // CHOSEN[stage])]]
    assert {row["text"] for row in different(rows)} == set(seen)
    assert all(0 < program["peak_bytes"] < target(name).usable_bytes for program in seen.values())


@pytest.mark.parametrize("name", TARGETS)
def test_programs_of_stages_that_are_not_chosen_are_those_of_stages_that_are(name: str):
    known = {program.name for stage in CHOSEN for program in programs_of(stage_of(stage), FULL, target(name))}
    for stage in STAGES:
        if stage.name not in (*CHOSEN, *JAXS):
            assert {program.name for program in programs_of(stage, FULL, target(name))} <= known


def test_canonical_programs_without_kernels_are_compiled_with_the_options_of_an_engine_and_others_are_not():
    setting = Setting.of_target(cut(FULL), target("h100"), {"implementation": "reference"})
    own = setting.schedule_fn(setting.size.model)

    def sums(program: Program) -> set[Held]:
        return {*held_products(program.lower(SingleDeviceSharding(device_of(target("h100")))).compile().as_text())}

    canonical = sums(passes.pass_program(setting, setting.size.model, own.with_budget(32, 1)))
    product = sums(kernels.product(setting, 256, "xla"))
    assert len(canonical) == 1
    assert product == canonical
    assert canonical.isdisjoint(sums(passes.pass_program(setting, setting.size.model, own.fast(32))))
    assert canonical.isdisjoint(sums(dataclasses.replace(kernels.product(setting, 256, "xla"), numerics=None)))
