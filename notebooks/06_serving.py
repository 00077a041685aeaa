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
# # A server whose equal requests get equal answers
#
# Servers put requests into batches as they come, and the order of floating-point sums follows the batch. So the same request
# may get another answer at another load, with temperature 0, too. `detspec serve` has OpenAI's interface and one more promise:
# equal `system_fingerprint` and equal request mean equal choices, to the bit. You will see a server asked at several loads, a
# picture of the answers that changed and of its speed, and an audit of all it said. It takes about a minute on two cores.
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
# It is a process of its own, and the only one that touches the device. It opens its port at once; `/health` says "ready" when a
# program is certified that can run any request. The others are compiled while it answers; with `--method none`, which does
# without drafts, they are few. `--log` keeps what it answers.
#
# On a GPU or TPU, first shut down the kernels of other notebooks: a TPU belongs to one process at a time, and jax reserves most
# of a GPU's memory.

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


command = [*DETSPEC, "serve", "--port", "0", "--max-requests", "16", "--max-len", "256", "--method", "none"]
server = subprocess.Popen([*command, "--log", str(LOG)], stderr=subprocess.PIPE, text=True)
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
# 96 requests, sampled and greedy, of 16 to 128 new tokens: first one after the other, then 4 and then 32 at a time. Every
# answer is compared: its tokens, and all bits of all log-probabilities. Then the same once more with `is_deterministic: false`,
# which is what servers usually do. That is the control: something should change there. Before the clock starts, the server gets
# a minute to compile the rest of its programs.

# %%
VERBS = ("read", "write", "parse", "merge", "split", "count", "sort", "find")
THINGS = ("lines", "words", "files", "paths", "dates", "names")
PROMPTS = [f"def {verb}_{thing}(" for verb in VERBS for thing in THINGS] * 2


def ask(number: int, is_deterministic: bool) -> tuple[list[int], list[float]]:
    """Tokens of one answer, and their log-probabilities."""
    found = client.completions.create(
        model="tiny_python",
        prompt=PROMPTS[number],
        max_tokens=16 + 28 * (number % 5),
        temperature=(0.0, 1.0, 1.0, 1.0)[number % 4],
        seed=number,
        logprobs=0,
        extra_body={"is_deterministic": is_deterministic, "ignore_eos": True, "return_token_ids": True},
    )
    return found.choices[0].token_ids, found.choices[0].logprobs.token_logprobs


def ask_all(width: int, is_deterministic: bool) -> tuple[list[tuple[list[int], list[float]]], float]:
    """All answers, `width` requests at a time, and how many a second there were."""
    began = time.perf_counter()
    with ThreadPoolExecutor(width) as threads:
        found = list(threads.map(lambda number: ask(number, is_deterministic), range(len(PROMPTS))))
    return found, len(found) / (time.perf_counter() - began)


def num_compiling() -> int:
    """Programs that the server has still to compile."""
    metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
    return int(float(re.search(r"^detspec:num_programs_compiling (\S+)", metrics, re.MULTILINE)[1]))


while num_compiling() and time.perf_counter() - began < 60:
    time.sleep(0.5)

WIDTHS = (1, 4, 32)
NAMES = {True: "deterministic", False: "ordinary"}
texts: dict[bool, list[int]] = {True: [], False: []}  # that are not those of one request at a time
answers: dict[bool, list[int]] = {True: [], False: []}  # whose tokens, or log-probabilities, are not
speeds: dict[bool, list[float]] = {True: [], False: []}
for is_deterministic in NAMES:
    alone = []
    for width in WIDTHS:
        found, speed = ask_all(width, is_deterministic)
        alone = alone or found
        texts[is_deterministic].append(sum(a[0] != b[0] for a, b in zip(alone, found, strict=True)))
        answers[is_deterministic].append(sum(a != b for a, b in zip(alone, found, strict=True)))
        speeds[is_deterministic].append(speed)
print(f"{'requests at a time':<44}", *(f"{width:6}" for width in WIDTHS))
for is_deterministic, name in NAMES.items():
    print(f"{name:<15}{'texts that changed':<29}", *(f"{number:6}" for number in texts[is_deterministic]))
    print(f"{'':<15}{'texts or log-probabilities':<29}", *(f"{number:6}" for number in answers[is_deterministic]))
    print(f"{'':<15}{'answers a second':<29}", *(f"{speed:6.1f}" for speed in speeds[is_deterministic]))
assert answers[True] == [0, 0, 0], "an answer depended on the load"
if not any(answers[False]):
    print("No ordinary answer changed here: this device computes the same in any batch, or the load was too small to show it.")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
COLOURS = {True: "#1b6ca8", False: "#7a7a7a"}
for aside, (is_deterministic, name) in zip((-0.2, 0.2), NAMES.items(), strict=True):
    places = [place + aside for place in range(len(WIDTHS))]
    left.bar(places, speeds[is_deterministic], 0.38, color=COLOURS[is_deterministic], label=name)
    bars = right.bar(places, texts[is_deterministic], 0.38, color=COLOURS[is_deterministic], label=name)
    right.bar_label(bars, texts[is_deterministic], fontsize=9)
for axes, title in ((left, "answers a second"), (right, f"texts of {len(PROMPTS)} that changed with the load")):
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
