"""Offences are found in small programs, and what looks like them is not taken for one."""

import pytest
from fixed_order import Kernel, Product, kernels, offences, products

REGIONS = """
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%largest (d: f32[], e: f32[]) -> f32[] {
  %d = f32[] parameter(0)
  %e = f32[] parameter(1)
  ROOT %f = f32[] maximum(%d, %e)
}

%count (g: s32[], h: s32[]) -> s32[] {
  %g = s32[] parameter(0)
  %h = s32[] parameter(1)
  ROOT %i = s32[] add(%g, %h)
}

%larger (t: f32[], u: f32[], v: s32[], w: s32[]) -> pred[] {
  %t = f32[] parameter(0)
  %u = f32[] parameter(1)
  ROOT %larger.1 = pred[] compare(%t, %u), direction=GT
}

%larger_or_first (aa: f32[], ab: f32[], ac: s32[], ad: s32[]) -> pred[] {
  %aa = f32[] parameter(0)
  %ab = f32[] parameter(1)
  %ac = s32[] parameter(2)
  %ad = s32[] parameter(3)
  %ae = pred[] compare(%aa, %ab), direction=GT
  %af = pred[] compare(%aa, %ab), direction=EQ
  %ag = pred[] compare(%ac, %ad), direction=LT
  %ah = pred[] and(%af, %ag)
  ROOT %ai = pred[] or(%ae, %ah)
}

%new (j: f32[], k: f32[]) -> f32[] {
  %j = f32[] parameter(0)
  ROOT %k = f32[] parameter(1)
}

%both (l: f32[], m: s32[], n: f32[], o: s32[]) -> (f32[], s32[]) {
  %l = f32[] parameter(0)
  %n = f32[] parameter(2)
  %p = pred[] compare(%l, %n), direction=GT
  %q = f32[] select(%p, %l, %n)
  ROOT %r = (f32[], s32[]) tuple(%q, %m)
}
"""
GIVEN = """
ENTRY %main (x: f32[8,4], w: bf16[4,4]) -> f32[8] {
  %x = f32[8,4]{1,0} parameter(0)
  %w = bf16[4,4]{1,0} parameter(1)
"""
NAMED = ', metadata={op_name="jit(f)/while/body/SCOPE/layer_0/mlp/op" stack_frame_id=1}, backend_config={"kind":"x"}'

CHOICES = {
    "product that XLA may cut": [
        "f32[8,4]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
        "bf16[8,4]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
        "f32[8,4]{1,0} convolution(%x, %w), dim_labels=bf_io->bf",
    ],
    "sum in an order of XLA's": [
        "f32[8]{0} reduce(%x, %zero), dimensions={1}, to_apply=%sum",
        "f32[8,4]{1,0} reduce-window(%x, %zero), window={size=1x4 pad=0_0x3_0}, to_apply=%sum",
        "f32[8,4]{1,0} all-reduce(%x), replica_groups={}, to_apply=%sum",
    ],
    "sum in the order of threads": [
        "f32[8,4]{1,0} scatter(%x, %where, %new), inserted_window_dims={}, index_vector_dim=1, to_apply=%sum"
    ],
    "library: __cublas$lt$matmul": [
        '(f32[8,4]{1,0}, s8[4]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", api_version=API'
    ],
    "library: __cudnn$softmax": ['f32[8,4]{1,0} custom-call(%x), custom_call_target="__cudnn$softmax"'],
    "sort that may swap equals": ["(f32[8]{0}, s32[8]{0}) sort(%y, %i), dimensions={0}, to_apply=%larger"],
    "random numbers of XLA's": ["f32[8]{0} rng(%low, %high), distribution=rng_uniform"],
}
EXACT = [
    "f32[8]{0} reduce(%x, %low), dimensions={1}, to_apply=%largest",
    "s32[8]{0} reduce(%i, %zero), dimensions={1}, to_apply=%count",
    "(f32[8]{0}, s32[8]{0}) reduce(%x, %i, %low, %zero), dimensions={1}, to_apply=%both",
    "s32[8,4]{1,0} dot(%x8, %w8), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
    "s32[8,4]{1,0} scatter(%i, %where, %new), inserted_window_dims={}, index_vector_dim=1, to_apply=%count",
    "f32[8,4]{1,0} scatter(%x, %where, %new), inserted_window_dims={}, index_vector_dim=1, to_apply=%new",
    "f32[8,4]{1,0} scatter(%x, %where, %new), inserted_window_dims={}, unique_indices=true, to_apply=%sum",
    "(f32[8]{0}, s32[8]{0}) sort(%y, %i), dimensions={0}, is_stable=true, to_apply=%larger",
    "(f32[8]{0}, s32[8]{0}) sort(%y, %i), dimensions={0}, to_apply=%larger_or_first",
    "f32[8,4]{1,0} add(%x, %x)",
    "f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%sum",
    'f32[8,4]{1,0} custom-call(%x, %w), custom_call_target="mosaic_gpu_v2"',
]


def program(instruction: str, scope: str = "verify") -> str:
    return f"{REGIONS}{GIVEN}  ROOT %found.1 = {instruction}{NAMED.replace('SCOPE', scope)}\n}}\n"


@pytest.mark.parametrize(("kind", "instruction"), [(kind, each) for kind, found in CHOICES.items() for each in found])
def test_offences_name_an_instruction_whose_result_depends_on_a_choice(kind: str, instruction: str):
    place = "jit(f)/while/body/verify/layer_0/mlp/op"
    assert offences(program(instruction)) == [(kind, "found.1", place)]
    assert offences(program(instruction, scope="draft")) == []


@pytest.mark.parametrize("instruction", EXACT)
def test_offences_leave_out_an_instruction_that_is_exact_or_has_one_order(instruction: str):
    assert offences(program(instruction)) == []


@pytest.mark.parametrize(
    ("operation", "last", "found"),
    [
        ("exponential(%p)", "f32[8]{0} reduce(%q, %low), dimensions={1}, to_apply=%largest", 1),
        ("exponential(%p)", "f32[4,8]{1,0} transpose(%q), dimensions={1,0}", 1),
        ("exponential(%p)", "f32[8,4]{1,0} add(%q, %p)", 0),
        ("multiply(%p, %p)", "f32[8]{0} reduce(%q, %low), dimensions={1}, to_apply=%largest", 0),
    ],
)
def test_offences_are_functions_in_fusions_of_reductions_and_transposes(operation: str, last: str, found: int):
    fused = f"""{REGIONS}
%fused (p: f32[8,4]) -> f32[8] {{
  %p = f32[8,4]{{1,0}} parameter(0)
  %q = f32[8,4]{{1,0}} {operation}
  ROOT %last = {last}
}}
{GIVEN}  ROOT %whole = {last.partition(" ")[0]} fusion(%x), kind=kInput, calls=%fused
}}
"""
    assert offences(fused) == [("function in a fusion that XLA tunes", "whole", "")] * found


def test_offences_are_found_in_fusions_of_a_triton_product():
    fused = f"""{REGIONS}
%gemm_fusion_dot_computation (p: bf16[8,4], q: bf16[4,4]) -> f32[8,4] {{
  %p = bf16[8,4]{{1,0}} parameter(0)
  %q = bf16[4,4]{{1,0}} parameter(1)
  ROOT %dot.1 = f32[8,4]{{1,0}} dot(%p, %q), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
}}
{GIVEN}  ROOT %gemm = f32[8,4]{{1,0}} fusion(%x, %w), kind=kCustom, calls=%gemm_fusion_dot_computation
}}
"""
    assert offences(fused) == [("product that XLA may cut", "dot.1", "")]


def test_kernels_and_products_say_names_layers_and_shapes():
    calls = [
        f'  %mpmd_map.{rows} = f32[{rows},512]{{1,0}} custom-call(%a, %b), custom_call_target="mosaic_gpu_v2", '
        f"operand_layout_constraints={{bf16[{rows},256]{{1,0}}, bf16[512,256]{{1,0}}}}, api_version=API_VERSION_TYPED_FFI, "
        'metadata={op_name="jit(f)/while/body/verify/layer_1/attention/jit(linear_f32)/pinned_linear/mpmd_map"}, '
        'backend_config={kernel_hash = "\\22(", module = "text"}'
        for rows in (64, 128)
    ]
    hlo = GIVEN + "\n".join(calls) + "\n}\n"
    assert kernels(hlo)[0] == Kernel("pinned_linear", "layer_1", 64, ("bf16[512,256]",))
    assert products(kernels(hlo)) == {Product("layer_1", ("bf16[512,256]",)): 2}
    assert kernels(hlo.replace("verify", "draft")) == []
