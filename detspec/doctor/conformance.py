"""Conformance of a device with an arithmetic of integers: each operation by its hash, then texts of the shipped model."""

import dataclasses
import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from detspec.checkpoint.load import Model, load
from detspec.choices import ACTIVATION_BITS
from detspec.engine.conformance import device_functions
from detspec.engine.device import Device
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.environment import chosen_schedule
from detspec.integer import conformance, spec
from detspec.integer.conformance import TEXTS
from detspec.sampling_params import SamplingParams

PROMPTS = ("def add(a, b):\n", "class Stack:\n    def push(", "import numpy as np\n", "for i in range(10):\n    ")
NEW_TOKENS = 24
SHIPPED = "tiny_python"


@dataclasses.dataclass(frozen=True)
class ConformanceReport:
    """Hashes of this device, and those that the package comes with."""

    device: str
    found: dict[str, str]
    expected: dict[str, str]
    arithmetic: str = spec.VERSION

    @property
    def differing(self) -> list[str]:
        """The names of what has other bits here, in the order in which a model runs them."""
        return [name for name, digest in self.expected.items() if self.found.get(name) != digest]

    def table(self) -> str:
        """The report for people."""
        lines = [f"{self.arithmetic} on {self.device}", ""]
        for name, digest in self.expected.items():
            here = self.found.get(name, "")
            lines.append(f"  {name:20} {here[:16]}  {'OK' if here == digest else f'DIFFERS, expected {digest[:16]}'}")
        if self.differing:
            first = self.differing[0]
            lines += ["", f"the operation {first!r} has other bits here: integer models would not have those of other devices"]
        else:
            lines += ["", f"OK {conformance.of_all(self.found)}: this device gives the bits of every device that says so"]
        return "\n".join(lines)


def run_conformance(on_progress: Callable[[str], None] = lambda step: None, weights: str = "integer") -> ConformanceReport:
    """Runs all operations of models with such `weights` on this device, then generates texts of the shipped model."""
    bits = ACTIVATION_BITS[weights]
    model = load(SHIPPED, weights=weights)
    on_progress("operations")
    found = conformance.digests(device_functions(chosen_schedule(None, model.cfg).numerics, bits), bits)
    on_progress("texts of the shipped model")
    found[TEXTS] = digest_of_texts(generated_texts(model))
    return ConformanceReport(jax.devices()[0].device_kind, found, conformance.expected(bits), spec.VERSIONS[bits])


def run_family_conformance(on_progress: Callable[[str], None] = lambda step: None) -> tuple[ConformanceReport, ...]:
    """Runs the operations that models of further families have besides on this device; those of soft caps apart."""
    on_progress("operations of further families")
    numerics = chosen_schedule(None, load(SHIPPED, weights="integer").cfg).numerics
    found = conformance.family_digests(partial(device_functions, numerics))
    of_caps = conformance.soft_cap_digests(device_functions(numerics))
    device = jax.devices()[0].device_kind
    return (
        ConformanceReport(device, of_caps, conformance.soft_cap_expected(), "soft caps"),
        ConformanceReport(device, found, conformance.family_expected(), "further families"),
    )


def generated_texts(model: Model) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Tokens and log-probabilities, fixed, of a few texts that an engine on this device generates all at once."""
    device = Device(model, EngineConfig(max_requests=len(PROMPTS), max_len=64, method="none"))
    device.conforms = True  # all operations are compared anyway, and the texts, too
    engine = Engine.over(device)
    completions = engine.generate(list(PROMPTS), sampling())
    return [(each.token_ids, np.rint(np.asarray(each.logprobs) * 2**spec.FRACTION).astype(np.int64)) for each in completions]


def sampling() -> list[SamplingParams]:
    """Sampling parameters of the texts: greedy, at two temperatures, and with a filter."""
    asked: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.2}, {"top_p": 0.9})
    return [SamplingParams(max_tokens=NEW_TOKENS, seed=seed, ignore_eos=True, **each) for seed, each in enumerate(asked)]


def oracle_texts(model: Model) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Texts of the oracle alone, token by token."""
    from detspec.model.to_integer import spec_model

    weights, sizes = spec_model(model.cfg, model.params)
    assert model.tokenizer is not None
    found = []
    for prompt, asked in zip(PROMPTS, sampling(), strict=True):
        text = spec.Text(weights, sizes)
        read = model.tokenizer.encode(prompt)
        tokens: list[int] = []
        logprobs = []
        for _ in range(NEW_TOKENS):
            logits = text.read(read)[-1:]
            position = np.asarray([text.length])
            read = spec.chosen(logits, position, wishes(asked, 1)).tolist()
            tokens += read
            logprobs.append(spec.logprobs(logits, np.asarray(read))[0])
        found.append((tuple(tokens), np.asarray(logprobs)))
    return found


def wishes(asked: SamplingParams, rows: int) -> spec.Wishes:
    """Wishes of `rows` choices of one request, as the oracle takes them."""
    return spec.Wishes(
        temperature=np.full(rows, asked.temperature, np.float32),
        top_k=np.full(rows, max(asked.top_k, 0)),
        top_p=np.full(rows, asked.top_p, np.float32),
        min_p=np.full(rows, asked.min_p, np.float32),
        seed=np.full(rows, asked.seed % 2**32),
    )


def digest_of_texts(texts: list[tuple[tuple[int, ...], np.ndarray]]) -> str:
    """SHA-256 in hex over tokens and log-probabilities."""
    hashed = hashlib.sha256()
    for tokens, logprobs in texts:
        hashed.update(np.asarray(tokens, "<i8").tobytes() + logprobs.astype("<i8").tobytes())
    return hashed.hexdigest()
