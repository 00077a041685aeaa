"""The formats of quantized matrices that are read: fp8, compressed-tensors, awq, gptq, and the experts of gpt-oss."""

import numpy as np

from detspec.checkpoint.quantized import Format, Group, Shape, StoredPart, Tensors

FLOATS = ("F32", "BF16", "F16")
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # e2m1
# Two numbers for each byte, the first in its low bits, as one of 8 bytes: so they are looked up at once.
FP4_PAIRS = FP4_VALUES[np.stack([np.arange(256) % 16, np.arange(256) // 16], 1)].view(np.uint64)[:, 0]
MX_GROUP = 32
# AWQ packs eight outputs into a word; output i has the bits from 4 * AWQ_ORDER[i] on.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def fp8(block: Group, scale: str = "weight_scale_inv") -> Format:
    """Float8 numbers times a float32 scale for each block, as in DeepSeek's and Qwen's folders; rounded once, at the end.

    AutoFP8 calls the scale `weight_scale`; that is the same number.
    """

    def dequantize(tensors: Tensors, shape: Shape) -> np.ndarray:
        return tensors["weight"].astype(np.float32) * _spread(tensors[scale].astype(np.float32), block, shape)

    parts = {"weight": StoredPart(("F8_E4M3",)), scale: StoredPart((*FLOATS, "F8_E8M0"), block)}
    return Format("fp8", parts, dequantize, {}, ("activation_scale", "input_scale"))


def whole_numbers(dtype: str, group: Group, symmetric: bool) -> Format:
    """Compressed-tensors, int-quantized (I8) and float-quantized (F8_E4M3): a byte a number."""

    def dequantize(tensors: Tensors, shape: Shape) -> np.ndarray:
        zeros = None if symmetric else tensors["weight_zero_point"]
        return _scaled(tensors["weight"], zeros, tensors["weight_scale"], group, shape)

    parts = {"weight": StoredPart((dtype,)), "weight_scale": StoredPart(FLOATS, group)}
    if not symmetric:
        parts["weight_zero_point"] = StoredPart(("I8",), group)
    return Format("compressed-tensors", parts, dequantize, {}, ("input_scale", "input_zero_point"))


def packed(bits: int, group: Group, symmetric: bool) -> Format:
    """Compressed-tensors, pack-quantized: inputs in words of 32 bits, zero points too but along outputs; all plus half."""
    per_word = 32 // bits
    half = 1 << (bits - 1)

    def dequantize(tensors: Tensors, shape: Shape) -> np.ndarray:
        zeros = None if symmetric else _unpack(tensors["weight_zero_point"], bits, axis=0) - half
        return _scaled(_unpack(tensors["weight_packed"], bits, axis=1) - half, zeros, tensors["weight_scale"], group, shape)

    parts = {"weight_packed": StoredPart(("I32",), (1, per_word)), "weight_scale": StoredPart(FLOATS, group)}
    if not symmetric:
        parts["weight_zero_point"] = StoredPart(("I32",), (per_word, group[1]))
    constants = {"weight_shape": lambda shape: np.array(shape)}
    return Format("compressed-tensors", parts, dequantize, constants, ("input_scale", "input_zero_point"))


def mxfp4() -> Format:
    """Compressed-tensors, mxfp4-pack-quantized: two e2m1 numbers a byte, the first in its low bits; 2^(scale - 127) for 32."""

    parts = {"weight_packed": StoredPart(("U8",), (1, 2)), "weight_scale": StoredPart(("U8", "F8_E8M0"), (1, MX_GROUP))}
    return Format("compressed-tensors", parts, _of_fp4, {}, ("input_global_scale",))


def mxfp4_of_experts() -> Format:
    """The experts of gpt-oss: numbers as in `mxfp4`, 16 bytes of a group along an axis of their own; never turned."""
    numbers = StoredPart(("U8",), (1, 2), per_block=MX_GROUP // 2)
    parts = {"_blocks": numbers, "_scales": StoredPart(("U8",), (1, MX_GROUP))}
    return Format("mxfp4", parts, _of_fp4, {}, (), of_experts=True)


def _of_fp4(tensors: Tensors, shape: Shape) -> np.ndarray:
    """Pairs of e2m1 numbers, the first tensor, times powers of two for groups, the second one."""
    packed, exponents = tensors.values()
    numbers = FP4_PAIRS[packed].view(np.float32)[: shape[0], : shape[1]]
    scales = np.ldexp(np.float32(1), exponents.view(np.uint8).astype(np.int32) - 127)
    return numbers * _spread(scales, (1, MX_GROUP), shape)


def awq(group_size: int | None) -> Format:
    """AWQ's gemm layout: eight outputs in a word in an order of its own, zero points likewise."""
    group = (1, group_size)

    def dequantize(tensors: Tensors, shape: Shape) -> np.ndarray:
        zeros = _unpack(tensors["qzeros"], 4, axis=0, order=AWQ_ORDER)
        return _scaled(_unpack(tensors["qweight"], 4, axis=0, order=AWQ_ORDER), zeros, tensors["scales"], group, shape)

    parts = {
        "qweight": StoredPart(("I32",), (8, 1), turned=True),
        "qzeros": StoredPart(("I32",), (8, group_size), turned=True),
        "scales": StoredPart(FLOATS, group, turned=True),
    }
    return Format("awq", parts, dequantize, {}, ())


def gptq(bits: int, group_size: int | None, is_v2: bool) -> Format:
    """GPTQ: inputs in words of 32 bits, zero points along outputs.

    Version 1 stores zero points less one, subtracted from whole words: a zero borrows from its neighbour. Adding one to each
    field of the whole word undoes both.
    """
    group = (1, group_size)
    per_word = 32 // bits
    one_each = np.uint32(0 if is_v2 else sum(1 << shift for shift in range(0, 32, bits)))

    def dequantize(tensors: Tensors, shape: Shape) -> np.ndarray:
        zeros = _unpack(tensors["qzeros"].view(np.uint32) + one_each, bits, axis=0)
        return _scaled(_unpack(tensors["qweight"], bits, axis=1), zeros, tensors["scales"], group, shape)

    parts = {
        "qweight": StoredPart(("I32",), (1, per_word), turned=True),
        "qzeros": StoredPart(("I32",), (per_word, group_size), turned=True),
        "scales": StoredPart(FLOATS, group, turned=True),
    }
    constants = {"g_idx": lambda shape: np.arange(shape[1]) // (group_size or shape[1])}
    return Format("gptq", parts, dequantize, constants, ())


def _scaled(numbers: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray, group: Group, shape: Shape) -> np.ndarray:
    """`(numbers - zeros) * scales`, rounded to the dtype of the scales, which is what the formats' libraries compute in.

    The product of a number of 9 bits and a scale of 11 is exact in float32, so it is rounded once.
    """
    exact = numbers[: shape[0], : shape[1]].astype(np.float32)
    if zeros is not None:
        exact -= _spread(zeros.astype(np.float32), group, shape)
    exact *= _spread(scales.astype(np.float32), group, shape)
    return exact.astype(scales.dtype, copy=False).astype(np.float32, copy=False)


def _spread(values: np.ndarray, group: Group, shape: Shape) -> np.ndarray:
    """Values of groups as values of numbers; where one value is for a whole axis, that axis is left for broadcasting.

    `[[1, 2]]` of groups `(None, 2)` becomes `[[1, 1, 2]]` for a shape `(5, 3)`.
    """
    for axis, unit in enumerate(group):
        if unit is not None and values.shape[axis] > 1:
            values = np.repeat(values, unit, axis=axis)
    return values[: shape[0], : shape[1]]


def _unpack(words: np.ndarray, bits: int, *, axis: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """The unsigned numbers of `bits` bits in each word, side by side along `axis`, as int32; lowest bits first without order.

    `[[0x21, 0x43]]` in bytes of two numbers becomes `[[1, 2, 3, 4]]` along axis 1 and `[[1, 3], [2, 4]]` along axis 0.
    """
    width = 8 * words.itemsize
    fields_in_order = np.arange(width // bits) if order is None else np.array(order)
    unsigned = words.view(f"u{words.itemsize}")
    shifts = (bits * fields_in_order).astype(unsigned.dtype)
    fields = unsigned[:, None, :] >> shifts[:, None] if axis == 0 else unsigned[:, :, None] >> shifts
    numbers = (fields & unsigned.dtype.type((1 << bits) - 1)).astype(np.int32)
    return numbers.reshape(-1, words.shape[1]) if axis == 0 else numbers.reshape(words.shape[0], -1)
