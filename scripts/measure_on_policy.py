"""Log-probabilities of `detspec.logprobs` against those of an engine, bit by bit, and its cost over an ordinary forward pass.

    nice python -m scripts.measure_on_policy --json out/bits.json            bits of small random models, a row a kind and dtype
    nice python -m scripts.measure_on_policy --cost --json out/cost.json     processor time in turns, and memory
    nice python -m scripts.measure_on_policy --steps --json out/steps.json   processor time of whole steps, in turns
    JAX_NUM_CPU_DEVICES=4 nice python -m scripts.measure_on_policy --ways    weights after 50 steps, made in several ways

Bits: texts of one to three pages of 16, at four temperatures; alone, in a gradient's program with and without remat, and among
1, 3 and 8 rows; and the 20 likeliest tokens of each position, which are the whole distribution of the kind `tokens_20`. The
control is the forward pass of ordinary training. The exit code is 1 if a bit differs, or if the control has all bits in a row
of the table.

Steps: rollouts and update of the shipped model, 32 texts of 48 tokens, exact over an ordinary engine with an ordinary trainer,
which also may work out the sampler's log-probabilities anew.

Ways: places, drafts, pages, prefix sharing and chips; of 144 every fifth, among which any two values meet. The exit code is 1
if two ways end with different weights, or if an ordinary engine with an ordinary trainer ends with the same at 4 and 16 places.
"""

import argparse
import dataclasses
import itertools
import json
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import detspec as ds
import detspec.rl as rl
from detspec.bench.bench import bench_prompts, random_model
from detspec.checkpoint.load import cast_params
from detspec.compile_cache import enable_jax_cache
from detspec.generation.logprobs import logits
from detspec.model.experts import MixtureOfExperts
from detspec.model.params import Params
from detspec.ops.row_sum import sum_fn
from detspec.presets import preset
from detspec.rl.learner import masters
from detspec.rl.policy import digest_weights
from detspec.sampler import logprobs_at, tempered
from scripts.ablations.on_policy import EXACT, Arm, Way, config_of, ordinary_logprobs, steps_of
from scripts.ablations.table import text_of

SIZES = {"vocab_size": 256, "d_model": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "d_ff": 128}
GEMMA: dict[str, Any] = {"activation": "gelu_tanh", "norm_plus_one": True, "scale_embeddings": True, "post_norms": True}
SLIDING: dict[str, Any] = {"sliding_window": 11, "sliding_layers": (True, False)}
LAYER_NORM: dict[str, Any] = {"norm": "layer", "norm_bias": True, "gated": False, "mlp_bias": True, "activation": "gelu"}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen": {"qkv_bias": True, "qk_norm": True, "tie_embeddings": True},
    "gemma": {**GEMMA, **SLIDING, "attn_softcap": 5.0, "logit_softcap": 3.0, "tie_embeddings": True},
    "olmo": {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_of": "width"},
    "pythia": {**LAYER_NORM, "parallel": True, "qkv_bias": True, "o_bias": True, "rotary_dim": 8},
    "gpt2": {**LAYER_NORM, "learned_positions": True, "position_encoding": "none"},
    "granite": {"embed_scale": 3.0, "residual_scale": 0.7, "logit_divisor": 3.0, "score_scale": 0.2},
    "sinks": {"sinks": True, **SLIDING},
    "experts": {"experts": MixtureOfExperts(8, 3, 24, renormalised=True), "dense_layers": (True, False)},
    "alibi": {"position_encoding": "alibi"},
    "tokens_20": {"vocab_size": 20},
}
DTYPES = ("bfloat16", "float16", "float32")
TEMPERATURES = (0.6, 0.9, 1.0, 1.7)
PAGE, LENGTH = 16, 48
LIKELIEST = 20
ORDINARY = Arm("ordinary", is_deterministic=False, is_canonical=False)
WARM_UP = 3  # steps that are not measured
WAYS_STEPS = 50
SHAPES = ((8, 512), (4, 2048))  # texts and tokens whose cost is measured


class Texts(NamedTuple):
    """Texts that an engine generated, and what it reported."""

    tokens: np.ndarray  # [B, T] int32
    lengths: np.ndarray  # [B] int32
    temperatures: np.ndarray  # [B] float32
    reported: np.ndarray  # [B, T] float32
    is_new: np.ndarray  # [B, T]

    def first(self, number: int) -> "Texts":
        """The first `number` texts."""
        return Texts(*(leaf[:number] for leaf in self))

    def num_differing(self, found: Any) -> int:
        """How many new tokens have other bits in `found [B, T]`."""
        return int((np.asarray(found).view(np.uint32) != self.reported.view(np.uint32))[self.is_new].sum())


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--cost", action="store_true", help="measure processor time and memory instead")
    modes.add_argument("--steps", action="store_true", help="measure processor time of whole steps instead")
    modes.add_argument("--ways", action="store_true", help="compare weights after 50 steps instead")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), help="kinds of models")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--texts", type=int, default=256, metavar="N", help="texts of each kind and dtype")
    parser.add_argument("--models", nargs="+", default=["tiny_python", "random_100m"], metavar="PRESET", help="with --cost")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="with --cost")
    parser.add_argument("--every", type=int, default=5, metavar="N", help="with --ways: of the 144 ways, each N-th")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    args = parser.parse_args(argv)
    enable_jax_cache()
    if args.ways:
        return ways(args.every)
    rows: list[dict[str, Any]] = steps(args.rounds) if args.steps else []
    cells = [(kind, dtype) for kind in args.kinds for dtype in args.dtypes]
    if args.cost:
        cells = [(name, dtype) for name in args.models for dtype in args.dtypes]
    for name, dtype in () if args.steps else cells:
        rows += cost(name, dtype, args.rounds) if args.cost else [bits(name, dtype, args.texts)]
        print(dict(rows[-1]), file=sys.stderr, flush=True)
        write(args.json, rows)
    write(args.json, rows)
    print(text_of(rows))
    if args.cost or args.steps:
        return 0
    print(f"\n{sum(row['compared'] for row in rows):,} log-probabilities, of which {sum(row['differ'] for row in rows)} differ")
    return int(any(row["differ"] or not row["ordinary differ"] for row in rows))


def write(file: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    """Writes `rows` with what they were measured on, if there is a file for them."""
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"fingerprint": ds.fingerprint(), "rows": rows}, indent=1) + "\n")


def bits(kind: str, dtype: str, number: int) -> dict[str, Any]:
    """How many log-probabilities were compared with an engine's, and how many of them differ."""
    cfg = ds.dense_config(**{**SIZES, "max_position": LENGTH, "dtype": dtype, **KINDS[kind]})
    model = random_model(cfg)
    schedule = ds.default_schedule(cfg).with_numerics(page=PAGE)
    engine = ds.Engine(model, ds.EngineConfig(32, LENGTH, schedule=schedule, method="none"))
    texts = generated(engine, number)
    few = texts.first(8)
    differ = {
        "forward": texts.num_differing(forward(model, engine.schedule, texts)),
        "gradient": texts.num_differing(in_gradient(model, engine.schedule, texts, remat=False)),
        "remat": texts.num_differing(in_gradient(model, engine.schedule, texts, remat=True)),
        **{
            f"{n} rows": few.first(n).num_differing(in_gradient(model, engine.schedule, few.first(n), remat=False))
            for n in (1, 3, 8)
        },
    }
    by_temperature = [likeliest(engine, texts, temperature) for temperature in TEMPERATURES]
    likely, likely_differ, whole = (sum(each) for each in zip(*by_temperature, strict=True))
    ordinary = jax.jit(
        lambda params: ordinary_logprobs(params, cfg, jnp.asarray(texts.tokens), jnp.asarray(texts.temperatures))
    )
    compared = 3 * int(texts.is_new.sum()) + sum(int(few.first(n).is_new.sum()) for n in (1, 3, 8)) + likely
    return {
        "kind": kind,
        "dtype": dtype,
        "compared": compared,
        "differ": sum(differ.values()) + likely_differ,
        **differ,
        "of likeliest": likely,
        "likeliest": likely_differ,
        "whole distributions": whole,
        "positions": int(texts.is_new.sum()),
        "ordinary differ": texts.num_differing(ordinary(model.params)),
    }


def generated(engine: ds.Engine, number: int) -> Texts:
    """Texts of one to three pages at all temperatures."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(PAGE, LENGTH + 1, number).astype(np.int32)
    prompts = [rng.integers(0, engine.model.cfg.vocab_size, 1 + i % 8).tolist() for i in range(number)]
    temperatures = [TEMPERATURES[i % len(TEMPERATURES)] for i in range(number)]
    sampling = [
        ds.SamplingParams(max_tokens=int(n) - len(p), temperature=t, seed=i, logprobs_mode="tempered", ignore_eos=True)
        for i, (n, p, t) in enumerate(zip(lengths, prompts, temperatures, strict=True))
    ]
    tokens = np.zeros((number, LENGTH), np.int32)
    reported = np.zeros((number, LENGTH), np.float32)
    is_new = np.zeros((number, LENGTH), bool)
    for row, (prompt, found) in enumerate(zip(prompts, engine.generate(prompts, sampling), strict=True)):
        tokens[row, : lengths[row]] = (*prompt, *found.token_ids)
        is_new[row, len(prompt) : lengths[row]] = True
        reported[row, is_new[row]] = found.logprobs
    return Texts(tokens, lengths, np.asarray(temperatures, np.float32), reported, is_new)


def forward(model: ds.Model, schedule: ds.Schedule, texts: Texts) -> Any:
    """The log-probabilities of `texts` by a program of their own."""

    @jax.jit
    def found(params: Params) -> jax.Array:
        return ds.logprobs(
            params, model.cfg, texts.tokens, texts.lengths, temperature=jnp.asarray(texts.temperatures), schedule=schedule
        )

    return found(model.params)


def in_gradient(model: ds.Model, schedule: ds.Schedule, texts: Texts, *, remat: bool) -> Any:
    """Log-probabilities that the program of a gradient works with, at masters in float32."""

    def loss_fn(params: Params, temperatures: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = ds.logprobs(
            params, model.cfg, texts.tokens, texts.lengths, temperature=temperatures, schedule=schedule, remat=remat
        )
        return -(found * jnp.exp(found)).sum(), found

    (_, found), _ = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(masters(model.params), texts.temperatures)
    return found


def likeliest(engine: ds.Engine, texts: Texts, temperature: float) -> tuple[int, int, int]:
    """How many log-probabilities of likeliest tokens were compared, how many differ, and how many positions list all tokens.

    Texts are those that were generated at `temperature`; they are scored at it.
    """
    chosen = texts.temperatures == np.float32(temperature)
    listed = [row[:n].tolist() for row, n in zip(texts.tokens[chosen], texts.lengths[chosen], strict=True)]
    sampling = ds.SamplingParams(temperature=temperature, logprobs=LIKELIEST, logprobs_mode="tempered")
    scored = engine.score(listed, 1, sampling)
    params, cfg = engine.model.params, engine.model.cfg
    sum_row = sum_fn(engine.schedule.numerics)
    of_all = jax.jit(lambda tokens: logits(params, cfg, tokens, schedule=engine.schedule))(texts.tokens[chosen])
    at = jax.jit(lambda rows, tokens, temperatures: logprobs_at(tempered(rows, temperatures), tokens, sum_row))
    rows = jnp.concatenate([of_all[row, : len(each.top_logprobs)] for row, each in enumerate(scored)])
    pairs = [top for each in scored for top in each.top_logprobs]
    tokens = np.asarray([[token for token, _ in top] for top in pairs], np.int32)
    values = np.asarray([[logprob for _, logprob in top] for top in pairs], np.float32)
    temperatures = np.full(len(rows), temperature, np.float32)
    found = np.stack([np.asarray(at(rows, tokens[:, rank], temperatures)) for rank in range(LIKELIEST)], axis=1)
    whole = sum(len({token for token, _ in top}) == cfg.vocab_size for top in pairs)
    return found.size, int((found.view(np.uint32) != values.view(np.uint32)).sum()), whole


def cost(name: str, dtype: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each shape: processor time over that of the ordinary forward pass, in turns, and memory of the programs."""
    shaped = dataclasses.replace(preset(name), max_position=max(T for _, T in SHAPES))
    own = ds.load() if name == "tiny_python" else random_model(shaped)
    cfg, params = cast_params(own.cfg, own.params, dtype)
    cfg = dataclasses.replace(cfg, max_position=shaped.max_position)
    weights = masters(params)
    rows = []
    for B, T in SHAPES:
        tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (B, T)).astype(np.int32)
        arguments = (weights, tokens, np.full(B, T, np.int32), np.full(B, 0.9, np.float32))
        programs = {key: jax.jit(fn).lower(*arguments).compile() for key, fn in programs_of(cfg).items()}
        spent: dict[str, list[float]] = {key: [] for key in programs}
        for number in range(rounds + 1):
            for key, program in programs.items():
                began = cpu_s()
                jax.block_until_ready(program(*arguments))
                if number:
                    spent[key].append(cpu_s() - began)
        of = {key: median(each) for key, each in spent.items()}
        mib = {key: program.memory_analysis().temp_size_in_bytes / 2**20 for key, program in programs.items()}
        ratios = {
            "forward": of["forward"] / of["ordinary forward"],
            "gradient": of["gradient"] / of["ordinary gradient"],
            "remat": of["remat"] / of["ordinary gradient"],
        }
        seconds = {f"{key}, s": value for key, value in of.items()}
        memory = {f"{key}, MiB": round(value, 1) for key, value in mib.items()}
        rows.append({"model": name, "dtype": dtype, "texts": B, "tokens": T, **ratios, **seconds, **memory})
    return rows


def programs_of(cfg: ds.ModelConfig) -> dict[str, Callable[..., Any]]:
    """Functions of masters, tokens, lengths and temperatures: forward passes and gradients of both kinds."""

    def ordinary(params: Params, tokens: jax.Array, lengths: jax.Array, temperatures: jax.Array) -> jax.Array:
        return ordinary_logprobs(params, cfg, tokens, temperatures)

    def canonical(remat: bool) -> Callable[..., jax.Array]:
        def found(params: Params, tokens: jax.Array, lengths: jax.Array, temperatures: jax.Array) -> jax.Array:
            return ds.logprobs(params, cfg, tokens, lengths, temperature=temperatures, remat=remat)

        return found

    def gradient(fn: Callable[..., jax.Array]) -> Callable[..., Any]:
        return jax.value_and_grad(lambda *arguments: fn(*arguments).sum())

    return {
        "ordinary forward": ordinary,
        "forward": canonical(False),
        "ordinary gradient": gradient(ordinary),
        "gradient": gradient(canonical(False)),
        "remat": gradient(canonical(True)),
    }


def steps(rounds: int) -> list[dict[str, Any]]:
    """A row for each kind of step: its processor time, that of an ordinary one, and their ratio, medians of steps in turns."""
    model = ds.load()
    config = dataclasses.replace(config_of("full", 0, model.cfg.dtype), samples=8, max_tokens=48, leaf=8, max_len=128)
    arms = (EXACT, ORDINARY, ORDINARY._replace(name="ordinary, scored anew", scores_anew=True))
    runs = {arm.name: steps_of(arm)(model, config, Way(32)) for arm in arms}
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(WARM_UP + rounds):
        for name, run in runs.items():
            began = cpu_s()
            jax.block_until_ready(next(run))
            if number >= WARM_UP:
                spent[name].append(cpu_s() - began)
    exact_s = median(spent[EXACT.name])
    return [{"step": name, "seconds": median(each), "exact over it": exact_s / median(each)} for name, each in spent.items()]


def ways(every: int) -> int:
    """Prints a digest of the weights for each `every`-th way; 1 if they are not one, or if those of an ordinary run are."""
    cfg = ds.dense_config(**{**SIZES, "max_position": LENGTH, "dtype": "bfloat16"})
    model = random_model(cfg)
    schedule = ds.default_schedule(cfg).with_numerics(page=PAGE)
    sampling = ds.SamplingParams(max_tokens=20, temperature=0.9, ignore_eos=True)
    found = set()
    axes = ((4, 8, 16), ("none", "ngram", "int8", "auto"), (False, True), (True, False), (1, 2, 4))
    for places, method, has_half, shares, chips in list(itertools.product(*axes))[::every]:
        if chips > len(jax.local_devices()):
            print(f"left out: {chips} chips, for which JAX_NUM_CPU_DEVICES must be {chips} or more", flush=True)
            continue
        num_pages = places * (LENGTH // PAGE) // 2 if has_half else None
        engine = ds.EngineConfig(places, LENGTH, num_pages, shares, method, schedule=schedule)
        policy = rl.Policy(model, engine, optimizer=optax.adam(1e-3), chips=chips)
        prompts = [list(prompt) for prompt in bench_prompts(model, 2, PAGE + 4)]
        for _ in range(WAYS_STEPS):
            groups = policy.rollouts(prompts, samples=8, sampling=sampling)
            rewards = [[float(sum(token % 2 for token in each.token_ids)) for each in group] for group in groups]
            policy.update(groups, rewards, rl.grpo())
        found.add(policy.digest())
        pages, shared = "half of the" if has_half else "all", "shared" if shares else "own"
        print(f"{places} places, {method}, {pages} pages, {shared} prefixes, {chips} chips: {policy.digest()[:16]}", flush=True)
    config = dataclasses.replace(config_of("full", 0, "bfloat16"), max_len=LENGTH)
    ends = [list(itertools.islice(steps_of(ORDINARY)(model, config, Way(places)), 10))[-1] for places in (4, 16)]
    ordinary = {digest_weights(weights) for _, weights in ends}
    print(f"{len(found)} digest of exact weights after {WAYS_STEPS} steps, {len(ordinary)} of ordinary ones after 10")
    return int(len(found) != 1 or len(ordinary) != 2)


def cpu_s() -> float:
    """Processor time of this process so far, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
