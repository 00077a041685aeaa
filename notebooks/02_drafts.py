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
# # Drafts, windows, and what determinism costs
#
# A canonical pass decides every token, so a draft can be as cheap and as careless as it likes. You will see four sources draft
# for the same requests, and their answers get the same digest. A picture shows which windows were accepted and which were
# rolled back. Then the clock says what determinism costs, and what drafts bring back.
#
# It takes about a minute and a half on two cores; speeds mean something only if nothing else runs there.
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
import time

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

import detspec as ds
from detspec.traces.record_windows import drafter_of

machine = ds.fingerprint()
print(f"{machine['backend']}: {machine['device_kind']} | jax {machine['jax']}")

# %% [markdown]
# ## Four draft sources
#
# | source | what it drafts | what a draft costs |
# |---|---|---|
# | `none` | nothing: each pass adds one token | nothing |
# | `ngram` | what followed the last tokens where they stood before | a search in the text |
# | `self` | what the model's own fast path says | an ordinary step for each token |
# | `int8` | what the model says with its matrices rounded to 8 bits | a step that reads half of the bytes |
#
# All of them draft up to 7 tokens for the same prompt, once greedy and once at temperature 1. The shipped model is small, so
# its text is nothing to be proud of. It repeats itself when it is greedy, which is what `ngram` lives on.

# %%
model = ds.load()
PROMPT = """class TestCase(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)
        self.assertEqual(add(2, 3), 5)
        self.assertEqual(add(3, 4), 7)

    def test_{name}(self):
        self.assertEqual({name}(1, 2),"""
NAMES = ("sub", "mul", "div", "mod", "pow", "min", "max", "gcd")
SOURCES = ("none", "ngram", "self", "int8")
KINDS = {"greedy": 0.0, "temperature 1": 1.0}

engines = {
    source: ds.Engine(
        model, ds.EngineConfig(max_requests=8, max_len=256, prefix_sharing=False, method=source, num_speculative_tokens=7)
    )
    for source in SOURCES
}


def sampling(temperature: float, deterministic: bool = True) -> ds.SamplingParams:
    """What all requests of this notebook ask for: 96 tokens."""
    return ds.SamplingParams(max_tokens=96, ignore_eos=True, temperature=temperature, seed=5, deterministic=deterministic)


prompt = PROMPT.format(name=NAMES[0])
answers = {
    (kind, source): engines[source].generate([prompt], sampling(temperature))[0]
    for kind, temperature in KINDS.items()
    for source in SOURCES
}
print(prompt + answers["greedy", "none"].text)

# %% [markdown]
# A *pass* verifies one window: the last committed token and the drafts after it. It commits the drafts that agree and one token
# of its own. So the fewer passes the same 96 tokens took, the better the draft.

# %%
print(f"{'':<22}{'passes':>8}{'tokens a pass':>15}{'drafted':>9}{'accepted':>10}{'rollbacks':>11}   digest of the answer")
for (kind, source), answer in answers.items():
    stats = answer.stats
    print(
        f"{kind + ', ' + source:<22}{stats.num_verify_passes:>8}{stats.mean_acceptance_length:>15.2f}"
        f"{stats.num_draft_tokens:>9}{stats.num_accepted_draft_tokens:>10}{stats.num_rollbacks:>11}   {answer.digest[:16]}"
    )

for kind in KINDS:
    assert len({answers[kind, source].digest for source in SOURCES}) == 1, f"{kind}: a draft changed the answer"

# %% [markdown]
# A digest covers the tokens and the 32 bits of every log-probability. It is the same for all four sources.
#
# Drafts at temperature 1 are not hopeless, because draft and pass share the noise of each position. A source that runs the
# model, `self` or `int8`, draws the same token as the pass unless their probabilities differ just there. `ngram` has no
# probabilities, and what it remembers is rarely what the dice say.
#
# ## Window by window
#
# The same requests once more, recorded step by step, with windows of 8: a row for each source, from the first new token to the
# last. Boxes are windows. Rejected drafts hang below the positions they were meant for, darker where several windows tried. The
# engine above spends rows on likely drafts alone, so its `ngram` drafted less than this recording.

# %%
SHOWN = (("greedy", "ngram"), ("temperature 1", "ngram"), ("temperature 1", "int8"), ("temperature 1", "self"))
traces = {
    (kind, source): ds.traces.run_trace(
        model, prompt, sampling(KINDS[kind]), window=8, max_tokens=96, drafter=drafter_of(model, source)
    )
    for kind, source in SHOWN
}
GREEN, DARK_GREEN, RED = "#9bd184", "#3f8f4f", "#ef8a80"

figure, axes = plt.subplots(len(traces), 1, figsize=(11, 4.6), sharex=True, layout="constrained")
for axis, ((kind, source), trace) in zip(axes, traces.items(), strict=True):
    first = trace.windows[0].start + 1
    for window in trace.windows:
        start = window.start + 1 - first
        for i in range(len(window.committed)):
            own = i == window.accepted  # the pass's own token: bonus or correction
            axis.add_patch(plt.Rectangle((start + i, 0), 1, 1, color=DARK_GREEN if own else GREEN, linewidth=0))
        for i in range(window.accepted, len(window.drafted)):
            axis.add_patch(plt.Rectangle((start + i, -0.8), 1, 0.7, color=RED, alpha=0.6, linewidth=0))
        axis.add_patch(plt.Rectangle((start, 0), len(window.committed), 1, fill=False, edgecolor="#222222", linewidth=0.8))
    rejected = sum(len(window.drafted) - window.accepted for window in trace.windows)
    axis.set_title(f"{source}, {kind}: {len(trace.windows)} windows, {rejected} drafts rejected", loc="left", fontsize=10)
    axis.set(xlim=(0, 96), ylim=(-0.9, 1.1), yticks=[])
    axis.spines[:].set_visible(False)
    axis.tick_params(bottom=False)
axes[-1].set_xlabel("new token")
meanings = {"draft accepted": GREEN, "chosen by the pass": DARK_GREEN, "draft rejected": RED}
figure.legend(
    handles=[Patch(color=colour, label=label) for label, colour in meanings.items()],
    loc="outside lower center",
    ncols=3,
    frameon=False,
)
plt.show()

# %% [markdown]
# A window of the first row in full, in which a draft differs. The drafts before it stay, the pass's own choice takes its place,
# and the cache length is set back. That smaller number is the whole rollback: nothing is copied, nothing is undone.

# %%
trace = traces["greedy", "ngram"]
rolled_back = [number for number, window in enumerate(trace.windows) if window.rolled_back and window.accepted]
ds.traces.trace_figure(trace, rolled_back[:1] or None)

# %% [markdown]
# ## What determinism costs
#
# Now by the clock. `ordinary` decodes with the same engine and promises nothing: no pass verifies what it says. Each way runs
# once a round, all in turns. A dot is the speed of one round over the best ordinary speed; the bar is the fastest round, since
# noise only adds time. Above 1 is faster than ordinary.

# %%
ROUNDS = 9
WAYS = ("ordinary", *SOURCES)


def seconds(way: str, num_requests: int, temperature: float) -> float:
    """Seconds that `num_requests` requests together take, one way."""
    engine = engines["none" if way == "ordinary" else way]
    prompts = [PROMPT.format(name=name) for name in NAMES[:num_requests]]
    began = time.perf_counter()
    engine.generate(prompts, sampling(temperature, deterministic=way != "ordinary"))
    return time.perf_counter() - began


ratios = {}
for num_requests in (1, 8):
    for source in SOURCES:  # compiles, certifies and times all programs first
        engines[source].prepare(num_requests, ds.Needs(deterministic=True, ordinary=source == "none", processing=False))
    for kind, temperature in KINDS.items():
        rounds = [{way: seconds(way, num_requests, temperature) for way in WAYS} for _ in range(ROUNDS + 1)][1:]
        ordinary = min(took["ordinary"] for took in rounds)
        for source in SOURCES:
            ratios[num_requests, kind, source] = [ordinary / took[source] for took in rounds]

# %%
best = {key: max(found) for key, found in ratios.items()}
print(f"speed over ordinary speed, best of {ROUNDS} rounds  " + "".join(f"{source:>9}" for source in SOURCES))
for num_requests in (1, 8):
    for kind in KINDS:
        name = f"{num_requests} request{'s' * (num_requests > 1)}, {kind}"
        print(f"{name:<48}" + "".join(f"{best[num_requests, kind, source]:>9.2f}" for source in SOURCES))

figure, axes = plt.subplots(1, 2, figsize=(11, 3.4), sharey=True, layout="constrained")
COLOURS = dict(zip(KINDS, ("#1b6ca8", "#d1495b"), strict=True))
for axis, num_requests in zip(axes, (1, 8), strict=True):
    axis.axhline(1, color="#777777", linewidth=1, linestyle="--")
    for number, (kind, colour) in enumerate(COLOURS.items()):
        for place, source in enumerate(SOURCES):
            x = place + 0.36 * number - 0.18
            key = num_requests, kind, source
            axis.bar(x, best[key], 0.32, color=colour, alpha=0.35, label=kind if place == 0 else None)
            axis.plot([x] * ROUNDS, ratios[key], ".", color=colour, markersize=5)
    axis.set_xticks(range(len(SOURCES)), SOURCES)
    axis.set_title(f"{num_requests} request{'s' * (num_requests > 1)}", loc="left", fontsize=10)
axes[0].set(ylabel="speed over ordinary speed", ylim=(0, max(2.0, 1.2 * max(best.values()))))
axes[0].legend(frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# How to read it:
#
# * `none` is the price of determinism alone. It is close to 1, because a pass with one row for each request is ordinary
#   decoding in a fixed order of sums. If your dots scatter by a factor, something else runs on this machine.
# * `ngram` pays where the text repeats itself, and for one request. `self` never pays on a CPU: its drafts cost as much as the
#   passes that they save.
# * `int8` pays where reading the weights takes the time. The shipped model fits into a processor's cache. With 100 million
#   weights one request was 1.7 times as fast as an ordinary one (`docs/bench.md` in the repository).
# * With 8 requests a CPU computes 8 rows for each position of the windows. A TPU or GPU has idle arithmetic there, and rows
#   cost next to nothing.
#
# You need not choose. An engine that is given several sources uses whichever commits most tokens per second with the requests
# at hand, and `method="auto"`, the default, does so among those that need no more memory. What it uses changes no bit:

# %%
config = ds.EngineConfig(max_requests=8, max_len=256, prefix_sharing=False, method=("none", "ngram"), num_speculative_tokens=7)
chooser = ds.Engine(model, config)
chooser.prepare(1, ds.Needs(deterministic=True, ordinary=False, processing=False))
for kind, temperature in KINDS.items():
    chosen = chooser.generate([prompt], sampling(temperature))[0]
    print(f"{kind:<16}{chosen.stats.num_verify_passes:>3} passes, digest {chosen.digest[:16]}")
    assert chosen.digest == answers[kind, "none"].digest

# %% [markdown]
# ## Is there something to compare?
#
# A test of equal bits means little if bits are always equal. So here is the control: the same greedy requests without the
# promise, alone and among eight. A deterministic request has the same bits in both; an ordinary one may not.

# %%
for deterministic in (False, True):
    alone, among = (
        engines["none"].generate([PROMPT.format(name=name) for name in NAMES[:number]], sampling(0.0, deterministic))[0]
        for number in (1, 8)
    )
    changed = sum(a != b for a, b in zip(alone.logprobs, among.logprobs, strict=True))
    kind = "deterministic" if deterministic else "ordinary"
    print(f"{kind:<14}{changed} of {len(alone.logprobs)} log-probabilities changed among eight requests")
    assert not (deterministic and changed)

# %% [markdown]
# ## Next
#
# * `03_thinking_states`: a model whose *thoughts* are drafted and verified in the same way.
# * `detspec trace --draft ngram --prompt "..."` draws windows of your own prompt.
# * `detspec bench` measures more batch sizes, windows and shares of deterministic requests.
# * A GPU or TPU belongs to this notebook until its kernel is shut down. Commands in a terminal, and the notebooks
#   `05_batch_job` and `06_serving`, need it for themselves.
