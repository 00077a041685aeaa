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
# # A server whose equal requests get equal answers
#
# Servers put requests into batches as they come, and the order of floating-point sums follows the batch. So the same request
# may get another answer at another load, with temperature 0, too. `detspec serve` has OpenAI's interface and one more promise:
# equal `system_fingerprint` and equal request mean equal choices, to the bit. Here a server is asked at several loads, and its
# answers are audited afterwards.
#
# (The badge opens Colab. Give it the address of this repository, and choose `notebooks/06_serving.ipynb`.)

# %%
import glob
import importlib.util
import pathlib
import shutil
import subprocess
import sys

ADDRESS = ""  # of the repository, once it has one: "git+https://..."

if importlib.util.find_spec("detspec") is None:  # on Colab, say
    extras = "plots,serve"
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
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package, "openai"], check=True)

# %% [markdown]
# ## The server
#
# It is a process of its own, and the only one that touches the device. It opens its port at once; `/health` says "ready" when
# a program is certified that can run any request. The others are compiled while it answers. `--log` keeps what it answers.

# %%
import re
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib.pyplot as plt
import openai

WORK = Path(tempfile.mkdtemp(prefix="detspec-"))
LOG = WORK / "log.jsonl"
DETSPEC = [sys.executable, "-m", "detspec"]


def is_ready(url: str) -> bool:
    """Whether the server answers."""
    try:
        return urllib.request.urlopen(f"{url}/health").status == 200
    except urllib.error.HTTPError:
        return False


command = [*DETSPEC, "serve", "--port", "0", "--max-requests", "16", "--max-len", "256", "--log", str(LOG)]
server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
lines = [server.stderr.readline().strip() for _ in range(2)]
print(*lines, sep="\n")
url = re.search(r"http://\S+", lines[1])[0]
began = time.perf_counter()
while not is_ready(url):
    assert server.poll() is None, server.stderr.read()
    time.sleep(0.2)
print(f"ready after {time.perf_counter() - began:.0f} s")
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

# %% [markdown]
# ## One question
#
# The official client. Log-probabilities come as decimals that hold every bit of a float32.

# %%
answer = client.completions.create(model="tiny_python", prompt="def read_lines(path):", max_tokens=32, seed=7, logprobs=0)
print(answer.choices[0].text)
print("\nlog-probabilities", answer.choices[0].logprobs.token_logprobs[:3])
print("fingerprint", answer.system_fingerprint, "| seed", answer.seed, "| digest", answer.choices[0].digest[:16])

# %% [markdown]
# As a stream, piece by piece:

# %%
body = {"model": "tiny_python", "prompt": "def read_lines(path):", "max_tokens": 32, "seed": 7}
text = ""
for chunk in client.completions.create(**body, stream=True):
    text += chunk.choices[0].text
    print(chunk.choices[0].text, end="", flush=True)
print()
assert text == answer.choices[0].text

# %% [markdown]
# ## Other loads
#
# 96 requests, greedy and sampled, of 8 to 64 new tokens: first one after the other, then 4 and then 32 at a time. Every
# answer is compared: text, tokens, and all bits of all log-probabilities. The same once more with
# `is_deterministic: false`, which is what servers usually do. That is the control: something should change there.

# %%
VERBS = ("read", "write", "parse", "merge", "split", "count", "sort", "find")
THINGS = ("lines", "words", "files", "paths", "dates", "names")
PROMPTS = [f"def {verb}_{thing}(" for verb in VERBS for thing in THINGS] * 2


def ask(number: int, is_deterministic: bool) -> str:
    """The choices of one answer, as JSON."""
    found = client.completions.create(
        model="tiny_python",
        prompt=PROMPTS[number],
        max_tokens=8 + 14 * (number % 5),
        temperature=(0.0, 0.8)[number % 2],
        seed=number,
        logprobs=0,
        extra_body={"is_deterministic": is_deterministic, "ignore_eos": True, "return_token_ids": True},
    )
    return found.choices[0].model_dump_json(exclude={"digest"})


def ask_all(width: int, is_deterministic: bool) -> tuple[list[str], float]:
    """All answers, `width` requests at a time, and how many a second there were."""
    began = time.perf_counter()
    with ThreadPoolExecutor(width) as threads:
        found = list(threads.map(lambda number: ask(number, is_deterministic), range(len(PROMPTS))))
    return found, len(found) / (time.perf_counter() - began)


WIDTHS = (1, 4, 32)
changed: dict[bool, list[int]] = {True: [], False: []}
speeds: dict[bool, list[float]] = {True: [], False: []}
for is_deterministic in (True, False):
    alone: list[str] = []
    for width in WIDTHS:
        found, speed = ask_all(width, is_deterministic)
        alone = alone or found
        changed[is_deterministic].append(sum(a != b for a, b in zip(alone, found, strict=True)))
        speeds[is_deterministic].append(speed)
print("requests at a time         ", *(f"{width:6}" for width in WIDTHS))
for is_deterministic, name in ((True, "deterministic"), (False, "ordinary")):
    print(f"{name:14} answers moved", *(f"{number:6}" for number in changed[is_deterministic]))
    print(f"{name:14} answers/s    ", *(f"{speed:6.1f}" for speed in speeds[is_deterministic]))
assert changed[True] == [0, 0, 0], "an answer depended on the load"
if not any(changed[False]):
    print("No ordinary answer moved here: this device computes the same in any batch, or the load was too small to show it.")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
NAMES = {True: "deterministic", False: "ordinary"}
COLOURS = {True: "#1b6ca8", False: "#7a7a7a"}
for aside, (is_deterministic, name) in zip((-0.2, 0.2), NAMES.items(), strict=True):
    places = [place + aside for place in range(len(WIDTHS))]
    left.bar(places, speeds[is_deterministic], 0.38, color=COLOURS[is_deterministic], label=name)
    shares = [100 * number / len(PROMPTS) for number in changed[is_deterministic]]
    bars = right.bar(places, shares, 0.38, color=COLOURS[is_deterministic], label=name)
    right.bar_label(bars, changed[is_deterministic], fontsize=9)
for axes, title in ((left, "answers a second"), (right, "answers that are not those of one at a time [%]")):
    axes.set(title=title, xlabel="requests at a time")
    axes.set_xticks(range(len(WIDTHS)), WIDTHS)
    axes.spines[["top", "right"]].set_visible(False)
left.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Scores
#
# `echo` with `max_tokens: 0` generates nothing: it gives the log-probability of every token of the prompt. They are the bits
# that generation reports for the same tokens. Harnesses for evaluations ask so.

# %%
whole = (
    PROMPTS[0] + client.completions.create(model="tiny_python", prompt=PROMPTS[0], max_tokens=8, temperature=0).choices[0].text
)
scored = client.completions.create(model="tiny_python", prompt=whole, max_tokens=0, echo=True, logprobs=0)
for token, logprob in list(zip(scored.choices[0].logprobs.tokens, scored.choices[0].logprobs.token_logprobs, strict=True))[:8]:
    print(f"{token!r:12} {logprob}")

# %% [markdown]
# ## Stop, and audit
#
# SIGTERM finishes what is in flight. The log holds every answer; an audit replays each one through the canonical pass, and
# compares it bit for bit. Ordinary answers are counted: nothing was promised.

# %%
server.terminate()
server.wait(60)
server.stderr.close()
print(f"{len(LOG.read_text().splitlines())} lines in the log")
done = subprocess.run([*DETSPEC, "audit", "--responses", str(LOG)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
print(done.stdout)
assert done.returncode == 0

# %% [markdown]
# ## Next
#
# * The guide to serving, `docs/serving.md`, has all routes, the limits, and how a trainer changes weights.
# * `scripts/bench_serve.py` measures a server as `vllm bench serve` does, with a share of deterministic requests.
# * A key in `DETSPEC_API_KEY` and `--host 0.0.0.0` let other machines in.
