"""Sampler and trainer of reinforcement learning: whether they agree, and what moves the weights that a run ends with.

    JAX_NUM_CPU_DEVICES=4 python -m scripts.ablations.on_policy

Setup      The shipped model; 6 steps of 16 texts of 24 tokens at temperature 0.9, rewarded by how often they have two words.
           Differences over all steps, in the program of the gradient; weights compared with those of the first way of a policy.
Hardware   Two cores of an Intel Xeon (family 6, model 167), jax 0.10.2, four simulated chips, next to much other work.
Found      Exact: 0 of 2,304 log-probabilities differ in bfloat16 and in float16, and the weights have one SHA-256 at 4, 8 and
           16 places, with any draft, on 1, 2 and 4 chips. Ordinary trainers differ in 1,091 (ratio 0.976 to 1.024) and 2,289
           (0.995 to 1.006), rollouts in int8 in 2,291 (0.747 to 1.316) and 2,277 (0.586 to 1.294): off-policy, but the same
           again. An ordinary engine differs in 911, and its places move all weights.
"""

import contextlib
import dataclasses
import itertools
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import detspec as ds
import detspec.rl as rl
from detspec.bench.bench import bench_prompts
from detspec.checkpoint.load import cast_params
from detspec.model.params import Params
from detspec.model.transformer import forward_sequences
from detspec.rl.advantages import advantages_of
from detspec.rl.config import RLConfig
from detspec.rl.learner import Leaf, compared, leaves_of, masters, published
from detspec.rl.policy import digest_weights
from detspec.rl.rollouts import Rollout
from detspec.seeds import seed_of
from detspec.train.data_parallel import sum_over_slices
from detspec.train.optimizer import OptimizerConfig, make_optimizer
from detspec.train.run import LOG_NAME, read_log
from scripts.ablations.models import model_of, with_weights
from scripts.ablations.table import Options, Plot, Promise, Row, carry_out

Found = tuple[list[dict[str, Any]], Params]  # metrics of each step, and the weights after the last one
Steps = Iterator[tuple[dict[str, float], Params]]  # metrics of a step, and the weights after it
ROOT = Path(__file__).parents[2]
DTYPES = {"tiny": ("bfloat16",), "full": ("bfloat16", "float16", "float32")}
PROMPTS = ("class Stack:\n    def push(", "import os\n\ndef walk(path):\n    ", "def __init__(self, name", "try:\n    value = ")
KILLS, LATEST_S = 5, 60.0  # the latest moment of a kill, in seconds


class Arm(NamedTuple):
    """The sampler and the trainer of a run."""

    name: str
    weights: str | None = None  # of the sampler, where they are others than the trainer's
    is_deterministic: bool = True
    is_canonical: bool = True  # the trainer's forward pass
    scores_anew: bool = False  # by the trainer's forward pass, instead of taking what the sampler reported


class Way(NamedTuple):
    """A way to carry out a run, which should not matter."""

    places: int
    method: str = "none"
    chips: int = 1

    @property
    def name(self) -> str:
        """How the table calls it."""
        return f"{self.places} places, {self.method}{f', {self.chips} chips' if self.chips > 1 else ''}"


EXACT = Arm("exact")
ENGINE = Arm("ordinary engine", is_deterministic=False)
ARMS = (EXACT, Arm("ordinary trainer", is_canonical=False), Arm("int8 rollouts", weights="int8"), ENGINE)
FEW, MANY = Way(4), Way(16)
WAYS = (FEW, MANY, Way(16, "auto"), Way(8, "ngram"), Way(8, chips=2), Way(8), Way(8, "int8"), Way(8, chips=4))


def ways_of(size: str, arm: Arm, dtype: str) -> Sequence[Way]:
    """The ways that are compared: for most, those that need few programs."""
    if arm is EXACT:
        return WAYS if size == "full" and dtype == "bfloat16" else (FEW, Way(16, "ngram"))
    return (FEW, MANY) if size == "full" or arm is ENGINE else (FEW,)


@dataclasses.dataclass(frozen=True)
class Words:
    """The reward is how often a text has the words `self` and `return`."""

    def draw(self, rng: np.random.Generator, number: int) -> list[tuple[str, None]]:
        """Draws the same prompts in each step."""
        return [(prompt, None) for prompt in PROMPTS[:number]]

    def reward(self, known: None, prompt: str, text: str) -> float:
        """Counts the words."""
        return float(text.count("self") + text.count("return"))


def config_of(size: str, seed: int, dtype: str) -> RLConfig:
    """The run that all arms and ways carry out."""
    return RLConfig(
        model=None,
        task=Words(),
        prompts=len(PROMPTS),
        samples=4,
        max_tokens=24,
        num_steps=2 if size == "tiny" else 6,
        optimizer=OptimizerConfig(peak_lr=1e-4, final_lr=1e-4, warmup_steps=0, weight_decay=0.0),
        temperature=0.9,
        dtype=dtype,
        seed=seed,
        checkpoint_every=1,
        max_len=64,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and reports."""
    plot = Plot("dtype", "policy", ("differ", "largest difference", "weights moved %"))
    agree = Promise("differ", lambda row: row["policy"] != EXACT.name)
    stay = Promise("weights moved %", lambda row: row["policy"] == ENGINE.name)
    return carry_out("on_policy", measure, __doc__, argv, plot=plot, promise=agree, also=stay)


def measure(options: Options) -> list[Row]:
    """A row for each arm, dtype and way; weights are compared with those of the arm's first way."""
    own = model_of(options)
    rows: list[Row] = []
    for dtype in DTYPES[options.size]:
        cfg, params = cast_params(own.cfg, own.params, dtype)
        model = dataclasses.replace(own, cfg=cfg, params=params)
        config = config_of(options.size, options.seed, dtype)
        for arm in ARMS:
            runs: dict[str, Callable[[], Found]] = {
                way.name: partial(whole, steps_of(arm), model, config, way)
                for way in ways_of(options.size, arm, dtype)
                if way.chips <= len(jax.local_devices())
            }
            if arm is EXACT and options.size == "full" and dtype == "float32":  # whose export has all bits of the masters
                runs[f"detspec train, {KILLS} kills"] = partial(killed, options.seed)
            first: Params = None
            for name, run in runs.items():
                metrics, weights = run()
                first = weights if first is None else first
                rows.append({"policy": arm.name, "dtype": dtype, "run": name, **columns(metrics), **moved(weights, first)})
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def whole(steps: Callable[[ds.Model, RLConfig, Way], Steps], model: ds.Model, config: RLConfig, way: Way) -> Found:
    """All steps of a run."""
    metrics, weights = zip(*itertools.islice(steps(model, config, way), config.num_steps), strict=True)
    return list(metrics), weights[-1]


def exact(model: ds.Model, config: RLConfig, way: Way) -> Steps:
    """The steps of a policy."""
    engine_config = ds.EngineConfig(way.places, config.max_len, method=way.method)
    optimizer = make_optimizer(config.optimizer, config.num_steps)
    policy = rl.Policy(model, engine_config, optimizer=optimizer, leaf=config.leaf, chips=way.chips, run=config.name)
    while True:
        groups = policy.rollouts(prompts_of(model), samples=config.samples, sampling=config.sampling)
        metrics = policy.update(groups, [[reward(each) for each in group] for group in groups], config.objective)
        yield metrics, jax.tree.map(jnp.copy, policy.state.params)  # the next step donates them


def steps_of(arm: Arm) -> Callable[[ds.Model, RLConfig, Way], Steps]:
    """`exact`, or steps with the sampler and the trainer of `arm`, which a policy would refuse: its checks are left out."""

    def run(model: ds.Model, config: RLConfig, way: Way) -> Steps:
        sampler = model if arm.weights is None else with_weights(model, arm.weights)
        engine = ds.Engine(sampler, ds.EngineConfig(way.places, config.max_len, method=way.method))
        optimizer = make_optimizer(config.optimizer, config.num_steps)
        gradient = gradient_fn(arm, model, config, engine.schedule)
        score = jax.jit(lambda params, leaf: ordinary_logprobs(params, model.cfg, leaf.tokens, leaf.temperature))
        params = masters(model.params)
        opt_state = jax.jit(optimizer.init)(params)
        update, apply = jax.jit(optimizer.update), jax.jit(optax.apply_updates)
        for step in itertools.count():
            engine.update_params(published(params, model.cfg), weight_version=str(step))
            texts = sample(engine, config, step, is_deterministic=arm.is_deterministic)
            groups = [texts[at : at + config.samples] for at in range(0, len(texts), config.samples)]
            rewards = [[reward(each) for each in group] for group in groups]
            advantages = np.concatenate(advantages_of(rewards, config.objective.advantage))
            limit = model.cfg.max_position
            leaves = leaves_of(texts, advantages, config.objective, leaf=config.leaf, max_position=limit)
            if arm.scores_anew:
                leaves = [leaf._replace(sampled=np.where(leaf.is_new, score(params, leaf), 0)) for leaf in leaves]
            found = [gradient(params, leaf) for leaf in leaves]
            grads = sum_over_slices(lambda _, of_leaf: of_leaf[1], params, found, chips=jax.local_devices()[:1])
            metrics = compared(leaves, [np.asarray(logprobs) for logprobs, _ in found], config.objective)
            updates, opt_state = update(grads, opt_state, params)
            params = apply(params, updates)
            yield metrics, params

    return exact if arm is EXACT else run


def gradient_fn(arm: Arm, model: ds.Model, config: RLConfig, schedule: ds.Schedule) -> Callable[[Params, Leaf], Any]:
    """`(params, leaf) -> logprobs [n, T], gradient` by the trainer of `arm`."""

    def logprobs_of(params: Params, leaf: Leaf) -> jax.Array:
        if arm.is_canonical:
            own = schedule if arm.weights is None else None  # of a sampler of other weights, too, numerics are the trainer's
            return ds.logprobs(params, model.cfg, leaf.tokens, leaf.lengths, temperature=leaf.temperature, schedule=own)
        return ordinary_logprobs(params, model.cfg, leaf.tokens, leaf.temperature)

    def loss_fn(params: Params, leaf: Leaf) -> tuple[jax.Array, jax.Array]:
        found = logprobs_of(params, leaf)
        of_new = jnp.where(leaf.is_new, found, 0.0)
        losses = config.objective.losses(of_new, leaf.sampled, leaf.advantages, None)
        return jnp.where(leaf.is_new, losses * leaf.weights[:, None], 0.0).sum(), found

    program = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))

    def gradient(params: Params, leaf: Leaf) -> Any:
        (_, found), grads = program(params, leaf)
        return found, grads

    return gradient


def ordinary_logprobs(params: Params, cfg: ds.ModelConfig, tokens: jax.Array, temperature: jax.Array) -> jax.Array:
    """Log-probabilities `[B, T]` of `tokens [B, T]` at `temperature [B]`, by the forward pass of ordinary training."""
    logits_f32, _ = forward_sequences(published(params, cfg), cfg, tokens)
    of_all = jax.nn.log_softmax(logits_f32 / temperature[:, None, None])
    of_next = jnp.take_along_axis(of_all[:, :-1], tokens[:, 1:, None], axis=2)[..., 0]
    return jnp.pad(of_next, ((0, 0), (1, 0)))


def sample(engine: ds.Engine, config: RLConfig, step: int, *, is_deterministic: bool) -> list[Rollout]:
    """The texts of a step, in the order of prompts, with the seeds that a policy gives them."""
    asked = {
        f"{step}/{p}/{s}": dataclasses.replace(
            config.sampling, seed=seed_of(config.name, step, p, s), deterministic=is_deterministic
        )
        for p in range(config.prompts)
        for s in range(config.samples)
    }
    prompts = prompts_of(engine.model)
    requests = [engine.request(prompts[int(id.split("/")[1])], sampling, id=id) for id, sampling in asked.items()]
    found = {each.id: Rollout.of(each, asked[each.id], str(step)) for each in engine.run(requests)}
    return [found[id] for id in asked]


def prompts_of(model: ds.Model) -> Sequence[str | Sequence[int]]:
    """The prompts of each step."""
    return PROMPTS if model.tokenizer else bench_prompts(model, len(PROMPTS), 8)


def reward(rollout: Rollout) -> float:
    """The reward of `Words`; without a tokenizer, the number of even tokens."""
    return Words().reward(None, "", rollout.text) if rollout.text else float(sum(t % 2 == 0 for t in rollout.token_ids))


def columns(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Columns of a row; of all steps, but for the share of clipped ratios, which is the first step's."""
    learned = [each for each in metrics if not each.get("skipped")]
    return {
        "differ": int(sum(each["logprob_bits_differ"] for each in learned)),
        "mean difference": float(np.mean([each["logprob_diff_mean"] for each in learned])),
        "largest difference": max(each["logprob_diff_max"] for each in learned),
        "K3": float(np.mean([each["k3"] for each in learned])),
        "least ratio": min(each["ratio_min"] for each in learned),
        "largest ratio": max(each["ratio_max"] for each in learned),
        "clipped at once %": 100 * learned[0]["clipped"],
    }


def moved(weights: Params, first: Params) -> dict[str, Any]:
    """The share of weights, float32, that have other bits than in `first`, and the beginning of their SHA-256."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(*map(jax.tree.leaves, (weights, first)), strict=True)]
    differ = sum(int((a.view(np.uint32) != b.view(np.uint32)).sum()) for a, b in pairs)
    return {"weights moved %": 100 * differ / sum(a.size for a, _ in pairs), "SHA-256": digest_weights(weights)[:12]}


def killed(seed: int) -> Found:
    """A run of `detspec train` that gets SIGKILL at `KILLS` random moments, and then goes on to its end."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        file, workdir = Path(folder) / "run.py", Path(folder) / "run"
        lines = ("from scripts.ablations.on_policy import config_of", "", "", "def get_config():")
        file.write_text("\n".join([*lines, f"    return config_of('full', {seed}, 'float32')", ""]))
        command = [sys.executable, "-m", "detspec", "train", "--config", str(file), "--workdir", str(workdir)]
        for _ in range(KILLS):
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0, LATEST_S))
                raise RuntimeError(f"the run ended before its kill: lower LATEST_S ({LATEST_S:g} s)")
            process.kill()
            process.wait()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        metrics = [line for line in read_log(workdir / LOG_NAME) if "rollouts" in line]
        return metrics, ds.load(workdir / "export").params


if __name__ == "__main__":
    sys.exit(main())
