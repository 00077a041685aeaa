"""Parts that run in the process: engines over all kinds of models, drafts, caches and requests."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import detspec as ds
from bits_parts import asked, commands
from bits_parts.models import CONFIGS, write_model
from bits_parts.record import Record

FAMILIES = tuple(name for name in CONFIGS if name != "drafter")
SHORT = {"max_len": 192, "num_speculative_tokens": 7}
NUM_WORDS = 43  # of the shipped model that thinks
FLIPS = "A coin's state is heads. Alice flips, then Bob flips. Carol naps. What's the state? A:"


def engine_of(record: Record, model: Any, *, drafters: Any = None, **config: Any) -> Any:
    """An engine whose fingerprint is recorded."""
    engine = ds.Engine(model, ds.EngineConfig(**{**SHORT, **config}), drafters=drafters)
    record.digests(engine.fingerprint())
    return engine


def family(name: str, record: Record) -> None:
    """A tiny random model of a family: generation of plain requests, and scores of what they gave."""
    model = ds.load(write_model(name))
    engine = engine_of(record, model, max_requests=4, method="none")
    prompts, sampling = asked.plain(model.cfg.vocab_size, 6)
    completions = engine.generate(prompts, sampling)
    record.completions(completions)
    record.digests(ds.default_schedule(model.cfg).bits())
    texts = [[*done.prompt_token_ids, *done.token_ids] for done in completions]
    record.completions(engine.score(texts[:3], [len(done.prompt_token_ids) for done in completions[:3]]))
    if name in ("qwen2", "gemma3"):
        record.bits(*ds.score(model.params, model.cfg, texts))
        plain = [dataclasses.replace(one, logprobs=0) for one in sampling[:3]]
        state = ds.generate(model.params, model.cfg, prompts[:3], plain)
        counts = np.asarray(state.committed)
        for array in (state.tokens, state.logprobs):
            record.bits(counts, *(np.asarray(row)[:count] for row, count in zip(array, counts, strict=True)))


def shipped(batch: int, number: int, record: Record, **config: Any) -> None:
    """The shipped model: requests that ask for everything."""
    model = ds.load()
    engine = engine_of(record, model, **{"max_requests": batch, "method": "none", **config})
    record.completions(engine.generate(*asked.code(model.tokenizer, number)))


def drafts(method: str, record: Record) -> None:
    """A source of drafts, or several of which the engine chooses."""
    model = ds.load()
    uses_model = method in ("draft_model", "auto")
    drafters = {"draft_model": ds.draft_model(ds.load(write_model("drafter")), target=model)} if uses_model else None
    engine = engine_of(record, model, drafters=drafters, max_requests=6, method=method)
    record.completions(engine.generate(*asked.code(model.tokenizer, 20, seed=7)))


def int8_model(record: Record) -> None:
    """Weights rounded to int8, of the shipped model and of one with a tied head and sliding layers."""
    for path in (None, write_model("gemma3")):
        model = ds.load(path, weights="int8")
        engine = engine_of(record, model, max_requests=4, method="none")
        record.completions(engine.generate(*asked.plain(model.cfg.vocab_size, 6, seed=3)))


def int8_cache(record: Record) -> None:
    """Keys and values in int8."""
    for path in (None, write_model("gemma2")):
        model = ds.load(path)
        schedule = ds.default_schedule(model.cfg).with_numerics(cache_dtype="int8")
        engine = engine_of(record, model, max_requests=4, method="self", schedule=schedule)
        record.completions(engine.generate(*asked.plain(model.cfg.vocab_size, 6, seed=4)))


def preemption(record: Record) -> None:
    """Pages that run out, so that requests start over."""
    model = ds.load()
    engine = engine_of(record, model, max_requests=8, method="ngram", num_pages=10, prefix_sharing=False)
    sampling = ds.SamplingParams(max_tokens=90, temperature=0.8, ignore_eos=True)
    record.completions(engine.generate([[3 + index] * (20 + 9 * index) for index in range(8)], sampling))
    assert engine.num_preemptions, "no request was preempted"


def streams(record: Record) -> None:
    """Updates of a stream, joined: how they are cut depends on the time."""
    model = ds.load()
    engine = engine_of(record, model, max_requests=1, method="none")
    prompts, sampling = asked.code(model.tokenizer, 4, seed=9)
    for prompt, how in zip(prompts[1:], sampling[1:], strict=True):
        updates = list(engine.stream(prompt, how))
        record.bits("".join(update.text for update in updates), [token for update in updates for token in update.token_ids])
        record.completions(update.completion for update in updates if update.completion is not None)


def thoughts(record: Record) -> None:
    """The shipped model that thinks while it reads: with thoughts, drafted ones, and without; its positions are ALiBi's."""
    model = ds.load("thinking_parity")
    prompts, sampling = asked.plain(NUM_WORDS, 8, seed=6)
    prompts += [model.tokenizer.encode(FLIPS), FLIPS]
    for config, thinking in (({}, None), ({"thoughts": "self"}, True), ({}, False)):
        engine = engine_of(record, model, max_requests=3, method="none", **config)
        each = [ds.SamplingParams(**{**how.facts(), "thinking": thinking}) for how in [*sampling, *sampling[:2]]]
        record.completions(engine.generate(prompts, each))


def two_chips(record: Record) -> None:
    """Models cut over two simulated devices: the shipped one, and one with sliding layers and an int8 cache."""
    for path, config in ((None, {"method": "self"}), (write_model("gemma2"), {"method": "none"})):
        model = ds.load(path, chips=2)
        engine = engine_of(record, model, max_requests=4, **config)
        record.completions(engine.generate(*asked.plain(model.cfg.vocab_size, 6, seed=8)))


Part = Callable[[Record], None]
PARTS: dict[str, Part] = {
    **{name: partial(family, name) for name in FAMILIES},
    "shipped, 32 at once": partial(shipped, 32, 120),
    "shipped, one at once": partial(shipped, 1, 14),
    **{f"drafts: {name}": partial(drafts, name) for name in ("none", "self", "ngram", "int8", "draft_model", "auto")},
    "int8 model": int8_model,
    "int8 cache": int8_cache,
    "preemption": preemption,
    "streams": streams,
    "thoughts": thoughts,
    "job": commands.job,
    "batch api": commands.batch_api,
    "workers": commands.workers,
    "audit of thoughts": commands.audit_of_thoughts,
}
# need two devices
CHIP_PARTS: dict[str, Part] = {"two chips": two_chips, "two engines": commands.two_engines}
QUICK = ("llama", "gemma3", "shipped, 32 at once", "drafts: auto", "int8 cache", "thoughts", "job")
