"""Values that ask for nothing, of fields that are not implemented: the table, the bodies, and the page that lists them."""

import json
from pathlib import Path

import pytest

from detspec.openai.bodies import parse_chat, parse_completion
from detspec.openai.fields import NEUTRAL, BodyError, ChatBody, CompletionBody, StreamOptions, asks_for_nothing, read_fields
from tests.openai.test_bodies import MAX_LEN, chat, completion, model  # noqa: F401  # a fixture

DOCS = Path(__file__).parents[2] / "docs"
# what clients send of their own accord: vLLM's defaults and OpenAI's, as their documentation has them
CLIENTS = {
    "best_of": 1,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "include_stop_str_in_output": False,
    "guided_json": None,
    "structured_outputs": None,
    "priority": 0.0,
    "logits_processors": None,
    "cache_salt": None,
    "kv_transfer_params": None,
    "vllm_xargs": None,
    "tools": None,
    "tool_choice": "auto",
    "functions": [],
    "parallel_tool_calls": True,
    "reasoning_effort": None,
    "response_format": {"type": "text"},
    "stop": [],
    "stop_token_ids": [],
    "logit_bias": {},
    "stream_options": None,
    "user": "me",
}
IN_CHAT = {"echo": False, "documents": None, "chat_template": None, "include_reasoning": True, "top_logprobs": 0}
OTHERS = (True, 2, "x", ["x"], {"x": 1})


def test_what_clients_send_of_their_own_accord_changes_nothing(model):  # noqa: F811
    for body, plain in (
        (completion(model, prompt="a", **CLIENTS), completion(model, prompt="a")),
        (chat(model, **CLIENTS, **IN_CHAT), chat(model)),
    ):
        assert (body.digest, body.sampling, body.options) == (plain.digest, plain.sampling, plain.options)


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_value_is_accepted_and_any_other_is_refused_by_name(name):
    *where, field = name.split(".")
    kind = StreamOptions if where else ChatBody  # chats have no echo
    for value in (None, *NEUTRAL[name]):
        assert read_fields({field: value}, kind, *where) == kind()
    for value in OTHERS:
        if asks_for_nothing(value, NEUTRAL[name]):
            continue
        with pytest.raises(BodyError, match=f"{name} is not supported, got .*: omit it") as caught:
            read_fields({field: value}, kind, *where)
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


def test_numbers_are_compared_as_numbers_and_truth_values_as_such():
    assert asks_for_nothing(1.0, (1,))
    assert asks_for_nothing(False, (False,))
    assert not asks_for_nothing(True, (1,))
    assert not asks_for_nothing(0, (False,))
    assert not asks_for_nothing(1.5, (1,))


def test_best_of_as_many_as_are_asked_for_chooses_none(model):  # noqa: F811
    assert completion(model, prompt="a", n=2, best_of=2) == completion(model, prompt="a", n=2)
    with pytest.raises(BodyError, match="best_of is not supported, got 3"):
        completion(model, prompt="a", n=2, best_of=3)


def test_options_of_a_stream_that_ask_for_nothing_need_no_stream(model):  # noqa: F811
    nothing = {"include_usage": False, "continuous_usage_stats": None, "include_obfuscation": False}
    assert completion(model, prompt="a", stream_options=nothing).options == StreamOptions()
    used = completion(model, prompt="a", stream=True, stream_options={**nothing, "include_usage": True}).options
    assert (used.include_usage, used.continuous_usage_stats) == (True, False)
    with pytest.raises(BodyError, match=r"stream_options\.include_obfuscation is not supported, got True"):
        completion(model, prompt="a", stream=True, stream_options={"include_obfuscation": True})


def test_no_implemented_field_is_in_the_table():
    assert set(NEUTRAL) & set(ChatBody.__struct_fields__) == set()
    assert set(NEUTRAL) & set(CompletionBody.__struct_fields__) == {"echo"}


def test_page_of_the_server_lists_the_table():
    rows: dict[str, list[str]] = {}
    for name, values in NEUTRAL.items():
        rows.setdefault(", ".join(f"`{json.dumps(value)}`" for value in values) or "null alone", []).append(f"`{name}`")
    page = (DOCS / "serving.md").read_text()
    for values, names in rows.items():
        assert f"| {values} | {', '.join(names)} |" in page


@pytest.mark.parametrize("role", ["developer", "tool", "critic"])
def test_roles_reach_the_template_as_they_are(model, role):  # noqa: F811
    parsed = chat(model, messages=[{"role": role, "content": "a"}])
    assert parsed.prompts == (tuple(model.tokenizer.encode(f"{role}:a|")),)


def test_numbers_of_logprobs_are_answered_or_refused(model):  # noqa: F811
    def bodies(**body):
        return parse_completion({"prompt": "a", **body}, model, max_len=MAX_LEN).logprobs

    assert (bodies(), bodies(logprobs=0), bodies(logprobs=2)) == (None, 0, 2)
    assert (chat(model, logprobs=False, top_logprobs=0).logprobs, chat(model, logprobs=True).logprobs) == (None, 0)
    with pytest.raises(BodyError, match="top_logprobs needs logprobs: true"):
        parse_chat({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 1}, model, max_len=MAX_LEN)
