"""The results of the replication as a Markdown page."""

from collections.abc import Iterable, Sequence
from typing import Any

from replications.thinking_states.pool import HUGE_PAGES

TITLES = {"parity": "Coin flips", "variables": "Variables", "two_hop": "Questions of two hops"}
OPERATIONS = {
    "two_hop": "Operations are hops: 1 asks for a fact of the world, 2 joins two of them in one of the questions, a tenth of "
    "all, that were held out."
}
Results = dict[str, dict[str, Any]]


def document(found: dict[str, Any]) -> str:
    """The whole page, from what `write_report` gathers."""
    results: Results = found["runs"]
    parts = [head(found)]
    parts += [accuracies(results, task) for task in TITLES]
    parts += [sweep(results, kind) for kind in ("chunk", "loop")]
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
    mark = next(iter(found["runs"].values()))["fingerprint"]
    return (
        "# Thinking States, replicated at small scale\n\n"
        "Made by `python -m replications.thinking_states`. Models are trained from scratch; accuracies are of generated "
        "answers, greedy, right only as a whole. Plain rotary positions do not extrapolate from scratch, with thoughts or "
        "without, so all arms have linear biases (ALiBi) but where a window is named.\n\n"
        f"{mark['device_kind']}, {found['cores']} cores, each training on one, in huge pages where glibc has them "
        f"(`GLIBC_TUNABLES={HUGE_PAGES}`); jax {mark['jax']}, jaxlib {mark['jaxlib']}, detspec {mark['detspec']}; all runs "
        f"took {found['seconds'] / 60:.1f} minutes of one core."
    )


def accuracies(results: Results, task: str) -> str:
    """Accuracy by operations of all runs of one task."""
    runs = {name: one for name, one in results.items() if name.startswith(f"{task}-") and "accuracy" in one}
    if not runs:
        return ""
    lengths = list(next(iter(runs.values()))["accuracy"])
    first = next(iter(runs.values()))["config"]
    rows = [
        [
            *(name, f"{one['config']['num_steps']}", f"{one['training_cpu_seconds']:.0f}"),
            *(percent(one["accuracy"][n]) for n in lengths),
            percent(sum(one["accuracy"].values()) / len(lengths)),
        ]
        for name, one in runs.items()
    ]
    notes = [
        f"Trained on 1 to {first['max_ops']} operations, {first['eval_problems']} problems for each number of operations; "
        "accuracy in %. CPU seconds hold compilation, training and this evaluation.",
        *filter(None, [OPERATIONS.get(task)]),
    ]
    if missed := [name for name, one in runs.items() if one["accuracy"][lengths[0]] < 0.95]:
        notes.append(f"Below 95 % at {lengths[0]} operations, so not learnt in distribution either: {', '.join(missed)}.")
    header = ["run", "steps", "CPU s", *lengths, "mean"]
    return "\n\n".join([f"## {TITLES[task]}", *notes, table(header, rows)])


def sweep(results: Results, kind: str) -> str:
    """Accuracy of short trainings by one setting."""
    of = {"chunk": "tokens of a chunk", "loop": "layers in the loop"}[kind]
    runs = {int(name.split("-")[1]): one for name, one in results.items() if name.startswith(f"{kind}-")}
    if not runs:
        return ""
    lengths = list(next(iter(runs.values()))["accuracy"])
    rows = [
        [f"{value}", f"{one['config']['thinking']['max_thought']}", f"{one['loss']:.3f}", f"{one['training_cpu_seconds']:.0f}"]
        + [percent(one["accuracy"][n]) for n in lengths]
        for value, one in sorted(runs.items())
    ]
    steps = next(iter(runs.values()))["config"]["num_steps"]
    note = f"Coin flips, one seed, {steps} steps; accuracy in % by operations."
    return "\n\n".join([f"## By {of}", note, table([of, "M", "last loss", "CPU s", *lengths], rows)])


def forced(result: dict[str, Any]) -> str:
    """Forced thoughts."""
    rows = [
        [f"{one['num_ops']}", f"{one['problems']}"] + [percent(one[name]) for name in ("right", "flipped", "flipped_by_own")]
        for one in result["found"]
    ]
    note = (
        f"Model `{result['models'][0]}`. The thought in the middle of the prompt is committed unverified, with every side in "
        "it turned; reading goes on behind it. Forced to be what it is anyhow, it must turn no answer."
    )
    header = ["operations", "problems", "right unforced, %", "answers turned, %", "turned by its own thought, %"]
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
        f"Held fixed: {rows_of} row(s) of {length} tokens, {settings['thought_tokens']} tokens of thoughts a row, the model; "
        "only the cuts differ. Parallel: all states from given thoughts, one pass, thinker and compressor included. "
        "Through time: the state is the chunk before's own stream, chunk after chunk, gradients through the states, no thinker "
        f"and no compressor. By turns in one process, medians of {settings['repeats']}."
    )
    header = ["chunks of a row", "tokens of a chunk", "of a thought", "parallel, ms", "through time, ms", "ratio"]
    return "\n\n".join(["## Time of a training step", note, table(header, rows)])


def rounds(result: dict[str, Any]) -> str:
    """Rounds by sparsity."""
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
        f"Model `{result['models'][0]}`, {settings['num_ops']} operations, means over {settings['num_problems']} prompts read "
        "one at a time. A round ends at a wrong guess; a pass also where its rows end. Without guesses a pass reads one chunk."
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
        f"Model `{result['models'][0]}`, {settings['num_ops']} operations, {percent(settings['filler'])} % fillers. By turns "
        f"in one process, medians of {settings['repeats']}; the speed-up is the median of ratios within a round."
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
        f"{settings['num_ops']} operations, one backbone, both arms trained on up to as many. From the prompts to the last "
        f"token, one canonical token of each row a pass; by turns in one process, medians of {settings['repeats']}. A chain "
        "decodes a token for every operation; thoughts take a pass for every chunk that is not guessed right, and a loop of "
        "the thinker for its tokens."
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


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first stand right."""
    lines = [list(header), ["---", *["---:"] * (len(header) - 1)], *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(share: float) -> str:
    """A share as a percentage: 0.984 -> 98.4."""
    return f"{100 * share:.1f}".removesuffix(".0")


def _bound(batch: int, thinking: dict[str, Any], cot: dict[str, Any]) -> str:
    """What the times to the answer are made of."""
    return (
        f"What bounds it with {batch} prompt(s): a pass over chunks with their thoughts takes "
        f"{thinking['reading_ms'] / max(thinking['passes'], 1):.2f} ms, and there are {thinking['passes']:.1f} one after the "
        f"other; a token of the chain takes {cot['decoding_ms'] / max(cot['tokens'], 1):.2f} ms, and there are "
        f"{cot['tokens']:.1f}. Thoughts win where passes are cheaper than tokens, or fewer: where few chunks are thought about."
    )
