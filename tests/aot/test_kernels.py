"""Kernels at the named shapes compile for the targets, and are in the program; `make kernels` compiles all for all."""

import dataclasses
import re

import pytest
from hlo import kernel_calls
from kernel_shapes import WITH_KERNELS, KernelShape, attention_shapes, compile_shape, linear_shapes

from detspec.targets import target

WIDE_AND_ODD = ("qwen3_8b/", "gemma3_1b/")  # the models of the products: whole blocks, and sizes that end within a block
SHAPES: tuple[KernelShape, ...] = (
    *attention_shapes(),
    *(shape for shape in linear_shapes() if shape.name.startswith(WIDE_AND_ODD)),
)


def kind(shape: KernelShape) -> str:
    """The pass of an attention, or the number of rows of a product."""
    return shape.name.rpartition("/")[2]


def dealt() -> list[tuple[str, KernelShape]]:
    """Targets and shapes in pairs: each shape for one TPU and one GPU, each target with a shape of each kind.

    The shapes of a kind and the targets of a platform take turns until all of both have had one. Each kind begins with another
    target, so that none gets one kind of layer alone.
    """
    kinds: dict[str, list[KernelShape]] = {}
    for shape in SHAPES:
        kinds.setdefault(kind(shape), []).append(shape)
    pairs = []
    for platform in ("tpu", "gpu"):
        names = [name for name in WITH_KERNELS if target(name).platform == platform]
        for first, shapes in enumerate(kinds.values()):
            turns = range(max(len(names), len(shapes)))
            pairs += [(names[(first + i) % len(names)], shapes[i % len(shapes)]) for i in turns]
    return pairs


@pytest.mark.parametrize(("name", "shape"), dealt(), ids=lambda value: value if isinstance(value, str) else value.name)
def test_kernel_compiles_for_target(name: str, shape: KernelShape):
    compiled = compile_shape(shape, target(name))
    assert kernel_calls(compiled.program.as_text(), target(name).platform) == 1


@pytest.mark.parametrize("name", [name for name in WITH_KERNELS if target(name).platform == "tpu"])
def test_attention_over_keys_and_values_in_int8_compiles_for_every_tpu(name: str):
    for shape in attention_shapes():
        if shape.name in ("qwen3_8b/alibi/decode1", "gemma3_1b/sliding/16x16"):  # splits and blocks of pages; one KV head
            compiled = compile_shape(dataclasses.replace(shape, cache_dtype="int8"), target(name))
            assert kernel_calls(compiled.program.as_text(), "tpu") == 1


def test_each_shape_is_dealt_to_both_platforms_and_each_layer_and_kind_to_all_targets():
    pairs = dealt()
    assert {(shape.name, target(name).platform) for name, shape in pairs} == {
        (shape.name, platform) for shape in SHAPES for platform in ("tpu", "gpu")
    }
    assert {(name, kind(shape)) for name, shape in pairs} == {(name, kind(shape)) for name in WITH_KERNELS for shape in SHAPES}
    layers = {(name, shape.name.split("/")[1]) for name, shape in pairs}
    assert layers >= {(name, layer) for name in WITH_KERNELS for layer in ("full", "sliding", "alibi")}


def test_shapes_have_names_of_their_own():
    shapes = (*attention_shapes(), *linear_shapes())
    assert len({shape.name for shape in shapes}) == len(shapes)


@pytest.mark.parametrize(
    "name",
    [
        "llama3_1_8b/full/16x16",
        "llama3_1_8b/full/decode32",
        "qwen3_8b/alibi/decode1",
        *(f"gemma2_2b/{layer}/{kind}" for layer in ("full", "sliding") for kind in ("16x16", "1x256", "decode1", "decode32")),
        "gemma3_1b/full/16x16",
    ],
)
def test_attention_for_gpus_spills_no_register(name: str, capfd, monkeypatch):
    """As ptxas says of a table length that is compiled nowhere else: a process keeps what it has compiled."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    (shape,) = (shape for shape in attention_shapes() if shape.name == name)
    compile_shape(dataclasses.replace(shape, max_len=5120), target("h100"))
    assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", capfd.readouterr().out) == [("0", "0")]


@pytest.mark.parametrize(("kind", "most"), [("decode32", 1), ("decode8", 1), ("decode1", 2)])
def test_splits_of_a_sequence_are_added_up_in_few_kernels(kind: str, most: int):
    """Without splits, one kernel moves the results of attention; with 2 it adds them up, too, and with 16 there are two."""
    (shape,) = (shape for shape in attention_shapes() if shape.name == f"gemma2_2b/full/{kind}")
    program = compile_shape(shape, target("h100")).hlo
    _, _, after = program[program.index("ENTRY") :].partition('custom_call_target="mosaic_gpu')
    from_positions = "fused_compare"  # which splits work, worked out once for all layers
    assert sum(" fusion(" in line and from_positions not in line for line in after.splitlines()) == most
