"""Chat templates: what they see, what they may not do, and where they come from. Against transformers: tests/parity/."""

import datetime
import json
from pathlib import Path

import pytest

from detspec.checkpoint.chat import ChatTemplate, read_chat_template
from detspec.checkpoint.conversation import NO_TIME
from detspec.errors import InputError

TURNS = (
    "{{ bos_token }}{% for message in messages %}\n"
    "<|{{ message.role }}|>{{ message.content | trim }}<|end|>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALK = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Ho <b>"}]


def render(source: str, messages=TALK, **variables) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **variables)


def test_conversation_renders_turn_by_turn():
    assert render(TURNS) == "<s><|user|>Hi<|end|>\n<|assistant|>Ho <b><|end|>\n<|assistant|>"
    assert render(TURNS, add_generation_prompt=False) == "<s><|user|>Hi<|end|>\n<|assistant|>Ho <b><|end|>\n"


def test_template_sees_tools_variables_and_json_without_html_escapes():
    assert render("{{ tools | tojson }}", tools=[{"name": "<é>"}]) == '[{"name": "<é>"}]'
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{% if tools is none %}none{% endif %}") == "none"


def test_generation_marks_and_loop_controls_are_understood():
    source = (
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert render(source) == " Hi "


def test_names_set_within_generation_marks_end_there():
    source = "{% set x = 'a' %}{% generation %}{% set x = 'b' %}{{ x }}{% endgeneration %}{{ x }}"
    assert render(source) == "ba"
    assert render(source.replace("{% generation %}", "").replace("{% endgeneration %}", "")) == "bb"


def test_dict_of_templates_makes_objects_and_has_nothing_else():
    assert render("{{ dict(a=1) }}{{ dict.fromkeys([2], 3) }}{{ dict }}") == "{'a': 1}{2: 3}<dict>"
    assert render("{{ dict['from_keys'] is defined }}{{ dict.from_keys is defined }}") == "FalseFalse"
    with pytest.raises(InputError, match="has no attribute 'from_keys'"):
        render("{{ dict.from_keys([('a', 1)]) }}")


def test_date_is_the_callers_if_one_is_given():
    assert render("{{ strftime_now('%d %b %Y') }}", now=datetime.datetime(2024, 7, 26)) == "26 Jul 2024"
    own = "{{ strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' }}"
    assert render(own) != render(own, now=NO_TIME) == "26 Jul 2024"
    with pytest.raises(InputError, match="the template prints the date, and a job has none: give --created"):
        render("{{ strftime_now('%d %b %Y') }}", now=NO_TIME)


@pytest.mark.parametrize(
    ("source", "culprit"),
    [
        ("{{ raise_exception('roles must alternate') }}", "does not take this conversation: roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "does not take this conversation"),
        ("{{ messages.append(1) }}", "does not take this conversation"),
        ("{{ 1 // 0 }}", "does not take this conversation"),
        ("{{ messages[0].content.no_such.thing }}", "does not take this conversation"),
        ("{{ messages | no_such_filter }}", "is no template that can be read"),
        ("{% for %}", "is no template that can be read"),
    ],
)
def test_template_that_refuses_or_does_what_it_may_not_is_one_error(source, culprit):
    with pytest.raises(InputError, match=culprit):
        render(source)


@pytest.mark.parametrize("messages", ["hello", {"role": "user"}, [], ["hello"]])
def test_conversation_that_is_none_is_refused(messages):
    with pytest.raises(InputError, match="conversation"):
        render(TURNS, messages)


def test_template_comes_from_its_own_file_else_from_the_tokenizer_config(tmp_path: Path):
    assert read_chat_template(tmp_path) is None
    config = {"bos_token": {"content": "<s>"}, "chat_template": [{"name": "default", "template": "{{ bos_token }}d"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_chat_template(tmp_path).render(TALK) == "<s>d"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ bos_token }}s"}))
    assert read_chat_template(tmp_path).render(TALK) == "<s>s"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}f")
    assert read_chat_template(tmp_path).render(TALK) == "<s>f"
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(InputError, match="no JSON object but list"):
        read_chat_template(tmp_path)
