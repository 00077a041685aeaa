"""Times the kernels on this machine's device, each in turn with a reference that it must keep up with, and names its bound.

python scripts/bench_kernels.py --json docs/data/bench_kernels.json # on a TPU or a Hopper GPU; some minutes
python scripts/bench_kernels.py --interpret                         # anywhere: small shapes in Pallas's interpreter, times void
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from detspec.bench.bench import random_model
from detspec.cache import cache_bytes
from detspec.config import ModelConfig
from detspec.doctor.doctor import run_doctor
from detspec.environment import default_schedule, fingerprint
from detspec.generation.init import init_state
from detspec.model.dense import dense_config, with_fields
from detspec.model.params import Params, pass_work
from detspec.model.transformer import forward
from detspec.ops.attention.api import paged_attention
from detspec.ops.attention.scores import Scores
from detspec.ops.linear.api import linear_fn
from detspec.presets import preset
from detspec.schedule import Budget, FastPath, Numerics, Schedule
from detspec.state import GenState, Windows

LEAST_SAMPLE_S = 0.02  # calls are queued until a sample takes this long, which hides dispatch
SMALL = dense_config(vocab_size=211, d_model=128, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64, d_ff=256)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that are measured; attention has the shape of `cfg`'s layers."""

    cfg: ModelConfig
    context: int  # positions of a sequence
    prefill: int  # positions of a whole prompt in one window
    rows: int  # sequences decoded together
    canonical: tuple[tuple[int, int], ...]  # groups and window of canonical passes
    linear_rows: tuple[int, ...]
    copy_bytes: int
    side: int  # rows and columns of a square product


FULL = Sizes(preset("llama3_1_8b"), 4096, 2048, 32, ((16, 16), (1, 256), (256, 1)), (1, 8, 32, 256), 4 << 30, 8192)
ON_CPU = Sizes(preset("random_100m"), 256, 256, 32, ((4, 16), (1, 64), (64, 1)), (1, 8, 32, 64), 256 << 20, 2048)
TINY = Sizes(SMALL, 32, 16, 2, ((2, 4), (1, 8), (2, 1)), (1, 16), 1 << 20, 128)


@dataclasses.dataclass(frozen=True)
class Contest:
    """Calls that are timed in turn and compared with the last of them, the reference.

    Attributes:
        what: kernel and shape.
        calls: functions by name; each starts the work and returns a result to wait for.
        work: bytes and FLOP of each call.
        target: least accepted ratio of the reference's time to the first call's.
    """

    what: str
    calls: dict[str, Callable[[], Any]]
    work: tuple[float, float]
    target: float | None = None


def main() -> None:
    """Measures, prints the table, writes the JSON file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpret", action="store_true", help="small shapes, kernels of --implementation in the interpreter")
    parser.add_argument("--implementation", default="pallas_tpu", help="pallas_tpu or pallas_gpu, with --interpret")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="number of rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all samples to this file")
    args = parser.parse_args()
    sizes = TINY if args.interpret else ON_CPU if jax.default_backend() == "cpu" else FULL
    schedule = default_schedule(sizes.cfg)
    if args.interpret:
        page = 64 if args.implementation == "pallas_gpu" else 16
        small = Schedule(
            Numerics(page=page, cache_dtype="bfloat16", implementation=args.implementation, interpret=True), Budget(8, 4)
        )
        schedule = dataclasses.replace(small, fast_path=FastPath(splits=2))
    elif schedule.numerics.implementation == "reference":
        raise SystemExit("bench_kernels: this device has no kernels; --interpret runs small shapes in the interpreter")
    result = run(sizes, schedule, args.repeats)
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def run(sizes: Sizes, schedule: Schedule, repeats: int) -> dict[str, Any]:
    """Measures the ceilings, then every contest; then the doctor examines a model of this layer shape."""
    copy_s, product_s = (median(seconds(call, repeats)) for call in (copying(sizes.copy_bytes), multiplying(sizes.side)))
    ceilings = {"bytes_per_s": 2 * sizes.copy_bytes / copy_s, "flop_per_s": 2 * sizes.side**3 / product_s}
    rows = [measured(contest, ceilings, repeats) for contest in tqdm(contests(sizes, schedule), unit="contest", disable=None)]
    examined = with_fields(sizes.cfg, num_layers=min(sizes.cfg.num_layers, 4))
    doctor = run_doctor(random_model(examined), schedule=schedule, max_requests=min(sizes.rows, 8))
    return {
        "fingerprint": fingerprint(),
        "schedule": dataclasses.asdict(schedule),
        "ceilings": ceilings,
        "rows": rows,
        "certified": doctor.certified,
    }


def contests(sizes: Sizes, schedule: Schedule) -> Iterator[Contest]:
    """Attention of canonical passes and decoding, pinned products, then passes of the whole model."""
    for groups, window in sizes.canonical:
        yield attention_contest(
            sizes, schedule.with_budget(groups * window, window), f"canonical {groups}x{window}", sizes.context
        )
    prefill = schedule.with_budget(sizes.prefill, sizes.prefill)
    yield attention_contest(sizes, prefill, f"prefill 1x{sizes.prefill}", sizes.prefill, target=0.6)
    yield decode_contest(sizes, schedule.fast(sizes.rows))
    for rows in sizes.linear_rows:
        yield linear_contest(sizes.cfg, schedule, rows)
    yield model_contest(sizes, schedule)


def attention_contest(sizes: Sizes, schedule: Schedule, name: str, context: int, target: float | None = None) -> Contest:
    """Windows at the end of `context` positions, compared with attention over contiguous keys and values."""
    cfg = sizes.cfg
    mixer = cfg.layer(0).mixer
    G = schedule.budget.groups
    W = schedule.budget.window
    q, k_pages, v_pages, tables, positions = operands(cfg, schedule, context)
    kernel = jax.jit(partial(paged_attention, scores=Scores(mixer.scores.scale), numerics=schedule.numerics))
    whole = (G, context, mixer.num_kv_heads, mixer.head_dim)
    k, v = (jax.random.normal(jax.random.key(n), whole, jnp.bfloat16) for n in (3, 4))
    mask = None if context == W else (positions[:, None, :, None] >= jnp.arange(context, dtype=jnp.int32)[None, None, None])
    library = "cudnn" if jax.default_backend() == "gpu" else "xla"
    plain = jax.jit(
        partial(jax.nn.dot_product_attention, scale=mixer.scores.scale, is_causal=mask is None, implementation=library)
    )
    calls = {"kernel": partial(kernel, q, k_pages, v_pages, tables, positions), **torch_attention(q, k, context)}
    calls[library] = partial(plain, q, k, v, mask=mask)
    seen = context - (W - 1) / 2
    tiles = G * -(-W // schedule.numerics.query_tile)
    num_bytes = 2 * v_pages.dtype.itemsize * mixer.num_kv_heads * mixer.head_dim * (context * G if W > 1 else seen * tiles)
    return Contest(
        f"attention, {name} at {context}", calls, (num_bytes, 4 * G * W * seen * mixer.num_heads * mixer.head_dim), target
    )


def decode_contest(sizes: Sizes, schedule: Schedule) -> Contest:
    """Decodes a token a sequence, compared with a copy that reads and writes as many bytes as its keys and values have."""
    cfg = sizes.cfg
    mixer = cfg.layer(0).mixer
    q, k_pages, v_pages, tables, positions = operands(cfg, schedule, sizes.context)
    kernel = jax.jit(partial(paged_attention, scores=Scores(mixer.scores.scale), numerics=schedule.numerics))
    num_bytes = 2 * sizes.rows * sizes.context * mixer.num_kv_heads * mixer.head_dim * v_pages.dtype.itemsize
    calls = {"kernel": partial(kernel, q, k_pages, v_pages, tables, positions), "copy": copying(num_bytes // 2)}
    flop = 4 * sizes.rows * sizes.context * mixer.num_heads * mixer.head_dim
    return Contest(f"attention, decode {sizes.rows} x {sizes.context}", calls, (num_bytes, flop), 0.75)


def linear_contest(cfg: ModelConfig, schedule: Schedule, rows: int) -> Contest:
    """The down projection of all rows, pinned and as XLA compiles it."""
    ff = cfg.layer(0).ff
    x = jax.random.normal(jax.random.key(0), (rows, ff.d_ff), cfg.jax_dtype)
    weight = jax.random.normal(jax.random.key(1), (cfg.d_model, ff.d_ff), cfg.jax_dtype)
    products = {name: jax.jit(linear_fn(schedule.with_numerics(linear=name).numerics)) for name in ("pinned", "xla")}
    calls = {name: partial(product, x, weight) for name, product in products.items()}
    return Contest(f"product, {rows} rows of {ff.d_ff} x {cfg.d_model}", calls, (weight.nbytes, 2 * rows * weight.size))


def model_contest(sizes: Sizes, schedule: Schedule) -> Contest:
    """A canonical pass of the whole model over 16-token windows, compared with a decode step; the work is that of the pass."""
    cfg = sizes.cfg
    params = random_model(cfg).params
    held = [
        init_state(cfg, max_requests=sizes.rows, max_len=sizes.context, max_stop_ids=1, max_logit_bias=1, schedule=schedule)
    ]

    def passing(schedule: Schedule) -> Callable[[], Any]:
        windows = last_windows(schedule, sizes)

        @partial(jax.jit, donate_argnums=1)
        def one_pass(params: Params, state: GenState) -> tuple[jax.Array, GenState]:
            logits, cache, _ = forward(params, cfg, windows, state.cache, numerics=schedule.numerics)
            return logits.max(-1), state.replace(cache=cache)

        def call() -> jax.Array:
            largest, held[0] = one_pass(params, held[0])
            return largest

        return call

    calls = {"canonical pass": passing(schedule), "decode step": passing(schedule.fast(sizes.rows))}
    work = pass_work(cfg, schedule, windows=min(schedule.budget.groups, sizes.rows), context=sizes.context)
    gigabytes = cache_bytes(cfg, max_requests=sizes.rows, max_len=sizes.context, numerics=schedule.numerics) / 1e9
    name = f"model, {schedule.budget.rows} rows canonical, {sizes.rows} decoded at {sizes.context} ({gigabytes:.1f} GB cache)"
    return Contest(name, calls, (work.bytes, work.flop), 1 / 1.5)


def operands(cfg: ModelConfig, schedule: Schedule, context: int) -> tuple[jax.Array, ...]:
    """Queries, pages of keys and values, scattered page tables, and positions that end at `context`."""
    mixer = cfg.layer(0).mixer
    G = schedule.budget.groups
    W = schedule.budget.window
    max_pages = -(-context // schedule.numerics.page)
    order = np.random.default_rng(0).permutation(G * max_pages).astype(np.int32)
    pool = (1 + G * max_pages, mixer.num_kv_heads, schedule.numerics.page, schedule.numerics.cache_head_dim(mixer.head_dim))
    q = jax.random.normal(jax.random.key(1), (G, W, mixer.num_heads, mixer.head_dim), jnp.bfloat16)
    pages = jax.random.normal(jax.random.key(2), pool, jnp.dtype(schedule.numerics.cache_dtype))
    positions = jnp.broadcast_to(jnp.arange(context - W, context, dtype=jnp.int32), (G, W))
    keys = jnp.moveaxis(pages, 2, schedule.numerics.key_slot_axis)
    return q, keys, pages, jnp.asarray(1 + order.reshape(G, max_pages)), positions


def last_windows(schedule: Schedule, sizes: Sizes) -> Windows:
    """The last window of every sequence, in as many groups as the pass has; padding beyond."""
    G, W = schedule.budget.groups, schedule.budget.window
    sequence = np.where(np.arange(G) < sizes.rows, np.arange(G), -1).astype(np.int32)
    used = sequence >= 0
    return Windows(
        tokens=jnp.ones((G, W), jnp.int32),
        sequence=jnp.asarray(sequence),
        start=jnp.asarray(np.where(used, sizes.context - W, 0).astype(np.int32)),
        count=jnp.asarray(np.where(used, W, 0).astype(np.int32)),
    )


def copying(num_bytes: int) -> Callable[[], jax.Array]:
    """A call that reads and writes `num_bytes` each."""
    array = jnp.zeros(num_bytes // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return lambda: copy(array)


def multiplying(side: int) -> Callable[[], jax.Array]:
    """A call that multiplies a square matrix of random bfloat16 with itself."""
    square = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)
    product = jax.jit(partial(jnp.matmul, preferred_element_type=jnp.float32))
    return lambda: product(square, square)


def torch_attention(q: jax.Array, k: jax.Array, context: int) -> dict[str, Callable[[], Any]]:
    """PyTorch's attention with the same shapes on a GPU, if PyTorch is installed."""
    if jax.default_backend() != "gpu":
        return {}
    try:
        import torch
    except ImportError:
        return {}
    G, W, N, H = q.shape
    K = k.shape[2]
    shapes = ((G, N, W, H), (G, K, context, H), (G, K, context, H))
    tensors = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
    keep = torch.ones(W, context, dtype=torch.bool, device="cuda").tril(context - W)
    mask = {"is_causal": True} if context == W else {"attn_mask": keep}

    def call() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(*tensors, enable_gqa=True, **mask)

    return {"torch": call}


def wait(result: Any) -> None:
    """Waits until the device has computed `result`."""
    if isinstance(result, jax.Array):
        result.block_until_ready()
    else:
        import torch

        torch.cuda.synchronize()


def seconds(call: Callable[[], Any], repeats: int) -> list[float]:
    """Samples of the seconds of one call, after a first call that compiles."""
    number = calls_in_a_sample(call)
    return [sample(call, number) for _ in range(repeats)]


def calls_in_a_sample(call: Callable[[], Any]) -> int:
    """The number of calls that take `LEAST_SAMPLE_S` together."""
    wait(call())
    return max(1, int(LEAST_SAMPLE_S / sample(call, 1)))


def sample(call: Callable[[], Any], number: int) -> float:
    """Mean seconds of `number` queued calls."""
    began = time.perf_counter()
    for _ in range(number):
        result = call()
    wait(result)
    return (time.perf_counter() - began) / number


def measured(contest: Contest, ceilings: dict[str, float], repeats: int) -> dict[str, Any]:
    """Samples each call once per round. Ratios are computed within a round; the result is their median."""
    numbers = {name: calls_in_a_sample(call) for name, call in contest.calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in contest.calls}
    for _ in range(repeats):
        for name, call in contest.calls.items():
            samples[name].append(sample(call, numbers[name]))
    *_, measure = contest.calls
    num_bytes, flop = contest.work
    floors = {"memory": num_bytes / ceilings["bytes_per_s"], "arithmetic": flop / ceilings["flop_per_s"]}
    bound = max(floors, key=lambda name: floors[name])
    first = next(iter(contest.calls))
    return {
        "what": contest.what,
        "samples_s": samples,
        "ratios": {
            name: median(b / a for a, b in zip(samples[name], samples[measure], strict=True))
            for name in list(contest.calls)[:-1]
        },
        "measure": measure,
        "target": contest.target,
        "bound": bound,
        "floor_s": floors[bound],
        "of_bound": floors[bound] / median(samples[first]),
    }


def table(result: dict[str, Any]) -> str:
    """A Markdown table of times, ratios, and the share of the bound that the kernel reaches."""
    ceilings = result["ceilings"]
    device = result["fingerprint"]
    numerics = result["schedule"]["numerics"]
    lines = [
        f"{device['device_kind']}, jax {device['jax']}: copies {ceilings['bytes_per_s'] / 1e12:.2f} TB/s (read and written), "
        f"bfloat16 products {ceilings['flop_per_s'] / 1e12:.0f} TFLOP/s; doctor: "
        f"{'certified' if result['certified'] else 'NOT certified'}; {numerics['implementation']}"
        + (", INTERPRETED: times are void" if numerics["interpret"] else ""),
        "",
        "| what | ms | against | speed, of that | target | bound | of bound |",
        "|---|---|---|---:|---:|---|---:|",
    ]
    for row in result["rows"]:
        times = ", ".join(f"{name} {1e3 * median(samples):.3f}" for name, samples in row["samples_s"].items())
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in row["ratios"].items())
        target = "" if row["target"] is None else f"{row['target']:.2f}"
        lines.append(
            f"| {row['what']} | {times} | {row['measure']} | {ratios} | {target} | {row['bound']} | {row['of_bound']:.0%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
