#!/usr/bin/env python
"""Measures what deterministic requests cost a server, in the ratios of LLM-42's figures 11 and 12, and whether answers move.

    python scripts/measure_serving.py --write-docs

Starts `detspec serve` with the shipped model, and measures its capacity for ordinary requests: 45 % are short, 45 % have a long
prompt, 10 % a long answer. Then the same requests arrive as a Poisson process at 50, 80 and 95 % of it, with none, 10 % and all
of them deterministic, in turns. Printed are P50 and P99 of the latency and P99 of the time to the first token, over those with
no deterministic request; at 10 % of the ordinary requests alone. The answers of all runs with only deterministic requests must
be equal to the bit, those of ordinary ones must not. Last, 32 clients are compared with `Engine.generate` on one engine.
Exit code 1 if a bit moved, or none did in the control.
"""

import argparse
import asyncio
import dataclasses
import datetime
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import detspec as ds
from detspec.cli.serve import keep_out_of_collections
from detspec.serve.app import make_app
from detspec.serve.service import Options, Service
from scripts.serving.client import Answer
from scripts.serving.draw import PAPER, draw
from scripts.serving.load import marked, send_all, summary

ROOT = Path(__file__).resolve().parents[1]
LOADS = (0.5, 0.8, 0.95)
RATIOS = (0.0, 0.1, 1.0)
KINDS = ((0.45, (32, 24)), (0.45, (256, 24)), (0.1, (32, 160)))  # share, tokens of the prompt and of the answer
MAX_LEN = 512
OF_EACH_PLACE = 8  # requests that are compared with and without HTTP


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes the results; returns 1 if a bit moved that must not, or none in the control."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=1024, help="requests of a run")
    parser.add_argument(
        "--rounds", type=int, default=1, help="runs of each kind, in turns, each with other arrivals; medians are reported"
    )
    parser.add_argument("--http-rounds", type=int, default=9, help="rounds of the comparison with `Engine.generate`")
    parser.add_argument(
        "--loads", type=float, nargs="*", default=LOADS, help="shares of the capacity; none measures HTTP alone"
    )
    parser.add_argument("--max-requests", type=int, default=32)
    parser.add_argument("--method", nargs="+", default=["none", "ngram"], help="the server's draft sources")
    parser.add_argument("--json", metavar="FILE", help="write the results here")
    parser.add_argument("--write-docs", action="store_true", help="write docs/data/serving.json and docs/serving.png")
    args = parser.parse_args(argv)
    if args.write_docs and not args.loads:
        parser.error("--write-docs writes the table of all loads: give --loads, or leave it out")
    bodies = mixed_bodies(args.num_prompts)
    found: dict[str, Any] = {}
    if args.loads:
        with server(args.max_requests, args.method) as port:
            found = measure(bodies, port, args)
    found["overhead"] = overhead(args.max_requests, args.method, args.http_rounds)
    print(table(found))
    for path in [Path(args.json)] if args.json else []:
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if args.write_docs:
        (ROOT / "docs/data/serving.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        ratios = {(row.load, row.ratio): (row.p50, row.p99, row.p99_ttft) for row in rows(found)}
        draw(ratios, ROOT / "docs/serving.png")
    return 0 if not args.loads or (found["num_differing"] == 0 and found["num_differing_ordinary"] > 0) else 1


def mixed_bodies(number: int) -> list[dict[str, Any]]:
    """Greedy and sampled completions of the three kinds, each in its share, shuffled."""
    rng = np.random.default_rng(0)
    lengths = [kind for share, kind in KINDS for _ in range(round(share * number))][:number]
    lengths += [KINDS[0][1]] * (number - len(lengths))
    return [
        {
            "prompt": rng.integers(0, 2048, prompt_len).tolist(),
            "max_tokens": new,
            "temperature": (0.0, 0.8)[place % 2],
            "seed": place,
            "ignore_eos": True,
            "logprobs": 0,
        }
        for place, (prompt_len, new) in enumerate(lengths[i] for i in rng.permutation(number))
    ]


@contextmanager
def server(max_requests: int, method: Sequence[str]) -> Iterator[int]:
    """The port of a server that is ready."""
    command = [sys.executable, "-m", "detspec", "serve", "--port", "0", "--max-requests", str(max_requests)]
    command += ["--max-len", str(MAX_LEN), "--method", *method]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stderr is not None
        found = None
        while found is None:  # the first line names the model
            assert process.poll() is None
            found = re.search(r"serving .*:(\d+)$", process.stderr.readline().strip())
        port = int(found[1])
        while compiles(port):
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait(120)


def compiles(port: int) -> bool:
    """Whether the server is still compiling, before it answers or while it does."""
    try:
        return bool(json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/health"))["compiling"])
    except urllib.error.HTTPError as error:
        return error.code == 503


def send(
    bodies: Sequence[dict[str, Any]], port: int, rate: float, *, most_at_once: int | None = None, seed: int = 1
) -> tuple[list[Answer], float]:
    """Sends `bodies`, and checks that all were answered; `seed` is that of their arrivals."""
    address = "127.0.0.1", port, "/v1/completions"
    answers, seconds = asyncio.run(send_all(bodies, address, rate=rate, burstiness=1.0, most_at_once=most_at_once, seed=seed))
    if failed := [answer.error for answer in answers if answer.error]:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    return answers, seconds


def measure(bodies: Sequence[dict[str, Any]], port: int, args: argparse.Namespace) -> dict[str, Any]:
    """Latencies by load and share of deterministic requests, and how many answers moved."""
    send(marked(bodies, 0.5, 42)[: 4 * args.max_requests], port, float("inf"))  # what runs for the first time
    _, seconds = send(marked(bodies, 0.0, 42), port, float("inf"), most_at_once=2 * args.max_requests)
    capacity = len(bodies) / seconds
    print(f"capacity {capacity:.1f} requests/s", file=sys.stderr)
    runs: dict[tuple[float, float], list[dict[str, Any]]] = {}
    facts: dict[float, list[list[str]]] = {0.0: [], 1.0: []}
    for number in range(args.rounds):
        for load in args.loads:
            for ratio in RATIOS if number % 2 == 0 else RATIOS[::-1]:
                asked = marked(bodies, ratio, 42)
                answers, seconds = send(asked, port, load * capacity, seed=number)
                ordinary = [a for a, body in zip(answers, asked, strict=True) if not body["is_deterministic"]]
                found = {"all": summary(answers, seconds), "ordinary": summary(ordinary, seconds) if ordinary else None}
                runs.setdefault((load, ratio), []).append(found)
                if ratio in facts:
                    facts[ratio].append([answer.facts for answer in answers])
                print(f"load {load}, ratio {ratio}: P50 {found['all']['median_e2el_ms']:.0f} ms", file=sys.stderr)
    answers, _ = send(marked(bodies, 1.0, 42), port, float("inf"), most_at_once=1)  # one after the other
    facts[1.0].append([answer.facts for answer in answers])
    shuffled = np.random.default_rng(2).permutation(len(bodies)).tolist()
    whole = [{**marked(bodies, 1.0, 42)[i], "stream": False} for i in shuffled]
    answers, _ = send(whole, port, float("inf"), most_at_once=64)
    facts[1.0].append([answers[shuffled.index(i)].facts for i in range(len(bodies))])
    return {
        "date": datetime.date.today().isoformat(),
        "fingerprint": ds.fingerprint(),
        "num_prompts": len(bodies),
        "capacity": capacity,
        "runs": [{"load": load, "ratio": ratio, "rounds": rounds} for (load, ratio), rounds in runs.items()],
        "num_compared": sum(len(other) for other in facts[1.0][1:]),
        "num_differing": differing(facts[1.0]),
        "num_differing_ordinary": differing(facts[0.0]),
    }


def differing(runs: Sequence[Sequence[str]]) -> int:
    """How many answers of later runs are not those of the first."""
    return sum(a != b for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


def overhead(max_requests: int, method: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of `OF_EACH_PLACE` requests for each place, by `Engine.generate` and over HTTP with 32 clients, in turns.

    One engine does both in one process, because two processes may differ by a tenth from start to end. The clients are a
    process of their own. "client" is its processor time: it shares the machine with the server.
    """
    import uvloop

    model = ds.load()
    config = ds.EngineConfig(max_requests=max_requests, max_len=MAX_LEN, method=method, max_prefill_passes=1, segment_steps=16)
    return uvloop.run(_overhead(Service(ds.Engine(model, config), Options("tiny_python")), rounds))


async def _overhead(service: Service, rounds: int) -> dict[str, list[float]]:
    import uvicorn

    bodies = [{**body, "is_deterministic": True} for body in mixed_bodies(OF_EACH_PLACE * service.engine.num_places)]
    prompts = [body["prompt"] for body in bodies]
    sampling = [
        ds.SamplingParams(max_tokens=b["max_tokens"], temperature=b["temperature"], seed=b["seed"], ignore_eos=True)
        for b in bodies
    ]
    settings = uvicorn.Config(make_app(service), port=0, log_level="warning", access_log=False, proxy_headers=False)
    server = uvicorn.Server(settings)
    service.thread.on_ready = keep_out_of_collections
    serving = asyncio.create_task(server.serve())
    while not (service.thread.is_ready and service.engine.is_prepared):
        await asyncio.sleep(0.1)
    port = server.servers[0].sockets[0].getsockname()[1]
    seconds: dict[str, list[float]] = {"engine": [], "http": [], "client": []}
    for number in range(rounds + 1):
        for name in ("engine", "http") if number % 2 else ("http", "engine"):
            began = time.perf_counter()
            if name == "engine":
                await service.thread.run_idle(lambda: service.engine.generate(prompts, sampling))
                found = {"engine": time.perf_counter() - began}
            else:
                found = dict(zip(("http", "client"), await _clients(bodies, port), strict=True))
            for key, value in found.items():
                seconds[key] += [value] if number else []  # what runs for the first time does not count
    server.should_exit = True
    await serving
    return seconds


async def _clients(bodies: Sequence[dict[str, Any]], port: int) -> list[float]:
    """Seconds of `bodies` by `scripts.serving.clients`, by the clock and of processor time."""
    command = [sys.executable, "-m", "scripts.serving.clients", str(port)]
    done = await asyncio.to_thread(
        subprocess.run, command, input=json.dumps(bodies), stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT
    )
    found: list[float] = json.loads(done.stdout)
    return found


@dataclasses.dataclass(frozen=True)
class Row:
    """Ratios of one load and share to the same load without deterministic requests; medians of the rounds.

    `tpot_spread` is P99 over P50 of the time per token, of all requests of that load and share, and `plain_spread` that without
    deterministic ones.
    """

    load: float
    ratio: float
    p50: float
    p99: float
    p99_ttft: float
    tpot_spread: float
    plain_spread: float


def rows(found: dict[str, Any]) -> list[Row]:
    """The ratios; at a share below 1 of the ordinary requests."""
    by_kind = {(run["load"], run["ratio"]): run["rounds"] for run in found["runs"]}
    made = []
    for (load, ratio), rounds in by_kind.items():
        if ratio:
            whose = "all" if ratio == 1 else "ordinary"
            values = [
                median(now[whose][key] / plain["all"][key] for now, plain in zip(rounds, by_kind[load, 0.0], strict=True))
                for key in ("median_e2el_ms", "p99_e2el_ms", "p99_ttft_ms")
            ]
            spreads = [
                median(each["all"]["p99_tpot_ms"] / each["all"]["median_tpot_ms"] for each in of_kind)
                for of_kind in (rounds, by_kind[load, 0.0])
            ]
            made.append(Row(load, ratio, *values, *spreads))
    return made


def table(found: dict[str, Any]) -> str:
    """The ratios as text, the paper's next to them."""
    lines = []
    if "runs" in found:
        lines.append(
            f"capacity {found['capacity']:.1f} ordinary requests/s; ratios to the same load without deterministic requests"
        )
        lines.append("load  deterministic    P50    P99  P99 TTFT   LLM-42's, and P99 over P50 of the time per token")
        for row in rows(found):
            paper = ", ".join(f"{low} to {high}" for low, high in PAPER[row.ratio])
            lines.append(f"{row.load:4.0%}  {row.ratio:13.0%}  {row.p50:5.2f}  {row.p99:5.2f}  {row.p99_ttft:8.2f}   {paper}")
            lines.append(f"      {row.tpot_spread:.2f}, without deterministic ones {row.plain_spread:.2f}")
        lines.append(f"{found['num_compared']} deterministic answers compared, {found['num_differing']} differ")
        lines.append(f"control: {found['num_differing_ordinary']} ordinary ones differ")
    ratios, own = (
        [value / engine for value, engine in zip(found["overhead"][name], found["overhead"]["engine"], strict=True)]
        for name in ("http", "client")
    )
    lines.append(
        f"32 clients over HTTP take {median(ratios):.3f} of the time of Engine.generate (rounds {min(ratios):.2f} to "
        f"{max(ratios):.2f}), and {median(own):.3f} of it as processor time of their own"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
