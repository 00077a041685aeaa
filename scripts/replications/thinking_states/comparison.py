"""The paper's tables and figures next to what was measured here: for each the two numbers, and what differs."""

from collections.abc import Iterable
from statistics import mean
from typing import Any

from scripts.replications.markdown import percent, table
from scripts.replications.thinking_states import paper
from scripts.replications.thinking_states.runs import trainings

Results = dict[str, dict[str, Any]]
ARMS = {"cot": "chain of thought", "no_cot": "neither", "thinking": "Thinking States", "coconut": "Coconut", "icot": "iCoT"}
NONE = "-"
MEASURED = ("forced", "rounds", "speeds", "loop_speeds", "answer_time", "prefill_time", "step_time")
MISSING = (
    ("two more seeds, where a row has one number", "the command is to take 45 minutes"),
    ("chunks of 48 tokens", "`ThinkingConfig.chunk` is a power of two"),
    ("GSM8K", "it needs a pretrained model; templated arithmetic of 1 to 8 steps stands in its place"),
    ("6 to 21 latents", "problems have 1 step (two hops), so 1, 2 and 4 latents replace it"),
    ("speed-ups of Coconut and iCoT", "their passes do not run in the engine, so times would not compare"),
    ("speed-ups of the other two-hop rows", "the figure by layers times two hops with thoughts against the chain"),
)


def comparison(results: Results) -> str:
    """All rows of the paper's tables and figures."""
    parts = [
        state_tracking(results),
        reasoning(results),
        latents(results),
        sweep(results, "chunk", paper.CHUNKS),
        sweep(results, "loop", paper.LAYERS),
        question(results),
        missing(results),
    ]
    return "\n\n".join(part for part in parts if part)


def state_tracking(results: Results) -> str:
    """Table 1."""
    rows = []
    for task, arms in paper.STATE_TRACKING.items():
        for arm in ("no_cot", "cot", "thinking"):
            cells = []
            for place, most in enumerate(paper.LENGTHS):
                runs = runs_of(results, f"{task}{most if most > paper.LENGTHS[0] else ''}", arm)
                cells += [f"{arms[arm][place]:.1f}", spread(beyond(one, most) for one in runs)]
            rows.append([f"{task}, {ARMS[arm]}", *cells])
    header = ["", *(cell for most in paper.LENGTHS for cell in (f"N = {most}, paper", "here"))]
    note = (
        "Trained on up to N operations, mean accuracy in % on N to 100 of them. The paper tunes a pretrained Qwen2.5 0.5B. "
        "Here small models are trained from scratch with linear biases. Thoughts then extend from N = 10 on. A chain "
        "must count operations by distance, and guesses beyond N. Its guesses are mostly well-formed, so with coins they are "
        "right half of the time, where theirs at N = 10 are not. Chance is 10 % with variables, which are digits; their chain "
        "is tested on up to 70 operations, because more exceed the models' positions. All arms of variables for N = 20 and 40 "
        "go on from the shorter ones, and so does the chain of coins."
    )
    return section("State tracking by training length (table 1)", note, header, rows)


def reasoning(results: Results) -> str:
    """Table 2."""
    speeds: dict[str, float] = {}
    if "speeds" in results:
        found = zip(results["speeds"]["settings"]["arms"], results["speeds"]["found"], strict=True)
        for arm, one in found:
            speeds.setdefault(arm, one["speedup"])  # the first of an arm is the task's own run
    rows = []
    for task, arms in paper.REASONING.items():
        for arm, (accuracy, speed) in arms.items():
            runs = runs_of(results, task, arm)
            ours = f"{speeds[arm]:.2f}" if task == "arithmetic" and arm in speeds else NONE
            theirs = [f"{accuracy:.1f}", f"{speed:.2f}"]
            here = [spread(tested(one, task) for one in runs), ours, spread(one.get("trained") for one in runs)]
            rows.append([f"{TASK_NAMES[task]}, {ARMS[arm]}", *theirs, *here, effort(results, runs), losses(runs)])
    header = ["", "paper", "speed-up", "here", "speed-up", "in training", "steps", "last loss"]
    note = (
        "Accuracy in % and speed over that of a chain of thought. In training: rows without a wrong token, teacher-forced, "
        "among the last 20 batches, which are new problems of the training questions. Steps include those of the model that a "
        "run goes on from. The paper's GSM problems ask for knowledge of the world and of language; templates ask only for "
        "sums of 1 to 8 steps. A step is written `+ 4 = 7`, as long as its operation: only then does the chain find its "
        "operations in so few training steps. The paper's two hops ask a pretrained model about the world. Here 240 facts of "
        "40 invented people are memorised: during training, where a tenth of the questions is held out; or before it (facts "
        "known), where all questions of two hops that begin with seven of the people are held out. Their facts stay in "
        "training, as questions of one hop."
    )
    return section("Reasoning (table 2)", note, header, rows)


def latents(results: Results) -> str:
    """Table 3."""
    rows = []
    for arm, number in (("icot", 0), ("coconut", 1), ("coconut2", 2), ("coconut4", 4)):
        runs = runs_of(results, "two_hop", arm)
        rows.append([f"{number}", spread(tested(one, "two_hop") for one in runs), effort(results, runs), losses(runs)])
    note = (
        f"The paper raises Coconut's latents from {paper.LATENTS[0]} to {paper.LATENTS[1]} on GSM; its accuracies were not "
        "at hand. Here: two hops, held-out questions, one step each, and latents in its place. None is iCoT."
    )
    return section("Number of latents (table 3)", note, ["latents", "here", "steps", "last loss"], rows)


SWEPT = {  # what is changed -> its name, the paper's figure, the measurement of times, and what ours is about
    "chunk": (
        "tokens of a chunk",
        "figure 3b",
        "speeds",
        "arithmetic, accuracy in % by operations. A thought holds the steps of all operations in its chunk, so longer chunks "
        "ask for longer thoughts.",
    ),
    "loop": (
        "layers in the loop",
        "figure 3a",
        "loop_speeds",
        "two hops, accuracy in % by hops, after a model of four layers has memorised all facts without thoughts. Then it "
        "learns to think, about questions that leave out seven people. Questions about these people alone are asked here, so "
        "a thought can only hold what the memorising model knew, as far as the layers before the thought find it.",
    ),
}


def sweep(results: Results, kind: str, theirs: dict[int, Any]) -> str:
    """Figure 3, accuracy and time by one setting."""
    runs = swept(results, kind)
    if not runs:
        return ""
    name, figure, measured, what = SWEPT[kind]
    timed: Results = {}
    if measured in results:
        timed = dict(zip(results[measured]["models"], results[measured]["found"], strict=True))
    rows = []
    for value, run in sorted(runs.items()):
        one = results[run]
        ms = [f"{timed[run]['ms']:.1f}", f"{timed[run]['speedup']:.2f}"] if run in timed else [NONE, NONE]
        shares = [percent(share) for share in one["accuracy"].values()]
        rows.append([f"{value}", *shares, *ms, effort(results, [one]), losses([one])])
    values = ", ".join(f"{value}: {accuracy}" for value, accuracy in theirs.items())
    note = f"The paper's accuracy on GSM, {values}. Here {what} One seed; milliseconds are those to the answers of 8 problems."
    lengths = list(results[next(iter(runs.values()))]["accuracy"])
    header = [name, *lengths, "ms", "speed-up over a chain", "steps", "last loss"]
    return section(f"By {name} ({figure})", note, header, rows)


def swept(results: Results, kind: str) -> dict[int, str]:
    """The runs of one setting by its value; the arm itself has chunks of its own length."""
    runs = {int(name.split("-")[1]): name for name in results if name.startswith(f"{kind}-")}
    if runs and kind == "chunk" and (own := "arithmetic-thinking-0") in results:
        runs[results[own]["config"]["thinking"]["chunk"]] = own
    return runs


def question(results: Results) -> str:
    """Question first against question last."""
    rows = []
    for order in ("last", "first"):
        for one in runs_of(results, order, "thinking"):
            accuracies = [percent(share) for share in one["accuracy"].values()]
            rows.append(
                [f"question {order}", f"{paper.QUESTION[order]:.2f}", *accuracies, effort(results, [one]), losses([one])]
            )
    if not rows:
        return ""
    lengths = list(runs_of(results, "last", "thinking")[0]["accuracy"]) if runs_of(results, "last", "thinking") else []
    note = (
        "Variables, trained on up to 5 operations for too few steps to learn them all. In the paper thoughts that know the "
        "question do better. Here each thought holds all three variables, whatever is asked, so the question tells it nothing."
    )
    return section("Question first", note, ["", "paper, GSM", *lengths, "steps", "last loss"], rows)


def missing(results: Results) -> str:
    """Names the missing measurements, and why they are missing."""
    rows = [list(row) for row in MISSING]
    if lacking := unfinished(results):
        rows.append([", ".join(lacking), "runs of this command that had not finished when this page was written"])
    return section("Not measured", "", ["row", "reason"], rows)


def unfinished(results: Results) -> list[str]:
    """Runs of the whole command without a result."""
    return [name for name in (*trainings(), *MEASURED) if name not in results]


TASK_NAMES = {"arithmetic": "GSM / arithmetic", "two_hop": "two hops, facts in training", "known": "two hops, facts known"}


def section(title: str, note: str, header: list[str], rows: list[list[str]]) -> str:
    """A title, a note and a table; empty if there are no rows."""
    return "\n\n".join(filter(None, [f"## {title}", note, table(header, rows)])) if rows else ""


def runs_of(results: Results, task: str, arm: str) -> list[dict[str, Any]]:
    """All seeds of one arm."""
    return [one for name, one in results.items() if name.rpartition("-")[0] == f"{task}-{arm}" and "accuracy" in one]


def beyond(one: dict[str, Any], most: int) -> float | None:
    """Mean accuracy over all tested numbers of operations from `most` on; None if none is tested."""
    shares = [share for n, share in one["accuracy"].items() if int(n) >= most]
    return mean(shares) if shares else None


def tested(one: dict[str, Any], task: str) -> float:
    """Accuracy on two hops; or the mean over up to as many operations as were trained on."""
    if task != "arithmetic":
        return float(one["accuracy"]["2"])
    return mean(share for n, share in one["accuracy"].items() if int(n) <= one["config"]["max_ops"])


def spread(shares: Iterable[float | None]) -> str:
    """The mean of shares in %, and from where to where they reach if there are several."""
    known = [share for share in shares if share is not None]
    if not known:
        return NONE
    reach = f" ({percent(min(known))} to {percent(max(known))})" if len(known) > 1 else ""
    return f"{percent(mean(known))}{reach}"


def effort(results: Results, runs: list[dict[str, Any]]) -> str:
    """Steps of a run, after those of the run that it goes on from."""
    if not runs:
        return NONE
    own = [runs[0]["config"]["num_steps"]]
    start = runs[0].get("starts_from")
    while start in results:
        own.insert(0, results[start]["config"]["num_steps"])
        start = results[start].get("starts_from")
    return " + ".join(map(str, own))


def losses(runs: list[dict[str, Any]]) -> str:
    """The mean of the last losses."""
    return f"{mean(one['loss'] for one in runs):.3f}" if runs else NONE
