"""audit.c gives the bits of spec.py: logits, log-probabilities and choices, for made-up models and for the shipped one."""

import functools
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import detspec as ds
from detspec.errors import InputError
from detspec.integer import audit
from detspec.integer.audit import LEFT_RANGE, AuditedText, AuditFound, audited_by_c, audited_by_spec, compile_audit, write_model
from detspec.integer.spec import LIMIT, IntMatrix, Scale, Sizes, SoftCap
from detspec.model.to_integer import spec_model
from detspec.native.processor import find_compiler

D, H, F, V, L = 40, 12, 56, 96, 3
SHAPES: dict[str, dict[str, Any]] = {
    "heads of their own": {},
    "grouped heads": {"heads": (6, 2)},
    "biases": {"heads": (2, 1), "bias": True},
    "norms of queries and keys": {"heads": (4, 2), "qk_norm": True},
    "sliding windows": {"windows": (4, None, 1)},
    "activations of 8 bits": {"heads": (6, 2), "bits": 8},
    "8 bits, and all else": {"heads": (4, 2), "bias": True, "qk_norm": True, "windows": (None, 6, 3), "bits": 8, "huge": 7},
    "gelu, and norms after alone": {"after": True, "before": False, "activation": "gelu_tanh", "qk_norm": True},
    "norms after and of all heads": {"heads": (4, 2), "after": True, "qk_norm": True, "wide": True, "huge": 7},
    "8 bits, gelu, norms of all heads": {
        "heads": (4, 2),
        "after": True,
        "activation": "gelu_tanh",
        "qk_norm": True,
        "wide": True,
        "bits": 8,
    },
    "soft caps": {"heads": (4, 2), "caps": (SoftCap(3 << 16, 31_000, -15), SoftCap(5 << 16, 18_911, -15)), "huge": 7},
    "8 bits, norms after alone": {"after": True, "before": False, "bits": 8, "windows": (4, None, 1)},
    "all, and equal logits": {"heads": (4, 2), "bias": True, "qk_norm": True, "windows": (None, 6, 3), "twins": True},
    "numbers that leave their range": {"windows": (3, 2, 2), "huge": 7},
}
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.3, "top_k": 5, "seed": -1},
    {"temperature": 1.0, "top_p": 0.7, "seed": 2**40 + 3},
    {"temperature": 2.5, "min_p": 0.05, "seed": 11},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 12},
    {"temperature": 1e-30, "top_p": 1e-6, "seed": 13},
    {"temperature": 1e6, "top_k": 95, "top_p": 0.9999999, "seed": 14},
    {"repetition_penalty": 1.2, "frequency_penalty": -1.5, "presence_penalty": -0.9},
    {"temperature": 0.9, "repetition_penalty": 0.7, "frequency_penalty": 1.1, "presence_penalty": 1.5, "seed": 15},
    {"temperature": 0.9, "seed": 16, "logit_bias": ((3, 1.5), (7, 100.0), (40, -100.0), (90, 1e-5)), "num_likeliest": 3},
    {"min_tokens": 7, "stop_ids": tuple(range(0, 96, 2)), "logprobs_mode": "processed", "num_likeliest": 2},
    {"temperature": 0.7, "seed": 17, "logprobs_mode": "tempered", "num_likeliest": 20},
    {"temperature": 1.0, "seed": 18, "logprobs_mode": "tempered"},
    {"temperature": 1.4, "seed": 19, "top_k": 9, "logprobs_mode": "processed", "num_likeliest": 12},
    {
        "temperature": 0.8,
        "seed": 20,
        "top_p": 0.8,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "logit_bias": ((5, 2.0), (6, -3.0)),
        "min_tokens": 3,
        "stop_ids": (5, 11, 12),
        "logprobs_mode": "processed",
        "num_likeliest": 96,
    },
    {"temperature": 1e-40, "seed": 21, "min_p": 1e-40, "presence_penalty": -1e-40, "logprobs_mode": "processed"},
)
# Each is found by logits, log-probabilities or choices of `SHAPES`.
FAULTS = (
    ("LOG2_E = 23637", "LOG2_E = 23638"),
    ("LN_2 = 22713", "LN_2 = 22714"),
    ("BEND = 48408812", "BEND = 0"),
    ("1743, 224", "1743, 225"),
    ("LIMIT = (1 << 30) - 1", "LIMIT = (1 << 30) - 2"),
    ("a + raised(1, r - 1)", "a + raised(1, r - 1) - 1"),  # halves are rounded down
    ("16513", "16512"),
    ("window <= position", "window < position"),
    ("{13, 15,", "{13, 14,"),
    ("likelier = so_far", "likelier += 0"),
    ("by > best", "by >= best"),  # the last of equals
    ("t > asked.prompt", "t >= asked.prompt"),
    ("t < asked.prompt", "t <= asked.prompt"),
    ("held(given, added(given, fixed", "held(given, added(given, -fixed"),
    ("asked->prompt + asked->min_tokens", "asked->prompt + asked->min_tokens + 1"),
    ("a[i] == a[last] && i > last", "a[i] == a[last] && i > last + 1"),  # of equals, every other one
    ("below[i] < least ? -LIMIT", "below[i] <= least ? -LIMIT"),
    ("asked->mode == PROCESSED", "asked->mode == TEMPERED"),
    ("asked->mode == TEMPERED &&", "asked->mode == PROCESSED &&"),
)
# Each is found by one of `SHAPES` of further families.
FAULTS_OF_FAMILIES = (
    ("GELU_1 = 18860", "GELU_1 = 18861"),
    ("GELU_3 = 13493", "GELU_3 = 13494"),
    ("GELU_MOST = 5 << 16", "GELU_MOST = 3 << 16"),
    ("-(a.exponent + 16));", "-(a.exponent + 15));"),
    ("if (in_8_bits) hadamard(row, D);", ""),
    ("if (!norm || norms_heads) return NULL;", "return NULL;"),
    ("score_cap = soft_cap(), logit_cap = soft_cap()", "logit_cap = soft_cap(), score_cap = soft_cap()"),
    ("score[t] = soft_capped(score[t], score_cap);", ""),
    ("logits[i] = soft_capped(logits[i], logit_cap);", "continue;"),
    ("|| size_of(a) >= LIMIT) return a;", ") return a;"),
    ("raised((1 << 15) - p, 15)", "raised((1 << 15) - p - 1, 15)"),
)
# Each is found by the same of `SHAPES` with activations of 8 bits.
FAULTS_OF_8_BITS = (
    ("dropped = in_8_bits ? 0", "dropped = in_8_bits ? 1"),
    ("a[i + size] = first - second", "a[i + size] = second - first"),
    ("MAX_BLOCK = 1 << 15", "MAX_BLOCK = 1 << 2"),
    ("if (in_8_bits) hadamard(a.values", "if (!in_8_bits) hadamard(a.values"),
)
STRICT = ("-Wall", "-Wextra", "-Werror", "-pedantic")
SANITIZED = ("-fsanitize=undefined", "-fno-sanitize-recover=all")
pytestmark = pytest.mark.usefixtures("cpu_kernels")


class Case(NamedTuple):
    model: tuple[dict[str, Any], Sizes]
    texts: list[AuditedText]
    expected: list[list[Any]]  # `plain` findings of spec.py


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_audit(tmp_path_factory.mktemp("audit"))


@functools.cache
def case_of(shape: str) -> Case:
    return case_with(made_up(**SHAPES[shape]), texts_of(V, 15, ASKED))


def case_with(model: tuple[dict[str, Any], Sizes], texts: list[AuditedText]) -> Case:
    return Case(model, texts, [plain(audited_by_spec(*model, text)) for text in texts])


def made_up(
    heads=(4, 4), bias=False, qk_norm=False, windows=(None,) * L, twins=False, huge=None, bits=15, **norms
) -> tuple[dict[str, Any], Sizes]:
    """A model of random numbers whose head is not its embeddings.

    With `twins`, tokens `i` and `i + V / 2` have equal logits. The token `huge` adds numbers near the limit to the stream.
    `norms` says whether there are some `before` and `after` parts and over `wide` heads, and which `activation` and soft `caps`
    there are.
    """
    rng = np.random.default_rng(1)
    N, K = heads

    def matrix(m: int, n: int) -> IntMatrix:
        values = np.clip(np.rint(rng.standard_t(3, (m, n)) * 40), -127, 127).astype(np.int8)
        return IntMatrix(values, rng.integers(2**14, 2**15 + 1, m), rng.integers(-24, -21, m))

    def scale(n: int) -> Scale:
        return Scale(rng.integers(-(2**14), 2**14 + 1, n), np.int64(-11))

    def layer() -> dict[str, Any]:
        found: dict[str, Any] = {"o": matrix(D, N * H)}
        found |= {name: scale(D) for name in ("attn_norm", "mlp_norm") if norms.get("before", True)}
        found |= {name: scale(D) for name in ("attn_post_norm", "mlp_post_norm") if norms.get("after")}
        found |= {"gate": matrix(F, D), "up": matrix(F, D), "down": matrix(D, F)}
        for name, number in (("q", N), ("k", K), ("v", K)):
            found[name] = matrix(number * H, D)
            if bias:
                found[f"{name}_bias"] = rng.integers(-(2**17), 2**17, number * H)
        own = (N * H, K * H) if norms.get("wide") else (H, H)
        return found | ({"q_norm": scale(own[0]), "k_norm": scale(own[1])} if qk_norm else {})

    weights = {"layers": [layer() for _ in range(L)], "final_norm": scale(D), "head": matrix(V, D)}
    weights["embed"] = rng.integers(-(2**17), 2**17, (V, D))
    if twins:
        weights["head"] = IntMatrix(*(np.concatenate([part[: V // 2]] * 2) for part in weights["head"]))
    if huge is not None:
        weights["embed"][huge] = rng.choice([-1, 1], D) * (LIMIT - 1)
    steps = tuple(tuple(map(int, rng.integers(0, 2**46, H // 2))) for _ in range(L))
    return weights, Sizes(
        N, K, 27_000, -16, 42_950, steps, windows, bits, norms.get("activation", "silu"), *norms.get("caps", ())
    )


def texts_of(vocab_size: int, length: int, asked: Sequence[dict[str, Any]]) -> list[AuditedText]:
    """Texts of few different tokens, so that penalties count to more than 1; token 7 stands at position 5."""
    rng = np.random.default_rng(length)
    found = []
    for one in asked:
        tokens = rng.choice(np.setdiff1d(rng.integers(0, vocab_size, 9), [7]), length)
        tokens[5] = 7
        found.append(AuditedText(tokens.tolist(), prompt_len=4, **one))
    return found


def by_c(program: Path, folder: Path, model: tuple[dict[str, Any], Sizes], texts: list[AuditedText]) -> list[list[Any]]:
    """Findings of the program about each of `texts`."""
    write_model(folder / "model", *model)
    return [plain(found) for found in audited_by_c([program], folder / "model", texts)]


def plain(found: AuditFound) -> list[Any]:
    """All that was found, and SHA-256 of the logits."""
    rest = (found.logprobs, found.chosen, found.likeliest, found.likeliest_logprobs)
    return [*(numbers.tolist() for numbers in rest), hashlib.sha256(found.logits.tobytes()).hexdigest()]


def changed(folder: Path, old: str, new: str) -> Path:
    """The program with a change of its source."""
    source = Path(audit.__file__).with_name("audit.c").read_text(encoding="utf-8")
    assert source.count(old) == 1
    (folder / "changed.c").write_text(source.replace(old, new), encoding="utf-8")
    subprocess.run([find_compiler(), "-std=c99", "-o", folder / "changed", folder / "changed.c"], check=True)
    return folder / "changed"


@pytest.mark.parametrize("shape", SHAPES)
def test_made_up_models_have_the_bits_of_the_definition(shape, program, tmp_path):
    model, texts, expected = case_of(shape)
    assert by_c(program, tmp_path, model, texts) == expected


def test_a_text_leaves_its_range_and_comes_back_where_no_window_reaches():
    for logprobs, chosen, likeliest, likeliest_logprobs, _ in case_of("numbers that leave their range").expected:
        lost = [x == LEFT_RANGE for x in logprobs]
        assert lost == [x == LEFT_RANGE for x in chosen]
        assert [[x == LEFT_RANGE for x in row] for row in likeliest_logprobs] == [
            [is_lost] * len(row) for is_lost, row in zip(lost, likeliest, strict=True)
        ]
        # Token 7 stands at position 5. Windows of 3, 2 and 2 positions reach 4 positions back, of which the last two layers
        # hold what has left its range.
        assert lost == [5 <= place <= 7 for place in range(len(lost))]


@pytest.mark.parametrize("weights", ["integer", "integer8"])
def test_shipped_model_has_the_bits_of_the_definition(weights, program, tmp_path):
    model = ds.load(weights=weights)
    texts = texts_of(model.cfg.vocab_size, 7, ASKED[5:6] + ASKED[8:11] + ASKED[-2:-1])
    case = case_with(spec_model(model.cfg, model.params), texts)
    assert by_c(program, tmp_path, case.model, texts) == case.expected


def test_control_a_weight_that_differs_is_found(program, tmp_path):
    (weights, sizes), texts, expected = case_of("grouped heads")
    values = weights["layers"][1]["down"].values.copy()
    values[3, 5] ^= 1
    layers = [dict(layer) for layer in weights["layers"]]
    layers[1]["down"] = layers[1]["down"]._replace(values=values)
    found = by_c(program, tmp_path, ({**weights, "layers": layers}, sizes), texts)
    assert all(one[-1] != other[-1] for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(("old", "new"), FAULTS)
def test_control_a_program_that_differs_is_found(old, new, tmp_path):
    faulty = changed(tmp_path, old, new)
    cases = [case_of(shape) for shape in list(SHAPES)[-2:]]
    assert [by_c(faulty, tmp_path, case.model, case.texts) == case.expected for case in cases] != [True, True]


@pytest.mark.parametrize(("old", "new"), FAULTS_OF_8_BITS)
def test_control_a_program_that_differs_in_8_bits_is_found(old, new, tmp_path):
    case = case_of("8 bits, and all else")
    assert by_c(changed(tmp_path, old, new), tmp_path, case.model, case.texts) != case.expected


@pytest.mark.parametrize(("old", "new"), FAULTS_OF_FAMILIES)
def test_control_a_program_that_differs_in_further_families_is_found(old, new, tmp_path):
    faulty = changed(tmp_path, old, new)
    cases = [case_of(shape) for shape in ("norms after and of all heads", "8 bits, gelu, norms of all heads", "soft caps")]
    assert not all(by_c(faulty, tmp_path, case.model, case.texts) == case.expected for case in cases)


def test_strict_compiler_has_no_remarks_and_no_behaviour_is_undefined(tmp_path):
    (tmp_path / "empty.c").write_text("int main(void) { return 0; }\n")
    trial = [find_compiler(), *SANITIZED, "-o", tmp_path / "empty", tmp_path / "empty.c"]
    sanitized = SANITIZED if subprocess.run(trial, capture_output=True, check=False).returncode == 0 else ()
    program = compile_audit(tmp_path, options=("-std=c99", "-O1", *STRICT, *sanitized))
    for shape in list(SHAPES)[-6:]:
        model, texts, expected = case_of(shape)
        assert by_c(program, tmp_path, model, texts) == expected


def test_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(InputError, match=r"audit\.c is compiled here, and no C compiler was found"):
        compile_audit(tmp_path)


def test_broken_files_are_refused(program, tmp_path):
    model, texts, _ = case_of("grouped heads")
    write_model(tmp_path / "model", *model)
    with pytest.raises(InputError, match="a number in a file is out of its bounds"):
        audited_by_c([program], tmp_path / "model", [AuditedText([1, V, 2])])
    whole = (tmp_path / "model").read_bytes()
    for broken, says in ((whole[:-1], "a file ends too early"), (b"\0" + whole[1:], "this is no model of integer/1")):
        (tmp_path / "broken").write_bytes(broken)
        with pytest.raises(InputError, match=says):
            audited_by_c([program], tmp_path / "broken", texts)
