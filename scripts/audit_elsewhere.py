"""audit.c on other processors: logits, log-probabilities and choices of the shipped model, with one SHA-256 for all.

    python scripts/audit_elsewhere.py --json docs/data/integer_processors.json

zig compiles audit.c for each processor, and qemu runs it. zig is installed from PyPI into an environment of its own below
`out`, and qemu's programs are unpacked there from Debian's package if they are not on the path. qemu emulates a processor's
instructions: this shows that the source means the same with other sizes of words, orders of bytes and code of compilers.
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import detspec as ds
from detspec.errors import InputError
from detspec.integer import spec
from detspec.integer.audit import AuditedText, audited_by_c, audited_by_spec, compile_audit, sha256_of, write_model
from detspec.model.to_integer import spec_model
from detspec.native.processor import find_compiler

OUT = Path(__file__).parents[1] / "out" / "elsewhere"
QEMU_PACKAGE = "qemu-user-static"
TEXTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        yield a\n        a, b = b, a + b\n",
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 7, "repetition_penalty": 1.1},
    ),
    (
        "import os\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = os.fspath(path)\n",
        {"temperature": 1.2, "seed": 8, "frequency_penalty": 0.3, "presence_penalty": -0.1},
    ),
    (
        "def count(words):\n    found = {}\n    for word in words:\n"
        "        found[word] = found.get(word, 0) + 1\n    return found\n",
        {
            "temperature": 0.9,
            "seed": 9,
            "top_k": 50,
            "logit_bias": ((300, 2.5), (400, -1.25)),
            "min_tokens": 8,
            "stop_ids": (0, 10, 301),
            "logprobs_mode": "processed",
            "num_likeliest": 4,
        },
    ),
    ("class Stack:\n    def __init__(self):\n", {"temperature": 0.7, "logprobs_mode": "tempered", "num_likeliest": 2}),
)


class Processor(NamedTuple):
    """A processor that audit.c is compiled for."""

    name: str
    bits: int
    first_byte: str  # of a word in memory
    target: str  # as zig names it
    emulator: str  # as qemu names it


PROCESSORS = (
    Processor("x86-64", 64, "lowest", "x86_64-linux-musl", "x86_64"),
    Processor("x86", 32, "lowest", "x86-linux-musl", "i386"),
    Processor("Arm", 64, "lowest", "aarch64-linux-musl", "aarch64"),
    Processor("Arm", 32, "lowest", "arm-linux-musleabihf", "arm"),
    Processor("RISC-V", 64, "lowest", "riscv64-linux-musl", "riscv64"),
    Processor("POWER", 64, "lowest", "powerpc64le-linux-musl", "ppc64le"),
    Processor("PowerPC", 32, "highest", "powerpc-linux-musleabihf", "ppc"),
    Processor("IBM Z", 64, "highest", "s390x-linux-musl", "s390x"),
)


def main() -> int:
    """Prints the table; the exit code is 1 if a processor has other numbers than numpy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=25, help="most tokens of each text")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    model = ds.load(weights="integer")
    if model.tokenizer is None:
        raise InputError(model.no_tokenizer)
    texts = [AuditedText(model.tokenizer.encode(text)[: args.tokens], prompt_len=4, **asked) for text, asked in TEXTS]
    weights, sizes = spec_model(model.cfg, model.params)
    rows: list[dict[str, Any]] = []

    def show(processor: str, target: str, sha256: str, **more: Any) -> None:
        rows.append({"processor": processor, "target": target, **more, "sha256": sha256})
        print(f"{processor:10} {more.get('bits', ''):>4} {more.get('first_byte', ''):>8}  {target:26} {sha256}", flush=True)

    show("numpy", "spec.py", sha256_of(*(audited_by_spec(weights, sizes, text) for text in texts)))
    zig = [installed_zig(), "-m", "ziglang"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", weights, sizes)
        native = compile_audit(folder)
        show(platform.machine(), "the system's compiler", sha256_of(*audited_by_c([native], folder / "model", texts)))
        for processor in PROCESSORS:
            options = ("-std=c99", "-O2", "-static", "-target", processor.target)
            command = [emulator(processor.emulator), compile_audit(folder, [*zig, "cc"], options)]
            found = sha256_of(*audited_by_c(command, folder / "model", texts))
            show(processor.name, processor.target, found, bits=processor.bits, first_byte=processor.first_byte)
    equal = len({row["sha256"] for row in rows}) == 1
    tokens = sum(len(text.tokens) - 1 for text in texts)
    print(f"{tokens} tokens, all logits, log-probabilities and choices: {'one SHA-256' if equal else 'DIFFERENT'}")
    if args.json:
        versions = {
            "numpy": np.__version__,
            "compiler": first_line([find_compiler(), "--version"]),
            "zig": first_line([*zig, "version"]),
            "qemu": first_line([emulator("x86_64"), "--version"]),
        }
        table = {"arithmetic": spec.VERSION, "model": model.source, "tokens": tokens, "versions": versions, "rows": rows}
        args.json.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return 0 if equal else 1


def installed_zig() -> Path:
    """The Python of an environment that has zig, which is made at the first call."""
    python = OUT / "zig" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", OUT / "zig"], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "ziglang"], check=True)
    return python


def emulator(name: str) -> Path:
    """The program of qemu that runs Linux programs of a processor."""
    for program in (f"qemu-{name}-static", f"qemu-{name}"):
        if found := shutil.which(program):
            return Path(found)
    unpacked = OUT / "qemu" / "usr" / "bin" / f"qemu-{name}-static"
    if not unpacked.exists():
        (OUT / "qemu").mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", QEMU_PACKAGE], cwd=OUT / "qemu", check=True)
        [package] = (OUT / "qemu").glob("*.deb")
        subprocess.run(["dpkg", "-x", package, OUT / "qemu"], check=True)
    return unpacked


def first_line(command: Sequence[Any]) -> str:
    """The first line that a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]


if __name__ == "__main__":
    raise SystemExit(main())
