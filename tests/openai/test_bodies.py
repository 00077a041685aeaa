"""Request bodies: prompts and sampling parameters, worked out by hand over a tokenizer of bytes."""

from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest

from detspec.checkpoint.chat import ChatTemplate
from detspec.checkpoint.tokenizer import Tokenizer
from detspec.engine.engine_config import EngineConfig
from detspec.openai.bodies import parse_chat, parse_completion, requests_of
from detspec.openai.fields import BodyError, ChatBody, CompletionBody, StreamOptions, TokenizeBody, read_fields
from detspec.sampling_params import SamplingParams
from detspec.serve.control import WeightsBody
from detspec.serve.token_ids import IdsBody
from detspec.serve.tokens import DetokenizeBody
from tests.engine.byte_model import BYTE_CFG, byte_tokenizer

MAX_LEN = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model without weights: a tokenizer that maps letters to their bytes, and a template of `role:content|`."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(byte_tokenizer().to_str())
    tokenizer = Tokenizer(path)
    template = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}{{ mark }}", {})

    def chat_prompt(messages, **variables):
        return tokenizer.encode(template.render_parts(messages, **variables), add_special_tokens=False)

    own = {"cfg": BYTE_CFG, "tokenizer": tokenizer, "chat_template": template, "chat_prompt": chat_prompt, "eos_ids": ()}
    return SimpleNamespace(**own, decode=tokenizer.decode, image_ids=frozenset())


def completion(model, /, **body):
    return parse_completion(body, model, max_len=MAX_LEN)


def chat(model, /, **body):
    return parse_chat({"messages": [{"role": "user", "content": "hi"}], **body}, model, max_len=MAX_LEN)


def encode(model, text: str) -> tuple[int, ...]:
    return tuple(model.tokenizer.encode(text))


def test_completion_without_further_fields_has_openai_defaults(model):
    parsed = completion(model, model="m", prompt="def f")
    assert parsed.prompts == (encode(model, "def f"),)
    assert parsed.sampling == (SamplingParams(max_tokens=16, temperature=1.0),)
    assert (parsed.body.model, parsed.seed, parsed.n, parsed.logprobs, parsed.echo) == ("m", None, 1, None, False)


def test_chat_is_rendered_and_may_fill_the_room(model):
    parsed = chat(model, chat_template_kwargs={"mark": "A"})
    prompt = encode(model, "user:hi|A")
    assert parsed.prompts == (prompt,)
    assert parsed.sampling == (SamplingParams(max_tokens=MAX_LEN - len(prompt), temperature=1.0),)


def test_null_is_not_given(model):
    names = ("stop", "seed", "logprobs", "max_tokens", "logit_bias", "echo", "best_of", "tools", "suffix")
    assert completion(model, prompt="a", **dict.fromkeys(names)).body == completion(model, prompt="a").body


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), ([97, 98], [(97, 98)]), ([[97], [98, 99]], [(97,), (98, 99)])],
)
def test_prompts_come_as_texts_or_ids_one_or_several(model, prompt, expected):
    found = completion(model, prompt=prompt).prompts
    assert found == tuple(encode(model, one) if isinstance(one, str) else one for one in expected)


@pytest.mark.parametrize("prompt", [[], [[]], ["a", [1]], [True], 5, {}, [["a"]], [1.0]])
def test_other_prompts_are_refused(model, prompt):
    with pytest.raises(BodyError, match="a text, a list of texts") as caught:
        completion(model, prompt=prompt)
    assert caught.value.param == "prompt"


def test_repeated_prompt_gets_further_seeds_and_others_their_own(model):
    parsed = completion(model, prompt=["a", "b", "a", "a"], n=2, seed=2**32 - 3)
    assert [sampling.seed for sampling in parsed.sampling] == [2**32 - 3, 2**32 - 3, 2**32 - 1, 1]
    alone = completion(model, prompt="b", n=2, seed=2**32 - 3)
    assert parsed.sampling[1] == alone.sampling[0]


def test_seed_of_64_bits_is_answered_modulo_2_to_the_32(model):
    for given, kept in ((-1, 2**32 - 1), (2**63 - 1, 2**32 - 1), (2**40 + 7, 7)):
        parsed, same = (completion(model, prompt=["a", "a"], n=2, seed=seed) for seed in (given, kept))
        assert parsed.sampling == same.sampling
        assert parsed.digest == same.digest
        assert completion(model, prompt=["a", "a"], n=2).with_seed(given).sampling == same.sampling


def test_seed_of_the_caller_equals_one_in_the_body(model):
    drawn = completion(model, prompt=["a", "a"], n=3).with_seed(7)
    given = completion(model, prompt=["a", "a"], n=3, seed=7)
    assert drawn.sampling == given.sampling
    assert drawn.digest == given.digest != completion(model, prompt=["a", "a"], n=3, seed=8).digest


def test_every_sampling_field_arrives(model):
    fields = {
        "max_tokens": 9,
        "min_tokens": 2,
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "logit_bias": {"5": -1},
        "seed": 4,
        "stop": "x",
        "stop_token_ids": [7],
        "ignore_eos": True,
        "logprobs": 3,
        "prompt_logprobs": 2,
        "logprobs_mode": "processed",
    }
    found = completion(model, prompt="a", **fields, is_deterministic=False).sampling[0]
    assert found == SamplingParams(**fields, deterministic=False)
    assert completion(model, prompt="a", top_k=-1).sampling[0].top_k == 0


def test_chat_logprobs_are_a_switch_and_a_number(model):
    assert chat(model).logprobs is None
    assert (chat(model, logprobs=True).logprobs, chat(model, logprobs=True, top_logprobs=3).sampling[0].logprobs) == (0, 3)
    assert chat(model, max_completion_tokens=5).sampling[0].max_tokens == 5


def test_echo_asks_for_logprobs_of_the_prompt(model):
    assert completion(model, prompt="a", echo=True).sampling[0].prompt_logprobs is None
    assert completion(model, prompt="a", echo=True, logprobs=2).sampling[0].prompt_logprobs == 2
    score = completion(model, prompt="a", echo=True, logprobs=1, max_tokens=0)
    assert score.is_score
    assert not completion(model, prompt="a", echo=True, logprobs=1, max_tokens=1).is_score


def test_parts_of_text_are_joined_by_line_ends(model):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(model, messages=[{"role": "user", "content": parts}]).prompts == (encode(model, "user:a\nb|"),)


def test_null_fields_of_a_message_count_as_left_out(model):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": None, "refusal": None}]
    assert chat(model, messages=messages).prompts == (encode(model, "user:a|assistant:|"),)


@pytest.mark.parametrize("as_field", [True, False])
def test_answer_goes_on_from_the_last_message_if_the_body_asks_for_it(model, as_field):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    given = options if as_field else {"chat_template_kwargs": options}
    assert chat(model, messages=messages, **given).prompts == (encode(model, "user:a|assistant:b "),)
    assert chat(model, messages=messages).prompts == (encode(model, "user:a|assistant:b |"),)


@pytest.mark.parametrize(
    ("body", "param", "code", "said"),
    [
        ({"guided": {}}, "guided", "unknown_parameter", "accepted: "),
        ({"suffix": "x"}, "suffix", "unsupported_parameter", "omit it"),
        ({"best_of": 3}, "best_of", "unsupported_parameter", "give 1"),
        ({"temperature": "hot"}, "temperature", "invalid_value", "a number, got 'hot'"),
        ({"temperature": -1}, "temperature", "invalid_value", "0 is greedy"),
        ({"max_tokens": True}, "max_tokens", "invalid_value", "an integer, got True"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value", "echo: true"),
        ({"max_tokens": 0, "echo": True, "n": 2}, "n", "invalid_value", "generates nothing"),
        ({"min_tokens": 99}, "min_tokens", "invalid_value", r"0 .. max_tokens \(16\)"),
        ({"is_deterministic": 1}, "is_deterministic", "invalid_value", "true or false"),
        ({"logprobs": 21}, "logprobs", "invalid_value", "0 .. 20"),
        ({"seed": 2**63}, "seed", "invalid_value", "2[*][*]63-1"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value", "stream: true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "unknown_parameter", "include_usage"),
        ({"prompt": None}, "prompt", "missing_required_parameter", "needs a prompt"),
        ({"prompt": "a" * 256 * MAX_LEN + "a"}, "prompt", "context_length_exceeded", "16385 characters"),
    ],
)
def test_bad_field_is_named(model, body, param, code, said):
    with pytest.raises(BodyError, match=said) as caught:
        completion(model, **{"prompt": "a", **body})
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"content": "a"}]}, "messages", r"messages\[0\] must be an object with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "content must be"),
        ({"chat_template_kwargs": {"now": 0}}, "chat_template_kwargs", "must not hold now"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not hold messages"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs", "must not hold tokenize"),
        ({"chat_template_kwargs": {"tools": 3}}, "chat_template_kwargs", "tools must be a list"),
        ({"chat_template_kwargs": {"chat_template": "rag"}}, "chat_template_kwargs", "one of the folder's, 'default'"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs", "has the role 'user'"),
        ({"continue_final_message": True}, "continue_final_message", "has the role 'user'"),
        ({"continue_final_message": 1}, "continue_final_message", "true, false or the name of a message's field"),
        ({"add_generation_prompt": "yes"}, "add_generation_prompt", "true or false"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt", "give one of them"),
        (
            {"add_generation_prompt": True, "chat_template_kwargs": {"add_generation_prompt": False}},
            "add_generation_prompt",
            "chat_template_kwargs.add_generation_prompt differ",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs", "parameter top_logprobs must be an integer in 0 .. 20"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "differ"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"prompt": "a"}, "prompt", "unknown field"),
    ],
)
def test_bad_field_of_chat_is_named(model, body, param, said):
    with pytest.raises(BodyError, match=said) as caught:
        chat(model, **body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "kind",
    [CompletionBody, ChatBody, TokenizeBody, StreamOptions, IdsBody, DetokenizeBody, WeightsBody],
    ids=lambda one: one.__name__,
)
def test_value_of_another_type_is_refused_by_name_with_what_is_accepted(kind):
    for name, hint in get_type_hints(kind).items():
        value: Any = 5 if "dict" in str(hint) else {}
        if hint is Any:
            assert getattr(read_fields({name: value}, kind), name) == value
            continue
        with pytest.raises(BodyError, match=rf"^{name} must be (an?|true,?) .*, got {value}$") as caught:
            read_fields({name: value}, kind)
        assert caught.value.param == name


def test_requests_have_ids_of_their_own_and_must_fit(model):
    config = EngineConfig(max_requests=2, max_len=MAX_LEN)
    requests = requests_of(completion(model, prompt=["a", "b"], seed=3), model, config, id="x")
    assert [(request.id, request.sampling.seed) for request in requests] == [("x/0", 3), ("x/1", 3)]
    with pytest.raises(BodyError, match="together more than") as caught:
        requests_of(completion(model, prompt="a" * 60), model, config, id="x")
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(BodyError, match="token id 5000") as caught:
        requests_of(completion(model, prompt=[5000]), model, config, id="x")
    assert caught.value.code == "invalid_value"


def test_digest_tells_requests_apart(model):
    bodies = [{}, {"n": 2}, {"echo": True}, {"logprobs": 0}, {"return_token_ids": True}, {"temperature": 0.5}]
    digests = {completion(model, prompt="a", seed=1, **body).digest for body in bodies}
    assert len(digests) == len(bodies)
    assert completion(model, prompt="a", seed=1, user="me").digest in digests
    assert chat(model, seed=1, request_id="r").digest == chat(model, seed=1).digest


def test_long_name_is_shortened_in_the_error(model):
    with pytest.raises(BodyError) as caught:
        completion(model, prompt="a", **{"k" * 10**6: 1})
    assert len(str(caught.value)) < 3000
    assert len(caught.value.param) < 300
