"""Programs that commit tokens on an H100 leave nothing to a library, a tuner or chance, and share their products.

make test-aot ARGS='tests/aot/test_committed.py -m sweep'       # all plans of an engine, for some minutes
"""

import dataclasses
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import compile_proof  # noqa: F401  # finds what stages of scripts/prove_on_device.py are made of
import jax
import jax.numpy as jnp
import pytest
from arithmetic import arithmetic
from compile_depths import shapes, unrolled
from fixed_order import PRODUCT, Kernel, Product, kernels, offences, products
from held_products import held_products
from instructions import instructions
from jax.sharding import SingleDeviceSharding
from prove_stages.programs import engine_programs

from detspec.config import ModelConfig
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Needs, Plan, needed_plans
from detspec.held import HELD
from detspec.model.dense import with_fields
from detspec.presets import preset
from detspec.riders.rider import Rows
from detspec.sampler import likeliest, process_if_asked, reported_logits, sample
from detspec.sampling_params import MAX_LOGPROBS, SamplingParams, sampling_arrays
from detspec.schedule import Schedule
from detspec.state import SamplingArrays
from detspec.target_compilers import compile_for, device_of
from detspec.targets import canonical_schedule, target

H100 = target("h100")
# Narrow, because compiling takes long. The heads are those of Llama 3.1, the width is no power of two, and of two layers the
# last is not the first.
CFG = with_fields(preset("llama3_1_8b"), num_layers=2, d_model=384, d_ff=768, num_heads=4, num_kv_heads=1, vocab_size=512)
# Scores and logits are capped, heads are wide, and norms stand after both halves of a layer.
GEMMA = with_fields(
    preset("gemma2_2b"),
    num_layers=1,
    sliding_layers=(True,),
    d_model=384,
    d_ff=768,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=512,
)
SCHEDULE = canonical_schedule(H100, CFG)  # what an engine takes if none is given
CONFIG = EngineConfig(max_requests=32, max_len=256)
# Passes that read drafts, or one row of each sequence; drafts whose products are the library's.
CHOSEN = ("32x8 ngram[32]", "16x16 self[8]")
FUNCTIONS = {"cosine", "sine", "exponential", "divide", "tanh"}  # their code holds joined products and additions
ENTRY = re.compile(r"\.entry (\w+)\((.*?)^\}", re.DOTALL | re.MULTILINE)
PTX = re.compile(r"\b((fma|mul|add|sub)(?:\.\w+)*\.(?:f32|f16x?2?|bf16x?2?))\b")
ROUNDED_DOWN = {"fma.rm.f32"}  # how an exponential finds its power of two
SPLITS = ((256, 1), (64, 4), (16, 16), (1, 256))


def canonical_plans() -> dict[str, Plan]:
    """All plans by which an engine runs deterministic requests, by label."""
    found = {}
    for processing in (False, True):
        needs = Needs(deterministic=True, ordinary=False, processing=processing)
        plans = needed_plans(CONFIG, SCHEDULE, CONFIG.max_requests + 1, needs)
        found |= {plan.label: plan for plan in plans if not plan.ordinary}
    return found


PLANS = canonical_plans()
OTHERS = [label for label in PLANS if label not in CHOSEN]


def engine_texts(*labels: str, only: str = "") -> list[str]:
    """Optimised HLO of the replays, of prefill and of the steps by the plans `labels`, or of those whose name has `only`."""
    config = dataclasses.replace(CONFIG, schedule=SCHEDULE)
    programs = engine_programs(CFG, config, [PLANS[label] for label in labels], name="engine")
    # The first plan's program comes first, then the replays and prefill.
    readers = ("read_sequences", "prefill_sequences")
    ordered = sorted(programs, key=lambda program: not program.name.endswith(readers))
    placed = SingleDeviceSharding(device_of(H100))
    return [program.lower(placed).compile().as_text() for program in ordered if only in program.name]


def compiled_pass(groups: int, window: int, schedule: Schedule = SCHEDULE, cfg: ModelConfig = CFG, **options: Any) -> str:
    """Optimised HLO of one layer's pass, its logits included, cut into windows; `options` are the compiler's."""
    cfg = with_fields(cfg, num_layers=1)
    schedule = schedule.with_budget(groups * window, window)
    placed = SingleDeviceSharding(device_of(H100))
    args = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), shapes(cfg, schedule, "unrolled")
    )
    lowered = jax.jit(partial(unrolled, cfg, schedule), donate_argnums=(2,)).lower(*args)
    return lowered.compile(compiler_options=options).as_text()


def of_one_pass(found: list[Kernel]) -> Counter[Product]:
    """How often each product is in one pass of a program; each pass but those of prefill works out logits once."""
    counted = products(found)
    passes = sum(number for product, number in counted.items() if not product.layer)
    assert not any(number % max(passes, 1) for number in counted.values())
    return Counter({product: number // max(passes, 1) for product, number in counted.items()})


@pytest.mark.slow
def test_programs_of_an_engine_leave_no_choice_and_have_the_same_products():
    replays, prefill, *others = texts = engine_texts(*CHOSEN)
    assert [offences(text) for text in texts] == [[]] * len(texts)
    expected = of_one_pass(kernels(replays))
    assert [of_one_pass(kernels(text)) for text in others if kernels(text)] == [expected] * len(CHOSEN)
    # Prefill needs only the keys and values of the last layer.
    read = of_one_pass(kernels(prefill))
    assert read <= expected
    assert {product for product in expected - read if product.layer == "layer_0"} == set()
    assert {product.layer for product in expected - read} == {"layer_1", ""}
    # What XLA works out between the kernels, however it fuses; logits may be worked out in a branch of their own.
    between = {kernel: found for kernel, found in arithmetic(replays).items() if kernel[1]}
    assert len(between) == 2 * CFG.num_layers
    for text in others:
        assert {kernel: found for kernel, found in arithmetic(text).items() if kernel[1]} == (between if kernels(text) else {})
    assert all(found <= between[kernel] for kernel, found in arithmetic(prefill).items())


@pytest.mark.sweep
@pytest.mark.parametrize("label", OTHERS)
def test_program_of_plan_leaves_no_choice(label: str):
    assert [offences(text) for text in engine_texts(label, only="run_segment")] == [[]]


def test_sampling_with_all_parameters_leaves_no_choice():
    """Filters, penalties and biases, the distributions that log-probabilities are reported of, and the likeliest tokens."""

    def program(logits: jax.Array, position: jax.Array, rows: SamplingArrays, texts: jax.Array) -> Any:
        process_fn = partial(process_if_asked, (), Rows(rows, position, lambda: texts))
        reported = reported_logits(logits, position, rows, process_fn)
        chosen = sample(logits, position, rows, process_fn, numerics=SCHEDULE.numerics)
        return chosen, reported, likeliest(reported, MAX_LOGPROBS)

    rows = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, sampling_arrays([SamplingParams()] * 8)))
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((8,), (8, 64))]
    hlo = compile_for(H100, program, jax.ShapeDtypeStruct((8, 4096), jnp.float32), integers[0], rows, integers[1]).hlo
    assert offences(hlo) == []
    assert "exponential(" in hlo


@pytest.mark.slow
def test_splits_of_equal_rows_run_the_same_products_and_arithmetic():
    texts = [compiled_pass(*split) for split in SPLITS]
    each = [[kernel for kernel in kernels(text) if kernel.name == PRODUCT] for text in texts]
    assert [Counter(found) for found in each] == [Counter(each[0])] * len(SPLITS)
    assert len(each[0]) == 5
    assert [arithmetic(text) for text in texts] == [arithmetic(texts[0])] * len(SPLITS)


@pytest.mark.parametrize("cfg", [CFG, GEMMA], ids=["llama", "gemma"])
def test_no_product_is_joined_with_an_addition_which_would_leave_out_its_rounding(cfg: ModelConfig, tmp_path: Path):
    """Whether a compiler does so depends on what is fused, and the assembler may where code does not say how it rounds."""
    schedule = canonical_schedule(H100, cfg)
    every = list(instructions(compiled_pass(16, 16, schedule, cfg, xla_dump_to=str(tmp_path), xla_dump_emitter_re=".*")))
    code = "".join(path.read_text() for path in tmp_path.glob("*.ptx"))
    found = {entry[0]: PTX.findall(entry[1]) for entry in ENTRY.findall(code)}
    written = {instruction for each in found.values() for instruction, _ in each}
    assert {instruction for instruction in written - ROUNDED_DOWN if ".rn" not in instruction} == set()
    counts = {name: Counter(operation for _, operation in each) for name, each in found.items()}
    opcodes = {
        name: {other.opcode for other in every if other.computation == each.called[0]}
        for each in every
        if each.opcode == "fusion" and (name := each.name.replace(".", "_")) in counts  # equal fusions share one kernel
    }
    assert set(opcodes) == set(counts)
    assert sum(counts[name]["fma"] for name, used in opcodes.items() if used & FUNCTIONS) > 0
    plain = [counts[name] for name, used in opcodes.items() if not used & FUNCTIONS]
    assert sum(bool(each["mul"] and each["add"] + each["sub"]) for each in plain) >= 4  # three rotate, one sums squares
    assert sum(each["fma"] for each in plain) == 0


def test_instructions_are_found_whatever_they_say_of_rounding_and_dtype():
    code = "fma.rn.f32 add.f32 mul.ftz.f32 sub.rn.bf16x2 fma.rn.relu.f16 mul.wide.u32 add.s64 fma.rn.f64 add.rn.f16x2"
    assert [found for found, _ in PTX.findall(code)] == [
        each for each in code.split() if not each.endswith(("u32", "s64", "f64"))
    ]


def test_pass_with_products_of_xla_does_leave_choices_which_options_hold_still():
    schedule = SCHEDULE.with_numerics(linear="xla")
    hlo = compiled_pass(16, 16, schedule)
    assert {"product that XLA may cut", "sum in an order of XLA's"} <= {offence.kind for offence in offences(hlo)}
    assert products(kernels(hlo)) == Counter()
    held = compiled_pass(16, 16, schedule, **HELD)
    assert {offence.kind for offence in offences(held)} == {"product that XLA may cut"}
    assert {(each.is_cut, each.block) for each in held_products(held)} == {(False, 64)}
