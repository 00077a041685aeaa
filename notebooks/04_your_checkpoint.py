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
# # Your own checkpoint
#
# You will see a Hugging Face folder become completions that can be audited: plan, load, examine the device, generate, replay.
# At the end the audit finds one token that was forged. Without a folder of your own, this notebook makes a small one with
# random weights. What that writes is nonsense, but its bits are exact. It takes less than a minute on two cores.
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

# %% [markdown]
# ## A folder
#
# Put the path of your model here: Llama 2 and 3.x, Mistral, Qwen2 and 2.5, Qwen3, Gemma 2 or Gemma 3 (text), with its
# `config.json`, `*.safetensors` and `tokenizer.json`. `huggingface_hub.snapshot_download("Qwen/Qwen3-0.6B")` returns such a
# path.

# %%
MODEL = None  # or "path/to/your/model"

# %%
import contextlib
import json
import os
import shlex
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt

import detspec as ds
from detspec.checkpoint.hf import save_hf
from detspec.checkpoint.load import load_config
from detspec.cli import main
from detspec.model.dense import with_fields
from detspec.model.params import init_params
from detspec.presets import preset

machine = ds.fingerprint()
print(f"{machine['backend']}: {machine['device_kind']} | jax {machine['jax']}")

MODEL = None if MODEL is None else str(Path(MODEL).resolve())
os.chdir(tempfile.mkdtemp(prefix="detspec-"))  # for all that this notebook writes
if MODEL is None:
    MODEL = "random_qwen3"
    small = {
        "vocab_size": 2048,
        "d_model": 256,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "d_ff": 512,
        "head_dim": 64,
    }
    cfg = with_fields(preset("qwen3_0_6b"), **small, max_position=1024, tie_embeddings=False)
    save_hf(MODEL, cfg, init_params(cfg, jax.random.key(0)), side_files_from="tiny_python")
for file in sorted(Path(MODEL).iterdir()):
    print(f"{file.stat().st_size / 1e6:10.3f} MB  {file.name}")

# %% [markdown]
# ## Plan
#
# Does it fit, and what speed is to be expected? Arithmetic needs only `config.json`: how many bytes weights and cache take, and
# how long a device reads and multiplies at least. The random folder is too small to be worth a line; here is the published
# shape of Qwen3 8B, and your own folder, if there is one.

# %%
from detspec.cache import cache_bytes
from detspec.model.params import param_shapes, params_bytes
from detspec.planning.planning import predict
from detspec.targets import TARGETS, canonical_schedule

ROOM = {"max_requests": 32, "max_len": 1024}
sizes = {}
shapes = {"qwen3_8b": preset("qwen3_8b")}
if MODEL != "random_qwen3":
    shapes[Path(MODEL).name] = load_config(MODEL)
for name, cfg in shapes.items():
    print(f"{name}: {ROOM['max_requests']} requests of {ROOM['max_len']} positions")
    print(f"  {'device':<12}{'weights':>11}{'cache':>11}{'usable':>11}{'ordinary':>16}{'deterministic':>18}")
    for target in TARGETS.values():
        schedule = canonical_schedule(target, cfg)
        weights, cache = params_bytes(param_shapes(cfg)), cache_bytes(cfg, **ROOM, numerics=schedule.numerics)
        sizes[name, target.name] = weights, cache
        cells = f"  {target.name:<12}{weights / 1e9:>8.2f} GB{cache / 1e9:>8.2f} GB{target.usable_bytes / 1e9:>8.2f} GB"
        if weights + cache > target.usable_bytes:
            print(f"{cells}{'does not fit':>34}")
            continue
        rates = predict(cfg, target, schedule=schedule, live=ROOM["max_requests"], context=ROOM["max_len"])["predicted"]
        print(f"{cells}{rates['ordinary_tok_per_s']:>10,.0f} tok/s{rates['canonical_tok_per_s']:>12,.0f} tok/s")

# %%
figure, axis = plt.subplots(figsize=(9, 2.8), layout="constrained")
for place, target in enumerate(TARGETS.values()):
    weights, cache = (size / 1e9 for size in sizes["qwen3_8b", target.name])
    axis.barh(place, target.usable_bytes / 1e9, 0.8, color="#eeeeee", label="usable" if place == 0 else None)
    axis.barh(place, weights, 0.5, color="#1b6ca8", label="weights" if place == 0 else None)
    axis.barh(place, cache, 0.5, left=weights, color="#9dc3f0", label="cache" if place == 0 else None)
axis.set_yticks(range(len(TARGETS)), list(TARGETS))
axis.invert_yaxis()
axis.set(xlabel="GB of one device", title="Qwen3 8B in bfloat16, 32 requests of 1024 positions")
figure.legend(frameon=False, loc="outside right upper")
plt.show()

# %% [markdown]
# These are bounds, not measurements: a pass takes at least as long as its bytes and products do at the device's peaks. `detspec
# plan --model DIR --target v6e:2x2` goes further. It compiles the real programs with the vendor's compiler, for a device that
# is not here, and reports the memory that they need (`pip install '.[aot]'`).
#
# ## Load
#
# Commands run in this process, by the helper below, because a TPU belongs to one process. In a terminal, write what is after
# `$`.


# %%
def detspec(*args: str) -> int:
    """Runs a command of detspec, and prints what it says; returns its exit code, 0 for success."""
    print(f"$ detspec {shlex.join(args)}", flush=True)
    with contextlib.redirect_stderr(sys.stdout):
        return main(args)


model = ds.load(MODEL)
print(f"{model.cfg.num_layers} layers of width {model.cfg.d_model}, {model.cfg.dtype}, vocabulary of {model.cfg.vocab_size}")
print("digest", model.digest)

# %% [markdown]
# The digest names exactly these weights: it is computed from the config and the bytes of all tensors. `detspec convert` writes
# the folder as our own, which loads faster, or back, and no weight changes a bit.

# %%
assert detspec("convert", "--model", MODEL, "--out", "converted") == 0
assert ds.load("converted").digest == model.digest

# %% [markdown]
# ## Ask the doctor
#
# Determinism is promised for programs that were certified on the device at hand. Each engine does that by itself, briefly. The
# doctor takes longer and shows what it does: one text goes through the canonical pass many times, and each time something
# changes that must not matter. The last line of the first table is the control: the ordinary path must differ, or the
# comparison has no power.

# %%
certified = detspec("doctor", "--model", MODEL, "--max-requests", "1") == 0
if not certified:
    print("The lines with NO say what differed. `--linear pinned` and `--alignment window` are the two ways out.")

# %% [markdown]
# ## Generate
#
# In Python, an engine takes texts or token ids. Here is one request alone, and the same among seven others.

# %%
PROMPTS = [f"def {name}(path, mode):\n" for name in ("read", "write", "copy", "move", "open", "close", "list", "find")]
sampling = ds.SamplingParams(max_tokens=32, temperature=0.8, seed=7, ignore_eos=True)
engine = ds.Engine(model, ds.EngineConfig(max_requests=8, max_len=256))
(alone,) = engine.generate(PROMPTS[:1], sampling)
among = engine.generate(PROMPTS, sampling)[0]
print(repr(alone.text))
print("digest, alone:           ", alone.digest)
print("digest, among 7 others:  ", among.digest)
assert alone.digest == among.digest

# %% [markdown]
# As a job: a file of prompts in, a file of completions out.

# %%
lines = [{"id": prompt.split("(")[0], "prompt": prompt} for prompt in PROMPTS]
Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
options = "--max-requests 8 --max-len 256 --max-tokens 32 --temperature 0.8 --seed 7 --ignore-eos"
assert detspec("generate", "--model", MODEL, "--prompts", "in.jsonl", "--out", "out.jsonl", *options.split()) == 0

records = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
print(f"{'id':<12}{'tokens':>7}{'mean log-probability':>22}   digest")
for record in records:
    print(
        f"{record['id']:<12}{len(record['token_ids']):>7}{sum(record['logprobs']) / len(record['logprobs']):>22.3f}"
        f"   {record['digest'][:16]}"
    )
assert records[0]["digest"] == alone.digest, "the job and the engine gave different answers"

# %% [markdown]
# The command found the same digest for the first prompt as the engine above, alone or not.
#
# ## Audit
#
# Anyone with the weights and this kind of device can check the records later. An audit replays each one: is every token what
# the model says there, and every log-probability the same 32 bits?

# %%
assert detspec("audit", "--model", MODEL, "--records", "out.jsonl") == 0

# %% [markdown]
# And if someone had changed a record? We replace one token of the third record.

# %%
shutil.copy("out.manifest.json", "forged.manifest.json")
forged = json.loads(json.dumps(records))
forged[2]["token_ids"][20] = (forged[2]["token_ids"][20] + 1) % model.cfg.vocab_size
Path("forged.jsonl").write_text("".join(json.dumps(record) + "\n" for record in forged))
code = detspec("audit", "--model", MODEL, "--records", "forged.jsonl")
print("exit code", code)
assert code == 1, "the audit missed a forged token"

# %% [markdown]
# ## Next
#
# * `05_batch_job`: the same job, killed and resumed, in shards, to the same bytes.
# * `ds.load(MODEL, weights="int8")` halves the memory of the weights; `chips=4` cuts them over four devices.
# * `model.chat_prompt([{"role": "user", "content": "Hi"}])` uses the chat template of your folder, if it has one.
# * A GPU or TPU belongs to this notebook until its kernel is shut down. Commands in a terminal, and the notebooks
#   `05_batch_job` and `06_serving`, need it for themselves.
