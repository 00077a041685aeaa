"""The demonstration of integer models: texts, one hash of them all, and audits by code that shares nothing with the engine."""

import hashlib
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detspec.checkpoint.load import Model
from detspec.demo.demo import demo_prompts
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Completion
from detspec.errors import InputError
from detspec.integer import spec
from detspec.integer.audit import AuditedText, AuditFound, audited_by_c, audited_by_spec, compile_audit, write_model
from detspec.model.to_integer import spec_model
from detspec.native.processor import find_compiler
from detspec.sampling_params import SamplingParams

FIRST_SEED = 400
MAX_TOKENS = 32
# The hash of the shipped model's texts; README names it.
EXPECTED = "a1f3c5527e51f119"
ORACLE = "detspec/integer/spec.py (numpy)"
AuditFn = Callable[[Sequence[AuditedText]], list[AuditFound]]


def run_integer_demo(model: Model, *, show: Callable[[str], None], progress: Callable[[str], None] = lambda step: None) -> bool:
    """Generates texts in integers, shows one hash of all tokens and log-probabilities, and has the oracle audit each.

    Returns whether the oracle agrees with all of them.
    """
    if model.tokenizer is None:
        raise InputError(f"the demonstration's prompts are text, and {model.no_tokenizer}")
    if model.cfg.weights != "integer":
        raise InputError('the demonstration needs an integer model: detspec.load(..., weights="integer")')
    prompts = demo_prompts()
    sampling = demo_sampling(len(prompts))
    longest = max(len(model.tokenizer.encode(prompt)) for prompt in prompts)
    progress("generating")
    engine = Engine(model, EngineConfig(max_requests=len(prompts), max_len=longest + MAX_TOKENS, method="none"))
    began = time.perf_counter()
    completions = engine.generate(prompts, sampling)
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    digest = digest_of(completions)
    show(f"{len(prompts)} texts, {num_tokens} tokens, all at once, at temperature 0.8, in integers ({spec.VERSION}).")
    show(f"\n  one hash of all tokens and log-probabilities:  {digest}\n")
    if digest == EXPECTED:
        show("It is the hash in the README. Each text is read by itself:\n")
    else:
        show("Each text is read by itself:\n")
    generated_s = time.perf_counter() - began
    texts = texts_of(completions, sampling)
    agrees = True
    for name, audit in oracles(model).items():
        progress(f"audit by {name}")
        began = time.perf_counter()
        differing = list(filter(None, map(audited, audit(texts), completions)))
        agrees &= not differing
        verdict = f"{len(differing)} texts differ: {differing[0]}" if differing else f"all {num_tokens} tokens and bits equal"
        show(f"  {name:34} {verdict}, in {time.perf_counter() - began:.1f} s")
    show(f"\nGenerated in {generated_s:.1f} s, with compiling. The first of them:\n\n{prompts[0]}{completions[0].text}")
    return agrees


def demo_sampling(number: int) -> list[SamplingParams]:
    """Sampling parameters of the texts."""
    return [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8, seed=FIRST_SEED + each, ignore_eos=True)
        for each in range(number)
    ]


def texts_of(completions: Sequence[Completion], sampling: Sequence[SamplingParams]) -> list[AuditedText]:
    """Completions as oracles take them."""
    return [
        AuditedText([*each.prompt_token_ids, *each.token_ids], len(each.prompt_token_ids), asked.temperature, seed=asked.seed)
        for each, asked in zip(completions, sampling, strict=True)
    ]


def oracles(model: Model) -> dict[str, AuditFn]:
    """The oracles that this machine can run, by name: numpy's, and that in C where there is a compiler."""
    weights, sizes = spec_model(model.cfg, model.params)
    found: dict[str, AuditFn] = {ORACLE: lambda texts: [audited_by_spec(weights, sizes, text) for text in texts]}
    if find_compiler() is not None:
        found["detspec/integer/audit.c"] = lambda texts: compiled_audit(weights, sizes, texts)
    return found


def compiled_audit(weights: dict[str, Any], sizes: spec.Sizes, texts: Sequence[AuditedText]) -> list[AuditFound]:
    """Audits by audit.c, which is compiled anew."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", weights, sizes)
        return audited_by_c([compile_audit(folder)], folder / "model", texts)


def audited(found: AuditFound, completion: Completion) -> str:
    """The first new token of a text where an oracle found another token or other bits, in words; "" if there is none."""
    chosen = found.chosen[-len(completion.token_ids) :]
    logprobs = (found.logprobs[-len(completion.token_ids) :] / 2**spec.FRACTION).astype(np.float32)
    given = np.asarray(completion.logprobs, np.float32)
    same = (chosen == np.asarray(completion.token_ids)) & (logprobs.view(np.int32) == given.view(np.int32))
    if same.all():
        return ""
    at = int(np.flatnonzero(~same)[0])
    return (
        f"new token {at + 1} is {completion.token_ids[at]} with {completion.logprobs[at]!r}, the oracle has {chosen[at]} and "
        f"{float(logprobs[at])!r}"
    )


def digest_of(completions: list[Completion]) -> str:
    """SHA-256 over tokens and log-probability bits, 16 hexadecimal digits."""
    hashed = hashlib.sha256()
    for completion in completions:
        hashed.update(np.asarray(completion.token_ids, "<i4").tobytes())
        hashed.update(np.asarray(completion.logprobs, "<f4").tobytes())
    return hashed.hexdigest()[:16]
