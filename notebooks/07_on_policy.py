# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Training on exactly the policy that sampled
#
# In reinforcement learning one program samples texts, and another one learns from them. They hold the same weights, and yet
# give a token two log-probabilities, because their sums have another order. The *ratio* of the two should be 1, and is not. So
# training learns from a policy that never sampled, and its result depends on how the sampler filled its batches.
#
# `detspec.rl` samples and learns with one set of numerics: the ratio is 1, exactly, in every step. You will see a reward rise,
# then the ratio next to that of an ordinary trainer, and two runs with other batches that end with the same weights, bit for
# bit. It takes about two minutes on two cores.
#
# On Colab, first upload the wheel that `make dist` writes (*Files*, at the left).

# %%
import glob
import importlib.util
import pathlib
import shutil
import subprocess
import sys

ADDRESS = ""  # of the repository, once it has one: "git+https://..."

if importlib.util.find_spec("detspec") is None:  # on Colab, say
    extras = "plots"
    if shutil.which("nvidia-smi"):
        extras += ",gpu"
    elif glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*"):
        extras += ",tpu"
    here = pathlib.Path.cwd()
    found = [folder for folder in (here, *here.parents) if (folder / "detspec" / "__init__.py").exists()]
    found += sorted(here.glob("detspec-*.whl"))
    if not found and not ADDRESS:
        sys.exit("detspec is not here: put the wheel that `make dist` writes next to this notebook, and run this cell again")
    package = f"{found[0]}[{extras}]" if found else f"detspec[{extras}] @ {ADDRESS}"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package], check=True)

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import detspec as ds
import detspec.rl as rl
from detspec.model.transformer import forward_sequences
from detspec.rl.learner import published

machine = ds.fingerprint()
print(f"{machine['backend']}: {machine['device_kind']} | jax {machine['jax']}")

# %% [markdown]
# ## Prompts and a reward
#
# The model that comes with the package writes Python. Its reward is how often a text of 24 tokens says `self` or `return`. That
# is a silly reward, but one that anyone can count.

# %%
PROMPTS = ["class Stack:\n    def push(", "import os\n\ndef walk(path):\n    ", "def __init__(self, name", "try:\n    value = "]
SAMPLING = ds.SamplingParams(max_tokens=24, temperature=0.9)
MODEL = ds.load()


def reward(rollout: rl.Rollout) -> float:
    """Counts two words."""
    return float(rollout.text.count("self") + rollout.text.count("return"))


def make_policy(places: int, drafts: str) -> rl.Policy:
    """The shipped model, about to learn; `places` is how many texts are sampled at once."""
    config = ds.EngineConfig(max_requests=places, max_len=64, method=drafts)
    return rl.Policy(MODEL, config, optimizer=optax.adam(1e-4), leaf=8)


def one_step(policy: rl.Policy) -> tuple[list[list[rl.Rollout]], dict[str, float]]:
    """Samples eight texts a prompt, and learns from them."""
    groups = policy.rollouts(PROMPTS, samples=8, sampling=SAMPLING)
    return groups, policy.update(groups, [[reward(each) for each in group] for group in groups], rl.grpo())


# %% [markdown]
# ## The ratio, twice
#
# Two trainers for the picture, of the same weights, tokens and temperature: `ds.logprobs`, from which `update` learns, and the
# forward pass that training usually has, in bfloat16 with XLA's products and sums. Both are asked inside of a gradient's
# program, as in training. Nothing learns from the second one.


# %%
def in_gradient(logprobs_fn):
    """Log-probabilities `[B, T]` as the program of a gradient works with them."""

    def loss(params, tokens, lengths):
        found = logprobs_fn(params, tokens, lengths)
        return found.sum(), found

    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return lambda *texts: np.asarray(gradient(*texts)[0][1])


@in_gradient
def exact(params, tokens, lengths):
    """Ours."""
    return ds.logprobs(params, MODEL.cfg, tokens, lengths, temperature=SAMPLING.temperature)


@in_gradient
def ordinary(params, tokens, lengths):
    """The usual one; texts are filled up at their end."""
    logits, _ = forward_sequences(published(params, MODEL.cfg), MODEL.cfg, tokens)
    of_all = jax.nn.log_softmax(logits / SAMPLING.temperature)
    of_next = jnp.take_along_axis(of_all[:, :-1], tokens[:, 1:, None], axis=2)[..., 0]
    return jnp.pad(of_next, ((0, 0), (1, 0)))


def ratios(logprobs_fn, params, groups: list[list[rl.Rollout]]) -> np.ndarray:
    """Trainer over sampler, for each sampled token."""
    texts = [each for group in groups for each in group]
    tokens = np.zeros((len(texts), 64), np.int32)
    for row, each in enumerate(texts):
        tokens[row, : each.length] = (*each.prompt_token_ids, *each.token_ids)
    found = logprobs_fn(params, tokens, np.asarray([each.length for each in texts], np.int32))
    here = [found[row, len(each.prompt_token_ids) : each.length] for row, each in enumerate(texts)]
    return np.exp(np.concatenate(here) - np.concatenate([each.logprobs for each in texts]))


# %% [markdown]
# ## A reward that rises
#
# `update` compares every log-probability of its own program with the one that the sampler reported, and raises an error if a
# single bit differs. So the columns on the right are no surprise: they are measured, in each step.

# %%
policy = make_policy(places=32, drafts="none")
rewards, digests = [], []
found = {"exact": [], "ordinary": []}
print("step  reward  log-probabilities that differ                   ratio")
for step in range(1, 11):
    weights = jax.tree.map(jnp.copy, policy.state.params)  # before the step
    groups, metrics = one_step(policy)
    rewards.append(metrics["reward"])
    digests.append(policy.digest())
    found["exact"].append(ratios(exact, weights, groups))
    found["ordinary"].append(ratios(ordinary, weights, groups))
    span = f"{metrics['ratio_min']:.7f} to {metrics['ratio_max']:.7f}"
    print(f"{step:4}  {rewards[-1]:6.2f}  {metrics['logprob_bits_differ']:29.0f}  {span}")

# %%
figure, (left, *others) = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
left.plot(range(1, len(rewards) + 1), rewards, marker="o", color="#1b6ca8")
left.set(title="reward", xlabel="step")
bins = np.linspace(0.9495, 1.0505, 102)
for axes, (name, some), colour in zip(others, found.items(), ("#1b6ca8", "#7a7a7a"), strict=True):
    all_steps = np.concatenate(some)
    axes.hist(np.clip(all_steps, bins[0], bins[-1]), bins, color=colour, log=True)
    axes.set(title=f"ratio, {name}: {all_steps.min():.3f} to {all_steps.max():.3f}", xlabel="trainer / sampler")
    print(f"{name:9}{np.mean(all_steps == 1):7.1%} of {len(all_steps)} ratios are 1")
for axes in (left, *others):
    axes.spines[["top", "right"]].set_visible(False)
plt.show()
assert (np.concatenate(found["exact"]) == 1).all()

# %% [markdown]
# ## Other batches, one result
#
# The first run sampled 32 texts at once. This one has room for 5 at a time, and drafts by prompt lookup. After three steps its
# weights have the same SHA-256 as those of the first run: tokens, log-probabilities and gradients were the same bits. The
# control is a fourth step with other seeds.

# %%
small = make_policy(places=5, drafts="ngram")
for _ in range(3):
    one_step(small)
print("after three steps, 32 texts at once  ", digests[2][:32])
print("5 at once, with drafts               ", small.digest()[:32])
assert small.digest() == digests[2]
small.run = "another run"
one_step(small)
print("after four steps, 32 texts at once   ", digests[3][:32])
print("5 at once, with drafts, other seeds  ", small.digest()[:32])
assert small.digest() != digests[3]

# %% [markdown]
# ## Next
#
# * `detspec train --config configs/rl_def.py` is a run of 40 steps that resumes after a kill, to the same bits.
#   `detspec audit --rl runs/rl_def --step 1` replays a step of it.
# * `docs/on_policy.md` says what decides bits, how a step may lag behind the weights, and what is refused.
# * `docs/rl_trainers.md` has the same log-probabilities in flax.nnx and in Tunix.
