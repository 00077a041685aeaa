"""Texts audited by audit.c, both arithmetics of integers in C, or by spec.py; nothing here is of jax.

weights, sizes = spec_model(model.cfg, model.params)
text = AuditedText([5, 17, 9], temperature=0.8, seed=7)
write_model(folder / "model", weights, sizes)
[by_c] = audited_by_c([compile_audit(folder)], folder / "model", [text])
assert sha256_of(by_c) == sha256_of(audited_by_spec(weights, sizes, text))
"""

import hashlib
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from detspec.errors import InputError
from detspec.integer import spec
from detspec.integer.spec import INVERSE_ROOTS, LIMIT, LOGS, SINES, SMALLEST, IntMatrix, Scale, Sizes, Text, Wishes
from detspec.native.processor import NO_COMPILER, find_compiler

MAGIC = {15: 0x31544E49, 8: 0x38544E49}  # "INT1" and "INT8", by the bits of activations
LEFT_RANGE = -(2**31)  # a log-probability or choice where numbers have left their range
MODES = ("raw", "processed", "tempered")  # audit.c numbers them so
ACTIVATIONS = ("silu", "gelu_tanh")  # and these
BLOCK = 256  # tokens that spec.py reads at once: it holds several numbers for each token of the vocabulary
OPTIONS = ("-std=c99", "-O2")


class AuditedText(NamedTuple):
    """Tokens and how those after the prompt were chosen and reported; fields as of `detspec.SamplingParams`."""

    tokens: Sequence[int]
    prompt_len: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Sequence[tuple[int, float]] = ()  # no token twice
    stop_ids: Sequence[int] = ()  # all tokens that end the text, those of the model, too
    min_tokens: int = 0
    logprobs_mode: str = "raw"
    num_likeliest: int = 0  # `k`: how many of the likeliest tokens are reported at each position


class AuditFound(NamedTuple):
    """Findings about the `T - 1` tokens of a text after its first, int32.

    Log-probabilities have 16 fraction bits: raw in the prompt, after it as `logprobs_mode` says.
    """

    logprobs: np.ndarray  # [T - 1], or LEFT_RANGE
    chosen: np.ndarray  # [T - 1], the token that the text's parameters choose there, or LEFT_RANGE
    logits: np.ndarray  # [T - 1, V] of the model, 16 fraction bits
    likeliest: np.ndarray  # [T - 1, k], tokens of what is reported
    likeliest_logprobs: np.ndarray  # [T - 1, k], or LEFT_RANGE


def sha256_of(*found: AuditFound) -> str:
    """SHA-256 of all numbers found, as bytes that are the same on all machines."""
    digest = hashlib.sha256()
    for one in found:
        for numbers in one:
            digest.update(numbers.astype("<i4").tobytes())
    return digest.hexdigest()


def audited_by_spec(weights: dict[str, Any], sizes: Sizes, text: AuditedText) -> AuditFound:
    """Audits a text by spec.py, `BLOCK` tokens at once."""
    reader = Text(weights, sizes)
    read = text.tokens[:-1]
    parts = []
    for first in range(0, len(read), BLOCK):
        logits = reader.read(read[first : first + BLOCK])
        parts.append(audited_logits(logits, first + 1 + np.arange(len(logits)), as_given(text)))
    return AuditFound(*(np.concatenate(each).astype(np.int32) for each in zip(*parts, strict=True)))


def as_given(text: AuditedText) -> AuditedText:
    """`text` with its parameters as float32, see spec.py."""

    def rounded(x: float) -> float:
        return float(np.float32(x)) if abs(np.float32(x)) >= SMALLEST else 0.0

    floats: dict[str, Any] = {name: rounded(value) for name, value in text._asdict().items() if isinstance(value, float)}
    if text.temperature > 0:
        floats["temperature"] = max(floats["temperature"], SMALLEST)
    bias = [(token, rounded(value)) for token, value in text.logit_bias]
    return text._replace(**floats, logit_bias=bias)


def audited_logits(logits: np.ndarray, position: np.ndarray, text: AuditedText) -> AuditFound:
    """Findings about the tokens at `position [R]`, from the `logits [R, V]` before them."""
    R, V = logits.shape
    tokens = np.asarray(text.tokens)

    def each(x: float, dtype: Any = np.float32) -> np.ndarray:
        return np.full(R, x, dtype)

    asked = Wishes(each(text.temperature), each(text.top_k, int), each(text.top_p), each(text.min_p), each(text.seed, int))
    bias = np.asarray(text.logit_bias, np.float64).reshape(-1, 2)
    found = spec.biased(logits, bias[:, 0].astype(int), bias[:, 1].astype(np.float32))
    found = spec.banned(found, position, np.asarray(text.stop_ids, int), text.prompt_len + text.min_tokens)
    penalties = (text.repetition_penalty, text.frequency_penalty, text.presence_penalty)
    if penalties != (1, 0, 0):  # which change nothing
        seen = spec.counted(tokens, 0, position, V) > 0
        count = spec.counted(tokens, text.prompt_len, position, V)
        found = spec.penalised(found, seen, count, *map(each, penalties))

    is_new = (position >= text.prompt_len)[:, None]
    reported = np.where(is_new, spec.reported(logits, found, asked, text.logprobs_mode), logits)
    likeliest = spec.likeliest(reported, text.num_likeliest) if text.num_likeliest else np.zeros((R, 0), np.int64)
    lost = logits.max(-1) >= LIMIT
    return AuditFound(
        logprobs=np.where(lost, LEFT_RANGE, spec.logprobs(reported, tokens[position])),
        chosen=np.where(lost, LEFT_RANGE, spec.chosen(found, position, asked)),
        logits=logits,
        likeliest=likeliest,
        likeliest_logprobs=np.where(lost[:, None], LEFT_RANGE, spec.logprobs(reported, likeliest)),
    )


def compile_audit(folder: Path, command: Sequence[str] | None = None, options: Sequence[str] = OPTIONS) -> Path:
    """The program made of audit.c, in `folder`, by the compiler `command`, or else by the system's.

    Raises `InputError` if there is no compiler or it fails.
    """
    if command is None:
        compiler = find_compiler()
        if compiler is None:
            raise InputError(f"audit.c is compiled here, and {NO_COMPILER}")
        command = [compiler]
    program = folder / "audit"
    with as_file(files("detspec.integer").joinpath("audit.c")) as source:
        _run([*command, *options, "-o", program, source])
    return program


def audited_by_c(command: Sequence[Any], model: Path, texts: Sequence[AuditedText]) -> list[AuditFound]:
    """Audits `texts` of the model in the file `model` by the program `command`, which is made of audit.c.

    Raises `InputError` if the program fails.
    """
    with tempfile.TemporaryDirectory() as name:
        requests, results, logits = (Path(name) / part for part in ("requests", "results", "logits"))
        with requests.open("wb") as file:
            write_requests(file, texts)
        _run([*command, model, requests, results, logits])
        numbers = np.fromfile(results, "<i4")
        of_logits = np.fromfile(logits, "<i4")
    lengths = [len(text.tokens) - 1 for text in texts]
    of_each = np.split(numbers, np.cumsum([n * (2 + 2 * text.num_likeliest) for n, text in zip(lengths, texts, strict=True)]))
    logits_of_each = np.split(of_logits.reshape(sum(lengths), len(of_logits) // max(1, sum(lengths))), np.cumsum(lengths))
    found = []
    for n, rows, own in zip(lengths, of_each, logits_of_each, strict=False):  # the last part is empty
        columns = rows.reshape(n, len(rows) // max(1, n))
        found.append(AuditFound(columns[:, 0], columns[:, 1], own, columns[:, 2::2], columns[:, 3::2]))
    return found


def _run(command: Sequence[Any]) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"{command[0]} failed with exit code {done.returncode} and says\n{done.stderr}")


def write_requests(file: BinaryIO, texts: Sequence[AuditedText]) -> None:
    """Writes `texts`; numbers that requests give as float32 are written as their bits."""
    _words(file, len(texts), max((len(text.tokens) for text in texts), default=1))
    for text in map(as_given, texts):
        _words(file, _bits(text.temperature), text.top_k, _bits(text.top_p), _bits(text.min_p), text.seed % 2**32)
        _words(file, *map(_bits, (text.repetition_penalty, text.frequency_penalty, text.presence_penalty)))
        _words(file, len(text.logit_bias), *(word for token, bias in text.logit_bias for word in (token, _bits(bias))))
        _words(file, text.min_tokens, len(text.stop_ids), *text.stop_ids)
        _words(file, MODES.index(text.logprobs_mode), text.num_likeliest)
        _words(file, text.prompt_len, len(text.tokens), *text.tokens)


def write_model(path: Path, weights: Mapping[str, Any], sizes: Sizes) -> None:
    """Writes a model as `detspec.integer.spec.Text` takes it."""
    layers = weights["layers"]
    vocabulary, width = weights["embed"].shape
    of_head = len(layers[0]["q"].values) // sizes.num_heads
    inner = {len(layer["gate"].values) for layer in layers}
    if len(inner) > 1:
        raise InputError(f"audit.c takes models whose MLPs have one width, got {sorted(inner)}")
    with path.open("wb") as file:
        _words(file, MAGIC[sizes.activation_bits], len(layers), width, *inner)
        _words(file, sizes.num_heads, sizes.num_kv_heads, of_head, vocabulary)
        _words(file, sizes.score_mantissa, sizes.score_exponent, sizes.epsilon)
        q_norm = layers[0].get("q_norm")
        _words(file, ACTIVATIONS.index(sizes.activation), q_norm is None or len(q_norm.values) == of_head)
        for cap in (sizes.score_cap, sizes.logit_cap):
            _words(file, *(cap or (0, 0, 0)))
        for table in (SINES, LOGS, INVERSE_ROOTS, weights["embed"]):
            _array(file, table)
        for layer, window, steps in zip(layers, sizes.windows, sizes.steps, strict=True):
            _words(file, window or 0, *(half for step in steps for half in (step >> 16, step & 0xFFFF)))
            _scale(file, layer.get("attn_norm"))
            for name in ("q", "k"):
                _matrix(file, layer[name])
                _array(file, layer.get(f"{name}_bias"))
                _scale(file, layer.get(f"{name}_norm"))
            _matrix(file, layer["v"])
            _array(file, layer.get("v_bias"))
            _matrix(file, layer["o"])
            for name in ("attn_post_norm", "mlp_post_norm", "mlp_norm"):
                _scale(file, layer.get(name))
            for name in ("gate", "up", "down"):
                _matrix(file, layer[name])
        _scale(file, weights["final_norm"])
        _matrix(file, weights["head"])


def _words(file: BinaryIO, *numbers: int) -> None:
    file.write(b"".join((int(number) % 2**32).to_bytes(4, "little") for number in numbers))


def _array(file: BinaryIO, numbers: Any) -> None:
    """Writes an array after its length; length 0 where there is none."""
    flat = np.zeros(0) if numbers is None else np.asarray(numbers).reshape(-1)
    _words(file, flat.size)
    file.write(flat.astype("<i4").tobytes())


def _matrix(file: BinaryIO, matrix: IntMatrix) -> None:
    file.write(np.asarray(matrix.values, np.int8).tobytes())
    _array(file, matrix.mantissa)
    _array(file, matrix.exponent)


def _scale(file: BinaryIO, scale: Scale | None) -> None:
    _array(file, scale and np.append(scale.values, scale.exponent))


def _bits(x: float) -> int:
    return int(np.float32(x).view(np.uint32))
