"""One batch job in many ways, as subprocesses of the command line: every way must give the same bytes.

    python scripts/soak_batch.py --workdir out/soak --json out/soak.json

Writes 500 mixed requests for the shipped model, runs each of `VARIANTS` over them, and compares the outputs with the first
one's: the whole file by sha256, permuted input line by line. Then the output is audited, scored (`ds.score`) and streamed.
Ordinary generation is the inverse control: two of its runs must differ. Exit code 0 if all is as it should be.
"""

import argparse
import dataclasses
import hashlib
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import detspec as ds

COMMAND = (sys.executable, "-m", "detspec.cli")
MAX_LEN = 1024
MOST_NEW_TOKENS = 96
WHILE_STARTING, STARTING_S = 0.3, 4.0  # share of the signals that are sent while a job starts, within so many seconds


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run the job.

    Attributes:
        name: for the table.
        arguments: of `detspec generate`, besides model, prompts and output.
        order: of the input: "file", "reversed" or "shuffled".
        shards: run as so many jobs, and merged.
        signals: sent at random moments, one a start, before the job is left to finish.
        like: name of the variant whose bytes it must have; None for none.
        unlike: name of the variant whose bytes it must not have.
    """

    name: str
    arguments: tuple[str, ...]
    order: str = "file"
    shards: int = 1
    signals: tuple[signal.Signals, ...] = ()
    like: str | None = "32 rows"
    unlike: str | None = None


VARIANTS = (
    Variant("32 rows", ("--max-requests", "32"), like=None),
    Variant("8 rows", ("--max-requests", "8")),
    Variant("3 rows", ("--max-requests", "3")),
    Variant("1 row", ("--max-requests", "1")),
    Variant("8 rows, self draft", ("--max-requests", "8", "--method", "self", "--num-speculative-tokens", "7")),
    Variant("no prefix sharing", ("--max-requests", "32", "--no-prefix-sharing")),
    Variant("few pages", ("--max-requests", "32", "--num-pages", "36")),
    Variant("shuffled", ("--max-requests", "32"), order="shuffled"),
    Variant("reversed", ("--max-requests", "8"), order="reversed"),
    Variant("4 shards, merged", ("--max-requests", "8"), shards=4),
    Variant("killed", ("--max-requests", "8"), signals=(signal.SIGKILL,) * 10 + (signal.SIGTERM,) * 3),
    Variant("ordinary, 32 rows", ("--max-requests", "32", "--ordinary"), like=None),
    Variant("ordinary, 3 rows", ("--max-requests", "3", "--ordinary"), like=None, unlike="ordinary, 32 rows"),
)


def main() -> int:
    """Runs the variants and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=Path, required=True, help="outputs and compiled programs; kept")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these variants, and what they are compared with")
    parser.add_argument("--json", type=Path, help="write what was found there, too")
    args = parser.parse_args()
    args.workdir.mkdir(parents=True, exist_ok=True)
    lines = some_lines(args.requests)
    found: dict[str, dict] = {}
    for variant in chosen(args.only):
        found[variant.name] = run(variant, lines, args.workdir.resolve())
        judge(variant, found)
        print(row(variant.name, found[variant.name]), flush=True)
    checks = {} if args.only else {name: check(args.workdir.resolve()) for name, check in CHECKS.items()}
    for name, (problems, seconds) in checks.items():
        print(f"{name:20} {'ok' if not problems else 'WRONG: ' + '; '.join(problems[:3])}  ({seconds:.1f} s)", flush=True)
    sound = all(entry["sound"] for entry in found.values()) and not any(problems for problems, _ in checks.values())
    if args.json:
        shown = {name: {key: value for key, value in entry.items() if key != "by_id"} for name, entry in found.items()}
        report = {
            "requests": args.requests,
            "fingerprint": ds.fingerprint(),
            "sound": sound,
            "variants": shown,
            "checks": checks,
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    print("all as it should be" if sound else "NOT AS IT SHOULD BE")
    return 0 if sound else 1


def chosen(names: list[str] | None) -> list[Variant]:
    """The variants named and those they are compared with, in the order of the list."""
    wanted = [variant for variant in VARIANTS if names is None or variant.name in names]
    needed = {name for variant in wanted for name in (variant.name, variant.like, variant.unlike)}
    return [variant for variant in VARIANTS if variant.name in needed]


def some_lines(number: int) -> list[str]:
    """Requests of 1 to 600 tokens of Python, greedy and sampled, some with a long prefix in common, some stopping early."""
    rng = np.random.default_rng(0)
    tokenizer = ds.load().tokenizer
    text = [tokenizer.encode(inspect.getsource(module)) for module in (argparse, dataclasses, json)]
    prefixes = [ids[: int(length)] for ids, length in zip(text, (450, 300, 200), strict=True)]
    common = sorted({token for ids in text for token in ids}, key=lambda token: -sum(ids.count(token) for ids in text))
    lines = []
    for i in range(number):
        ids = text[int(rng.integers(3))]
        length = 1 + int(600 * rng.random() ** 3)
        begin = int(rng.integers(max(1, len(ids) - length)))
        prompt = ids[begin : begin + length]
        if i % 3 == 0:
            prompt = (prefixes[int(rng.integers(3))] + prompt)[:600]
        sampling: dict[str, object] = {"max_tokens": int(rng.integers(4, MOST_NEW_TOKENS + 1)), "seed": i}
        if i % 2:
            sampling["temperature"] = float(rng.choice([0.3, 0.8, 1.2]))
            sampling |= [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}][int(rng.integers(4))]
        if i % 5 == 0:
            sampling["stop_token_ids"] = common[:2]
        if i % 7 == 0:
            sampling |= {
                "repetition_penalty": 1.2,
                "frequency_penalty": 0.3,
                "logit_bias": {str(common[5]): 2.0},
                "min_tokens": 3,
            }
        if i % 11 == 0:
            sampling["stop"] = ["\n\n", "return"]
        if i % 25 == 1:
            sampling["n"] = 3
        lines.append(json.dumps({"id": f"r{i}", "prompt_token_ids": prompt, "sampling": sampling}))
    return lines


def run(variant: Variant, lines: list[str], workdir: Path) -> dict:
    """What one variant gave."""
    order = list(lines)
    if variant.order == "reversed":
        order.reverse()
    if variant.order == "shuffled":
        random.Random(1).shuffle(order)
    folder = workdir / variant.name.replace(",", "").replace(" ", "_")
    folder.mkdir(exist_ok=True)
    (folder / "in.jsonl").write_text("\n".join(order) + "\n")
    out = folder / "out.jsonl"
    base = ("generate", "--prompts", str(folder / "in.jsonl"), "--out", str(out), "--max-len", str(MAX_LEN))
    began = time.perf_counter()
    sent = 0
    expected = sum(json.loads(line)["sampling"].get("n", 1) for line in lines)
    if variant.shards > 1:
        for index in range(variant.shards):
            start(workdir, *base, *variant.arguments, "--fresh", "--shard", f"{index}/{variant.shards}")
        start(workdir, "merge", "--out", str(out))
    elif variant.signals:
        sent = start_and_signal(variant, workdir, out, base, expected)
    else:
        start(workdir, *base, *variant.arguments, "--fresh")
    stats = json.loads((folder / "out.stats.json").read_text())
    content = out.read_bytes()
    by_id = {name_of(json.loads(line)): hashlib.sha256(line).hexdigest() for line in content.splitlines()}
    assert len(by_id) == expected, f"{variant.name}: {len(by_id)} of {expected} completions came back"
    return {
        "sha256": hashlib.sha256(content).hexdigest(),
        "by_id": by_id,
        "in_order": variant.order == "file",
        "signals": sent,
        "wall_s": round(time.perf_counter() - began, 1),
        **{key: stats[key] for key in ("num_tokens", "num_resumed")},
        **{key: stats["last_start"][key] for key in ("compile_s", "generate_s", "tok_per_s", "num_rollbacks")},
    }


def name_of(record: dict) -> str:
    """Id and number of a sample."""
    return f"{record['id']}/{record.get('index', 0)}"


def start(workdir: Path, *arguments: str) -> None:
    """One process of the command line, left to finish."""
    subprocess.run([*COMMAND, *arguments], env=environment(workdir), stderr=subprocess.DEVNULL, check=True)


def environment(workdir: Path) -> dict[str, str]:
    """Compiled programs are kept in the work folder: a job that is started anew soon goes on."""
    return {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(workdir / "xla"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def start_and_signal(variant: Variant, workdir: Path, out: Path, base: tuple[str, ...], expected: int) -> int:
    """A start of the job for each signal, and one that is left to finish; counts the signals.

    Some are sent while the job starts, the others a moment after a random number of completions, which leaves enough of the
    `expected` ones for the signals to come.
    """
    rng = random.Random(2)
    signals = list(variant.signals)
    rng.shuffle(signals)
    for path in out.parent.glob("out.*"):
        path.unlink()
    journal = out.with_name(out.name + ".journal")

    def num_kept() -> int:
        return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else 0

    for index, number in enumerate(signals):
        process = subprocess.Popen([*COMMAND, *base, *variant.arguments], env=environment(workdir), stderr=subprocess.DEVNULL)
        if rng.random() < WHILE_STARTING:
            time.sleep(rng.uniform(0.0, STARTING_S))
        else:
            kept = num_kept()
            wanted = kept + 1 + rng.randrange(max(1, (expected - kept) // (len(signals) - index + 1)))
            while process.poll() is None and num_kept() < wanted:
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 0.2))
        if process.poll() is not None:
            raise SystemExit(f"{variant.name}: the job ended with {process.returncode} before {number.name} was sent")
        process.send_signal(number)
        code = process.wait()
        assert code in (-number, 128 + number), f"{variant.name}: exit code {code} after {number.name}"
    start(workdir, *base, *variant.arguments)
    return len(signals)


def audited(workdir: Path) -> tuple[list[str], float]:
    """What `detspec audit` finds wrong with the first variant's output, and how long it took."""
    began = time.perf_counter()
    records = workdir / VARIANTS[0].name.replace(" ", "_") / "out.jsonl"
    command = [*COMMAND, "audit", "--records", str(records)]
    done = subprocess.run(command, env=environment(workdir), capture_output=True, text=True, check=False)
    return [] if done.returncode == 0 else [done.stdout.strip() or done.stderr.strip()], time.perf_counter() - began


def scored(workdir: Path) -> tuple[list[str], float]:
    """Where `ds.score` of prompts and recorded tokens gives other bits than the output holds."""
    began = time.perf_counter()
    model, pairs = ds.load(), list(requests_and_records(workdir))
    problems = []
    for start in range(0, len(pairs), 16):
        batch = pairs[start : start + 16]
        texts = [[*line["prompt_token_ids"], *record["token_ids"]] for line, record in batch]
        for (line, record), logprobs in zip(batch, ds.score(model.params, model.cfg, texts, max_len=MAX_LEN), strict=True):
            if logprobs[len(line["prompt_token_ids"]) :].tolist() != record["logprobs"]:
                problems.append(name_of(record))
    return problems, time.perf_counter() - began


def streamed(workdir: Path) -> tuple[list[str], float]:
    """Where streams of the requests join to something else than the output holds."""
    began = time.perf_counter()
    engine = ds.Engine(ds.load(), ds.EngineConfig(max_requests=1, max_len=MAX_LEN))
    problems = []
    for line, record in requests_and_records(workdir):
        asked = {**line["sampling"], "n": 1, "seed": line["sampling"]["seed"] + record.get("index", 0)}
        pieces = list(engine.stream(line["prompt_token_ids"], ds.SamplingParams(**asked)))
        tokens = [token for piece in pieces for token in piece.token_ids]
        logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
        text = "".join(piece.text for piece in pieces)
        if (tokens, logprobs, text) != (record["token_ids"], record["logprobs"], record["text"]):
            problems.append(name_of(record))
    return problems, time.perf_counter() - began


CHECKS = {"audit": audited, "score": scored, "stream": streamed}


def requests_and_records(workdir: Path) -> Iterator[tuple[dict, dict]]:
    """Lines of input and output of the first variant that belong together."""
    folder = workdir / VARIANTS[0].name.replace(" ", "_")
    lines = {line["id"]: line for line in map(json.loads, (folder / "in.jsonl").read_text().splitlines())}
    for record in map(json.loads, (folder / "out.jsonl").read_text().splitlines()):
        yield lines[record["id"]], record


def judge(variant: Variant, found: dict[str, dict]) -> None:
    """Compares a variant with those it must and must not equal."""
    entry = found[variant.name]
    entry["differ"] = None
    entry["sound"] = True
    for name, same in ((variant.like, True), (variant.unlike, False)):
        if name is not None:
            other = found[name]
            entry["differ"] = sum(other["by_id"][id] != digest for id, digest in entry["by_id"].items())
            equal = entry["sha256"] == other["sha256"] if entry["in_order"] else entry["differ"] == 0
            entry["sound"] = equal is same


def row(name: str, entry: dict) -> str:
    """One line of the table."""
    differ = "" if entry["differ"] is None else f"{entry['differ']} differ"
    return (
        f"{name:20} {entry['sha256'][:16]}  {differ:12} {'ok' if entry['sound'] else 'WRONG':5} {entry['signals']:3} signals "
        f"{entry['num_resumed']:4} resumed  {entry['num_tokens']:6} tokens  {entry['num_rollbacks']:4} rollbacks  "
        f"generate {entry['generate_s']:6.1f} s  wall {entry['wall_s']:6.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
