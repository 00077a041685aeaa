"""Trials of engines in this process: each draws a value for every axis, and compares tokens and bits with known answers.

A trial in twelve is a control, in which something is as it must not be: the comparison must find it.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import detspec as ds
from detspec.compile_cache import enable_jax_cache
from scripts.soak.answers import Answer, Answers, num_different
from scripts.soak.caches import empty_cache, use_cache
from scripts.soak.checks import CHECKS, num_ties
from scripts.soak.clocks import wrong_clocks
from scripts.soak.drawing import Shape, Way, draw_shapes, draw_way, facts_of
from scripts.soak.gathering import drawn_requests, gathering
from scripts.soak.serving import serve
from scripts.soak.sizes import Size
from scripts.soak.subjects import RANDOM, TIED, ordinary, subjects
from scripts.soak_mesh import adding, forget

ARE_CONTROLS = 1 / 12  # share of the trials
CHIPS_ADD = 0.05  # share of the controls, because all programs are compiled anew for it
OTHER = {RANDOM: TIED, TIED: RANDOM}  # models of the same shape, whose weights are used in between
LEAST_OTHERS = 8  # of so many requests at once, ordinary generation gives one other bits than alone

Facts = dict[str, Any]


class EngineTrials:
    """Trials of engines, which are kept warm.

    Attributes:
        fingerprint: what the bits depend on.
    """

    def __init__(self, workdir: Path, seed: int, size: Size) -> None:
        """Loads the models; compiled programs and expected answers are in `workdir`."""
        use_cache(workdir / "cache")
        enable_jax_cache()
        self._workdir = workdir
        self._subjects = subjects(workdir / "answers", seed, size)
        self._shapes = draw_shapes(random.Random(f"{seed}/shapes"), size)
        self._engines: dict[tuple[Shape, bool], ds.Engine] = {}
        self.fingerprint = ds.fingerprint()

    def run(self, rng: random.Random) -> Facts:
        """Runs a trial: returns what it drew, what happened, and what differs."""
        if rng.random() < ARE_CONTROLS:
            return self._chips_that_add(rng) if rng.random() < CHIPS_ADD else self._ordinary(rng)
        shape = rng.choice(self._shapes)
        way = draw_way(rng)
        if way.programs == "kept":
            return self._compared(rng, shape, way)
        with self._compiled_anew():
            return self._compared(rng, shape, way)

    def _compared(self, rng: random.Random, shape: Shape, way: Way) -> Facts:
        """Serves some requests and compares the answers."""
        subject = self._subjects[shape.model]
        engine = self._engine(shape, sharing=way.prefixes != "off")
        before = counts(engine)
        controls: dict[str, list[int]] = {}
        pairs: list[tuple[Answer, Answer]] = []
        chosen = drawn_requests(rng, way.composition, subject.requests)
        with wrong_clocks(rng.randrange(2**32) if way.clocks == "jump" else None):
            if way.weights == "there and back" and shape.model in OTHER:
                other = self._subjects[OTHER[shape.model]]
                engine.update_params(other.on(shape.chips).params)
                answers = serve(engine, chosen).answers
                pairs += [(answer, other.expected[name]) for name, answer in answers.items()]
                differs = num_different((answer, subject.expected[name]) for name, answer in answers.items())[0] > 0
                controls["other weights"] = [int(differs), 1]
                engine.update_params(subject.on(shape.chips).params)
            elif way.prefixes == "cold":
                engine.update_params(subject.on(shape.chips).params)
            gathered = gathering(rng, way, chosen, subject.requests)
            served = serve(engine, gathered.requests, gathered.arrivals, gathered.aborts, stream=way.asked == "streamed")
        pairs += [(served.answers[name], subject.expected[like]) for name, like in gathered.names.items()]
        differ, tokens = num_different(pairs)
        facts: Facts = {"differ": differ + served.num_broken, "tokens": tokens, "checked_tokens": 0}
        if way.checked in CHECKS:
            found = CHECKS[way.checked](subject, engine, [name for name in gathered.names if name in subject.expected])
            facts["differ"] += found.differ
            facts["checked_tokens"] = found.compared
            controls[way.checked] = [int(found.control_differs), 1]
        if shape.model == TIED:
            facts["ties"], broken = num_ties(subject, served.answers)
            facts["differ"] += broken
        happened = {name: value - before[name] for name, value in counts(engine).items()}
        is_sound = not facts["differ"] and all(found == tried for found, tried in controls.values())
        drawn = {**facts_of(shape), **facts_of(way), "requests": len(chosen)}
        return {"kind": "engine", **drawn, **facts, **happened, "controls": controls, "as_expected": is_sound}

    def _ordinary(self, rng: random.Random) -> Facts:
        """The inverse control: ordinary answers among others must differ from those alone."""
        shape = rng.choice([shape for shape in self._shapes if shape.chips == 1 and shape.max_requests >= LEAST_OTHERS])
        way = draw_way(rng)
        subject = self._subjects[shape.model]
        requests = rng.sample(subject.requests, len(subject.requests))
        engine = self._engine(shape, sharing=way.prefixes != "off")
        answers = serve(engine, list(map(ordinary, requests)), stream=way.asked == "streamed").answers
        return control(f"ordinary, {shape.model}", answers, subject.ordinary_alone)

    def _chips_that_add(self, rng: random.Random) -> Facts:
        """The inverse control for chips: where they add parts of sums, bits must differ."""
        subject = self._subjects[RANDOM]
        chips = rng.choice((2, 4))
        with adding():
            config = ds.EngineConfig(max_requests=8, max_len=subject.max_len, method="none", schedule=subject.schedule(16))
            answers = serve(ds.Engine(subject.on(chips), config), subject.requests[:24]).answers
        return control(f"{chips} chips that add", answers, subject.expected)

    def _engine(self, shape: Shape, *, sharing: bool) -> ds.Engine:
        """The engine for a shape, made when it is first needed."""
        if (shape, sharing) not in self._engines:
            subject = self._subjects[shape.model]
            config = ds.EngineConfig(
                max_requests=shape.max_requests,
                max_len=subject.max_len,
                num_pages=max(shape.max_requests, subject.few_pages) if shape.few_pages else None,
                prefix_sharing=sharing,
                method=shape.method,
                num_speculative_tokens=shape.most_drafted,
                segment_steps=shape.segment_steps,
                max_prefill_passes=shape.prefill_passes,
                schedule=subject.schedule(shape.window),
            )
            uses_other = shape.method == "draft_model"
            drafters = {"draft_model": ds.draft_model(subject.other, target=subject.model)} if uses_other else None
            self._engines[shape, sharing] = ds.Engine(subject.on(shape.chips), config, drafters=drafters)
        return self._engines[shape, sharing]

    @contextmanager
    def _compiled_anew(self) -> Iterator[None]:
        """In this context there are no engines and no programs, and the cache is empty."""
        kept = self._engines
        with empty_cache(self._workdir / "empty_cache", self._workdir / "cache"):
            self._engines = {}
            forget()
            try:
                yield
            finally:
                self._engines = kept


def control(name: str, answers: Answers, expected: Answers) -> Facts:
    """The line of a control: `answers` must not be as expected."""
    differ, compared = num_different((answer, expected[name]) for name, answer in answers.items())
    found = {"compared": compared, "control_differs": differ, "controls": {name: [int(differ > 0), 1]}}
    return {"kind": "control", "tokens": 0, "differ": 0, **found, "as_expected": differ > 0}


def counts(engine: ds.Engine) -> dict[str, int]:
    """Counts of an engine so far."""
    stats = engine.stats
    return {"preemptions": engine.num_preemptions, "drafted": stats.num_draft_tokens, "rollbacks": stats.num_rollbacks}
