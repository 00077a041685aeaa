"""The demonstration of integer models: texts whose one hash is the same on every device, audited by the oracle meanwhile."""

import hashlib
import time
from collections.abc import Callable

import numpy as np

from detspec.checkpoint.load import Model
from detspec.demo.demo import demo_prompts
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Completion
from detspec.errors import InputError
from detspec.integer import spec
from detspec.model.to_integer import spec_model
from detspec.sampling_params import SamplingParams

FIRST_SEED = 400
MAX_TOKENS = 32
# Of the shipped model: what README says, found on a CPU. It is the same wherever `detspec doctor --integer` says OK.
EXPECTED = ""


def run_integer_demo(model: Model, *, show: Callable[[str], None], progress: Callable[[str], None] = lambda step: None) -> bool:
    """Generates texts in integers, shows one hash of all tokens and log-probabilities, and has the oracle audit each.

    Returns whether the oracle agrees with all of them.
    """
    if model.tokenizer is None:
        raise InputError(f"the demonstration's prompts are text, and {model.no_tokenizer}")
    if model.cfg.weights != "integer":
        raise InputError('the demonstration needs an integer model: detspec.load(..., weights="integer")')
    prompts = demo_prompts()
    each = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8, seed=FIRST_SEED + number, ignore_eos=True)
        for number in range(len(prompts))
    ]
    longest = max(len(model.tokenizer.encode(prompt)) for prompt in prompts)
    progress("generating")
    engine = Engine(model, EngineConfig(max_requests=len(prompts), max_len=longest + MAX_TOKENS, method="none"))
    began = time.perf_counter()
    completions = engine.generate(prompts, each)
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    digest = digest_of(completions)
    show(f"{len(prompts)} texts, {num_tokens} tokens, all at once, at temperature 0.8, in integers: {spec.VERSION}")
    show(f"\n  one hash of all tokens and log-probabilities   {digest}\n")
    known = "the one that the package comes with" if digest == EXPECTED else "of this model alone"
    show(f"It is {known}. A GPU, a TPU and any other CPU give the same.\n" if digest == EXPECTED else f"It is {known}.\n")
    progress("audit by the oracle")
    show("The oracle, numpy alone, reads each text by itself:")
    weights, sizes = spec_model(model.cfg, model.params)
    agrees = True
    audit_began = time.perf_counter()
    for number, (completion, asked) in enumerate(zip(completions, each, strict=True)):
        differs = audited(weights, sizes, completion, asked)
        agrees &= not differs
        if differs or number < 3:
            show(f"  text {number}: {differs or 'equal'}   {completion.text[:60]!r}")
    spent = time.perf_counter() - audit_began
    show(f"  {'all equal' if agrees else 'NOT EQUAL'}: {num_tokens} tokens and log-probabilities in {spent:.1f} s")
    show(f"  (generated in {audit_began - began - 0:.1f} s, compilation included)")
    return agrees


def audited(weights: dict[str, object], sizes: spec.Sizes, completion: Completion, asked: SamplingParams) -> str:
    """The first new token of a text where the oracle has another token or other bits, in words; "" if there is none."""
    prompt = len(completion.prompt_token_ids)
    tokens = np.asarray([*completion.prompt_token_ids, *completion.token_ids])
    logits = spec.Text(weights, sizes).read(tokens[:-1].tolist())[prompt - 1 :]
    rows = len(logits)
    wishes = spec.Wishes(
        temperature=np.full(rows, asked.temperature, np.float32),
        top_k=np.full(rows, max(asked.top_k, 0)),
        top_p=np.full(rows, asked.top_p, np.float32),
        min_p=np.full(rows, asked.min_p, np.float32),
        seed=np.full(rows, asked.seed % 2**32),
    )
    chosen = spec.chosen(logits, prompt + np.arange(rows), wishes)
    logprobs = (spec.logprobs(logits, tokens[prompt:]) / 2**spec.FRACTION).astype(np.float32)
    same = (chosen == tokens[prompt:]) & (logprobs.view(np.int32) == np.asarray(completion.logprobs, np.float32).view(np.int32))
    if same.all():
        return ""
    at = int(np.flatnonzero(~same)[0])
    return (
        f"new token {at + 1} is {tokens[prompt + at]} with {completion.logprobs[at]!r}, the oracle has {chosen[at]} and "
        f"{float(logprobs[at])!r}"
    )


def digest_of(completions: list[Completion]) -> str:
    """SHA-256 over tokens and log-probability bits, 16 hexadecimal digits."""
    hashed = hashlib.sha256()
    for completion in completions:
        hashed.update(np.asarray(completion.token_ids, "<i4").tobytes())
        hashed.update(np.asarray(completion.logprobs, "<f4").tobytes())
    return hashed.hexdigest()[:16]
