"""Draws docs/on_policy.png: rewards of three runs of configs/rl_def.py, and ratios of an exact and of an ordinary trainer.

    for seed in 0 1 2; do detspec train --config configs/rl_def.py:$seed; done
    python -m scripts.draw_on_policy --record runs/rl_def-0 runs/rl_def-1 runs/rl_def-2      # writes docs/data/on_policy.json
    python -m scripts.draw_on_policy                                                         # draws what is recorded

Ratios are those of the first step of the first run, whose texts the shipped model sampled.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import detspec as ds
from detspec.model.params import Params
from detspec.rl.learner import masters
from detspec.rl.run import ROLLOUTS
from detspec.train.run import LOG_NAME, read_log
from detspec.viz.figures import COLOURS, matplotlib_needed
from scripts.ablations.on_policy import ordinary_logprobs

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "docs" / "data" / "on_policy.json"
PICTURE = ROOT / "docs" / "on_policy.png"
EDGES = np.linspace(0.9495, 1.0505, 102)  # 1 is in the middle of a bin


def main(argv: Sequence[str] | None = None) -> int:
    """Records if asked to, and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", nargs="+", type=Path, metavar="RUN", help="work folders of runs")
    parser.add_argument("--picture", type=Path, default=PICTURE, metavar="FILE.png")
    args = parser.parse_args(argv)
    if args.record:
        parts = record(args.record)
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(part)}" for name, part in parts.items())
        RECORDED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    draw(args.picture, json.loads(RECORDED.read_text(encoding="utf-8")))
    return 0


def record(runs: Sequence[Path]) -> dict[str, Any]:
    """Rewards of `runs`, what their logs say of bits, and a histogram of both kinds of ratios."""
    logs = [[line for line in read_log(run / LOG_NAME) if "rollouts" in line] for run in runs]
    steps = [line for log in logs for line in log if not line["skipped"]]
    first = [line for line in read_log(runs[0] / ROLLOUTS) if line["step"] == 1]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "fingerprint": ds.fingerprint(),
        "rewards": [[line["reward"] for line in log] for log in logs],
        "bits_differ": sum(line["logprob_bits_differ"] for line in steps),
        "ratio": [min(line["ratio_min"] for line in steps), max(line["ratio_max"] for line in steps)],
        "edges": [round(float(edge), 4) for edge in EDGES],
        **{name: summary(of) for name, of in ratios(first).items()},
    }


def ratios(lines: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Trainer over sampler for each token that the shipped model sampled at a temperature of 1, in two gradients' programs."""
    model = ds.load()
    prompts = [line["prompt_token_ids"] for line in lines]
    lengths = np.asarray([len(line["prompt_token_ids"]) + len(line["token_ids"]) for line in lines], np.int32)
    tokens = np.zeros((len(lines), 64), np.int32)
    for row, line in enumerate(lines):
        tokens[row, : lengths[row]] = [*line["prompt_token_ids"], *line["token_ids"]]
    sampled = np.concatenate([np.asarray(line["logprobs"], np.float32) for line in lines])
    trainers: dict[str, Callable[..., jax.Array]] = {
        "exact": lambda params, tokens: ds.logprobs(params, model.cfg, tokens, lengths),
        "ordinary": lambda params, tokens: ordinary_logprobs(params, model.cfg, tokens, jnp.ones(len(lines))),
    }
    found = {name: in_gradient(fn, masters(model.params), tokens) for name, fn in trainers.items()}
    of_new = {
        name: np.concatenate([each[row, len(prompts[row]) : lengths[row]] for row in range(len(lines))])
        for name, each in found.items()
    }
    return {name: np.exp(here.astype(np.float64) - sampled) for name, here in of_new.items()}


def in_gradient(fn: Callable[..., jax.Array], params: Params, tokens: np.ndarray) -> np.ndarray:
    """Log-probabilities `fn(params, tokens)` as the program of a gradient has them."""

    def loss_fn(params: Params) -> tuple[jax.Array, jax.Array]:
        found = fn(params, tokens)
        return found.sum(), found

    return np.asarray(jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params)[0][1])


def summary(of: np.ndarray) -> dict[str, Any]:
    """The histogram of ratios, and figures about them."""
    counts = np.histogram(np.clip(of, EDGES[0], EDGES[-1]), EDGES)[0]
    return {"number": len(of), "are_1": int((of == 1).sum()), "span": [of.min(), of.max()], "counts": counts.tolist()}


def draw(path: Path, recorded: dict[str, Any]) -> None:
    """Writes the picture."""
    with matplotlib_needed():
        from matplotlib.figure import Figure
    figure = Figure(figsize=(10.2, 3.2), dpi=110, layout="constrained")
    left, *others = figure.subplots(1, 3)
    for seed, rewards in enumerate(recorded["rewards"]):
        left.plot(range(1, len(rewards) + 1), rewards, color=COLOURS[seed], label=f"seed {seed}")
    left.set(title="functions that parse", xlabel="step", ylim=(0, 1))
    left.legend(frameon=False)
    for axes, name in zip(others, ("exact", "ordinary"), strict=True):
        part = recorded[name]
        axes.stairs(
            part["counts"], recorded["edges"], baseline=0.5, fill=True, color=COLOURS[0] if name == "exact" else "#7a7a7a"
        )
        low, high = part["span"]
        axes.set(
            title=f"{name} trainer: {low:.3f} to {high:.3f}", xlabel="ratio, trainer / sampler", ylabel="tokens", yscale="log"
        )
    for axes in (left, *others):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
