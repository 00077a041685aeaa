"""Requests that arrive as a Poisson process, or all at once, and what is said of their latencies; names are vLLM's."""

import asyncio
import hashlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from scripts.serving.client import Answer, complete

METRICS = ("ttft", "tpot", "itl", "e2el")


async def send_all(
    bodies: Sequence[dict[str, Any]],
    address: tuple[str, int, str],
    *,
    rate: float,
    burstiness: float,
    most_at_once: int | None,
    seed: int,
) -> tuple[list[Answer], float]:
    """Sends all `bodies` to `address` (host, port, path) at `rate` requests a second; returns answers and seconds.

    Gaps are gamma distributed of shape `burstiness`, exponential at 1; an infinite rate sends all at once, `most_at_once` of
    them in flight.
    """
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), len(bodies)) if np.isfinite(rate) else None
    gate = asyncio.Semaphore(most_at_once or len(bodies))

    async def send(body: dict[str, Any]) -> Answer:
        async with gate:
            return await complete(*address, body)

    began = time.perf_counter()
    due = began
    tasks = []
    for place, body in enumerate(bodies):
        if gaps is not None:
            due += gaps[place]
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(send(body)))
    answers = await asyncio.gather(*tasks)
    return answers, time.perf_counter() - began


def marked(bodies: Sequence[dict[str, Any]], ratio: float, seed: int) -> list[dict[str, Any]]:
    """`bodies` of which a share of `ratio` is deterministic, chosen by a hash of the prompt and `seed`.

    If it is at most a half, they are spread over the first three quarters, so that none runs alone at the end.
    """
    first = range(len(bodies) * 3 // 4 if 0 < ratio <= 0.5 else len(bodies))

    def key(place: int) -> bytes:
        return hashlib.sha256(f"{seed} {place} {bodies[place]['prompt']}".encode()).digest()

    chosen = set(sorted(first, key=key)[: round(ratio * len(bodies))])
    return [{**body, "is_deterministic": place in chosen} for place, body in enumerate(bodies)]


def summary(
    answers: Sequence[Answer],
    seconds: float,
    *,
    percentiles: Sequence[float] = (50, 99),
    goodput: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Figures of `vllm bench serve`, under its names; times in milliseconds."""
    done = [answer for answer in answers if not answer.error]
    num_tokens = sum(answer.num_tokens for answer in done)
    found: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(answers) - len(done),
        "total_output_tokens": num_tokens,
        "request_throughput": len(done) / seconds,
        "output_throughput": num_tokens / seconds,
    }
    times = {
        "ttft": [1e3 * answer.ttft_s for answer in done],
        "tpot": [1e3 * answer.tpot_s for answer in done if answer.num_tokens > 1],
        "itl": [1e3 * gap for answer in done for gap in answer.itl_s],
        "e2el": [1e3 * answer.e2e_s for answer in done],
    }
    for name in METRICS:
        values = np.asarray(times[name] or [np.nan])
        found |= {f"mean_{name}_ms": float(values.mean()), f"median_{name}_ms": float(np.median(values))}
        found |= {f"p{p:g}_{name}_ms": float(np.percentile(values, p)) for p in percentiles}
    if goodput:
        good = [
            all(1e3 * getattr(answer, f"{'e2e' if name == 'e2el' else name}_s") <= limit for name, limit in goodput.items())
            for answer in done
        ]
        found["request_goodput"] = sum(good) / seconds
    return found
