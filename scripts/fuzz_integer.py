"""Compares random integer models and rows in JAX with the definition in numpy, integer by integer.

    JAX_PLATFORMS=cpu nice python -m scripts.fuzz_integer --number 10000

Each trial draws one of `SHAPES`, and weights of a Student's t distribution with channels of outliers, rows of zeros, and
embeddings from 0.03 to 4096 times as large. A pass reads a text in windows, over pages; the definition reads it at once. All
logits must be equal, and what random requests get of them: tokens, log-probabilities and likeliest tokens, with biases, bans of
stop tokens, filters and penalties.

The exit code is 1 at the first difference; what is printed with it repeats that trial. Compiling is done first.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.cache import init_cache
from detspec.choices import ACTIVATION_BITS
from detspec.config import ModelConfig, RopeScaling
from detspec.integer import spec
from detspec.integer.audit import LEFT_RANGE, AuditedText, AuditFound, as_given, audited_logits
from detspec.integer.spec import Text
from detspec.jobs.oracle import as_floats
from detspec.model.dense import dense_config
from detspec.model.params import param_shapes
from detspec.model.to_integer import integer_config, integer_params, spec_model
from detspec.model.transformer import forward
from detspec.ops import integer_choices
from detspec.progress import Progress
from detspec.sampler import likeliest, process_logits, reported_logits, sample
from detspec.sampling_params import FIELDS, SamplingParams, sampling_arrays
from detspec.schedule import Numerics
from detspec.state import SamplingArrays, Windows

NUMERICS = Numerics(page=16, implementation="reference", linear="xla", cache_dtype="int8")
LENGTH, WINDOW = 24, 8
NUM_LIKELIEST = 5
ROOM = 32  # most biased tokens of a row, and most stop tokens
FIRST_SEED = 20_000
MOST = {15: 16_000, 8: 1_000}  # magnitude of weights by bits of activations: rotated embeddings are up to 16 times larger
MODES = ("raw", "processed", "tempered")
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
# vocabulary, width, layers, heads, KV heads, size of a head, width of the MLP; and what differs
SHAPES: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((97, 32, 1, 4, 2, 8, 48), {"tie_embeddings": True}),
    ((211, 64, 2, 4, 2, 16, 96), {"qkv_bias": True}),
    ((150, 48, 1, 3, 1, 32, 200), {"qk_norm": True, "sliding_window": 5, "sliding_layers": (True,)}),
    ((301, 96, 1, 2, 2, 64, 64), {"rope_scaling": RopeScaling("llama3", factor=8.0, original_max_position=16)}),
    ((64, 40, 2, 8, 4, 4, 33), {"qkv_bias": True, "qk_norm": True, "rope_scaling": RopeScaling("linear", factor=4.0)}),
    ((520, 256, 1, 1, 1, 128, 520), {"norm_eps": 1e-6, "rope_theta": 1e6}),
    (
        (180, 64, 2, 4, 2, 16, 72),
        {"norm_plus_one": True, "activation": "gelu_tanh", "post_norms": True, "qk_norm": True, "score_dim": 20.0},
    ),
    (
        (140, 48, 2, 4, 2, 12, 96),
        {
            "pre_norms": False,
            "post_norms": True,
            "qk_norm": True,
            "qk_norm_of": "width",
            "rope_interleaved": True,
            "rotary_dim": 8,
        },
    ),
    (
        (130, 48, 2, 4, 1, 16, 80),
        {"activation": "gelu_tanh", "post_norms": True, "attn_softcap": 5.0, "logit_softcap": 3.0, "tie_embeddings": True},
    ),
)


@cache
def config(index: int) -> ModelConfig:
    """The config in floats of a shape."""
    sizes, changes = SHAPES[index]
    return dense_config(*sizes, dtype="float32", **changes)


@cache
def program(index: int, bits: int) -> Any:
    """Logits, choices and penalised logits of a text, for a shape and bits of activations."""
    cfg = integer_config(config(index), bits)
    empty = init_cache(cfg, max_requests=1, max_len=LENGTH, numerics=NUMERICS)

    def run(params: Any, tokens: jax.Array, rows: SamplingArrays, count: jax.Array) -> dict[str, jax.Array]:
        starts = jnp.arange(0, LENGTH, WINDOW, dtype=jnp.int32)
        each = jnp.full_like(starts, WINDOW)
        windows = Windows(tokens=tokens.reshape(-1, WINDOW), sequence=jnp.zeros_like(starts), start=starts, count=each)
        logits = forward(params, cfg, windows, empty, numerics=NUMERICS).logits_f32
        positions = jnp.arange(1, LENGTH + 1, dtype=jnp.int32)

        def process(logits: jax.Array) -> jax.Array:
            return process_logits(logits, positions, rows, jnp.broadcast_to(tokens, (LENGTH, LENGTH)))  # each its own request

        chosen, logprobs = sample(logits, positions, rows, process, numerics=NUMERICS)
        reported = reported_logits(logits, positions, rows, process)
        best = likeliest(reported, NUM_LIKELIEST)
        at = partial(integer_choices.logprobs, reported)
        return {
            "logits": logits,
            "tokens": chosen,
            "log-probabilities": logprobs,
            "likeliest tokens": best,
            "log-probabilities of the likeliest": jax.vmap(at, in_axes=1, out_axes=1)(best),
            "penalised logits": integer_choices.penalised(logits, count > 0, count, rows),
        }

    return jax.jit(run)


def drawn_params(cfg: ModelConfig, rng: np.random.Generator, most: int) -> Any:
    """Weights in floats up to `most`; half of the models have neither outliers nor large embeddings."""
    is_calm = rng.random() < 0.5
    degrees = 30.0 if is_calm else rng.choice([1.5, 3.0, 30.0])
    size = 2.0 ** rng.uniform(-7, 0)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        name = jax.tree_util.keystr(path)
        x = rng.standard_t(degrees, leaf.shape)
        if "norm" in name:
            x = np.where(rng.random(leaf.shape) < 0.1, rng.uniform(-40, 40, leaf.shape), 1 + 0.2 * x)
        elif "embed" in name:
            x *= 2.0 ** rng.uniform(-5, 1 if is_calm else 12)
        elif "bias" not in name:
            x *= size
        if x.ndim == 2 and not is_calm and rng.random() < 0.5:
            x[:, rng.integers(0, x.shape[1], 3)] *= 2.0 ** rng.uniform(0, 8)
        if x.ndim == 2 and rng.random() < 0.5:
            x[rng.integers(0, x.shape[0], 2)] = 0
        return np.clip(x, -most, most).astype(np.float32)

    return jax.tree.map_with_path(draw, param_shapes(cfg))


def drawn_sampling(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    """Wishes of a request; half of them have biases, and half ban stop tokens for a while."""
    biased = rng.choice(vocab_size, rng.integers(0, ROOM + 1) if rng.random() < 0.5 else 0, replace=False)
    stops = rng.choice(vocab_size, rng.integers(0, ROOM + 1) if rng.random() < 0.5 else 0, replace=False)
    return SamplingParams(
        max_tokens=LENGTH,
        logit_bias={int(token): float(rng.choice([-100, 100, 1e-5, -2.5, rng.uniform(-9, 9)])) for token in biased},
        stop_token_ids=tuple(map(int, stops)),
        min_tokens=int(rng.integers(0, LENGTH + 1)),
        temperature=float(rng.choice([0, 0.3, 0.8, 1, 1.7, 1e-20, 1e6])),
        top_k=int(rng.choice([0, 1, 5, 40])),
        top_p=float(rng.choice([1, 1, 1, 1, 1, 0.9, 0.5, 1e-6])),
        min_p=float(rng.choice([0, 0.05, 0.5, 1e-9])),
        repetition_penalty=float(rng.choice([1, 1.3, 0.6, 1e-6, 1e6])),
        frequency_penalty=float(rng.choice([0, 0.5, -1.7])),
        presence_penalty=float(rng.choice([0, -0.3, 2])),
        seed=int(rng.integers(0, 2**32)),
        logprobs_mode=str(rng.choice(MODES)),
    )


def defined(
    params: Any, cfg: ModelConfig, tokens: np.ndarray, sampling: Sequence[SamplingParams], prompt_lens: Sequence[int]
) -> list[AuditFound]:
    """The definition's findings about each row, of one token each, with all tokens in the order of what is reported."""
    logits = Text(*spec_model(cfg, params)).read(tokens)
    names = set(AuditedText._fields) & set(FIELDS)
    found = []
    for row, (asked, prompt_len) in enumerate(zip(sampling, prompt_lens, strict=True)):
        given = {name: getattr(asked, name) for name in names}
        text = AuditedText([*tokens, 0], prompt_len, stop_ids=asked.stop_token_ids, num_likeliest=cfg.vocab_size, **given)
        found.append(audited_logits(logits[row : row + 1], np.asarray([row + 1]), as_given(text)))
    return found


def trial(seed: int, bits: int) -> tuple[list[str], int]:
    """Compares one model with so many bits of activations and its rows; the names of what differs, and how many rows left
    their range.
    """
    rng = np.random.default_rng(seed)
    index = seed % len(SHAPES)
    cfg = config(index)
    params = integer_params(cfg, drawn_params(cfg, rng, MOST[bits]), bits)
    tokens = rng.integers(0, cfg.vocab_size, LENGTH)
    sampling = [drawn_sampling(rng, cfg.vocab_size) for _ in range(LENGTH)]
    prompt_lens = [int(rng.integers(1, row + 2)) for row in range(LENGTH)]
    count = np.where(rng.random((LENGTH, cfg.vocab_size)) < 0.1, rng.integers(1, 50, (LENGTH, cfg.vocab_size)), 0)
    rows = jax.tree.map(jnp.asarray, sampling_arrays(sampling, prompt_lens, max_stop_ids=ROOM, max_logit_bias=ROOM))
    ran = program(index, bits)(params, jnp.asarray(tokens, jnp.int32), rows, jnp.asarray(count, jnp.int32))
    of_rows = defined(params, integer_config(cfg, bits), tokens, sampling, prompt_lens)
    audited = AuditFound(*map(np.concatenate, zip(*of_rows, strict=True)))
    of_all = audited.likeliest_logprobs
    place = (audited.likeliest == audited.chosen[:, None]).argmax(1)
    penalties = (np.asarray([getattr(s, name) for s in sampling], np.float32) for name in PENALTIES)
    expected = {
        "logits": audited.logits,
        "tokens": audited.chosen,
        "log-probabilities": as_floats(of_all[np.arange(LENGTH), place]),
        "likeliest tokens": audited.likeliest[:, :NUM_LIKELIEST],
        "log-probabilities of the likeliest": of_all[:, :NUM_LIKELIEST],
        "penalised logits": spec.penalised(audited.logits, count > 0, count, *penalties),
    }
    found = {name: np.asarray(numbers) for name, numbers in ran.items()}
    lost = audited.chosen == LEFT_RANGE  # a text ends there with its log-probability, whatever else a program finds
    found["tokens"] = np.where(lost, LEFT_RANGE, found["tokens"])
    name = "log-probabilities of the likeliest"
    found[name] = np.where(lost[:, None], LEFT_RANGE, found[name])
    differs = [
        name
        for name, numbers in expected.items()
        if not np.array_equal(found[name], numbers, equal_nan=numbers.dtype == np.float32)
    ]
    return differs, int(lost.sum())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs trials until the number, the time or equality is at its end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=10_000, help="trials")
    parser.add_argument("--seed", type=int, default=FIRST_SEED, help="seed of the first trial; the others follow")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no trial begins after this time")
    parser.add_argument("--weights", choices=ACTIVATION_BITS, default="integer", help="kind of the models")
    args = parser.parse_args(arguments)
    began = time.monotonic()
    done = 0
    num_lost = 0
    with Progress(args.number, "trials") as progress:
        for seed in range(args.seed, args.seed + args.number):
            if time.monotonic() - began > 60 * args.minutes:
                break
            differs, lost = trial(seed, ACTIVATION_BITS[args.weights])
            if differs:
                again = f"--seed {seed} --number 1 --weights {args.weights}"
                print(f"{', '.join(differs)} differ: python -m scripts.fuzz_integer {again}")
                return 1
            done += 1
            num_lost += lost
            progress.finished()
            progress.show(f"seed {seed}")
    rows = f"{done * LENGTH} rows, of which {num_lost} left their range"
    print(f"{done} models of {len(SHAPES)} shapes, {rows}: no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
