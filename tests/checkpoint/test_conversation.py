"""Conversations on their way to a template: values, null fields, reasoning, parts, and messages that go on."""

import contextlib
import dataclasses
import enum
from types import SimpleNamespace

import numpy as np
import pytest

from detspec.checkpoint.chat import ChatTemplate
from detspec.checkpoint.conversation import as_plain, plain_messages
from detspec.errors import InputError

PRINTS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
LISTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
)
TURNS = "{%% for m in messages %%}[{{ m.role }}]%s{%% endfor %%}"
STRING = "{%% if m.content is string %%}{{ m.content }}{%% else %%}%s{%% endif %%}"
WITHOUT_PARTS = {
    "fails": "{{ '' + m.content }}",
    "drops_lists": STRING % "",
    "prints_the_list": "{{ m.content }}",
    "prints_json": STRING % "{{ m.content | tojson }}",
    "prints_indented_json": STRING % "{{ m.content | tojson(indent=2) }}",
    "prints_parts": STRING % "{% for p in m.content %}{{ p }}{% endfor %}",
    "prints_values": STRING % "{% for p in m.content %}{{ p.values() | join(' ') }}{% endfor %}",
    "reads_the_first": STRING % "{{ m.content[0].text }}",
    "reads_the_last": STRING % "{{ m.content[-1].text }}",
}
LOOPS = STRING % "{% for p in m.content %}<{{ p.text }}>{% endfor %}"
WITH_PARTS = {
    "loops": LOOPS,
    "asks_the_type": LOOPS.replace("<{{", "{% if p['type'] == 'text' %}<{{").replace("}}>", "}}>{% endif %}"),
    "shouts": LOOPS.replace("p.text", "p.text | upper"),
    "strips": LOOPS.replace("p.text", "p['text'] | trim"),
}
CLOSES = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = {"role": "user", "content": "q"}
BEGUN = {"role": "assistant", "content": "a "}
OPEN = {"continue_final_message": True, "add_generation_prompt": False}


def render(source: str, *messages, **variables) -> str:
    return ChatTemplate(source, {}).render(list(messages), **variables)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


class Color(enum.StrEnum):
    RED = "red"


@dataclasses.dataclass
class Spoken:
    role: str
    content: str
    name: str | None = None


def test_null_fields_of_a_message_are_left_out_and_those_inside_stay():
    given = {"role": "assistant", "content": None, "tool_calls": [{"id": None}], "refusal": None}
    assert plain_messages([given]) == [{"role": "assistant", "tool_calls": [{"id": None}]}]
    assert given["content"] is None


def test_template_never_sees_a_null_field():
    asks = "{% for m in messages %}{{ 'content' in m }}{{ 'tool_calls' in m }}{{ m.content }}{% endfor %}"
    assert render(asks, {"role": "assistant", "content": None, "tool_calls": None}) == "FalseFalse"
    assert render(asks, {"role": "assistant", "content": ""}) == "TrueFalse"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_found_under_each_of_its_names(name):
    source = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}"
    assert render(source, {**BEGUN, name: "r"}) == "r|r"
    assert render(source, {**BEGUN, name: None}) == "|"
    assert render(source, {**BEGUN, "reasoning": "b", "thinking": "a"}) == "a|a"
    assert render(source, {**BEGUN, "reasoning_content": "c", "thinking": "a"}) == "c|a"


def test_objects_arrays_and_numbers_become_plain_values():
    dumped = SimpleNamespace(model_dump=lambda: {"role": "user", "content": "b", "refusal": None})
    spoken = [Spoken("user", "a"), dumped, {"role": Color.RED, "content": np.str_("c"), "n": np.int64(3), "x": np.arange(2)}]
    plain = plain_messages(spoken)
    assert plain == [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "red", "content": "c", "n": 3, "x": [0, 1]},
    ]
    assert {type(value) for value in plain[2].values()} == {str, int, list}
    assert plain_messages(np.array(spoken[:1], dtype=object)) == plain[:1]
    assert as_plain((True, 0.5, {"a": (None,)})) == (True, 0.5, {"a": (None,)})


def test_value_that_is_no_json_is_refused_by_its_type():
    with pytest.raises(InputError, match="made of JSON values, got bytes"):
        render(PRINTS, {"role": "user", "content": b"x"})
    with pytest.raises(InputError, match="made of JSON values, got function"):
        render(PRINTS, USER, helper=render)
    endless = []
    endless.append(endless)
    with pytest.raises(InputError, match="must not be nested so deeply, or hold itself"):
        render(PRINTS, {"role": "user", "content": endless})


def test_template_that_handles_parts_gets_them():
    assert ChatTemplate(LISTS, {}).render_parts([{"role": "user", "content": parts("a", "b")}, USER]) == "[user]<a><b>[user]q"


@pytest.mark.parametrize("texts", [("so",), ("user", "is it"), ("", "q"), ("assistant",), ("[", "type", "text"), (), ("",)])
@pytest.mark.parametrize("body", WITHOUT_PARTS.values(), ids=WITHOUT_PARTS)
def test_template_that_does_not_handle_parts_gets_their_texts_joined(body, texts):
    """Also texts that the prompt holds elsewhere: in a role, or in another message."""
    template = ChatTemplate(TURNS % body, {})
    asked = [{"role": "user", "content": "is it so?"}, {"role": "assistant", "content": parts("text")}]
    talk = [*asked, {"role": "user", "content": parts(*texts)}]
    expected = "[user]is it so?[assistant]text[user]" + "\n".join(texts)
    assert template.render_parts(talk) == expected
    assert template.render_parts(talk, mood=TURNS) == expected


def test_template_shows_a_list_as_transformers_does_where_nothing_joins_it():
    talk = [{"role": "user", "content": parts("a", "b")}]
    assert render(PRINTS, *talk) == f"[user]{talk[0]['content']}"
    assert render(PRINTS, USER) == ChatTemplate(PRINTS, {}).render_parts([USER]) == "[user]q"


@pytest.mark.parametrize("body", WITH_PARTS.values(), ids=WITH_PARTS)
def test_template_that_handles_parts_gets_them_whatever_they_say(body):
    for texts in [("a", "b"), ("so",), ("user", "is it"), ("", "q"), ("probe0word", "PROBE1WORD0text0end")]:
        talk = [{"role": "user", "content": "is it so?"}, {"role": "user", "content": parts(*texts)}]
        shown = ChatTemplate(TURNS % body, {}).render_parts(talk)
        assert shown.lower() == "[user]is it so?[user]" + "".join(f"<{text}>" for text in texts).lower()


def test_template_that_reads_the_first_part_alone_gets_all_texts_in_it():
    source = TURNS % "{{ m.content[0].text }}"
    assert ChatTemplate(source, {}).render_parts([{"role": "user", "content": parts("a", "b")}]) == "[user]a\nb"
    assert ChatTemplate(source, {}).render_parts([{"role": "user", "content": parts("a")}]) == "[user]a"
    assert ChatTemplate(source, {}).render_parts([{"role": "user", "content": []}]) == "[user]"


def test_each_message_is_tried_by_itself():
    """A template may loop over the parts of some roles, and leave messages of another role out."""
    source = (
        "{% for m in messages if m.role != 'critic' %}[{{ m.role }}]{% if m.role == 'tool' %}{{ m.content | tojson }}"
        "{% else %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
    )
    talk = [{"role": role, "content": parts("x", role)} for role in ("critic", "user", "tool")]
    assert ChatTemplate(source, {}).render_parts(talk) == '[user]<x><user>[tool]"x\\ntool"'


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "a part of the type 'image_url': models read text alone"),
        ({"type": "input_audio", "input_audio": {}}, "a part of the type 'input_audio'"),
        ({"type": "text", "content": "x"}, 'accepted are {"type": "text", "text": ...}'),
    ],
)
def test_part_that_no_template_can_show_is_refused(part, said):
    with pytest.raises(InputError, match=said.replace("{", r"\{").replace("...", r"\.\.\.")):
        ChatTemplate(LISTS, {}).render_parts([USER, {"role": "user", "content": [part]}])


def test_answer_goes_on_within_the_last_message():
    assert render(CLOSES, USER, BEGUN, **OPEN) == "<user>q</><assistant>a "
    assert render(CLOSES, USER, BEGUN, continue_final_message=True) == "<user>q</><assistant>a "
    assert render(CLOSES, USER, {**BEGUN, "content": ""}, **OPEN) == "<user>q</><assistant>"
    assert render(CLOSES, USER, BEGUN, add_generation_prompt=False) == "<user>q</><assistant>a </>"
    assert render(CLOSES, USER, BEGUN) == "<user>q</><assistant>a </><assistant>"


def test_blanks_of_a_message_that_goes_on_are_stripped_if_the_template_strips_them():
    strips = CLOSES.replace("{{ m.content }}", "{{ m.content | trim }}")
    assert render(strips, USER, BEGUN, **OPEN) == "<user>q</><assistant>a"


def test_last_text_of_parts_goes_on():
    begun = {**BEGUN, "content": [*parts("a", "b"), {"type": "thinking"}]}
    assert render(LISTS, USER, begun, **OPEN) == "[user]q[assistant]<a><b"
    assert begun["content"][1]["text"] == "b"
    joined = ChatTemplate(CLOSES, {}).render_parts([USER, {**BEGUN, "content": parts("a", "b")}], **OPEN)
    assert joined == "<user>q</><assistant>a\nb"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_goes_on_if_it_is_named(name):
    thought = {"role": "assistant", "content": "", name: "so"}
    assert render(CLOSES, USER, thought, continue_final_message=name) == "<user>q</><assistant>(so"


@pytest.mark.parametrize(
    ("messages", "options", "said"),
    [
        ([USER, BEGUN], {**OPEN, "add_generation_prompt": True}, "give one of them"),
        ([USER], OPEN, "the last one has the role 'user'"),
        ([USER, {"role": "assistant"}], OPEN, "the last message has no text 'content' that could go on, got None"),
        ([USER, {"role": "assistant", "content": {"a": 1}}], OPEN, "has no text 'content'"),
        ([USER, {"role": "assistant", "content": [{"type": "image"}]}], OPEN, "has no text 'content'"),
        ([USER, BEGUN], {"continue_final_message": "reasoning_content"}, "has no text 'reasoning_content'"),
        ([USER, {**BEGUN, "mood": "x"}], {"continue_final_message": "mood"}, "reads no field of this name"),
        ([USER, BEGUN], {"continue_final_message": 3}, "true, false or the name of a field, got 3"),
        ([USER, BEGUN], {"add_generation_prompt": "yes"}, "add_generation_prompt must be true or false, got 'yes'"),
    ],
)
def test_message_that_cannot_go_on_is_refused(messages, options, said):
    with pytest.raises(InputError, match=said):
        render(CLOSES, *messages, **options)


@pytest.mark.parametrize("filters", ["upper", "replace('a', 'b')", "truncate(3)"])
def test_template_that_changes_the_message_that_goes_on_is_refused(filters):
    changes = CLOSES.replace("m.content }}", f"m.content | {filters} }}}}")
    with pytest.raises(InputError, match="changes the last message, which the answer should go on from: 'abc a'"):
        render(changes, USER, {**BEGUN, "content": "abc a"}, **OPEN)


@pytest.mark.parametrize("name", ["messages", "tokenize", "return_tensors", "conversation", "add_special_tokens"])
def test_variable_that_is_no_variable_is_refused(name):
    with pytest.raises(InputError, match=f"variables of a chat template must not hold {name}"):
        render(PRINTS, USER, **{name: []})


ODD = (
    None,
    True,
    0,
    -1,
    2**63,
    0.5,
    float("nan"),
    "",
    "content",
    "x" * 1000,
    [],
    [[]],
    [{}],
    {},
    {"a": None},
    b"x",
    object(),
    {1},
    np.zeros(2),
)


@pytest.mark.parametrize(
    "name", ["chat_template", "continue_final_message", "add_generation_prompt", "tools", "documents", "mood"]
)
def test_option_of_any_type_is_taken_or_is_one_error(name):
    template = ChatTemplate(CLOSES, {})
    taken = 0
    for value in ODD:
        try:
            assert template.render_parts([USER, BEGUN], **{name: value}).startswith("<user>q</>")
            taken += 1
        except InputError:
            pass
    assert 0 < taken < len(ODD)


def test_messages_of_any_type_are_taken_or_are_one_error():
    template = ChatTemplate(CLOSES, {})
    for value in ODD:
        for messages in (value, [value], [{"role": value, "content": "x"}], [{"role": "user", "content": value}]):
            for option in ({}, OPEN):
                with contextlib.suppress(InputError):
                    assert isinstance(template.render_parts(messages, **option), str)
    assert template.render_parts([{"role": "user", "content": 0.5}]) == "<user>0.5</><assistant>"


def test_documents_must_be_objects():
    assert render("{{ documents[0].title }}", USER, documents=[{"title": "t"}]) == "t"
    with pytest.raises(InputError, match="documents must be a list of objects, got 'd'"):
        render(PRINTS, USER, documents="d")
