"""The official client against the server: what it asks for is what it gets, whole or as a stream."""

import dataclasses
import json

import openai
import pytest

from detspec.sampling_params import SamplingParams
from tests.serve.running import Running, choices, chunks_of, make_engine, serving

PROMPT = "def f(x):"
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(model):
    with serving(make_engine(model)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running):
    with server.client() as client:
        yield client


def expected(server: Running, one_row, prompt, **sampling):
    """Completions of an engine for one sequence, without a server."""
    return one_row.generate([prompt], SamplingParams(**{"max_tokens": 16, "temperature": 1.0, **sampling}))


def test_completion_is_that_of_the_engine(server, client, one_row):
    answer = client.completions.create(model="bytes", prompt=PROMPT, seed=5, logprobs=0, extra_body={"return_token_ids": True})
    (alone,) = expected(server, one_row, PROMPT, seed=5)
    (choice,) = answer.choices
    assert choice.text == alone.text
    assert tuple(choice.token_ids) == alone.token_ids
    assert tuple(choice.logprobs.token_logprobs) == alone.logprobs
    assert choice.finish_reason == "length"
    assert choice.digest == alone.digest
    assert answer.usage.completion_tokens == 16
    assert (answer.seed, answer.system_fingerprint) == (5, server.http.get("/fingerprint").json()["system_fingerprint"])


def test_parameters_reach_the_engine(server, client, one_row):
    bias = {"65": 20, "66": 20}
    answer = client.completions.create(
        model="bytes",
        prompt=[PROMPT, "class A:"],
        n=2,
        seed=3,
        max_tokens=12,
        temperature=0.9,
        logit_bias=bias,
        logprobs=2,
        frequency_penalty=0.5,
        stop=["bb"],
        extra_body={"top_k": 40, "return_token_ids": True},
    )
    sampling = {"n": 2, "seed": 3, "max_tokens": 12, "temperature": 0.9, "logit_bias": bias, "logprobs": 2}
    sampling |= {"frequency_penalty": 0.5, "stop": ("bb",), "top_k": 40}
    alone = [c for prompt in (PROMPT, "class A:") for c in expected(server, one_row, prompt, **sampling)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [(c.text, tuple(c.token_ids), c.finish_reason) for c in answer.choices] == [
        (c.text, c.token_ids, c.finish_reason) for c in alone
    ]
    assert all(len(top) >= 2 for choice in answer.choices for top in choice.logprobs.top_logprobs)
    assert any(choice.finish_reason == "stop" and choice.stop_reason == "bb" for choice in answer.choices)


@pytest.mark.parametrize("asked", [{}, {"logprobs": 0}, {"logprobs": 3}, {"echo": True}, {"echo": True, "logprobs": 1}])
def test_stream_of_a_completion_joins_to_the_whole_answer(client, asked):
    body = {"model": "bytes", "prompt": [PROMPT, "class A:"], "n": 2, "seed": 1, "max_tokens": 9, **asked}
    whole = client.completions.create(**body)
    texts = dict.fromkeys(range(4), "")
    logprobs: dict[int, list] = {index: [] for index in range(4)}
    offsets: dict[int, list] = {index: [] for index in range(4)}
    ends = {}
    chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                logprobs[choice.index] += choice.logprobs.token_logprobs
                offsets[choice.index] += choice.logprobs.text_offset
            if choice.finish_reason is not None:
                ends[choice.index] = choice.finish_reason, choice.digest
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert ends == {choice.index: (choice.finish_reason, choice.digest) for choice in whole.choices}
    if "logprobs" in asked:
        assert [logprobs[c.index] for c in whole.choices] == [c.logprobs.token_logprobs for c in whole.choices]
        assert [offsets[c.index] for c in whole.choices] == [c.logprobs.text_offset for c in whole.choices]
    assert chunks[-1].usage == whole.usage
    assert {(chunk.id, chunk.system_fingerprint, chunk.seed) for chunk in chunks} == {
        (whole.id, whole.system_fingerprint, whole.seed)
    }


def test_chat_and_its_stream(server, client, one_row):
    body = {"model": "bytes", "messages": MESSAGES, "seed": 2, "max_tokens": 8, "logprobs": True}
    whole = client.chat.completions.create(**body, top_logprobs=2)
    prompt = server.engine.model.chat_prompt(MESSAGES)
    (alone,) = expected(server, one_row, prompt, seed=2, max_tokens=8)
    message = whole.choices[0].message
    assert (message.role, message.content) == ("assistant", alone.text)
    assert [entry.logprob for entry in whole.choices[0].logprobs.content] == list(alone.logprobs)
    assert all(len(entry.top_logprobs) == 2 for entry in whole.choices[0].logprobs.content)
    chunks = list(client.chat.completions.create(**body, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == alone.text
    streamed = [entry.logprob for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert streamed == list(alone.logprobs)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_seed_that_was_drawn_is_answered_and_gives_the_same_again(client):
    first = client.completions.create(model="bytes", prompt=PROMPT)
    other = client.completions.create(model="bytes", prompt=PROMPT)
    again = client.completions.create(model="bytes", prompt=PROMPT, seed=first.seed)
    assert first.seed != other.seed
    assert first.choices[0].text != other.choices[0].text
    assert [first.choices, first.id, first.seed] == [again.choices, again.id, again.seed]


def test_prompt_is_scored_with_the_bits_of_the_engine(client, one_row):
    text = [*range(40), 50, 60]
    answer = client.completions.create(model="bytes", prompt=text, max_tokens=0, echo=True, logprobs=1)
    (scored,) = one_row.score([text])
    found = answer.choices[0].logprobs
    assert found.token_logprobs == [None, *scored.logprobs]
    likeliest = [max(top[0][1], own) for top, own in zip(scored.top_logprobs, scored.logprobs, strict=True)]
    assert [max(top.values()) for top in found.top_logprobs[1:]] == likeliest
    assert answer.usage.completion_tokens == 0
    generated = client.completions.create(model="bytes", prompt=text, max_tokens=1, echo=True, logprobs=1)
    assert generated.choices[0].logprobs.token_logprobs[:-1] == found.token_logprobs


def test_token_ids_in_and_out(server, one_row):
    own = {"max_tokens": 7, "seed": 4, "n": 2, "detokenize": False, "skip_special_tokens": True}
    body = {"token_ids": [5, 17, 9], "sampling_params": own}
    answer = server.ask("/inference/v1/generate", **body)
    alone = expected(server, one_row, [5, 17, 9], max_tokens=7, seed=4, n=2)
    assert [(tuple(c["token_ids"]), tuple(c["logprobs"])) for c in answer["choices"]] == [
        (c.token_ids, c.logprobs) for c in alone
    ]
    tokens: dict[int, list[int]] = {0: [], 1: []}
    with server.http.stream("POST", "/inference/v1/generate", json={**body, "stream": True}) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    for line in lines:
        for choice in json.loads(line)["choices"]:
            tokens[choice["index"]] += choice["token_ids"]
    assert [tuple(part) for part in tokens.values()] == [c.token_ids for c in alone]


def test_tokenizer_over_http(server):
    ids = server.ask("/tokenize", prompt="a é", return_token_strs=True)
    assert ids["count"] == len(ids["tokens"]) == len(ids["token_strs"])
    assert server.ask("/detokenize", tokens=ids["tokens"]) == {"prompt": "a é"}
    chat = server.ask("/tokenize", messages=MESSAGES)
    assert server.ask("/detokenize", tokens=chat["tokens"]) == {"prompt": "u:hello;"}
    begun = server.ask("/tokenize", messages=[*MESSAGES, {"role": "assistant", "content": "so"}], continue_final_message=True)
    assert server.ask("/detokenize", tokens=begun["tokens"]) == {"prompt": "u:hello;a:so"}
    too_many = [1] * (server.engine.config.max_len + 1)
    answer = server.http.post("/detokenize", json={"tokens": too_many})
    assert (answer.status_code, f"{len(too_many)} ids, more than max_len" in answer.text) == (400, True)
    assert server.http.get("/tokenizer_info").json()["eos_token"] is None
    assert server.http.get("/v1/models").json()["data"][0]["id"] == "bytes"


@pytest.mark.parametrize("asked", [{}, {"logprobs": 2}], ids=["in pieces", "in one piece"])
def test_chunks_have_null_usage_until_the_last_which_has_it(server, asked):
    body = {"prompt": [PROMPT, "b"], "n": 2, "max_tokens": 3, "seed": 1, "echo": True, **asked}
    usage = server.ask(**body)["usage"]
    chunks = chunks_of(server, {**body, "stream_options": {"include_usage": True}})
    assert [chunk["usage"] for chunk in chunks] == [None] * (len(chunks) - 1) + [usage]
    assert chunks[-1]["choices"] == []
    every = chunks_of(server, {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    assert [chunk["usage"]["prompt_tokens"] for chunk in every] == [usage["prompt_tokens"]] * len(every)
    assert all("usage" not in chunk for chunk in chunks_of(server, body))


def test_chunks_of_a_chat_have_null_usage_until_the_last(client):
    body = {"model": "bytes", "messages": MESSAGES, "seed": 2, "max_tokens": 4}
    usage = client.chat.completions.create(**body).usage
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage for chunk in chunks] == [None] * (len(chunks) - 1) + [usage]
    assert all("usage" in chunk.model_fields_set for chunk in chunks)


def test_model_is_shown_by_its_name_alone(server, client, monkeypatch):
    (card,) = server.http.get("/v1/models").json()["data"]
    assert server.http.get("/v1/models/").json()["data"] == [card]
    assert card.items() <= client.models.retrieve("bytes").model_dump().items()
    assert server.http.head("/v1/models/bytes").status_code == 200
    with pytest.raises(openai.NotFoundError, match="the model 'org/bytes' is not served here, but 'bytes'") as caught:
        client.models.retrieve("org/bytes")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    monkeypatch.setattr(server.service, "options", dataclasses.replace(server.service.options, name="org/bytes"))
    for path in ("org/bytes", "org%2Fbytes"):
        assert server.http.get(f"/v1/models/{path}").json() == {**card, "id": "org/bytes"}
    assert server.http.get("/v1/models/bytes").status_code == 404


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"prompt": "a", "temperature": 0, "temperature": 1}', "temperature"),
        (b'{"prompt": "a", "stream_options": {"include_usage": true, "include_usage" : true}}', "include_usage"),
        (b'{"prompt": "a", "logit_bias": {"5": 1, "\\u0035": 2}}', "5"),
    ],
)
def test_doubled_key_of_a_body_is_named(server, body, key):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        answer = server.http.post(path, content=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, key)
        assert error["message"] == f"the body names the key {key!r} twice in one object"


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.BadRequestError, match="unknown field 'guided'"):
        client.completions.create(model="bytes", prompt=PROMPT, extra_body={"guided": {}})
    with pytest.raises(openai.BadRequestError, match="guided_json is not supported"):
        client.completions.create(model="bytes", prompt=PROMPT, extra_body={"guided_json": {}})
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' is not served here, but 'bytes'"):
        client.completions.create(model="gpt", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="bytes", prompt=PROMPT, max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\] has a part"):
        client.chat.completions.create(model="bytes", messages=[{"role": "user", "content": [{"type": "image_url"}]}])


@pytest.mark.slow  # eight programs
def test_more_biased_tokens_than_programs_had_room_for_are_taken(server):
    bias = {token: (-100.0 if token % 2 else 2.0) for token in range(400)}
    wide = {"prompt": PROMPT, "max_tokens": 9, "temperature": 0.9, "seed": -3, "stop_token_ids": list(range(1000, 1030))}
    plain = {"prompt": PROMPT, "max_tokens": 6, "seed": 1}
    before = choices(server, plain)
    answer = server.ask(**wide, logit_bias=bias)
    assert answer["seed"] == 2**32 - 3
    assert choices(server, wide) != json.dumps(answer["choices"])
    assert choices(server, {**wide, "logit_bias": bias}) == json.dumps(answer["choices"])
    assert choices(server, plain) == before
