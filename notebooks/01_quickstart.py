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
# # The same request, the same bits, in any batch
#
# You will see 32 requests answered twice: one at a time, and all at once. In ordinary generation several texts come out
# different, because the order of floating-point sums follows the batch. In deterministic generation no text changes, and no bit
# of any log-probability. A picture shows where texts fork, and the last one how `detspec` prevents it: a fast path *drafts*, a
# canonical pass *verifies*, what agrees is *committed*, and the rest is rolled back.
#
# It takes about a minute on two cores, with a small model of Python code that comes with the package. It also runs on a GPU or
# a TPU.
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
import dataclasses
import textwrap

import detspec as ds

# %matplotlib inline

machine = ds.fingerprint()
print(f"{machine['backend']}: {machine['device_kind']} | jax {machine['jax']}")

# %% [markdown]
# ## Load and generate
#
# `ds.load()` reads the small model of the package. `ds.load("path/to/model")` reads a Hugging Face folder of the Llama,
# Mistral, Qwen or Gemma family. An engine compiles its programs with the first request, and certifies them on this device.

# %%
PROMPTS = (
    "def read_lines(path):\n",
    "class Point:\n    def __init__(self, x, y):\n",
    "import os\n\ndef walk(folder):\n    for name in",
    "try:\n    value = int(text)\nexcept",
)
model = ds.load()
engines = {number: ds.Engine(model, ds.EngineConfig(max_requests=number, max_len=256)) for number in (1, 32)}
(answer,) = engines[1].generate(PROMPTS[:1], ds.SamplingParams(max_tokens=64, temperature=0.8, seed=7))
print(PROMPTS[0] + answer.text)

# %% [markdown]
# ## Alone, and in a crowd
#
# Eight seeds for each of four prompts make 32 requests. One engine takes one at a time, the other all at once. Nothing about a
# request changes, only its neighbours.

# %%
prompts = PROMPTS * 8
sampling = ds.SamplingParams(max_tokens=192, temperature=1.0, ignore_eos=True)


def generate(number: int, deterministic: bool) -> list[ds.Completion]:
    """Answers to all requests, `number` at a time."""
    asked = dataclasses.replace(sampling, deterministic=deterministic)
    return engines[number].generate(prompts, [dataclasses.replace(asked, seed=seed) for seed in range(32)])


KINDS = {"ordinary": False, "deterministic": True}
alone = {kind: generate(1, deterministic) for kind, deterministic in KINDS.items()}
crowd = {kind: generate(32, deterministic) for kind, deterministic in KINDS.items()}

# %% [markdown]
# `ds.compare` compares tokens, and the 32 bits of every log-probability: `==` on the bit pattern, no tolerance.

# %%
compared = {kind: ds.compare(alone[kind], crowd[kind]) for kind in KINDS}
print(f"{'changed in the crowd':<24}{'texts':>12}{'log-probabilities':>22}")
for kind, found in compared.items():
    texts = f"{found.num_forks} of {len(found.texts)}"
    print(f"{kind:<24}{texts:>12}{f'{found.num_logprobs_differ:,} of {found.num_logprobs:,}':>22}")
assert compared["deterministic"].equal, "a deterministic answer depended on its batch"

# %% [markdown]
# Most changes are small. Sooner or later one of them turns a token, and from there on a text goes another way.
# Log-probabilities are compared up to there. The ordinary texts in full:

# %%
compared["ordinary"]

# %% [markdown]
# The same as a picture: a line for each ordinary text, and below how far its log-probabilities are apart. In the picture of the
# deterministic ones, all would be blue.

# %%
ds.traces.comparison_figure(compared["ordinary"])

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
trace = ds.traces.find_rollback(model, list(PROMPTS), window=4)
drafted = sum(len(window.drafted) for window in trace.windows)
accepted = sum(window.accepted for window in trace.windows)
print(f"{accepted} of {drafted} drafted tokens accepted in {len(trace.windows)} windows")
ds.traces.trace_figure(trace)

# %% [markdown]
# ## What the bits may depend on
#
# `engine.fingerprint()` names it all, and every result carries it.

# %%
for name, value in engines[1].fingerprint().items():
    print(textwrap.fill(f"{name:<18}{value}", 100, subsequent_indent=" " * 18))

# %% [markdown]
# ## Next
#
# * `02_drafts` looks at draft sources and the clock, `03_thinking_states` at a model that thinks while it reads,
#   `04_your_checkpoint` loads a folder of yours, `05_batch_job` kills a job, and `06_serving` asks a server.
# * `detspec doctor` certifies this device; `detspec bench` measures what determinism costs here.
# * `detspec generate --prompts in.jsonl --out out.jsonl` writes the same bytes at any batch size, and after any restart.
# * A GPU or TPU belongs to this notebook until its kernel is shut down. `05_batch_job` and `06_serving` start processes that
#   need it: shut down this kernel before.
