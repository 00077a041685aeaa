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
# # One text on every device
#
# You will see sixteen texts, and one hash of all their tokens and log-probabilities. The hash is the same on a CPU, a GPU and a
# TPU, because the model computes with integers alone: integer sums have no order. Then code that shares nothing with what
# generated works out every token once more, in front of you.
#
# It takes about a minute on two cores, with a small model of Python code that comes with the package. On Colab, choose another
# kind of device (*Runtime*, *Change runtime type*), run all cells again, and compare.
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
import detspec as ds
from detspec.demo.demo import demo_prompts
from detspec.demo.integer_demo import EXPECTED, ORACLE, audited, demo_sampling, digest_of, oracles, texts_of

# %matplotlib inline

machine = ds.fingerprint()
print(f"{machine['backend']}: {machine['device_kind']} | jax {machine['jax']}")

# %% [markdown]
# ## Generate
#
# `weights="integer"` rounds the model once: weights to 8 bits, all else to integers with a scale. From there on nothing is done
# with floats.

# %%
model = ds.load(weights="integer")
engine = ds.Engine(model, ds.EngineConfig(max_requests=16, max_len=160, method="none"))
prompts = demo_prompts()
sampling = demo_sampling(len(prompts))
texts = engine.generate(prompts, sampling)
print(prompts[0] + texts[0].text)

# %% [markdown]
# ## One hash
#
# It is made of all tokens and of all bits of their log-probabilities. Each result comes with a fingerprint, which says what its
# bits depend on: here the arithmetic and the weights, and no device.

# %%
print(f"here:          {digest_of(texts)}")
print(f"in the README: {EXPECTED}")
assert digest_of(texts) == EXPECTED, "this device has other bits: `detspec doctor --integer` names the operation"
engine.fingerprint()

# %% [markdown]
# ## Another batch, another order
#
# The same requests in reverse, three at a time.

# %%
few = ds.Engine(model, ds.EngineConfig(max_requests=3, max_len=160, method="none"))
reverse = few.generate(prompts[::-1], sampling[::-1])
print(digest_of(reverse[::-1]))
assert digest_of(reverse[::-1]) == EXPECTED

# %% [markdown]
# ## Audit
#
# `detspec/integer/spec.py` is the definition: numpy, no other import, one token after the other. It chooses the same tokens
# and finds the same bits.

# %%
read = oracles(model)[ORACLE](texts_of(texts, sampling))
differing = [found for found in map(audited, read, texts) if found]
print(f"{len(differing)} of {len(texts)} texts differ")
assert not differing, differing[0]

# %% [markdown]
# ## The control: a model in bfloat16
#
# The same requests in floats. Their hash depends on the device, its compiler and their versions. It is another model, too: in
# the picture, a line for each text, texts fork where two tokens are about equally likely.

# %%
floats = ds.Engine(ds.load(), ds.EngineConfig(max_requests=16, max_len=160, method="none"))
in_floats = floats.generate(prompts, sampling)
print(f"in bfloat16, here: {digest_of(in_floats)}")
ds.traces.comparison_figure(ds.compare(texts, in_floats))

# %% [markdown]
# ## Next
#
# * `detspec doctor --integer` compares each operation with hashes of the package.
# * `detspec generate --weights integer` writes records that `detspec audit --with c` checks on any other machine.
# * `docs/integer.md` says how it works, what it costs, and what it does not give.
