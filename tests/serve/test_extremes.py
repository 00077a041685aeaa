"""Values of every type and size in every field of requests: each is answered, or refused by its name, and no bit moves.

What is taken runs together with a request whose bits are known from another engine. `make test-sweeps` makes 20,000 draws.
"""

import decimal
import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from detspec.engine.engine import Engine
from detspec.engine.request import Completion, Request
from detspec.errors import InputError, ParameterError
from detspec.jobs.batch_lines import BatchReader
from detspec.jobs.lines import parse_line, parse_request
from detspec.jobs.prompts import JobSpec, Prompts
from detspec.openai.fields import TOO_LONG, ChatBody, CompletionBody
from detspec.sampling_params import FIELDS, SamplingParams
from tests.engine.byte_model import facts
from tests.hostile import outcome
from tests.serve.running import Running, make_engine, serving

PROMPT = [5, 17, 9, 33]
KNOWN = SamplingParams(max_tokens=6, temperature=0.8, seed=3)
TOGETHER = 50  # draws between two looks at the known request
NUMBERS = [0, 1, -1, 2, 2**31 - 1, 2**31, 2**32, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e-45, 1e-38, 1e38, 1e39, -1e39]
FEW = [0, 1, 2, 0.5, 1.0, True, None, "a", "raw", "processed", [3], {"3": -5}]  # most fields take some of them
NOT_JSON = [math.inf, -math.inf, math.nan]
OTHERS: list[Any] = [
    "",
    "5",
    "a",
    "x" * 100_000,
    "\ufffd",
    None,
    True,
    False,
    [],
    {},
    [[1]],
    [None],
    [True],
    ["a"],
    [[], {}],
    {"a": 1},
]
OTHERS += [{"5": 1.5}, {"2048": 1}, {"-1": 1}, {"5": None}, {"5": 1e39}, [{"role": "user", "content": None}], [2047], [2048]]
PYTHON: list[Any] = [np.int64(2**62), np.uint64(2**63), np.float32(math.nan), np.float64(1e300), np.bool_(True), np.arange(3)]
PYTHON += [np.zeros((2, 2)), np.str_("a"), np.array([None]), np.array(["a"]), np.array(7), jnp.arange(2), jnp.bfloat16(0.5)]
PYTHON += [
    b"5",
    {1, 2},
    range(3),
    (1, 2),
    object(),
    int,
    1j,
    decimal.Decimal(1),
    10**5000,
    np.longdouble(0.5),
    {np.int64(5): 1},
]


@pytest.fixture(scope="module")
def engine(model) -> Engine:
    return make_engine(model)


@pytest.fixture(scope="module")
def server(model) -> Iterator[Running]:
    with serving(make_engine(model)) as running:
        yield running


@pytest.fixture(scope="module")
def known(one_row: Engine) -> Completion:
    """The known request, alone in an engine that has met nothing else."""
    return one_row.generate([PROMPT], KNOWN)[0]


def drawn(rng: random.Random, values: list[Any]) -> Any:
    """A value, or one inside a list or an object."""
    value = rng.choice(values)
    kind = rng.randrange(8)
    if kind == 0:
        return [value] * rng.choice([1, 2, 40])
    return {"5": value} if kind == 1 else value


def check(engine: Engine, taken: list[Request], known: Completion) -> None:
    """Runs what was taken around the known request, which keeps its bits; each is answered."""
    half = len(taken) // 2
    requests = [*taken[:half], Request("known", PROMPT, KNOWN), *taken[half:]]
    found = list(engine.run(requests))
    assert len(found) == sum(request.sampling.n for request in requests)
    assert [one.error for one in found] == [""] * len(found)
    assert [facts(one) for one in found if one.id == "known"] == [facts(known)]
    assert engine.num_pages_held == 0
    json.dumps([one.digest for one in found])


def is_refused(found: Request | InputError, name: str) -> bool:
    """Whether it is an error, which says what is at fault."""
    if not isinstance(found, InputError):
        return False
    assert found.name == name if isinstance(found, ParameterError) else name.split("_")[0] in str(found) or "room" in str(found)
    return True


def names(refused: dict[str, Any], name: str) -> bool:
    """Whether an error of a body is about field `name`; tokens that do not fit are an error of the prompt."""
    return refused["param"] == name or name in refused["message"] or refused["code"] == TOO_LONG


def run_all(engine: Engine, known: Completion, draws: int, read: Callable[[int, random.Random], list[Request]]) -> None:
    """`draws` values of `read`, which gives requests for those that are taken; both must happen."""
    rng = random.Random(draws)
    num_taken = num_refused = 0
    taken: list[Request] = []
    for number in range(draws):
        requests = read(number, rng)
        taken += requests
        num_taken += bool(requests)
        num_refused += not requests
        if len(taken) >= TOGETHER or number == draws - 1:
            check(engine, taken, known)
            taken = []
    assert min(num_taken, num_refused) > draws / 20


DRAWS = pytest.mark.parametrize("draws", [100, pytest.param(4000, marks=pytest.mark.sweep)])


@DRAWS
def test_any_value_of_a_parameter_is_run_or_refused_by_name(engine, known, draws):
    def read(number: int, rng: random.Random) -> list[Request]:
        name = rng.choice(FIELDS)
        value = drawn(rng, [*FEW, *FEW, *NUMBERS, *NOT_JSON, *OTHERS, *PYTHON])
        short = {} if name == "max_tokens" else {"max_tokens": 2}
        found = outcome(lambda: engine.request(PROMPT, SamplingParams(**{**short, name: value}), id=str(number)))
        return [] if is_refused(found, name) else [found]

    run_all(engine, known, draws, read)


@DRAWS
def test_any_value_of_a_prompt_is_run_or_refused(engine, known, draws):
    def read(number: int, rng: random.Random) -> list[Request]:
        value = drawn(rng, [*NUMBERS, *NOT_JSON, *OTHERS, *PYTHON])
        sampling = SamplingParams(max_tokens=2)
        if rng.random() < 0.5:
            found = outcome(lambda: engine.request(value, sampling, id=str(number)))
        else:
            found = outcome(lambda: engine.request(Request("", value, KNOWN).prompt_token_ids, sampling, id=str(number)))
        return [] if is_refused(found, "prompt") else [found]

    run_all(engine, known, draws, read)


@DRAWS
def test_any_value_of_a_line_is_run_or_refused_by_name(engine, known, draws):
    defaults = SamplingParams(max_tokens=2)

    def read(number: int, rng: random.Random) -> list[Request]:
        name = rng.choice([*FIELDS, "id", "prompt", "prompt_token_ids", "sampling"])
        value = drawn(rng, [*NUMBERS, *NOT_JSON, *OTHERS])
        line: dict[str, Any] = {"id": str(number), "prompt_token_ids": PROMPT}
        if name == "prompt":
            del line["prompt_token_ids"]
        line |= {"sampling": {name: value}} if name in FIELDS else {name: value}
        found = outcome(lambda: parse_request(parse_line(0, json.dumps(line).encode()), engine.model, engine.config, defaults))
        return [] if is_refused(found, name) else [Request(str(number), found.prompt_token_ids, found.sampling)]

    run_all(engine, known, draws, read)


@DRAWS
def test_any_value_of_a_batch_line_is_answered_or_refused_by_name(engine, known, draws, tmp_path):
    (tmp_path / "in.jsonl").write_text("")

    def read(number: int, rng: random.Random) -> list[Request]:
        name, line = a_body(rng, [*NUMBERS, *NOT_JSON, *OTHERS])
        raw = json.dumps({"custom_id": str(number), "method": "POST", **line}).encode()
        asked = reader.asked(number, raw)
        if asked.requests:
            return list(asked.requests)
        answer = json.loads(reader.outputs(asked, [])[0].line)
        if answer["error"] is None:
            refused = answer["response"]["body"]["error"]
            assert names(refused, name)
        return []

    with Prompts(str(tmp_path / "in.jsonl")) as prompts:
        reader = BatchReader(engine, JobSpec(prompts, SamplingParams(), is_openai=True), {})
        run_all(engine, known, draws, read)


@DRAWS
def test_any_value_of_a_body_is_answered_or_refused_by_name(server, known, draws):
    rng = random.Random(draws)
    statuses = []
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0.8, "seed": 3, "logprobs": 0, "return_token_ids": True}
    for number in range(draws):
        name, line = a_body(rng, [*NUMBERS, *NOT_JSON, *OTHERS])
        found = server.http.post(line["url"], content=json.dumps(line["body"]).encode())
        statuses.append(found.status_code)
        assert found.status_code in (200, 400, 404)
        if found.status_code != 200:
            refused = found.json()["error"]
            assert names(refused, name) or "no JSON" in refused["message"]
        if number % TOGETHER == TOGETHER - 1:
            choice = server.ask(**body)["choices"][0]
            logprobs = np.asarray(choice["logprobs"]["token_logprobs"], np.float32)
            assert (tuple(choice["token_ids"]), logprobs.tobytes()) == facts(known)[:2]
    server.wait_until_empty()
    assert server.engine.num_pages_held == 0
    assert min(statuses.count(200), statuses.count(400)) > draws / 20


def a_body(rng: random.Random, values: list[Any]) -> tuple[str, dict[str, Any]]:
    """The name of a field, and where a body goes in which it has one of `values`."""
    is_chat = rng.random() < 0.5
    name = rng.choice((ChatBody if is_chat else CompletionBody).__struct_fields__)
    body: dict[str, Any] = {"max_tokens": 2, "seed": 1}
    body |= {"messages": [{"role": "user", "content": "a"}]} if is_chat else {"prompt": PROMPT}
    if name == "max_completion_tokens":
        del body["max_tokens"]
    return name, {"url": "/v1/chat/completions" if is_chat else "/v1/completions", "body": {**body, name: drawn(rng, values)}}
