"""The demonstration: the same requests in several batches and orders, ordinary and deterministic; their bits are compared.

Ordinary generation is the inverse control: if its bits were the same in every batch, too, the comparison would show nothing.
"""

import dataclasses
import importlib.resources
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from detspec.checkpoint.load import Model
from detspec.engine.bits import same_bits
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Needs
from detspec.engine.request import Completion
from detspec.errors import InputError
from detspec.riders.counters import Stats
from detspec.sampling_params import SamplingParams

BATCHES = (1, 5, 16)
TEMPERATURES = (0.0, 0.8)
KINDS = ("ordinary", "deterministic")
DRAFTING_BATCH = 5  # in small batches the fast path's bits differ most from the canonical ones, so drafts are rejected
SHUFFLE_SEED = 0
SHOWN_PROMPTS = 2
SHOWN_LINES = 10
SHOWN_WIDTH = 110
PARTING_CHARS = 36
SELF_DRAFT = "self draft"
TIMED = "timed"
REPEATS = 2  # runs of each kind, in turn; the faster one counts, since noise only adds time


@dataclasses.dataclass(frozen=True)
class Change:
    """Numbers of texts, and of log-probabilities by bit pattern, that differ from the first run's."""

    texts: int
    logprobs: int
    num_texts: int
    num_logprobs: int

    @property
    def none(self) -> bool:
        """Whether nothing changed."""
        return self.texts == 0 and self.logprobs == 0


@dataclasses.dataclass(frozen=True)
class DemoRun:
    """All prompts generated once. `completions` have the order of the prompts, even if the run shuffled them."""

    kind: str
    temperature: float
    batch: int
    label: str
    completions: tuple[Completion, ...]
    seconds: float

    @property
    def num_tokens(self) -> int:
        """Number of new tokens of all prompts."""
        return sum(len(completion.token_ids) for completion in self.completions)


@dataclasses.dataclass(frozen=True)
class DemoReport:
    """All runs so far, in order. Each run is compared with the first one of its kind and temperature."""

    prompts: tuple[str, ...]
    runs: tuple[DemoRun, ...]
    plans: tuple[str, ...]

    def reference(self, run: DemoRun) -> DemoRun:
        """The first run of the same kind and temperature."""
        return next(r for r in self.runs if (r.kind, r.temperature) == (run.kind, run.temperature))

    def change(self, run: DemoRun) -> Change:
        """The change in `run` compared with its reference."""
        return compare(self.reference(run).completions, run.completions)

    @property
    def held(self) -> bool:
        """Whether no bit changed in any deterministic run."""
        return all(self.change(run).none for run in self.runs if run.kind == "deterministic")

    @property
    def control_found(self) -> bool:
        """Whether ordinary runs changed, which shows that the comparison can see a change."""
        return not all(self.change(run).none for run in self.runs if run.kind == "ordinary")

    def heading(self) -> str:
        """The lines over the table of changes."""
        return "\n".join(
            [
                f"Changes compared with batch {BATCHES[0]}, of {len(self.prompts)} texts and of the bits of log-probabilities:",
                "",
                f"  {'':38}{'ordinary':>24}   {'deterministic':>24}",
                f"  {'':38}{'texts':>10}{'log-probs':>14}   {'texts':>10}{'log-probs':>14}",
            ]
        )

    def row(self, temperature: float, label: str) -> str:
        """A line of the table of changes: the runs that have been made with this label, of both kinds."""
        runs = [run for run in self.runs if (run.temperature, run.label) == (temperature, label)]
        cells = "   ".join(self._cells([run for run in runs if run.kind == kind]) for kind in KINDS)
        return f"  {f'temperature {temperature:g}, {label}':38}{cells}".rstrip()

    def _cells(self, repeats: list[DemoRun]) -> str:
        """The largest change among the repeats of one run."""
        if not repeats:
            return f"{'':24}"
        change = max((self.change(run) for run in repeats), key=lambda change: change.logprobs)
        return f"{f'{change.texts}/{change.num_texts}':>10}{f'{change.logprobs}/{change.num_logprobs}':>14}"

    def parting(self) -> str:
        """The first ordinary text that changed, around the place where it differs from its reference."""
        for run in self.runs:
            if run.kind == "ordinary":
                for first, other in zip(self.reference(run).completions, run.completions, strict=True):
                    if first.text != other.text:
                        pairs = zip(first.text, other.text, strict=False)
                        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first.text), len(other.text)))
                        shown = slice(max(0, at - PARTING_CHARS), at + PARTING_CHARS)
                        return (
                            f"\nAn ordinary text that changed, at temperature {run.temperature:g}:\n\n"
                            f"  {self.reference(run).label:10}{first.text[shown]!r}\n"
                            f"  {run.label:10}{other.text[shown]!r}"
                        )
        return ""

    def speed(self, batch: int) -> str:
        """A line of the table of speeds."""
        rates = [self._rate(kind, batch) for kind in KINDS]
        return f"  {f'batch {batch}':16}{rates[0]:12,.0f}{rates[1]:16,.0f}{rates[1] / rates[0]:8.2f}"

    def _rate(self, kind: str, batch: int) -> float:
        """Tokens per second over both temperatures, from the fastest run of each."""
        tokens = 0
        seconds = 0.0
        for temperature in TEMPERATURES:
            timed = [run for run in self.runs if (run.kind, run.batch, run.temperature) == (kind, batch, temperature)]
            fastest = min((run for run in timed if run.label == TIMED), key=lambda run: run.seconds)
            tokens += fastest.num_tokens
            seconds += fastest.seconds
        return tokens / seconds

    def speculation(self) -> str:
        """The programs that ran, and the counters of the self draft."""
        lines = [f"\nPrograms certified here (windows x rows per window [batch]): {', '.join(self.plans)}"]
        for run in self.runs:
            if SELF_DRAFT in run.label:
                stats = sum((completion.stats for completion in run.completions), Stats())
                lines.append(
                    f"Self draft at temperature {run.temperature:g}: {stats.num_draft_tokens} tokens drafted, "
                    f"{stats.num_accepted_draft_tokens} accepted; rollbacks: {stats.num_rollbacks}, "
                    f"recomputed tokens: {stats.num_recomputed_tokens}"
                )
        return "\n".join(lines)

    def texts(self) -> str:
        """Some texts with their digests."""
        lines = ["\nDigests of deterministic texts at temperature 0, and the texts; the mark ends the prompt:", ""]
        greedy = next(run for run in self.runs if run.kind == "deterministic" and run.temperature == 0)
        for prompt, completion in list(zip(self.prompts, greedy.completions, strict=True))[:SHOWN_PROMPTS]:
            text = f"{prompt}▏{completion.text}".splitlines()
            lines += [f"  {completion.digest[:16]}", *(f"  │ {line[:SHOWN_WIDTH]}" for line in text[:SHOWN_LINES]), ""]
        return "\n".join(lines[:-1])


def run_demo(
    model: Model, *, max_tokens: int = 64, show: Callable[[str], None], progress: Callable[[str], None] = lambda stage: None
) -> DemoReport:
    """Generates the demonstration's prompts at batch sizes 1, 5 and 16, and at 16 in shuffled order.

    Calls `show` with lines of text as soon as they are known, and `progress` with the name of each of the `NUM_STAGES` stages.
    Programs of the next batch are compiled while one runs. Speeds are those of runs after all that.
    """
    prompts = demo_prompts()
    report = DemoReport(tuple(prompts), (), ())

    def run(engine: Engine, kind: str, temperature: float, label: str, order: Sequence[int] = range(len(prompts))) -> None:
        nonlocal report
        made = one_run(engine, kind, temperature, label, prompts, order, max_tokens)
        report = dataclasses.replace(report, runs=(*report.runs, made))

    shuffled = np.random.default_rng(SHUFFLE_SEED).permutation(len(prompts)).tolist()
    settings: list[tuple[int, str, Sequence[int]]] = [(batch, f"batch {batch}", range(len(prompts))) for batch in BATCHES]
    settings.append((BATCHES[-1], f"batch {BATCHES[-1]}, shuffled", shuffled))
    with ThreadPoolExecutor(1) as compiler:
        ready = {batch: compiler.submit(ready_engine, model, batch, prompts, max_tokens, "auto") for batch in BATCHES}
        show(report.heading())
        for temperature in TEMPERATURES:
            for batch, label, order in settings:
                progress(f"temperature {temperature:g}, {label}")
                for kind in KINDS:
                    run(ready[batch].result(), kind, temperature, label, order)
                show(report.row(temperature, label))
        engines = {batch: engine.result() for batch, engine in ready.items()}
    drafting = ready_engine(model, DRAFTING_BATCH, prompts, max_tokens, "self")
    for temperature in TEMPERATURES:
        label = f"batch {DRAFTING_BATCH}, {SELF_DRAFT}"
        progress(f"temperature {temperature:g}, {label}")
        run(drafting, "deterministic", temperature, label)
        show(report.row(temperature, label))
    if parting := report.parting():
        show(parting)
    show(f"\nSpeed after compiling, in new tokens per second:\n\n  {'':16}{'ordinary':>12}{'deterministic':>16}{'ratio':>8}")
    for batch in BATCHES:
        progress(f"speed of batch {batch}")
        engines[batch].prepare(batch, Needs(processing=False))  # all that is compiled in the end, and nothing while it is timed
        for temperature in TEMPERATURES:
            for kind in KINDS * REPEATS:
                run(engines[batch], kind, temperature, TIMED)
        show(report.speed(batch))
    certificates = [c for engine in (*engines.values(), drafting) for c in engine.certificates.values()]
    plans = dict.fromkeys(certificate.plan.label for certificate in certificates if certificate.is_certified)
    report = dataclasses.replace(report, plans=tuple(plans))
    show(report.speculation())
    show(report.texts())
    return report


NUM_STAGES = len(TEMPERATURES) * (len(BATCHES) + 2) + len(BATCHES)


def demo_prompts() -> list[str]:
    """The prompts that the package ships."""
    text = (importlib.resources.files("detspec") / "assets" / "demo_prompts.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["prompt"] for line in text.splitlines() if line]


def ready_engine(model: Model, batch: int, prompts: Sequence[str], max_tokens: int, method: str) -> Engine:
    """An engine that has compiled and certified what a run of `prompts` cannot do without."""
    if model.tokenizer is None:
        raise InputError(f"the demonstration's prompts are text, and {model.no_tokenizer}")
    longest = max(len(model.tokenizer.encode(prompt)) for prompt in prompts)
    engine = Engine(model, EngineConfig(max_requests=batch, max_len=longest + max_tokens, method=method))
    engine.prepare(batch, Needs(processing=False), first_only=True)
    return engine


def one_run(
    engine: Engine, kind: str, temperature: float, label: str, prompts: Sequence[str], order: Sequence[int], max_tokens: int
) -> DemoRun:
    """Generates the prompts in `order`; the seed of each prompt is its index."""
    asked = SamplingParams(max_tokens=max_tokens, temperature=temperature, deterministic=kind == "deterministic")
    sampling = [dataclasses.replace(asked, seed=i) for i in order]
    began = time.perf_counter()
    completions = engine.generate([prompts[i] for i in order], sampling)
    seconds = time.perf_counter() - began
    by_prompt = dict(zip(order, completions, strict=True))
    ordered = tuple(by_prompt[i] for i in range(len(prompts)))
    return DemoRun(kind, temperature, engine.config.max_requests, label, ordered, seconds)


def compare(first: Sequence[Completion], second: Sequence[Completion]) -> Change:
    """Compares texts by tokens and log-probabilities by place; a place that only one of them has counts as changed."""
    texts = logprobs = num_logprobs = 0
    for a, b in zip(first, second, strict=True):
        x, y = (np.asarray(completion.logprobs, np.float32) for completion in (a, b))
        shorter, longer = sorted((len(x), len(y)))
        texts += a.token_ids != b.token_ids
        logprobs += longer - int(same_bits(x[:shorter], y[:shorter]).sum())
        num_logprobs += longer
    return Change(int(texts), logprobs, len(first), num_logprobs)
