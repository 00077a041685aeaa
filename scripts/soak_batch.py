"""Runs one batch job in many ways, as subprocesses of the command line: every way must give the same bytes.

    python scripts/soak_batch.py --workdir out/soak --json out/soak.json

Writes 500 mixed requests for the shipped model, runs each of `VARIANTS`, and compares their outputs with the first one's: whole
files by SHA-256, outputs of reordered input line by line. Then the output is audited, scored (`ds.score`) and streamed.
Ordinary generation is the inverse control: two of its runs must differ. The exit code is 0 if everything is as expected.
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

COMMAND = (sys.executable, "-m", "detspec")
MAX_LEN = 1024
MOST_NEW_TOKENS = 96
WHILE_STARTING = 0.3  # share of the signals that are sent while a job starts
NUM_DEVICES = 4  # simulated; variants run on one of them unless they say otherwise
STARTING_S = 4.0  # seconds that count as the start


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run the job.

    Attributes:
        name: name in the table.
        arguments: arguments of `detspec generate` besides model, prompts and output.
        order: order of the input: "file", "reversed" or "shuffled".
        shards: number of jobs that are merged.
        signals: signals to send at random moments, one per start; the last start runs to the end.
        like: name of the variant that must have the same bytes; None for none.
        unlike: name of the variant that must have other bytes; None for none.
        chips: how many simulated chips the first, second, ... start runs on; then from the beginning.
    """

    name: str
    arguments: tuple[str, ...]
    order: str = "file"
    shards: int = 1
    signals: tuple[signal.Signals, ...] = ()
    like: str | None = "32 rows"
    unlike: str | None = None
    chips: tuple[int, ...] = (1,)

    def start_arguments(self, number: int) -> tuple[str, ...]:
        """Further arguments of start `number`."""
        return (*self.arguments, "--chips", str(self.chips[number % len(self.chips)]))


VARIANTS = (
    Variant("32 rows", ("--max-requests", "32"), like=None),
    Variant("8 rows", ("--max-requests", "8")),
    Variant("3 rows", ("--max-requests", "3")),
    Variant("1 row", ("--max-requests", "1")),
    Variant("8 rows, self draft", ("--max-requests", "8", "--method", "self", "--num-speculative-tokens", "7")),
    Variant("8 rows, prompt lookup", ("--max-requests", "8", "--method", "ngram")),
    Variant("no prefix sharing", ("--max-requests", "32", "--no-prefix-sharing")),
    Variant("few pages", ("--max-requests", "32", "--num-pages", "36")),
    Variant("shuffled", ("--max-requests", "32"), order="shuffled"),
    Variant("reversed", ("--max-requests", "8"), order="reversed"),
    Variant("4 shards, merged", ("--max-requests", "8"), shards=4),
    Variant("killed", ("--max-requests", "8"), signals=(signal.SIGKILL,) * 10 + (signal.SIGTERM,) * 3),
    Variant("2 chips", ("--max-requests", "8"), chips=(2,)),
    Variant("4 chips, self draft", ("--max-requests", "8", "--method", "self", "--num-speculative-tokens", "7"), chips=(4,)),
    Variant("2 chips, prompt lookup", ("--max-requests", "3", "--method", "ngram"), chips=(2,)),
    Variant("4 chips, few pages", ("--max-requests", "32", "--num-pages", "36"), order="reversed", chips=(4,)),
    Variant("shards on 1, 2, 4 chips", ("--max-requests", "8"), shards=3, chips=(1, 2, 4)),
    Variant(
        "killed on 4, 2, 1 chips", ("--max-requests", "8"), signals=(signal.SIGKILL,) * 4 + (signal.SIGTERM,), chips=(4, 2, 1)
    ),
    Variant("ordinary, 32 rows", ("--max-requests", "32", "--ordinary"), like=None),
    Variant("ordinary, 3 rows", ("--max-requests", "3", "--ordinary"), like=None, unlike="ordinary, 32 rows"),
)


def main() -> int:
    """Runs the variants and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=Path, required=True, help="folder for outputs and compiled programs; it is kept")
    parser.add_argument("--requests", type=int, default=500, help="number of requests")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these variants and those they are compared with")
    parser.add_argument("--json", type=Path, help="also write the findings to this file")
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
        print(f"{name:24} {'ok' if not problems else 'WRONG: ' + '; '.join(problems[:3])}  ({seconds:.1f} s)", flush=True)
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
    print("all variants as expected" if sound else "NOT AS EXPECTED")
    return 0 if sound else 1


def chosen(names: list[str] | None) -> list[Variant]:
    """The named variants and those they are compared with, in the order of `VARIANTS`."""
    wanted = [variant for variant in VARIANTS if names is None or variant.name in names]
    needed = {name for variant in wanted for name in (variant.name, variant.like, variant.unlike)}
    return [variant for variant in VARIANTS if variant.name in needed]


def some_lines(number: int) -> list[str]:
    """Requests with 1 to 600 tokens of Python, greedy and sampled; some share a long prefix, some stop early."""
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
    """Runs one variant; returns digests and statistics of its output."""
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
            start(workdir, *base, *variant.start_arguments(index), "--fresh", "--shard", f"{index}/{variant.shards}")
        start(workdir, "merge", "--out", str(out))
    elif variant.signals:
        sent = start_and_signal(variant, workdir, out, base, expected)
    else:
        start(workdir, *base, *variant.start_arguments(0), "--fresh")
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
    """Id and sample number of a record."""
    return f"{record['id']}/{record.get('index', 0)}"


def start(workdir: Path, *arguments: str) -> None:
    """Runs the command line in a process and waits for its end."""
    subprocess.run([*COMMAND, *arguments], env=environment(workdir), stderr=subprocess.DEVNULL, check=True)


def environment(workdir: Path) -> dict[str, str]:
    """Environment variables that keep compiled programs in the work folder, so that restarts are quick, and simulate chips."""
    return {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(workdir / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_NUM_CPU_DEVICES": str(NUM_DEVICES),
    }


def start_and_signal(variant: Variant, workdir: Path, out: Path, base: tuple[str, ...], expected: int) -> int:
    """Starts the job once per signal, then once more to its end; returns the number of signals.

    Some signals are sent while the job starts, the others shortly after a random number of completions. That number leaves
    enough of the `expected` completions for the remaining signals.
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
        command = [*COMMAND, *base, *variant.start_arguments(index)]
        process = subprocess.Popen(command, env=environment(workdir), stderr=subprocess.DEVNULL)
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
    start(workdir, *base, *variant.start_arguments(len(signals)))
    return len(signals)


def audited(workdir: Path) -> tuple[list[str], float]:
    """Problems that `detspec audit` finds in the first variant's output on one and on four chips, and the seconds it took."""
    began = time.perf_counter()
    records = workdir / VARIANTS[0].name.replace(" ", "_") / "out.jsonl"
    problems = []
    for chips in ("1", "4"):
        command = [*COMMAND, "audit", "--records", str(records), "--chips", chips]
        done = subprocess.run(command, env=environment(workdir), capture_output=True, text=True, check=False)
        problems += [] if done.returncode == 0 else [done.stdout.strip() or done.stderr.strip()]
    return problems, time.perf_counter() - began


def scored(workdir: Path) -> tuple[list[str], float]:
    """Records whose log-probabilities have other bits than `ds.score` gives, and the seconds it took."""
    began = time.perf_counter()
    model = ds.load()
    pairs = list(requests_and_records(workdir))
    problems = []
    for start in range(0, len(pairs), 16):
        batch = pairs[start : start + 16]
        texts = [[*line["prompt_token_ids"], *record["token_ids"]] for line, record in batch]
        for (line, record), logprobs in zip(batch, ds.score(model.params, model.cfg, texts, max_len=MAX_LEN), strict=True):
            if logprobs[len(line["prompt_token_ids"]) :].tolist() != record["logprobs"]:
                problems.append(name_of(record))
    return problems, time.perf_counter() - began


def streamed(workdir: Path) -> tuple[list[str], float]:
    """Records that differ from the joined stream of their request, and the seconds it took."""
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
    """Pairs of input line and output record of the first variant."""
    folder = workdir / VARIANTS[0].name.replace(" ", "_")
    lines = {line["id"]: line for line in map(json.loads, (folder / "in.jsonl").read_text().splitlines())}
    for record in map(json.loads, (folder / "out.jsonl").read_text().splitlines()):
        yield lines[record["id"]], record


def judge(variant: Variant, found: dict[str, dict]) -> None:
    """Compares a variant with those that it must equal or differ from; stores the verdict in `found`."""
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
        f"{name:24} {entry['sha256'][:16]}  {differ:12} {'ok' if entry['sound'] else 'WRONG':5} {entry['signals']:3} signals "
        f"{entry['num_resumed']:4} resumed  {entry['num_tokens']:6} tokens  {entry['num_rollbacks']:4} rollbacks  "
        f"generate {entry['generate_s']:6.1f} s  wall {entry['wall_s']:6.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
