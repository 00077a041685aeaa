"""Response bodies: shapes worked out by hand, and read by the official client's types."""

import codecs
import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from openai.types import Completion as OfficialCompletion
from openai.types.chat import ChatCompletion
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Library

from detspec.checkpoint.tokenizer import Tokenizer
from detspec.engine.request import Completion, Thought
from detspec.openai.bodies import parse_chat, parse_completion
from detspec.openai.fields import BodyError
from detspec.openai.logprobs import TokenPlaces, TokenTexts
from detspec.openai.responses import answer_body, error_body, make_answerer, scored, system_fingerprint
from detspec.riders.counters import Stats
from tests.decoders import TOKENS, small_tokenizer
from tests.engine.byte_model import BYTE_CFG, byte_tokenizer

A, B, C = 64, 65, 66  # tokens of "a", "b", "c": see `encode`
HALVES = (127, 102)  # the bytes c3 a9 of "é"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    library = byte_tokenizer()
    library.add_special_tokens([AddedToken("<|end|>", special=True)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(library.to_str())
    tokenizer = Tokenizer(path)

    def chat_prompt(messages, **variables):
        return tokenizer.encode(messages[0]["content"])

    own = {"cfg": BYTE_CFG, "tokenizer": tokenizer, "chat_template": None, "chat_prompt": chat_prompt}
    own |= {
        "decode": tokenizer.decode,
        "token_bytes": tokenizer.token_bytes,
        "text_facts": lambda: {"tokenizer": tokenizer.digest},
    }
    return SimpleNamespace(**own)


@pytest.fixture(scope="module")
def answerer(model):
    return answerer_of(model)


def answerer_of(model, *, weights="w", max_len=64):
    return make_answerer(model, {"detspec": "1", "model": weights}, max_len=max_len, name="bytes", created=1700000000)


def ended(model, parsed, token_ids, index=0, **changes) -> Completion:
    """A completion of `token_ids`, whose log-probabilities are -0.5, -1, -1.5 and so on."""
    prompt = parsed.prompts[index // parsed.n]
    text = model.decode(token_ids)
    logprobs = tuple(-0.5 * (i + 1) for i in range(len(token_ids)))
    facts = {"finish_reason": "length", "digest": "d", "stats": Stats(), "index": index % parsed.n}
    return Completion(
        **{"id": "x", "prompt_token_ids": prompt, "token_ids": tuple(token_ids), "logprobs": logprobs}
        | {"text": text, **facts, **changes}
    )


def completion(model, /, **body):
    return parse_completion({"prompt": "ab", "seed": 1, **body}, model, max_len=64)


def chat(model, /, **body):
    return parse_chat({"messages": [{"role": "user", "content": "ab"}], "seed": 1, **body}, model, max_len=64)


def encode(model, text: str) -> list[int]:
    return model.tokenizer.encode(text)


def test_completion_has_the_official_shape(model, answerer):
    parsed = completion(model, model="m")
    body = answer_body(parsed, [ended(model, parsed, encode(model, "cd"))], answerer)
    official = OfficialCompletion.model_validate(body)
    assert official.choices[0].text == "cd"
    assert official.choices[0].logprobs is None
    assert dict(official.usage) | {"completion_tokens_details": None} == {
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "total_tokens": 4,
        "completion_tokens_details": None,
        "prompt_tokens_details": None,
    }
    assert (body["id"], body["object"], body["created"]) == (f"cmpl-{parsed.digest[:32]}", "text_completion", 1700000000)
    assert (body["model"], body["seed"]) == ("m", 1)
    assert body["choices"][0]["digest"] == "d"
    assert body["system_fingerprint"].startswith("detspec-")


def test_chat_has_the_official_shape(model, answerer):
    parsed = chat(model, logprobs=True, top_logprobs=2)
    top = (((A, -0.25), (C, -0.5)), ((B, -1.0), (A, -2.0)))
    body = answer_body(parsed, [ended(model, parsed, encode(model, "cb"), top_logprobs=top)], answerer)
    official = ChatCompletion.model_validate(body)
    assert official.choices[0].message.content == "cb"
    first = official.choices[0].logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("c", -0.5, [99])
    assert [(entry.token, entry.logprob) for entry in first.top_logprobs] == [("a", -0.25), ("c", -0.5)]
    assert body["model"] == "bytes"


def test_completion_logprobs_name_the_chosen_token_and_the_likeliest(model, answerer):
    parsed = completion(model, logprobs=1)
    top = (((A, -0.25),), ((B, -1.0),))
    body = answer_body(parsed, [ended(model, parsed, encode(model, "cb"), top_logprobs=top)], answerer)
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["c", "b"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"a": -0.25, "c": -0.5}, {"b": -1.0}],
        "text_offset": [0, 1],
    }
    OfficialCompletion.model_validate(body)
    plain = completion(model, logprobs=0)
    body = answer_body(plain, [ended(model, plain, encode(model, "c"))], answerer)
    assert body["choices"][0]["logprobs"]["top_logprobs"] is None


def test_echo_puts_the_prompt_before_and_null_first(model, answerer):
    parsed = completion(model, logprobs=1, echo=True)
    asked = {"top_logprobs": (((C, -0.5),),), "prompt_logprobs": (None, -3.0), "prompt_top_logprobs": ((), ((A, -0.125),))}
    body = answer_body(parsed, [ended(model, parsed, encode(model, "c"), **asked)], answerer)
    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -3.0, -0.5],
        "top_logprobs": [None, {"a": -0.125, "b": -3.0}, {"c": -0.5}],
        "text_offset": [0, 1, 2],
    }


def test_score_has_the_prompt_alone(model, answerer):
    parsed = completion(model, prompt=[A, B], logprobs=0, echo=True, max_tokens=0)
    body = answer_body(parsed, [ended(model, parsed, [], prompt_logprobs=(None, -3.0))], answerer)
    assert body["choices"][0]["text"] == "ab"
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -3.0]
    assert body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("logprobs", [0, 2])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompt_of_an_aborted_request_has_nulls(model, answerer, max_tokens, logprobs):
    """A score, or a text that is generated."""
    parsed = completion(model, prompt=[A, B, C], logprobs=logprobs, echo=True, max_tokens=max_tokens, prompt_logprobs=1)
    aborted = ended(model, parsed, [], finish_reason="abort")
    if parsed.is_score:
        aborted = scored(dataclasses.replace(aborted, prompt_token_ids=(A,)), parsed.prompts[0])
    choice = answer_body(parsed, [aborted], answerer)["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None] * 3
    assert choice["logprobs"]["top_logprobs"] == ([None] * 3 if logprobs else None)
    assert choice["prompt_logprobs"] == [None] * 3


@pytest.mark.parametrize("text", ["", "abc"])
def test_weight_versions_are_one_span_at_most(model, answerer, text):
    parsed = completion(model, return_weight_versions=True)
    choice = answer_body(parsed, [ended(model, parsed, encode(model, text))], answerer)["choices"][0]
    assert choice["weight_versions"] == ([{"start": 0, "end": 3, "version": "w"}] if text else [])
    plain = completion(model)
    assert "weight_versions" not in answer_body(plain, [ended(model, plain, [A])], answerer)["choices"][0]


def test_fingerprint_names_all_that_choices_depend_on(model):
    other = SimpleNamespace(**{**vars(model), "text_facts": lambda: {"tokenizer": "other"}})
    answerers = [answerer_of(model), answerer_of(model, weights="v"), answerer_of(model, max_len=65), answerer_of(other)]
    assert len({answerer.system_fingerprint for answerer in answerers}) == len(answerers)
    assert answerer_of(model).system_fingerprint == answerers[0].system_fingerprint


def test_prompt_logprobs_have_ranks(model, answerer):
    parsed = completion(model, prompt_logprobs=2)
    asked = {"prompt_logprobs": (None, -3.0), "prompt_top_logprobs": ((), ((A, -0.125), (C, -0.5)))}
    body = answer_body(parsed, [ended(model, parsed, encode(model, "c"), **asked)], answerer)
    found = body["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    assert found[1] == {
        str(B): {"logprob": -3.0, "rank": None, "decoded_token": "b"},
        str(A): {"logprob": -0.125, "rank": 1, "decoded_token": "a"},
        str(C): {"logprob": -0.5, "rank": 2, "decoded_token": "c"},
    }


def test_choices_are_numbered_prompt_by_prompt(model, answerer):
    parsed = completion(model, prompt=["a", "b"], n=2)
    texts = ["aa", "ab", "ba", "bb"]
    ends = [ended(model, parsed, encode(model, text), index) for index, text in enumerate(texts)]
    body = answer_body(parsed, ends, answerer)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == list(enumerate(texts))
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10}


def test_stop_reason_is_what_the_request_named(model, answerer):
    parsed = completion(model, stop=["cx", "c"], stop_token_ids=[B])

    def reason(ids, text, finish="stop"):
        end = ended(model, parsed, ids, text=text, finish_reason=finish)
        return answer_body(parsed, [end], answerer)["choices"][0]["stop_reason"]

    assert reason([A, C], "a") == "c"
    assert reason([A, B], "ab") == B
    assert reason([A], "a") is None  # the model's own end
    assert reason([A, B], "ab", "length") is None


def test_floats_survive_as_float32_and_infinity_is_a_number(model, answerer):
    values = tuple(np.random.default_rng(0).normal(size=50).astype(np.float32).tolist())
    parsed = completion(model, logprobs=0, max_tokens=51)
    end = ended(model, parsed, [A] * 51, logprobs=(*values, float("-inf")))
    read = json.loads(json.dumps(answer_body(parsed, [end], answerer), allow_nan=False))
    found = read["choices"][0]["logprobs"]["token_logprobs"]
    assert np.asarray(found[:50], np.float32).tobytes() == np.asarray(values, np.float32).tobytes()
    assert found[50] == -9999.0


def test_tokens_that_are_halves_of_characters_keep_their_bytes(model, answerer):
    ids = encode(model, "éa")
    parsed = chat(model, logprobs=True)
    body = answer_body(parsed, [ended(model, parsed, ids)], answerer)
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["bytes:\\xc3", "bytes:\\xa9", "a"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == body["choices"][0]["message"]["content"]
    plain = completion(model, logprobs=0)
    assert answer_body(plain, [ended(model, plain, ids)], answerer)["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1]


def test_text_offsets_count_what_an_incremental_decoder_has_given(answerer):
    """Bytes of characters next to whole words, in any order; looked up tokens must not skip the bytes that wait."""
    texts = answerer.token_texts
    whole = [token for token in range(256) if not texts.text_of(token).startswith("bytes:")]
    halves = [token for token in range(256) if token not in whole]
    rng = np.random.default_rng(0)
    for tokens in (rng.choice([*whole[:9], *halves[:9], *whole[-9:]], 40).tolist() for _ in range(50)):
        before = [b"".join(map(texts.bytes_of, tokens[:number])) for number in range(len(tokens))]
        decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in before]
        lengths = [len(decoder.decode(given)) for decoder, given in zip(decoders, before, strict=True)]
        places = TokenPlaces(texts.tokens)
        assert [places.next(token)[0] for token in tokens] == lengths


def test_texts_tokens_and_offsets_agree_with_and_without_echo(tmp_path):
    """The blank of a prompt's first token is left out, that of an answer's is not; a special token has no text."""
    tokenizer = small_tokenizer("byte_fallback_strip", tmp_path)
    names = {text: token for token, (text, _, _) in enumerate(TOKENS["byte_fallback_strip"], 1)}
    own = {"cfg": BYTE_CFG, "tokenizer": tokenizer, "token_bytes": tokenizer.token_bytes, "decode": tokenizer.decode}
    model = SimpleNamespace(**own, text_facts=dict)
    answerer = answerer_of(model)
    prompt, new = [0, names["▁the"], names["▁b"]], [names["▁b"], names["<0xC3>"], names["<0xA9>"], names["▁the"]]
    for echo in (False, True):
        parsed = completion(model, prompt=prompt, echo=echo, logprobs=0)
        asked = {"text": " bé the", "prompt_logprobs": (None, -1.0, -2.0)}
        choice = answer_body(parsed, [ended(model, parsed, new, **asked)], answerer)["choices"][0]
        logprobs, number = choice["logprobs"], 3 if echo else 0
        assert choice["text"] == ("the b" if echo else "") + " bé the"
        assert logprobs["tokens"][:number] == ["<s>", "the", " b"][:number]
        assert logprobs["tokens"][number:] == [" b", "bytes:\\xc3", "bytes:\\xa9", " the"]
        for offset, text in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            assert text.startswith(("bytes", "<s>")) or choice["text"].startswith(text, offset)
        assert logprobs["text_offset"][number:] == [len(choice["text"]) - 7 + place for place in (0, 2, 2, 3)]


def test_echoed_prompt_that_ends_inside_a_character_leaves_it_to_the_answer(model, answerer):
    parsed = completion(model, prompt=[A, HALVES[0]], echo=True)
    body = answer_body(parsed, [ended(model, parsed, [HALVES[1]], text="é")], answerer)
    assert body["choices"][0]["text"] == "aé"
    score = completion(model, prompt=[A, HALVES[0]], echo=True, max_tokens=0)
    assert answer_body(score, [ended(model, score, [])], answerer)["choices"][0]["text"] == "a\ufffd"


def test_two_tokens_of_one_text_keep_the_likelier(model, answerer):
    parsed = completion(model, logprobs=2)
    same = SimpleNamespace(text_of=lambda token, begins: "same", tokens=model.token_bytes)
    other = dataclasses.replace(answerer, token_texts=same)
    end = ended(model, parsed, [C], top_logprobs=(((A, -0.25), (B, -0.75)),))
    assert answer_body(parsed, [end], other)["choices"][0]["logprobs"]["top_logprobs"] == [{"same": -0.25}]


def test_extensions_are_there_when_asked(model, answerer):
    parsed = completion(model, return_token_ids=True, return_tokens_as_token_ids=True, logprobs=0)
    thought = Thought("t", (1, 2), is_cut=False)
    choice = answer_body(parsed, [ended(model, parsed, [C], thoughts=(thought,))], answerer)["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([C], encode(model, "ab"))
    assert choice["logprobs"]["tokens"] == [f"token_id:{C}"]
    assert choice["thoughts"] == [{"token_ids": [1, 2], "text": "t", "is_cut": False}]


def test_token_texts_of_every_alphabet(model, tmp_path):
    special = model.tokenizer.library.token_to_id("<|end|>")
    assert TokenTexts(model.tokenizer).text_of(special) == "<|end|>"
    assert TokenTexts(None).text_of(5) == "<5>"
    library = Library(models.BPE({"▁a": 0, "<0xC3>": 1, "b": 2}, [], byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    (tmp_path / "tokenizer.json").write_text(library.to_str())
    texts = TokenTexts(Tokenizer(tmp_path / "tokenizer.json"))
    assert [texts.bytes_of(token) for token in range(3)] == [b" a", b"\xc3", b"b"]


def test_fingerprint_names_the_version_and_what_bits_depend_on():
    name = system_fingerprint({"detspec": "1", "b": 2})
    assert name == system_fingerprint({"b": 2, "detspec": "1"}) != system_fingerprint({"detspec": "1", "b": 3})
    assert len(name.rpartition("-")[2]) == 16
    assert system_fingerprint({"arithmetic": "integer/1", "model": "m"}).startswith("detspec-integer/1-")


def test_error_has_the_official_shape():
    error = error_body(BodyError("no", "prompt", "invalid_value"))["error"]
    assert error == {"message": "no", "type": "invalid_request_error", "param": "prompt", "code": "invalid_value"}
