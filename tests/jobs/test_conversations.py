"""Conversations are the same prompts from Python, in lines of our own, in batch lines and in bodies over HTTP."""

import dataclasses
import json

import pytest

from detspec.checkpoint.chat import ChatTemplate
from detspec.checkpoint.conversation import NO_TIME
from detspec.errors import InputError
from detspec.jobs.lines import parse_line, parse_request
from detspec.openai.bodies import parse_chat
from detspec.sampling_params import SamplingParams

PRINTS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
SOURCES = {
    "default": PRINTS + "{% if add_generation_prompt %}<assistant>{% endif %}",
    "tool_use": "{{ tools | length }}" + PRINTS,
    "lists": "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}",
}
USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}


@pytest.fixture(scope="module")
def talker(one_row):
    return dataclasses.replace(one_row.model, chat_template=ChatTemplate(SOURCES, {}))


def prompts(model, config, messages, **options) -> list[list[int]]:
    """Token ids by each way in."""
    own = {"id": "a", "messages": messages, "chat_template_kwargs": options}
    line = parse_request(parse_line(0, json.dumps(own).encode()), model, config, SamplingParams(max_tokens=1))
    fields = {name: options[name] for name in ("add_generation_prompt", "continue_final_message") if name in options}
    kwargs = {name: value for name, value in options.items() if name not in fields}
    bodies = [{"chat_template_kwargs": options}, {"chat_template_kwargs": kwargs, **fields}]
    parsed = [parse_chat({"messages": messages, **body}, model, max_len=config.max_len, now=NO_TIME) for body in bodies]
    return [model.chat_prompt(messages, **options), list(line.prompt_token_ids), *(list(one.prompts[0]) for one in parsed)]


@pytest.mark.parametrize(
    ("messages", "options", "text"),
    [
        ([USER], {}, "<user>q</><assistant>"),
        ([USER, ANSWER], {"add_generation_prompt": False}, "<user>q</><assistant>a</>"),
        ([USER, ANSWER], {"continue_final_message": True}, "<user>q</><assistant>a"),
        ([USER, ANSWER], {"continue_final_message": "content", "add_generation_prompt": False}, "<user>q</><assistant>a"),
        ([USER, {"role": "assistant", "content": None, "refusal": None}], {}, "<user>q</><assistant></><assistant>"),
        ([PARTS, ANSWER], {"continue_final_message": True}, "<user>b\nc</><assistant>a"),
        ([PARTS], {"chat_template": "lists"}, "<b><c>"),
        ([PARTS], {"tools": [{"name": "f"}]}, "1<user>b\nc</>"),
    ],
)
def test_conversation_is_the_same_prompt_by_every_way_in(one_row, talker, messages, options, text):
    expected = talker.tokenizer.encode(text, add_special_tokens=False)
    assert prompts(talker, one_row.config, messages, **options) == [expected] * 4


@pytest.mark.parametrize(
    ("messages", "options", "said"),
    [
        ([USER, ANSWER], {"continue_final_message": True, "add_generation_prompt": True}, "give one of them"),
        ([USER], {"continue_final_message": True}, "has the role 'user'"),
        ([USER], {"chat_template": PRINTS}, "must be one of the folder's, 'default', 'lists', 'tool_use'"),
        ([USER], {"tokenize": True}, "must not hold tokenize"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "image_url"),
    ],
)
def test_conversation_is_refused_by_every_way_in(one_row, talker, messages, options, said):
    ways = [
        lambda: talker.chat_prompt(messages, **options),
        lambda: parse_request(
            parse_line(0, json.dumps({"id": "a", "messages": messages, "chat_template_kwargs": options}).encode()),
            talker,
            one_row.config,
            SamplingParams(max_tokens=1),
        ),
        lambda: parse_chat({"messages": messages, "chat_template_kwargs": options}, talker, max_len=one_row.config.max_len),
    ]
    for way in ways:
        with pytest.raises(InputError, match=said):
            way()


def test_line_of_our_own_refuses_options_as_keys(one_row, talker):
    raw = json.dumps({"id": "a", "messages": [USER, ANSWER], "continue_final_message": True}).encode()
    with pytest.raises(InputError, match=r"unknown key 'continue_final_message'; accepted: .*chat_template_kwargs"):
        parse_request(parse_line(0, raw), talker, one_row.config, SamplingParams(max_tokens=1))
