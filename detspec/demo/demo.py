"""The demonstration: the same requests alone and in a crowd, ordinary and deterministic; their texts and bits are compared.

Ordinary generation is the inverse control: if its texts were the same in a crowd, too, the comparison would show nothing.
"""

import dataclasses
import importlib.resources
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from detspec.checkpoint.load import Model
from detspec.demo.excerpts import side_by_side
from detspec.engine.bits import same_bits
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Needs
from detspec.engine.request import Completion
from detspec.errors import InputError
from detspec.jobs.comparison import first_differing
from detspec.sampling_params import SamplingParams

ORDINARY = "ordinary"
DETERMINISTIC = "deterministic"
KINDS = (ORDINARY, DETERMINISTIC)
NUM_SEEDS = 2  # requests of each prompt
FIRST_SEED = 200
SHUFFLE_SEED = 0
DRAFTING_BATCH = 8
ALONE = "alone, one after the other"
DRAFTS = f"{DRAFTING_BATCH} at once, with drafts"
NUM_TIMED = 4  # requests of a timed run alone
REPEATS = 2  # timed runs of each kind, in turn; the faster one counts, since noise only adds time


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
    """Requests generated once. `completions` have the order of the requests, even if the run shuffled them."""

    kind: str
    label: str
    completions: tuple[Completion, ...]
    seconds: float

    @property
    def num_tokens(self) -> int:
        """Number of new tokens of all requests."""
        return sum(len(completion.token_ids) for completion in self.completions)


@dataclasses.dataclass(frozen=True)
class DemoReport:
    """All runs so far, in order. Each run is compared with the first one of its kind, in which requests were alone."""

    runs: tuple[DemoRun, ...]

    def change(self, run: DemoRun) -> Change:
        """The change in `run` compared with the requests alone."""
        alone = next(other for other in self.runs if other.kind == run.kind)
        return compare(alone.completions, run.completions)

    @property
    def held(self) -> bool:
        """Whether no bit changed in any deterministic run."""
        return all(self.change(run).none for run in self.runs if run.kind == DETERMINISTIC)

    @property
    def control_found(self) -> bool:
        """Whether ordinary texts changed, which shows that the comparison can see a change."""
        return any(self.change(run).texts for run in self.runs if run.kind == ORDINARY)

    def row(self, label: str) -> str:
        """A line of the table of changes: the runs with this label, of both kinds."""
        changes = {run.kind: self.change(run) for run in self.runs if run.label == label}
        return f"  {label:28}{'   '.join(_cells(changes.get(kind)) for kind in KINDS)}".rstrip()


def _cells(change: Change | None) -> str:
    if change is None:
        return f"{'':24}"
    return f"{f'{change.texts}/{change.num_texts}':>10}{f'{change.logprobs}/{change.num_logprobs}':>14}"


def run_demo(
    model: Model, *, max_tokens: int = 256, show: Callable[[str], None], progress: Callable[[str], None] = lambda stage: None
) -> DemoReport:
    """Generates the demonstration's requests alone, all at once, all at once in another order, and by drafts.

    Calls `show` with lines of text as soon as they are known, and `progress` with the name of each of the `NUM_STAGES` stages.
    Programs of the next run are compiled while one runs. Speeds are those of runs after all that.
    """
    prompts = demo_prompts() * NUM_SEEDS
    crowd = f"all {len(prompts)} at once"
    shuffled = f"all {len(prompts)}, shuffled"
    others = np.random.default_rng(SHUFFLE_SEED).permutation(len(prompts)).tolist()
    report = DemoReport(())

    def run(engine: Engine, kind: str, label: str, order: Sequence[int] = range(len(prompts))) -> DemoRun:
        nonlocal report
        sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=FIRST_SEED, ignore_eos=True)
        made = one_run(engine, kind, label, prompts, order, sampling)
        report = DemoReport((*report.runs, made))
        return made

    with ThreadPoolExecutor(1) as compiler:
        ready = {
            (kind, batch): compiler.submit(ready_engine, model, batch, prompts, max_tokens, "none", kind)
            for kind in KINDS
            for batch in (1, len(prompts))
        }
        drafting = compiler.submit(ready_engine, model, DRAFTING_BATCH, prompts, max_tokens, "self", DETERMINISTIC)
        show(f"{len(prompts)} requests, each with its seed, at temperature 1: alone, and all at once.")
        for kind in KINDS:
            progress(f"{kind}, {ALONE}")
            alone = run(ready[kind, 1].result(), kind, ALONE)
            progress(f"{kind}, {crowd}")
            found = run(ready[kind, len(prompts)].result(), kind, crowd)
            show(_parting(model, prompts, alone, found))
            progress(f"{kind}, {shuffled}")
            run(ready[kind, len(prompts)].result(), kind, shuffled, others)
        progress(DRAFTS)
        run(drafting.result(), DETERMINISTIC, DRAFTS)
    show(f"\nWhat changes, compared with the requests alone:\n\n  {'':28}{'ordinary':>24}   {'deterministic':>24}")
    show(f"  {'':28}{'texts':>10}{'log-probs':>14}   {'texts':>10}{'log-probs':>14}")
    for label in (crowd, shuffled, DRAFTS):
        show(report.row(label))
    progress("speed")
    show(f"\nNew tokens a second, compiled:\n\n  {'':28}{'ordinary':>12}{'deterministic':>16}{'ratio':>8}")
    for label, batch, order in (("alone", 1, range(NUM_TIMED)), (crowd, len(prompts), range(len(prompts)))):
        show(_speed(label, [ready[kind, batch].result() for kind in KINDS], prompts, order, max_tokens))
    return report


NUM_STAGES = 3 * len(KINDS) + 2


def _parting(model: Model, prompts: Sequence[str], alone: DemoRun, crowd: DemoRun) -> str:
    """Says how many texts differ, and shows around its first differing token the text that differs first."""
    found = [
        (place, prompt, first, other)
        for prompt, first, other in zip(prompts, alone.completions, crowd.completions, strict=True)
        if (place := first_differing(first.token_ids, other.token_ids)) is not None
    ]
    heading = f"\n{alone.kind.capitalize()}: {len(found)} of {len(prompts)} texts change when all run at once."
    if not found:
        return heading
    place, prompt, first, other = min(found, key=lambda each: each[0])
    columns = {"alone": first, f"among {len(prompts)}": other}
    texts = {label: _cut_at(model, prompt, each.token_ids, place) for label, each in columns.items()}
    return f"{heading} One of them, from its new token {place + 1} on:\n\n{side_by_side(texts)}"


def _cut_at(model: Model, prompt: str, token_ids: Sequence[int], place: int) -> tuple[str, str, str]:
    """The text before the token at `place`, that token's, and the text after it."""
    before, with_token, whole = (model.decode(token_ids[:end]) for end in (place, place + 1, len(token_ids)))
    return prompt + before, with_token[len(before) :], whole[len(with_token) :]


def _speed(label: str, engines: Sequence[Engine], prompts: Sequence[str], order: Sequence[int], max_tokens: int) -> str:
    """A line of the table of speeds."""
    rates = [0.0, 0.0]
    sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, ignore_eos=True)
    for _ in range(REPEATS):
        for number, (kind, engine) in enumerate(zip(KINDS, engines, strict=True)):
            made = one_run(engine, kind, label, prompts, order, sampling)
            rates[number] = max(rates[number], made.num_tokens / made.seconds)
    return f"  {label:28}{rates[0]:12,.0f}{rates[1]:16,.0f}{rates[1] / rates[0]:8.2f}"


def demo_prompts() -> list[str]:
    """The prompts that the package ships."""
    text = (importlib.resources.files("detspec") / "assets" / "demo_prompts.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["prompt"] for line in text.splitlines() if line]


def ready_engine(model: Model, batch: int, prompts: Sequence[str], max_tokens: int, method: str, kind: str) -> Engine:
    """An engine that has compiled and certified what requests of this kind need, `batch` of them at once."""
    if model.tokenizer is None:
        raise InputError(f"the demonstration's prompts are text, and {model.no_tokenizer}")
    longest = max(len(model.tokenizer.encode(prompt)) for prompt in prompts)
    engine = Engine(model, EngineConfig(max_requests=batch, max_len=longest + max_tokens, method=method))
    needs = Needs(deterministic=kind == DETERMINISTIC, ordinary=kind == ORDINARY, processing=False)
    engine.prepare(batch, needs)
    return engine


def one_run(
    engine: Engine, kind: str, label: str, prompts: Sequence[str], order: Sequence[int], sampling: SamplingParams
) -> DemoRun:
    """Generates the prompts of `order`, in that order; the seed of each is its index after that of `sampling`."""
    asked = dataclasses.replace(sampling, deterministic=kind == DETERMINISTIC)
    each = [dataclasses.replace(asked, seed=sampling.seed + i) for i in order]
    began = time.perf_counter()
    completions = engine.generate([prompts[i] for i in order], each)
    seconds = time.perf_counter() - began
    by_prompt = dict(zip(order, completions, strict=True))
    return DemoRun(kind, label, tuple(by_prompt[i] for i in sorted(by_prompt)), seconds)


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
