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
# # A batch job that survives being killed
#
# Clusters kill jobs: a node is wanted back, a time limit ends, power fails. `detspec generate` keeps what is finished, and the
# same command goes on. You will see a job killed twice without warning, and a picture of who wrote what. Its output has the
# *same bytes* as if nothing had happened, since every completion is a function of its request alone. That holds for other batch
# sizes and for shards, too. Ordinary generation is the control: there, lines change. It takes about a minute on two cores.
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
# All work is done by commands, each a process of its own that gives the device back when it ends. This notebook leaves the
# device alone, and asks a process for its name, too.
#
# On a GPU or TPU, first shut down the kernels of other notebooks: a TPU belongs to one process at a time, and jax reserves most
# of a GPU's memory. If the line below says "cpu" there, another process has the device.

# %%
import hashlib
import json
import shlex
import tempfile
import textwrap
import time
from pathlib import Path

import matplotlib.pyplot as plt

WORK = Path(tempfile.mkdtemp(prefix="detspec-"))


def command(text: str) -> list[str]:
    """A command line of detspec as a list, for this Python; prints it."""
    print(f"$ detspec {text}", flush=True)
    return [sys.executable, "-m", "detspec", *shlex.split(text)]


def run(text: str, expected: tuple[int, ...] = (0,)) -> None:
    """Runs a command of detspec in the folder of this job, and prints what it says."""
    done = subprocess.run(command(text), cwd=WORK, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    assert done.returncode in expected, f"exit code {done.returncode}"


name_device = "import detspec as ds; m = ds.fingerprint(); print(f\"{m['backend']}: {m['device_kind']} | jax {m['jax']}\")"
asked = subprocess.run([sys.executable, "-c", name_device], capture_output=True, text=True)
if asked.returncode != 0:
    sys.exit(f"{asked.stderr}\nIs the device free? Shut down the kernels of other notebooks, and run this cell again.")
print(asked.stdout, end="")

# %% [markdown]
# ## The prompts
#
# A line a request: an `id`, a prompt, and whatever sampling differs from the command's.

# %%
VERBS = ("read", "write", "parse", "merge", "split", "count", "sort", "find")
THINGS = ("lines", "words", "files", "paths", "dates", "names")
requests = [
    {"id": f"{verb}-{thing}", "prompt": f"def {verb}_{thing}(", "sampling": {"max_tokens": 32 + 48 * (i % 5), "seed": i}}
    for i, (verb, thing) in enumerate((verb, thing) for verb in VERBS for thing in THINGS)
]
(WORK / "in.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
print(*(json.dumps(request) for request in requests[:3]), f"... {len(requests)} lines", sep="\n")

# %% [markdown]
# ## Undisturbed
#
# First the whole job at once, eight requests at a time. The checksum of its output is what all that follows is compared with.

# %%
OPTIONS = "--model tiny_python --prompts in.jsonl --max-len 256 --temperature 1 --ignore-eos"


def checksum(name: str) -> str:
    """The SHA-256 of a file in hex."""
    return hashlib.sha256((WORK / name).read_bytes()).hexdigest()


run(f"generate {OPTIONS} --out calm.jsonl --max-requests 8")
calm = checksum("calm.jsonl")
print("sha256", calm)
first = json.loads((WORK / "calm.jsonl").read_text().splitlines()[0])
print("\n" + requests[0]["prompt"] + first["text"])

# %% [markdown]
# ## Killed, and killed again
#
# The same job with four requests at a time. Finished completions go to `killed.jsonl.journal`. We watch it grow and send
# SIGKILL after a third and after two thirds of the requests: the process gets no chance to clean up. Then the command is
# started a third time, now with eight requests at a time, and runs to its end.

# %%
JOURNAL = WORK / "killed.jsonl.journal"
began = time.perf_counter()
history = []  # (seconds, completions in the journal, number of the start)
written = []  # ids in the journal after each start that was killed


def num_kept() -> int:
    """Completions in the journal, whose first line is a header; a last line that is not whole does not count."""
    return max(JOURNAL.read_bytes().count(b"\n") - 1, 0) if JOURNAL.exists() else 0


def start(number: int, max_requests: int, kill_at: int | None) -> None:
    """Starts the job; kills it once the journal holds `kill_at` completions."""
    process = subprocess.Popen(
        command(f"generate {OPTIONS} --out killed.jsonl --max-requests {max_requests}"),
        cwd=WORK,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None:
        if JOURNAL.exists():
            history.append((time.perf_counter() - began, num_kept(), number))
        if kill_at is not None and num_kept() >= kill_at:
            process.kill()
            break
        time.sleep(0.005)
    said = process.communicate()[1]
    if process.returncode == 0:
        history.append((time.perf_counter() - began, len(requests), number))
        print(said)
    else:
        print(f"  exit code {process.returncode}; {num_kept()} of {len(requests)} completions are in the journal\n")
        assert not (WORK / "killed.jsonl").exists(), "an output must not appear before it is whole"
        lines = JOURNAL.read_text().split("\n")[1 : 1 + num_kept()] if JOURNAL.exists() else []
        written.append({json.loads(line)["line"]["id"] for line in lines})


start(1, 4, kill_at=len(requests) // 3)
start(2, 4, kill_at=2 * len(requests) // 3)
start(3, 8, kill_at=None)
print("sha256", checksum("killed.jsonl"))
assert checksum("killed.jsonl") == calm, "a killed job gave other bytes"

# %%
figure, (axis, strip) = plt.subplots(2, 1, figsize=(10, 4.2), height_ratios=(5, 1), layout="constrained")
COLOURS = ("#1b6ca8", "#8e5ea2", "#2e8b57")
for number, colour in enumerate(COLOURS, 1):
    points = [(seconds, kept) for seconds, kept, start_number in history if start_number == number]
    if not points:  # a device that is faster than this notebook looks may have finished before
        continue
    axis.step(*zip(*points, strict=True), where="post", color=colour, linewidth=2, label=f"start {number}")
    seconds, kept = points[-1]
    complete = kept == len(requests)
    axis.plot(seconds, kept, "o" if complete else "x", color=colour if complete else "#c62828", markersize=9)
    mark = "complete" if complete else "killed"
    axis.annotate(mark, (seconds, kept), xytext=(0, 8), textcoords="offset points", ha="center", fontsize=9)
axis.set(xlabel="seconds", ylabel="completions kept", ylim=(0, 1.2 * len(requests)))
axis.axhline(len(requests), color="#bbbbbb", linewidth=1, linestyle="--")
axis.legend(frameon=False, loc="lower right")
for place, request in enumerate(requests):
    writer = next((number for number, ids in enumerate(written) if request["id"] in ids), len(COLOURS) - 1)
    strip.add_patch(plt.Rectangle((place, 0), 0.9, 1, color=COLOURS[writer], linewidth=0))
strip.set(
    xlim=(0, len(requests)), ylim=(0, 1), yticks=[], xlabel="line of the output, in the colour of the start that wrote it"
)
strip.spines[:].set_visible(False)
plt.show()

# %% [markdown]
# Flat parts are starts: Python, the model, the compiled programs, their certification. A completion that was under way when its
# process died is generated anew, to the same bits. The output has the order of the input, whoever wrote which line.
#
# ## In shards
#
# A job array runs a block of the lines in each task. The tasks may have other batch sizes and drafts. `merge` joins them, and
# checks that they belong together.

# %%
run(f"generate {OPTIONS} --out sharded.jsonl --max-requests 8 --shard 0/2")
run(f"generate {OPTIONS} --out sharded.jsonl --max-requests 4 --shard 1/2 --method ngram")
run("merge --out sharded.jsonl")
print("sha256", checksum("sharded.jsonl"))
assert checksum("sharded.jsonl") == calm, "shards gave other bytes"

# %% [markdown]
# ## Audit
#
# Next to the output lie `killed.manifest.json`, which has all that the bytes depend on, and `killed.stats.json`, which has all
# that they do not depend on: times, speeds, batch sizes. An audit replays the completions. It does not care which start wrote
# them.

# %%
run("audit --records killed.jsonl")
manifest = json.loads((WORK / "killed.manifest.json").read_text())
for name, value in manifest["fingerprint"].items():
    print(textwrap.fill(f"{name:<18}{value}", 100, subsequent_indent=" " * 18))
stats = json.loads((WORK / "killed.stats.json").read_text())
print(
    f"\n{stats['num_requests']} requests, {stats['num_tokens']} tokens, {stats['num_resumed']} completions from earlier starts"
)

# %% [markdown]
# ## The control
#
# Equal bytes mean something only if they can differ. `--ordinary` does without the promise. It runs once with 32 requests at a
# time, and once with one; `detspec compare` says where texts fork, and how many log-probabilities have other bits.

# %%
for max_requests in (32, 1):
    run(f"generate {OPTIONS} --out ordinary{max_requests}.jsonl --max-requests {max_requests} --ordinary")
run("compare ordinary1.jsonl ordinary32.jsonl", expected=(0, 1))  # 1: they differ

# %% [markdown]
# ## Next
#
# * `scripts/slurm_array.sbatch` and `scripts/kubernetes_job.yaml` in the repository are such jobs for clusters.
# * SIGTERM is kinder than SIGKILL: the job finishes the segment on the device, writes out, and exits with 143.
# * `--on-error reject` puts malformed lines aside; `--dry-run` checks everything and generates nothing.
