"""Arithmetic between kernels is the same however it is fused, and another if a rounding is left out."""

from arithmetic import arithmetic

KERNEL = (
    '  ROOT %k = f32[8,4]{1,0} custom-call(%x), custom_call_target="mosaic_gpu_v2", operand_layout_constraints='
    '{bf16[8,4]{1,0}}, metadata={op_name="jit(f)/layer_0/pinned_linear/mpmd_map"}\n}\n'
)
APART = """
ENTRY %main (a: f32[8,4], b: f32[4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[4]{0} parameter(1)
  %wide = f32[8,4]{1,0} broadcast(%b), dimensions={1}
  %sum = f32[8,4]{1,0} add(%a, %wide)
  %short = bf16[8,4]{1,0} convert(%sum)
  %long = f32[8,4]{1,0} convert(%short)
  %twice = f32[8,4]{1,0} multiply(%long, %a)
  %x = bf16[8,4]{1,0} convert(%twice)
"""
FUSED = """
%fused (p: f32[8,4], q: f32[4]) -> (f32[8,4], bf16[8,4]) {
  %p = f32[8,4]{1,0} parameter(0)
  %q = f32[4]{0} parameter(1)
  %wide = f32[8,4]{1,0} broadcast(%q), dimensions={1}
  %sum = f32[8,4]{1,0} add(%wide, %p)
  %short = bf16[8,4]{1,0} convert(%sum)
  ROOT %both = (f32[8,4]{1,0}, bf16[8,4]{1,0}) tuple(%sum, %short)
}

%fused.1 (r: bf16[8,4], s: f32[8,4]) -> bf16[8,4] {
  %r = bf16[8,4]{1,0} parameter(0)
  %s = f32[8,4]{1,0} parameter(1)
  %long = f32[8,4]{1,0} convert(%r)
  %twice = f32[8,4]{1,0} multiply(%long, %s)
  ROOT %last = bf16[8,4]{1,0} convert(%twice)
}

ENTRY %main (a: f32[8,4], b: f32[4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[4]{0} parameter(1)
  %first = (f32[8,4]{1,0}, bf16[8,4]{1,0}) fusion(%a, %b), kind=kLoop, calls=%fused
  %part = bf16[8,4]{1,0} get-tuple-element(%first), index=1
  %x = bf16[8,4]{1,0} fusion(%part, /*index=1*/%a), kind=kLoop, calls=%fused.1
"""


def test_arithmetic_is_the_same_in_one_fusion_in_two_or_in_none():
    apart = arithmetic(APART + KERNEL)
    assert apart == arithmetic(FUSED + KERNEL)
    assert list(apart) == [("pinned_linear", "layer_0")]


def test_arithmetic_is_another_if_a_rounding_is_left_out_or_an_operation_is_another():
    hlo = APART + KERNEL
    others = (hlo.replace("multiply(%long, %a)", "multiply(%sum, %a)"), hlo.replace("multiply(", "subtract("))
    assert len({str(arithmetic(text)) for text in (hlo, *others)}) == 3
    assert arithmetic(hlo.replace("multiply(%long, %a)", "multiply(%a, %long)")) == arithmetic(hlo)
