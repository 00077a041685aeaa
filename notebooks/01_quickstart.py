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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/)
#
# # detspec in five minutes
#
# Ask a language model the same thing twice and the bits of the answer differ, because the batch around the request differed.
# `detspec` makes them equal: a fast path only *drafts*, a canonical pass *verifies*, and what it accepts is *committed*. This
# notebook shows it on a small model that comes with the package. It runs on a CPU, a GPU or a TPU.
#
# (The badge opens Colab. Give it the address of this repository, and choose `notebooks/01_quickstart.ipynb`.)

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
import dataclasses

import matplotlib.pyplot as plt
import numpy as np

import detspec as ds

machine = ds.fingerprint()
print(f"{machine['backend']}: {machine['device_kind']} | jax {machine['jax']}")

# %% [markdown]
# ## Load and generate
#
# `ds.load()` reads the small model of the package, which was trained on Python code. `ds.load("path/to/model")` reads a Hugging
# Face folder of the Llama, Mistral, Qwen or Gemma family.

# %%
model = ds.load()
engine = ds.Engine(model, ds.EngineConfig(max_requests=16, max_len=256))
prompts = [
    "def read_lines(path):\n",
    "class Point:\n    def __init__(self, x, y):\n",
    "import os\n\ndef walk(folder):\n    for name in",
    "try:\n    value = int(text)\nexcept",
] * 4
sampling = ds.SamplingParams(max_tokens=64, temperature=0.8, seed=1, ignore_eos=True)
completions = engine.generate(prompts, sampling)
print(prompts[0] + completions[0].text)

# %% [markdown]
# ## The same requests, in another batch
#
# The first four once more, this time one at a time. Nothing about a request has changed, only its neighbours.


# %%
def generate(max_requests: int, deterministic: bool) -> list[ds.Completion]:
    """Answers to the first four prompts, with as many prompts in the batch as it holds."""
    engine = ds.Engine(model, ds.EngineConfig(max_requests=max_requests, max_len=256))
    requested = dataclasses.replace(sampling, deterministic=deterministic)
    return engine.generate(prompts[: max(max_requests, 4)], requested)[:4]


kinds = {"ordinary": False, "deterministic": True}
together = {kind: generate(16, deterministic) for kind, deterministic in kinds.items()}
alone = {kind: generate(1, deterministic) for kind, deterministic in kinds.items()}

# %% [markdown]
# We compare tokens and the 32 bits of every log-probability: `==` on the bit pattern, no tolerance. Most changes are in the
# last bits. Sooner or later one of them changes a token, and from there on the two answers differ.


# %%
def changed(a: ds.Completion, b: ds.Completion) -> np.ndarray:
    """True at every position whose token, or whose log-probability's bits, differ."""
    bits_a, bits_b = (np.asarray(c.logprobs, np.float32).view(np.uint32) for c in (a, b))
    return (np.asarray(a.token_ids) != np.asarray(b.token_ids)) | (bits_a != bits_b)


differs = {kind: np.stack([changed(*pair) for pair in zip(together[kind], alone[kind], strict=True)]) for kind in together}
print(f"{'':<16}{'positions':>10}{'changed':>10}{'answers changed':>18}")
for kind, strip in differs.items():
    print(f"{kind:<16}{strip.size:>10}{strip.sum():>10}{strip.any(axis=1).sum():>13} of {len(strip)}")

assert not differs["deterministic"].any(), "a deterministic answer depended on its batch"

# %% [markdown]
# The same as a picture: a line per answer, a column per token, red where a bit changed between the two batches.

# %%
figure, axes = plt.subplots(2, 1, figsize=(9, 2.6), sharex=True, layout="constrained")
for axis, (kind, strip) in zip(axes, differs.items(), strict=True):
    axis.imshow(strip, aspect="auto", cmap="RdYlGn_r", vmin=0, vmax=1, interpolation="nearest")
    axis.set_title(f"{kind}: {strip.sum()} of {strip.size} positions changed", loc="left", fontsize=10)
    axis.set_yticks(range(len(strip)), [f"answer {i}" for i in range(len(strip))], fontsize=7)
axes[-1].set_xlabel("position after the prompt")
plt.show()

# %% [markdown]
# ## Draft, verify, commit, roll back
#
# Two windows of one request, from a real run. In the first one every drafted token is accepted, and the pass adds its own next
# token as a bonus. In the second one a drafted token is rejected: the tokens before it are kept, the pass's choice is committed
# in its place, and the cache length is set back. Nothing is copied or undone.
#
# The model's own drafts are rarely rejected on a CPU. If none was here, the same weights in int8 drafted the window, and the
# title says so. The draft never changes what is committed.

# %%
trace = ds.traces.find_rollback(model, prompts[:4], window=4)
drafted = sum(len(window.drafted) for window in trace.windows)
accepted = sum(window.accepted for window in trace.windows)
print(f"{trace.title}: {accepted} of {drafted} drafted tokens accepted in {len(trace.windows)} windows")
figure = ds.traces.trace_figure(trace)
figure

# %% [markdown]
# ## Next
#
# * `02_drafts` looks at draft sources and the clock, `03_thinking_states` at a model that thinks while it reads,
#   `04_your_checkpoint` loads a folder of yours, and `05_batch_job` kills a job.
# * `detspec doctor` certifies this device; `detspec bench` measures what determinism costs here.
# * `detspec generate --prompts in.jsonl --out out.jsonl` writes the same bytes at any batch size, and after any restart.
# * `engine.fingerprint()` names everything that the bits may depend on. Every result carries it:

# %%
for name, value in engine.fingerprint().items():
    print(f"{name:<12} {value}")
