"""Measures what a newcomer waits for: imports, help, the first token with and without files of programs, models of new shapes.

    python scripts/measure_start.py --rounds 3
    python scripts/measure_start.py --rounds 3 --before ../detspec-before     # side by side with another checkout, in turns

Each measurement is a process of its own, timed from its start by the process that starts it. "empty" begins with an empty cache
folder, "filled" with what "empty" left. Without other work on the machine, two cores compile two programs at a time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
COMMAND = "import sys; from detspec.cli import main; sys.exit(main())"
FIRST_TOKEN = """
import time
import detspec as ds
engine = ds.Engine(ds.load())
next(iter(engine.stream("def fib(n):", ds.SamplingParams(max_tokens=8))))
print("reached", time.time())
"""
WRITE_MODELS = """
import sys
from pathlib import Path
import jax
from detspec.checkpoint.hf import save_hf
from detspec.model.dense import dense_config
from detspec.model.params import init_params
for i, (layers, width, heads, kv_heads, head_dim, hidden, vocab) in enumerate([
    (2, 64, 4, 2, 16, 128, 256), (3, 96, 6, 3, 16, 160, 300), (4, 128, 4, 4, 32, 192, 512), (5, 64, 2, 1, 32, 224, 400),
    (6, 160, 5, 5, 32, 256, 640), (7, 128, 8, 2, 16, 288, 700), (2, 256, 8, 4, 32, 320, 1000),
]):
    cfg = dense_config(vocab, width, layers, heads, kv_heads, head_dim, hidden, tie_embeddings=True)
    save_hf(Path(sys.argv[1]) / str(i), cfg, init_params(cfg, jax.random.key(i)))
"""
SEVEN_MODELS = """
import sys, time
from pathlib import Path
import detspec as ds
from detspec.model.dense import dense_config
for folder in sorted(Path(sys.argv[1]).iterdir()):
    model = ds.load(folder)
    ds.score(model.params, model.cfg, [[1, 2, 3, 4]])
    engine = ds.Engine(model, ds.EngineConfig(max_requests=4, max_len=128))
    engine.generate([[1, 2, 3], [4]], ds.SamplingParams(max_tokens=48, ignore_eos=True))
print("reached", time.time())
"""


def main(argv: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each; medians are shown")
    parser.add_argument("--before", type=Path, help="also measure the checkout in this folder, in turns")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="cases to measure")
    parser.add_argument("--json", type=Path, help="also write all seconds to this file")
    args = parser.parse_args(argv)
    codes = {"now": ROOT} | ({"before": args.before.resolve()} if args.before else {})
    seconds: dict[str, dict[str, list[float]]] = {}
    for _ in range(args.rounds):
        for code, root in codes.items():
            with tempfile.TemporaryDirectory() as home:
                for name in args.only:
                    for case, found in CASES[name](root, Path(home)):
                        seconds.setdefault(case, {}).setdefault(code, []).append(found)
                        print(f"{code:8} {case:36} {found:8.2f} s", file=sys.stderr, flush=True)
    print(f"{'seconds, medians':36}" + "".join(f"{code:>10}" for code in codes))
    for case, of_code in seconds.items():
        print(f"{case:36}" + "".join(f"{median(of_code[code]):10.2f}" for code in codes))
    if args.json:
        args.json.write_text(json.dumps(seconds, indent=2) + "\n")
    return 0


def measure(root: Path, home: Path, *args: str) -> float:
    """Seconds from the start of `python ARGS` until it ends, or until the time that it prints as "reached"."""
    home.mkdir(exist_ok=True)
    env = {**os.environ, "PYTHONPATH": str(root), "XDG_CACHE_HOME": str(home), "JAX_PLATFORMS": "cpu"}
    began = time.time()
    done = subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True, cwd=home)
    ended = time.time()
    if done.returncode:
        raise SystemExit(f"{args[:2]} failed:\n{done.stderr}")
    reached = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("reached ")]
    return (reached[0] if reached else ended) - began


def imports(root: Path, home: Path) -> Iterator[tuple[str, float]]:
    """Times of imports, which need no program."""
    yield "import detspec", measure(root, home, "-c", "import detspec")
    yield "detspec --help", measure(root, home, "-c", COMMAND, "--help")


def first_token(root: Path, home: Path) -> Iterator[tuple[str, float]]:
    """From the start of the process to the first streamed token of the shipped model."""
    for state in ("empty", "filled"):
        yield f"first token, {state} cache", measure(root, home / "library", "-c", FIRST_TOKEN)


def command(root: Path, home: Path) -> Iterator[tuple[str, float]]:
    """The whole command, from its start to its end, with one prompt of 8 new tokens."""
    prompts = home / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "def fib(n):"}\n')
    for state in ("empty", "filled"):
        job = ("generate", "--prompts", str(prompts), "--out", str(home / f"{state}.jsonl"), "--max-tokens", "8")
        yield f"detspec generate, {state} cache", measure(root, home / "command", "-c", COMMAND, *job)


def seven_models(root: Path, home: Path) -> Iterator[tuple[str, float]]:
    """Models of seven shapes, each loaded, scored and run once; nothing was compiled before."""
    folder = home / "models"
    folder.mkdir()
    measure(root, home, "-c", WRITE_MODELS, str(folder))
    yield "seven tiny models", measure(root, home / "seven", "-c", SEVEN_MODELS, str(folder))


CASES = {"imports": imports, "first-token": first_token, "command": command, "seven-models": seven_models}

if __name__ == "__main__":
    sys.exit(main())
