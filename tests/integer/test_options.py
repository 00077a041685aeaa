"""Every option of a request has the bits of the definition: choices, log-probabilities and likeliest tokens, of made-up logits.

Engines work them out in JAX, with noise from XLA's operations or from a kernel in C. Each option has a control: where the
definition is asked for another value of it, something differs.
"""

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.integer import audit, spec
from detspec.integer.audit import LEFT_RANGE, AuditedText
from detspec.integer.spec import LIMIT
from detspec.jobs.oracle import as_floats
from detspec.sampler import likeliest, numbers_of, process_logits, reported_logits, sample
from detspec.sampling_params import FIELDS, SamplingParams, all_stop_ids, sampling_arrays
from detspec.schedule import Numerics
from detspec.state import SamplingArrays

V, LENGTH, PROMPT = 120, 40, 9
K = 20
EOS = (3, 60)
TOKENS = np.random.default_rng(4).choice(np.random.default_rng(5).integers(0, V, 25), LENGTH + 1)
RANDOM = {"temperature": 0.9, "seed": 2**32 - 5}
# An option, and another value of it that must be told from it.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": (RANDOM, {"temperature": 1.0}),
    "tiny temperature": ({"temperature": 1e-40, "logprobs_mode": "tempered"}, {"temperature": 1e-3}),
    "seed": (RANDOM, {"seed": 2**32 - 4}),
    "logit_bias": ({"logit_bias": {7: 3.0, 8: 2.5, 9: -100.0, 11: 0.3}, **RANDOM}, {"logit_bias": {}}),
    "rounded bias": ({"logit_bias": {7: 5.0, 8: 2.5 * 2**-16}, "logprobs_mode": "processed"}, {"logit_bias": {7: 5.0}}),
    "min_tokens": ({"min_tokens": 20, "stop_token_ids": tuple(range(50)), **RANDOM}, {"min_tokens": 5}),
    "min_tokens, processed": ({"min_tokens": 9, "logprobs_mode": "processed"}, {"min_tokens": 8}),
    "ignore_eos": ({"min_tokens": 30, "ignore_eos": True, "logprobs_mode": "processed"}, {"ignore_eos": False}),
    "tempered": ({"logprobs_mode": "tempered", **RANDOM}, {"logprobs_mode": "raw"}),
    "tempered, 1": ({"logprobs_mode": "tempered", "temperature": 1.0}, {"logprobs_mode": "tempered", "temperature": 1.00001}),
    "processed": ({"logprobs_mode": "processed", **RANDOM}, {"temperature": 0.9001}),
    "top_k": ({"logprobs_mode": "processed", "top_k": 7, **RANDOM}, {"top_k": 8}),
    "top_p": ({"logprobs_mode": "processed", "top_p": 0.7, **RANDOM}, {"top_p": 0.75}),
    "min_p": ({"logprobs_mode": "processed", "min_p": 0.02, **RANDOM}, {"min_p": 0.05}),
    "tiny min_p": ({"logprobs_mode": "processed", "min_p": 1e-40, "temperature": 0.05}, {"min_p": 1e-30}),
    "penalties": (
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.4, "logprobs_mode": "processed"},
        {"presence_penalty": -0.39},
    ),
}
# Fields that decide how many texts there are, where they end and what else is said: none changes a logit.
NO_LOGIT = {"max_tokens", "n", "stop", "deterministic", "prompt_logprobs", "logprobs"}
REFUSED = {"thinking"}


@cache
def logits() -> np.ndarray:
    """Rows `[LENGTH, V]` with many equal logits; one that has left its range, and one that a ban would hide it in."""
    rng = np.random.default_rng(3)
    found = (rng.normal(size=(LENGTH, V)) * 2.0 ** rng.uniform(14, 19, (LENGTH, 1))).astype(np.int64) // 4096 * 4096
    found[14, 5] = LIMIT
    found[15] = LIMIT
    found[20, 7:30] = -LIMIT
    found[22] = -LIMIT
    return found


@partial(jax.jit, static_argnames="numerics")
def program(logits: jax.Array, tokens: jax.Array, rows: SamplingArrays, numerics: Numerics) -> Any:
    """Choices with their log-probabilities, those of the given tokens, and the likeliest tokens with theirs."""
    position = jnp.arange(1, LENGTH + 1, dtype=jnp.int32)

    def process(logits: jax.Array) -> jax.Array:
        return process_logits(logits, position, rows, tokens[None])

    chosen = sample(logits, position, rows, process, numerics=numerics)
    reported = reported_logits(logits, position, rows, process)
    at = numbers_of(reported).logprobs_at
    best = likeliest(reported, K)
    return chosen, at(reported, tokens[1:]), best, jax.vmap(partial(at, reported), in_axes=1, out_axes=1)(best)


def by_jax(sampling: SamplingParams, implementation: str) -> list[np.ndarray]:
    room = {"eos_ids": EOS, "max_stop_ids": 60, "max_logit_bias": 4}  # one program for all
    rows = sampling_arrays([sampling] * LENGTH, [PROMPT] * LENGTH, **room)
    given = jnp.asarray(logits(), jnp.int32), jnp.asarray(TOKENS, jnp.int32), jax.tree.map(jnp.asarray, rows)
    numerics = Numerics(page=16, implementation=implementation, linear="xla", cache_dtype="int8")
    (chosen, of_chosen), of_given, best, of_best = jax.device_get(program(*given, numerics=numerics))
    chosen = np.where(np.isnan(of_chosen), LEFT_RANGE, chosen)
    return [chosen, of_chosen[PROMPT - 1 :], of_given, best, of_best]  # choices in the prompt are never reported


def by_definition(sampling: SamplingParams) -> list[np.ndarray]:
    """Findings of spec.py, as `by_jax` has them."""
    names = set(AuditedText._fields) & set(FIELDS)
    stops = all_stop_ids(sampling, EOS)
    text = AuditedText(TOKENS, PROMPT, stop_ids=stops, num_likeliest=V, **{name: getattr(sampling, name) for name in names})
    found = audit.audited_logits(logits(), np.arange(1, LENGTH + 1), audit.as_given(text))
    of_all = as_floats(found.likeliest_logprobs)
    of_chosen = of_all[np.arange(LENGTH), (found.likeliest == found.chosen[:, None]).argmax(1)]
    return [found.chosen, of_chosen[PROMPT - 1 :], as_floats(found.logprobs), found.likeliest[:, :K], of_all[:, :K]]


def differences(found: list[np.ndarray], expected: list[np.ndarray]) -> list[str]:
    names = ("chosen", "log-probabilities of the chosen", "log-probabilities", "likeliest", "of the likeliest")
    pairs = zip(names, found, expected, strict=True)
    return [name for name, a, b in pairs if not np.array_equal(a, b, equal_nan=a.dtype == np.float32)]


@pytest.mark.parametrize("implementation", ["reference", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPTIONS)
def test_option_has_the_bits_of_the_definition(name, implementation, request):
    if implementation == "cpu":
        request.getfixturevalue("cpu_kernels")
    sampling = SamplingParams(**{"max_tokens": 40, **OPTIONS[name][0]})
    assert differences(by_jax(sampling, implementation), by_definition(sampling)) == []


@pytest.mark.parametrize("name", OPTIONS)
def test_control_of_another_value_differs(name):
    option, other = OPTIONS[name]
    sampling = SamplingParams(**{"max_tokens": 40, **option})
    assert differences(by_jax(sampling, "reference"), by_definition(dataclasses.replace(sampling, **other)))


def test_every_parameter_of_requests_is_audited_or_changes_no_logit_or_is_refused():
    audited = set(AuditedText._fields) | {"stop_token_ids", "ignore_eos"}
    assert set(FIELDS) - NO_LOGIT - REFUSED <= audited


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tempered_log_probabilities_without_a_temperature_are_raw_for_logits_at_the_end_of_the_range(temperature):
    """Over a temperature, a logit of -LIMIT is excluded, however near the others are."""
    low = np.asarray([[-LIMIT, -LIMIT + 2**16, -LIMIT + 2**15]])
    asked = audit.AuditedText([0, 0], temperature=temperature, logprobs_mode="tempered")
    assert (spec.tempered(low, np.float32([1]))[0] != low[0] + LIMIT - 2**16).any()
    assert (audit.audited_logits(low, np.asarray([1]), asked).logprobs > spec.SMALLEST_LOGPROB).all()
    params = [SamplingParams(temperature=temperature, logprobs_mode=mode) for mode in ("tempered", "raw")]
    tempered, raw = (sampling_arrays([each]).packed for each in params)
    assert (tempered == raw).all()
