"""The CPU kernels as a library: where it comes from, what is said if there is none, and bits on narrower processors."""

import ctypes
import dataclasses
import functools
import os
import re
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec import environment
from detspec.cache import Int8Pages
from detspec.environment import fingerprint
from detspec.errors import InputError
from detspec.native import library, processor
from detspec.native.processor import cpu_facts, has_tiles
from detspec.ops.attention.api import paged_attention
from detspec.ops.attention.scores import Scores
from detspec.ops.implementations import begin_kernels
from detspec.ops.linear.int8 import linears_f32, quantize
from detspec.schedule import Numerics

SOURCE = library.source_text()


def test_target_of_a_dtype_without_kernels_is_refused():
    with pytest.raises(InputError, match='"cpu" kernels take float32, bfloat16, float16, int8, int32, got int16'):
        library.target("detspec_linear", jnp.int16)


def test_compiling_without_a_compiler_says_how_to_get_one(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(InputError, match="no C compiler was found: install gcc or clang, or name one"):
        library._compile(SOURCE, library.options_for("F32"))


def test_what_the_compiler_refuses_is_shown():
    with pytest.raises(InputError, match=r"(?s)the CPU kernels do not compile: .* says\n.*no_such_type"):
        library._compile("no_such_type x;", library.options_for("F32"))


def test_library_is_kept_for_the_next_process(monkeypatch, tmp_path):
    monkeypatch.setenv("DETSPEC_COMPILE_CACHE", str(tmp_path / "programs"))
    compiled = []
    monkeypatch.setattr(library, "_compile", lambda source, options: compiled.append(options) or b"code")
    options = library.options_for("BF16")
    assert library._machine_code(SOURCE, options) == library._machine_code(SOURCE, options) == b"code"
    assert len(compiled) == 1
    library._machine_code(SOURCE + " ", options)
    library._machine_code(SOURCE, library.options_for("F32"))
    assert len(compiled) == 3


@pytest.fixture
def fresh(monkeypatch, tmp_path) -> pytest.MonkeyPatch:
    """No unit has been compiled, in this process or another; XLA, which takes a name once, is told of none."""
    monkeypatch.setenv("DETSPEC_COMPILE_CACHE", str(tmp_path / "programs"))
    monkeypatch.setattr(library, "_begun", {})
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, **__: None)
    return monkeypatch


def test_threads_that_ask_at_once_have_a_unit_compiled_once(fresh):
    compiled = []
    compile_fn = library._compile

    def counted(source: str, options: tuple[str, ...]) -> bytes:
        compiled.append(source)
        return compile_fn(source, options)

    fresh.setattr(library, "_compile", counted)
    with ThreadPoolExecutor(4) as threads:
        names = [*threads.map(lambda _: library.target("detspec_take", jnp.float16), range(4))]
    assert len(set(names)) == len(compiled) == 1
    assert library.target("detspec_sum", jnp.float16).removeprefix("detspec_sum") == names[0].removeprefix("detspec_take")
    assert len(compiled) == 1  # a function of the same unit


def test_what_fails_in_the_background_is_said_when_it_is_needed_and_tried_again(fresh):
    fresh.setenv("CC", "no-such-compiler")
    library.begin("detspec_take", jnp.float16)
    for _ in range(2):
        with pytest.raises(InputError, match="no C compiler was found: install gcc or clang, or name one"):
            library.target("detspec_take", jnp.float16)
    fresh.delenv("CC")
    assert library.target("detspec_take", jnp.float16).startswith("detspec_take_F16_")


def test_unit_has_its_own_functions_and_leaves_out_the_others():
    compiled = library._load(library._compile(library.source_text("rows"), library.options_for("F32")))
    found = {function for function in library.UNIT_OF if hasattr(compiled, function)}
    assert found == {function for function, unit in library.UNIT_OF.items() if unit == "rows"}


def test_every_function_of_the_source_is_in_a_unit():
    defined = set(re.findall(r"^XLA_FFI_Error \*(detspec_\w+)\(", SOURCE, re.MULTILINE))
    assert defined == set(library.UNIT_OF)


BEGINS = {
    "floats": (None, None, "pinned", [("detspec_linear", "bfloat16"), ("detspec_attention", "bfloat16")]),
    "int8 weights": ("int8", None, "pinned", [("detspec_int8_linear", "bfloat16"), ("detspec_attention", "bfloat16")]),
    "integers": ("int8", 15, "xla", [("detspec_integer_product", "bfloat16"), ("detspec_attention", "bfloat16")]),
    "products of XLA": (None, None, "xla", [("detspec_attention", "bfloat16")]),
}


@pytest.mark.skipif("not hasattr(os, 'sched_getaffinity') or len(os.sched_getaffinity(0)) < 2", reason="moves a thread")
def test_thread_leaves_a_processor_and_may_run_there_afterwards():
    base = files("detspec.native").joinpath("base.c").read_text(encoding="utf-8")
    source = base + "\nint left_for(int processor) { leave(processor); return this_processor(); }\n"
    left_for = library._load(library._compile(source, library.options_for("F32"))).left_for
    allowed = os.sched_getaffinity(0)
    for number in allowed:
        assert left_for(number) in allowed - {number}
        assert os.sched_getaffinity(0) == allowed


@pytest.mark.parametrize("of", list(BEGINS))
def test_model_begins_the_units_that_its_passes_need(monkeypatch, of):
    weights, activation_bits, linear, expected = BEGINS[of]
    begun = []
    monkeypatch.setattr(library, "begin", lambda *names: begun.append(names))
    cfg = SimpleNamespace(
        weights=weights, dtype="bfloat16", activation_bits=activation_bits, is_integer=activation_bits is not None
    )
    numerics = Numerics(implementation="cpu", linear=linear, cache_dtype="bfloat16")
    begin_kernels(cfg, numerics)
    assert begun == expected
    begin_kernels(cfg, dataclasses.replace(numerics, implementation="reference"))
    assert begun == expected


@pytest.mark.slow
@pytest.mark.skipif(not has_tiles(), reason="needs AMX, and a system and a compiler that know it")
def test_matrix_tiles_are_other_numerics_and_the_fingerprint_names_them(monkeypatch):
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((5, 300), (48, 300)))
    result = [jax.ShapeDtypeStruct((5, 48), jnp.float32)]
    with_tiles, named = fingerprint(), library.target("detspec_linear", jnp.bfloat16)
    [tiled] = jax.jit(jax.ffi.ffi_call(named, result))(x, weight)
    monkeypatch.setattr(environment, "has_tiles", lambda: False)
    assert fingerprint()["instruction_sets"] != with_tiles["instruction_sets"]
    assert fingerprint() | {"instruction_sets": ""} == with_tiles | {"instruction_sets": ""}
    jax.ffi.register_ffi_target(
        "test_widened", jax.ffi.pycapsule(compiled_for("native", "BF16").detspec_linear), platform="cpu"
    )
    [widened] = jax.jit(jax.ffi.ffi_call("test_widened", result))(x, weight)
    assert (np.asarray(tiled) != np.asarray(widened)).any()
    np.testing.assert_allclose(tiled, widened, rtol=0, atol=300 * 2.0**-24)  # another order of sums of numbers of size 1


@pytest.mark.parametrize("lacks", ["_in_compiler", "_granted"])
def test_tiles_that_the_compiler_or_the_system_lacks_are_not_used(monkeypatch, lacks):
    monkeypatch.setattr(processor, lacks, lambda: False)
    assert not processor.has_tiles.__wrapped__()


@functools.cache
def compiled_for(march: str, dtype: str) -> ctypes.CDLL:
    """The kernels for a processor, without instructions that multiply pairs or tiles."""
    own = ("-DDOTS", "-DAMX", "-mamx", "-march")
    options = [option for option in library.options_for(dtype) if not option.startswith(own)]
    return library._load(library._compile(SOURCE, (*options, f"-march={march}")))


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in cpu_facts().get("flags", ""), reason="compiles for AVX2, and runs it")
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_bits_of_processors_that_widen_weights_are_the_same_for_narrow_and_wide_registers(dtype):
    """AVX2 has half of AVX-512's registers, other tiles, and other instructions; SSE has four lanes and no multiply-add."""
    numbers = {"F32": jnp.float32, "BF16": jnp.bfloat16}[dtype]
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal(shape), numbers) for shape in ((233, 300), (211, 300)))
    found = []
    for march in ("native", "haswell", "x86-64-v2"):
        name = f"test_linear_{dtype}_{march}"
        kernel = jax.ffi.pycapsule(compiled_for(march, dtype).detspec_linear)
        jax.ffi.register_ffi_target(name, kernel, platform="cpu")
        for rows in (37, 233):  # as many as are turned, and fewer
            [y] = jax.jit(jax.ffi.ffi_call(name, [jax.ShapeDtypeStruct((rows, 211), jnp.float32)]))(x[:rows], weight)
            found.append(np.asarray(y).view(np.uint32))
    assert all((each == found[1][: len(each)]).all() for each in found)
    assert (
        found[1] != np.asarray(jnp.einsum("ri,oi->ro", x, weight, preferred_element_type=jnp.float32)).view(np.uint32)
    ).any()


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in cpu_facts().get("flags", ""), reason="compiles for AVX2, and runs it")
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_gates_have_the_same_bits_for_narrow_and_wide_registers(dtype):
    numbers = {"F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16}[dtype]
    rng = np.random.default_rng(0)
    gate_f32, up_f32 = (4 * rng.standard_normal((233, 211), np.float32) for _ in range(2))
    x, gate, up = (jnp.asarray(rng.standard_normal((233, 300)) / 8, numbers) for _ in range(3))
    found: dict[tuple[str, int], list[np.ndarray]] = {}
    for march in ("native", "haswell", "x86-64-v2"):
        for function, args, width in (("gate", (gate_f32, up_f32), 211), ("linear", (x, gate, up), 233)):
            name = f"test_{function}_as_gate_{dtype}_{march}"
            kernel = getattr(compiled_for(march, dtype), f"detspec_{function}")
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(kernel), platform="cpu")
            call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((233, width), numbers))
            for activation in (0, 1):
                y = np.asarray(call(*args, activation=np.int32(activation)))
                found.setdefault((function, activation), []).append(y.view(f"u{y.itemsize}"))
    for narrow_and_wide in found.values():
        assert all((each == narrow_and_wide[0]).all() for each in narrow_and_wide)
    assert (found["gate", 0][0] != found["gate", 1][0]).any()


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in cpu_facts().get("flags", ""), reason="compiles for AVX2, and runs it")
@pytest.mark.parametrize("rows", [37, 500])  # those of an expert are turned from 192 on
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_products_with_experts_have_the_bits_of_single_ones_for_narrow_and_wide_registers(dtype, rows):
    numbers = {"F32": jnp.float32, "BF16": jnp.bfloat16}[dtype]
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal(shape), numbers) for shape in ((rows, 300), (4, 43, 300)))
    rounded = quantize(weight)
    ids = rng.random((rows, 5)).argsort(1)[:, :2].astype(np.int32)  # 4 names no expert
    for march in ("native", "haswell", "x86-64-v2"):
        calls = {}
        for function in ("linear", "int8_linear", "experts", "int8_experts"):
            name = f"test_{function}_of_experts_{dtype}_{march}_{rows}"
            kernel = getattr(compiled_for(march, dtype), f"detspec_{function}")
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(kernel), platform="cpu")
            shape = (rows, 2, 43) if "experts" in function else (rows, 43)
            calls[function] = jax.ffi.ffi_call(name, [jax.ShapeDtypeStruct(shape, jnp.float32)])
        for kind, leaves in (("", (weight,)), ("int8_", (rounded.values, rounded.scale))):
            [got] = calls[f"{kind}experts"](x, ids, *leaves)
            each = [calls[f"{kind}linear"](x, *(leaf[expert] for leaf in leaves))[0] for expert in range(4)]
            expected = np.stack([*each, np.zeros((rows, 43), np.float32)])[ids, np.arange(rows)[:, None]]
            assert (np.asarray(got).view(np.uint32) == expected.view(np.uint32)).all()


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in cpu_facts().get("flags", ""), reason="compiles for AVX2, and runs it")
def test_tokens_are_the_same_for_narrow_and_wide_registers():
    rng = np.random.default_rng(0)
    R, V = 500, 3001
    logits = jnp.asarray(3 * rng.standard_normal((R, V)), jnp.float32)
    temperature, min_p = (jnp.asarray(rng.choice(some, R), jnp.float32) for some in ((0, 0.5, 1.0, 2.0), (0, 0, 0.02)))
    top_p, top_k = jnp.asarray(rng.choice((1.0, 0.9, 0.3), R), jnp.float32), jnp.asarray(rng.choice((0, 5, 200), R), jnp.int32)
    seed, position = (jnp.asarray(rng.integers(0, 2**31, R), jnp.int32) for _ in range(2))
    found = []
    for march in ("native", "haswell", "x86-64-v2"):
        name = f"test_draw_{march}"
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(compiled_for(march, "F32").detspec_draw), platform="cpu")
        call = jax.jit(jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((R,), jnp.int32)))
        found.append(np.asarray(call(logits, temperature, top_p, min_p, top_k, seed, position)))
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()
    assert (found[0] != np.asarray(call(logits, temperature, top_p, min_p, top_k, seed + 1, position))).any()


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in cpu_facts().get("flags", ""), reason="compiles for AVX2, and runs it")
def test_products_with_int8_weights_have_the_bits_of_xla_for_narrow_and_wide_registers():
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((37, 300), (211, 300)))
    rounded = quantize(weight)
    [expected] = linears_f32(x, [rounded])
    for march in ("native", "haswell", "x86-64-v2"):
        name = f"test_int8_linear_{march}"
        kernel = jax.ffi.pycapsule(compiled_for(march, "BF16").detspec_int8_linear)
        jax.ffi.register_ffi_target(name, kernel, platform="cpu")
        result = [jax.ShapeDtypeStruct((37, 211), jnp.float32)]
        [y] = jax.jit(jax.ffi.ffi_call(name, result))(x, rounded.values, rounded.scale)
        assert (np.asarray(y).view(np.uint32) == np.asarray(expected).view(np.uint32)).all()


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in cpu_facts().get("flags", ""), reason="compiles for AVX2, and runs it")
def test_attention_over_a_cache_in_int8_has_the_same_bits_for_narrow_and_wide_registers():
    rng = np.random.default_rng(0)
    k, v = (
        Int8Pages(jnp.asarray(rng.integers(-127, 128, shape, np.int8)), jnp.asarray(rng.random((9, 2, 32), np.float32) / 64))
        for shape in ((9, 2, 48, 32), (9, 2, 32, 48))
    )
    q = jnp.asarray(rng.standard_normal((3, 4, 6, 48)), jnp.bfloat16)
    tables = jnp.asarray(1 + rng.permutation(8)[:6].reshape(3, 2), jnp.int32)
    positions = jnp.asarray([[0, 1, 2, 3], [30, 31, 32, 33], [60, 61, 62, 63]], jnp.int32)
    numerics = Numerics(page=32, implementation="cpu", cache_dtype="int8")
    expected = np.asarray(paged_attention(q, k, v, tables, positions, scores=Scores(0.2, cap=5.0), numerics=numerics))
    for march in ("haswell", "x86-64-v2"):
        compiled = compiled_for(march, "F32")
        name = f"test_int8_attention_{march}"
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(compiled.detspec_attention), platform="cpu")
        call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((12, 6, 48), jnp.float32))
        operands = q.reshape(12, 6, 48), k.values, v.values, tables, positions, np.zeros(6, np.float32), k.scale, v.scale
        got = call(*operands, scale=np.float32(0.2), cap=np.float32(5.0), sliding_window=np.int32(2**31 - 1))
        assert np.asarray(got).tobytes() == expected.tobytes()
