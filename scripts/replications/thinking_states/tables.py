"""The results of the replication as a Markdown page."""

from typing import Any

from scripts.replications.markdown import percent, table
from scripts.replications.pool import HUGE_PAGES
from scripts.replications.thinking_states.comparison import NONE, Results, comparison, losses, unfinished

TITLES = {
    "parity": "Coin flips",
    "parity20": "Coin flips, trained on more operations",
    "parity40": "Coin flips, trained on yet more operations",
    "variables": "Variables",
    "variables20": "Variables, trained on more operations",
    "variables40": "Variables, trained on yet more operations",
    "two_hop": "Two-hop questions",
    "known": "Two-hop questions, facts known beforehand",
    "arithmetic": "Arithmetic",
}
OPERATIONS = {
    "two_hop": "Operations are hops. A question of 1 hop asks for a fact of the world. One of 2 hops joins two facts; a tenth "
    "of these questions were held out, and only they are asked here.",
    "known": "A model that has memorised all facts is trained on them and on questions of two hops that begin with 33 of 40 "
    "people. Only questions of two hops that begin with the other seven are asked here.",
}


def document(found: dict[str, Any]) -> str:
    """The whole page, from the results that `write_report` gathers."""
    results: Results = found["runs"]
    parts = [head(found)]
    parts.append(comparison(results))
    parts += [accuracies(results, task) for task in TITLES]
    for name, section in (
        ("forced", forced),
        ("step_time", step_time),
        ("rounds", rounds),
        ("prefill_time", prefill_time),
        ("answer_time", answer_time),
    ):
        if name in results:
            parts.append(section(results[name]))
    parts.append(runs_table(results))
    return "\n\n".join(part for part in parts if part) + "\n"


def head(found: dict[str, Any]) -> str:
    """Title, command and machine."""
    marks = [one["fingerprint"] for one in found["runs"].values()]
    mark = marks[0]
    devices = " and ".join(dict.fromkeys(one["device_kind"] for one in marks))
    ended = "The runs that had finished" if unfinished(found["runs"]) else "All runs"
    return (
        "# Thinking States, replicated at small scale\n\n"
        "Made by `python -m scripts.replications.thinking_states`. Models are trained from scratch. Accuracy is exact match of "
        "the greedily generated answer. Models with plain rotary positions, trained from scratch, do not extrapolate, with or "
        "without thoughts. So all arms have linear biases (ALiBi), except where a window is named.\n\n"
        f"{devices}, {found['cores']} cores, one for each training, with huge pages where glibc has them "
        f"(`GLIBC_TUNABLES={HUGE_PAGES}`). jax {mark['jax']}, jaxlib {mark['jaxlib']}, detspec {mark['detspec']}. {ended} "
        f"took {found['cpu_seconds'] / 60:.0f} minutes of processor time.\n\n"
        "![Accuracies and times](results.png)"
    )


def accuracies(results: Results, task: str) -> str:
    """Accuracy of all runs of one task, by operations."""
    runs = {name: one for name, one in results.items() if name.startswith(f"{task}-") and "accuracy" in one}
    if not runs:
        return ""
    lengths = sorted({int(n) for one in runs.values() for n in one["accuracy"]})
    first = next(iter(runs.values()))["config"]
    rows = [
        [
            *(name, f"{one['config']['num_steps']}", losses([one]), share(one.get("trained"))),
            *(f"{one['training_cpu_seconds']:.0f}", *(share(one["accuracy"].get(f"{n}")) for n in lengths)),
        ]
        for name, one in runs.items()
    ]
    notes = [
        f"Trained on 1 to {first['max_ops']} operations. Accuracy in %, on {first['eval_problems']} problems for each number "
        "of operations. In training: rows without a wrong token, teacher-forced, in the last batches. CPU seconds are those of "
        "compilation, training and this evaluation.",
        *filter(None, [OPERATIONS.get(task)]),
    ]
    most = max(n for n in lengths if n <= max(first["max_ops"], lengths[0]))
    if missed := [name for name, one in runs.items() if one["accuracy"].get(f"{most}", 1) < 0.95]:
        notes.append(f"Below 95 % at {most} operations: {', '.join(missed)}.")
    header = ["run", "steps", "last loss", "in training", "CPU s", *map(str, lengths)]
    return "\n\n".join([f"## {TITLES[task]}", *notes, table(header, rows)])


def share(value: float | None) -> str:
    """A share in %, or a sign that there is none."""
    return NONE if value is None else percent(value)


def forced(result: dict[str, Any]) -> str:
    """Forced thoughts."""
    rows = [
        [f"{one['num_ops']}", f"{one['problems']}"] + [percent(one[name]) for name in ("right", "flipped", "flipped_by_own")]
        for one in result["found"]
    ]
    note = (
        f"Model `{result['models'][0]}`. The thought in the middle of the prompt is committed unverified, with each heads in "
        "it changed to tails and each tails to heads. Then reading continues. The control forces the model's own thought: it "
        "must change no answer."
    )
    header = ["operations", "problems", "right unforced, %", "answers changed, %", "changed by its own thought, %"]
    return "\n\n".join(["## Forced thoughts", note, table(header, rows)])


def step_time(result: dict[str, Any]) -> str:
    """Time of an optimiser step."""
    rows = [
        [
            *(f"{one[key]}" for key in ("chunks", "chunk", "thought")),
            *(f"{one['parallel_ms']:.1f}", f"{one['unrolled_ms']:.1f}", f"{one['ratio']:.2f}"),
        ]
        for one in result["found"]
    ]
    settings = result["settings"]
    rows_of, length = settings["shape"]
    note = (
        f"Fixed are the model, {rows_of} row(s) of {length} tokens, and {settings['thought_tokens']} tokens of thoughts per "
        "row; only the cut into chunks differs. Parallel: all states come from given thoughts, in one pass that includes "
        "thinker and compressor. Through time: the state is the previous chunk's own stream, chunk after chunk, with gradients "
        f"through the states, without thinker and compressor. In turn in one process, medians of {settings['repeats']}."
    )
    header = ["chunks of a row", "tokens of a chunk", "of a thought", "parallel, ms", "through time, ms", "ratio"]
    return "\n\n".join(["## Time of a training step", note, table(header, rows)])


def rounds(result: dict[str, Any]) -> str:
    """Rounds of speculation, by sparsity."""
    rows = [
        [
            *(percent(one["filler"]), f"{one['chunks']:.1f}", f"{one['thoughts']:.1f}", source),
            *(f"{counted['rounds']:.1f}", f"{counted['passes']:.1f}", percent(counted["right"])),
        ]
        for one in result["found"]
        for source, counted in one["sources"].items()
    ]
    settings = result["settings"]
    note = (
        f"Model `{result['models'][0]}`, {settings['num_ops']} operations, means over {settings['num_problems']} prompts, read "
        "one at a time. A round ends at a wrong guess; a pass also ends where its rows end. Without guesses a pass reads one "
        "chunk."
    )
    header = ["fillers, %", "chunks", "thoughts not trivial", "guesses", "rounds", "passes", "right guesses, %"]
    return "\n\n".join(["## Rounds of speculative prefill", note, table(header, rows)])


def prefill_time(result: dict[str, Any]) -> str:
    """Wall time of speculative prefill."""
    rows = [
        [
            f"{one['batch']}",
            one["source"],
            f"{one['rows']}",
            f"{one['passes']:.1f}",
            f"{one['ms']:.1f}",
            f"{one['speedup']:.2f}",
        ]
        for one in result["found"]
    ]
    settings = result["settings"]
    note = (
        f"Model `{result['models'][0]}`, {settings['num_ops']} operations, {percent(settings['filler'])} % fillers. In turn in "
        f"one process, medians of {settings['repeats']}. The speed-up is the median of ratios within a round."
    )
    header = ["prompts", "guesses", "rows of a pass", "passes", "ms", "speed-up"]
    return "\n\n".join(["## Time of reading long sparse prompts", note, table(header, rows)])


def answer_time(result: dict[str, Any]) -> str:
    """Time to the answer."""
    settings = result["settings"]
    rows = [
        [
            *(f"{one['batch']}", one["label"], percent(one["accuracy"])),
            *(f"{one[name]:.1f}" for name in ("tokens", "rounds", "passes")),
            *(f"{one[name]:.2f}" for name in ("reading_ms", "decoding_ms", "ms")),
        ]
        for one in result["found"]
    ]
    best = []
    bounds = []
    for batch in settings["batches"]:
        here = [one for one in result["found"] if one["batch"] == batch]
        thinking, cot = (min((o for o in here if o["arm"] == arm), key=lambda o: o["ms"]) for arm in ("thinking", "cot"))
        best.append([f"{batch}", f"{thinking['ms']:.2f}", f"{cot['ms']:.2f}", f"{cot['ms'] / thinking['ms']:.2f}"])
        bounds.append(_bound(batch, thinking, cot))
    note = (
        f"{settings['num_ops']} operations, one backbone, both arms trained on up to {settings['num_ops']} operations. Time "
        "from the prompts to the last token; each pass decodes one canonical token per row. In turn in one process, medians of "
        f"{settings['repeats']}. A chain decodes a token for every operation. Thoughts take a pass for every chunk with a "
        "wrong guess, and a loop of the thinker for the thought's tokens."
    )
    header = ["prompts", "how", "right, %", "new tokens", "rounds", "passes", "reading, ms", "decoding, ms", "all, ms"]
    fastest = table(["prompts", "Thinking States, ms", "chain of thought, ms", "speed-up"], best)
    return "\n\n".join(["## Time to the answer", note, table(header, rows), "The fastest of each arm:", fastest, *bounds])


def runs_table(results: Results) -> str:
    """Every run with its time."""
    rows = [
        [name, f"{one['seconds']:.0f}", f"{one['cpu_seconds']:.0f}", one.get("command", "")] for name, one in results.items()
    ]
    return "\n\n".join(["## Runs", table(["run", "seconds", "CPU s", "command"], rows)])


def _bound(batch: int, thinking: dict[str, Any], cot: dict[str, Any]) -> str:
    """A sentence on the parts of the times to the answer."""
    return (
        f"With {batch} prompt(s), {thinking['passes']:.1f} passes over chunks and their thoughts follow each other, each of "
        f"{thinking['reading_ms'] / max(thinking['passes'], 1):.2f} ms. A chain has {cot['tokens']:.1f} tokens, each of "
        f"{cot['decoding_ms'] / max(cot['tokens'], 1):.2f} ms. Thoughts win where passes are cheaper than tokens, or fewer: "
        "where few chunks need a thought."
    )
