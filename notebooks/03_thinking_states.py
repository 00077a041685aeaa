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
# # A model that thinks while it reads
#
# In *Latent Reasoning with Supervised Thinking States* (arXiv 2602.08332) a model does not reason after its prompt, but while
# it reads. After each chunk of the prompt a small head writes a short thought. The thought becomes a few vectors, the *state*,
# which are added to the next chunk.
#
# You will see such a model trained from scratch, in about a minute on two cores. Then we watch it think, chunk by chunk, and
# take its thoughts away: right answers drop to chance. At last we put another thought into its head, and its answer turns.
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
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

import detspec as ds
from detspec.state import NO_TOKEN
from detspec.thinking.blocks import forward_taught
from detspec.train.optimizer import OptimizerConfig
from detspec.train.problems.tasks import Parity
from detspec.train.reasoning import ReasoningConfig
from detspec.train.run import read_log, run_experiment

machine = ds.fingerprint()
print(f"{machine['backend']}: {machine['device_kind']} | jax {machine['jax']}")

# %% [markdown]
# ## The problems
#
# A coin is flipped, or not. Some people do something else altogether. Each operation that concerns the coin makes a *step*, the
# side that is up after it; the steps are what the thoughts are taught from.

# %%
task = Parity(filler=0.5, up_to=True)
problem = task.draw(np.random.default_rng(1), 5)
print(problem.question)
print("steps: ", ", ".join(problem.steps))
print("answer:", problem.answer)

# %% [markdown]
# ## Training
#
# Four layers of width 64, trained on problems of 1 to 8 operations. During training the right thoughts are given, so all chunks
# of a prompt are learned in one parallel pass: nothing runs through time.
#
# On the command line this is `detspec train --config FILE`, with a file that defines such a config.
# `configs/thinking_parity.py` trains the model that is shipped as `ds.load("thinking_parity")`.

# %%
config = ReasoningConfig(
    backbone=ds.dense_config(
        vocab_size=64,
        d_model=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        d_ff=128,
        tie_embeddings=True,
        max_position=512,
        dtype="float32",
        position_encoding="alibi",
    ),
    thinking=ds.ThinkingConfig(chunk=8, in_layer=1, out_layer=3, max_thought=4, end_id=0),
    task=task,
    arm="thinking",
    max_ops=8,
    seq_len=64,
    num_steps=350,
    batch_size=32,
    optimizer=OptimizerConfig(peak_lr=4e-3, final_lr=1e-4, warmup_steps=20),
    eval_every=25,
    eval_ops=(8,),
    eval_problems=32,
    checkpoint_every=350,
)
work = Path(tempfile.mkdtemp(prefix="detspec-"))
result = run_experiment(config.experiment(work), workdir=work, progress=False)
print(f"right answers to new problems of 8 operations: {result.metrics['accuracy at 8']:.0%}")

# %%
log = read_log(work / "log.jsonl")
steps = [line for line in log if "loss" in line]
evaluations = [line for line in log if "heldout_thoughts" in line]
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3), layout="constrained")
left.semilogy([line["step"] for line in steps], [line["loss"] for line in steps], color="#1b6ca8", linewidth=1)
left.set(title="loss of thoughts and answers, in nats", xlabel="step")
right.plot([line["step"] for line in evaluations], [line["heldout_thoughts"] for line in evaluations], "o-", color="#2e8b57")
right.set(title="new thoughts without a wrong token", xlabel="step", ylim=(0, 1.05))
for axis in (left, right):
    axis.grid(alpha=0.25)
plt.show()

# %% [markdown]
# ## Watch it think
#
# The trained folder loads like any other model. Each completion brings the thoughts after the chunks of its prompt. The chunk
# that ends with `A:` has none: the answer follows.

# %%
model = ds.load(result.export)
engine = ds.Engine(model, ds.EngineConfig(max_requests=32, max_len=256))
QUESTION = (
    "A coin's state is heads. Alice flips, then Bob sings, then Carol flips, then David naps, then Erin flips, "
    "then Frank waits, then Grace reads, then Henry hums. What's the state? A:"
)
greedy = ds.SamplingParams(max_tokens=4)
C = model.cfg.thinking.chunk
ids = model.tokenizer.encode(QUESTION)
chunks = [model.decode(ids[start : start + C]) for start in range(0, len(ids), C)]

(answer,) = engine.generate([QUESTION], greedy)
print(f"{'read':<44}thought")
for chunk, thought in zip(chunks, [*(thought.text or "-" for thought in answer.thoughts), ""], strict=True):
    print(f"{chunk:<44}{thought}")
print("\nanswer:", answer.text)

# %% [markdown]
# The same as a picture: chunks below, thoughts above, a state between each two. The lower part shows how this was read without
# waiting for thoughts. All chunks are read at once, as if nothing had to be thought. One pass says which of these drafts were
# right; thoughts up to the first wrong draft are committed, with the pass's own thought in its place. Then the rest is read
# again.

# %%
ds.traces.thought_figure(ds.traces.run_thought_trace(model, QUESTION, greedy))

# %% [markdown]
# ## Take its thoughts away
#
# `SamplingParams(thinking=False)` reads the same prompt without thoughts. Problems longer than 8 operations were never seen in
# training, with or without.

# %%
OPERATIONS = (2, 4, 8, 16, 32)
PROBLEMS = 32
problems = {n: [task.draw(np.random.default_rng((7, n, i)), n) for i in range(PROBLEMS)] for n in OPERATIONS}
accuracy = {}
for thinking in (True, False):
    asked = dataclasses.replace(greedy, thinking=thinking)
    for n, drawn in problems.items():
        outs = engine.generate([f"{problem.question} A:" for problem in drawn], asked)
        accuracy[thinking, n] = np.mean([out.text.strip() == problem.answer for out, problem in zip(outs, drawn, strict=True)])

print(f"{'operations':<20}" + "".join(f"{n:>7}" for n in OPERATIONS))
for thinking in (True, False):
    print(f"{'with thoughts' if thinking else 'without':<20}" + "".join(f"{accuracy[thinking, n]:>7.2f}" for n in OPERATIONS))

figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for thinking, colour, name in ((True, "#2e8b57", "with thoughts"), (False, "#d1495b", "without")):
    axis.plot(range(len(OPERATIONS)), [accuracy[thinking, n] for n in OPERATIONS], "o-", color=colour, label=name)
axis.axhline(0.5, color="#777777", linestyle=":", linewidth=1)
axis.axvspan(-0.3, OPERATIONS.index(8) + 0.5, color="#eeeeee", zorder=0)
axis.text(-0.2, 0.03, "as long as in training", fontsize=9, color="#555555")
axis.set_xticks(range(len(OPERATIONS)), OPERATIONS)
axis.set(xlabel="operations", ylabel="right answers", ylim=(0, 1.05), xlim=(-0.3, len(OPERATIONS) - 0.7))
axis.legend(frameon=False)
plt.show()

assert all(accuracy[True, n] > accuracy[False, n] for n in OPERATIONS), "thoughts do not help yet: raise num_steps"

# %% [markdown]
# ## Force a thought
#
# Does the answer follow from the thoughts, or are they a commentary? We give the model one thought of ours, and let it think on
# from there. `forward_taught` is the pass of training: it takes the thought after each chunk as given, and says what would be
# thought next, and what the answer is.

# %%
M = model.cfg.thinking.max_thought
END = model.cfg.thinking.end_id
LENGTH = 128
taught = jax.jit(forward_taught, static_argnums=1)


def think_on(question: str, forced: dict[int, str]) -> tuple[list[str], str]:
    """The thought after each chunk, and the answer. `forced` has thoughts by chunk; all others are the model's own."""
    ids = model.tokenizer.encode(question)
    tokens = np.zeros((1, LENGTH), np.int32)
    tokens[0, : len(ids)] = ids
    thoughts = np.full((1, LENGTH // C, M), NO_TOKEN, np.int32)
    texts = []
    for chunk in range((len(ids) - 1) // C):
        said = [*model.tokenizer.encode(forced[chunk]), END] if chunk in forced else []
        while END not in said and len(said) < M:  # token by token, each with those before it
            thoughts[0, chunk, : len(said)] = said
            _, thought_logits = taught(model.params, model.cfg, tokens, thoughts)
            said.append(int(thought_logits[0, chunk, len(said)].argmax()))
        thoughts[0, chunk, : len(said)] = said
        texts.append(model.decode([token for token in said if token != END]))
    logits, _ = taught(model.params, model.cfg, tokens, thoughts)
    return texts, model.decode([int(logits[0, len(ids) - 1].argmax())])


own, own_answer = think_on(QUESTION, {})
assert own == [thought.text for thought in answer.thoughts], "the pass of training thinks what the engine thought"

OTHER = {"heads": "tails", "tails": "heads"}
changed = next((chunk for chunk, thought in enumerate(own) if thought), 0)
opposite = " ".join(OTHER[word] for word in own[changed].split()) or "tails"
forced, forced_answer = think_on(QUESTION, {changed: opposite})

print(f"{'read':<44}{'own thought':<20}with one forced")
for number, chunk in enumerate(chunks):
    mine, other = (thoughts[number] if number < len(thoughts) else "" for thoughts in (own, forced))
    print(f"{chunk:<44}{mine or '-':<20}{other or '-'}{'   <- forced' if number == changed else ''}")
print(f"\n{'answer':<44}{own_answer:<20}{forced_answer}")

# %% [markdown]
# The flips that were read later turn the coin from where the forced thought put it. So the thoughts carry the state: no other
# way leads from the first chunks to the answer, for a model that was taught to read it off the last one.
#
# A wrong *draft* of a thought is another matter. It is verified and rejected, and changes nothing but the time. Here the engine
# drafts thoughts in two ways, alone and among others, and the bits are those from before.

# %%
others = [f"{problem.question} A:" for problem in problems[8][:7]]
reader = ds.Engine(model, ds.EngineConfig(max_requests=1, max_len=256, thoughts="self"))
print(f"{'drafted thoughts':<20}{'requests':>9}{'passes':>8}{'drafted':>9}{'accepted':>10}   digest")
for source, prompts in (("none", [QUESTION]), ("none", [*others, QUESTION]), ("self", [QUESTION])):
    out = (reader if source == "self" else engine).generate(prompts, greedy)[-1]
    stats = out.stats
    print(
        f"{source:<20}{len(prompts):>9}{stats.num_read_passes:>8}{stats.num_draft_thoughts:>9}"
        f"{stats.num_accepted_thoughts:>10}   {out.digest[:16]}"
    )
    assert out.digest == answer.digest, "a draft, or a neighbour, changed the answer"

# %% [markdown]
# `none` drafts that there is nothing to think, as the paper does; each thought that was not trivial cost one pass more. `self`
# reads ahead on the cheapest shape, chunk by chunk, and is nearly always right. Requests that are read together share the rows
# of a pass, so one of them may take more passes than it would alone.
#
# ## Next
#
# * `ds.load("thinking_parity")` is the same kind of model, trained for longer: it holds up to 100 operations.
# * `detspec demo --thinking "A coin's state is heads. Bob flips. What's the state?"` asks it.
# * `configs/` has sums of variables, two-hop questions, and how to train on worked examples of your own.
# * A GPU or TPU belongs to this notebook until its kernel is shut down. Commands in a terminal, and the notebooks
#   `05_batch_job` and `06_serving`, need it for themselves.
