"""Templates and special tokens of folders, as transformers reads their files."""

import json
from pathlib import Path
from typing import Any

import pytest

from detspec.checkpoint.added_tokens import read_special_tokens
from detspec.checkpoint.chat import MAX_TEMPLATES, ChatTemplate, read_chat_template, read_templates
from detspec.checkpoint.folder import copy_side_files
from detspec.errors import InputError

TALK = [{"role": "user", "content": "q"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
BOTH = [
    {"name": "default", "template": "D{{ messages[0].content }}"},
    {"name": "tool_use", "template": "T{{ tools | length }}"},
]


def write(folder: Path, **files: Any) -> Path:
    """Writes texts and JSON values as files: `tokenizer_config` is `tokenizer_config.json`."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def with_files(folder: Path, default: str | None, **further: str) -> Path:
    """Writes templates as files of their own."""
    if default is not None:
        (folder / "chat_template.jinja").write_text(default)
    (folder / "additional_chat_templates").mkdir()
    for name, source in further.items():
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(source)
    return folder


def written_as(form: str, folder: Path) -> Path:
    """The two templates in each form that folders have."""
    named = {entry["name"]: entry["template"] for entry in BOTH}
    if form == "files":
        return with_files(folder, named.pop("default"), **named)
    return write(folder, tokenizer_config={"chat_template": BOTH if form == "list" else named})


@pytest.mark.parametrize("form", ["list", "object", "files"])
def test_template_for_tools_is_taken_if_there_are_tools(tmp_path, form):
    template = read_chat_template(written_as(form, tmp_path))
    assert template.render(TALK) == "Dq"
    assert template.render(TALK, tools=TOOLS) == "T1"
    assert template.render(TALK, tools=[]) == "T0"
    assert template.render(TALK, tools=TOOLS, chat_template="default") == "Dq"
    assert template.source == BOTH[0]["template"]


def test_only_template_is_taken_for_tools_too(tmp_path):
    template = read_chat_template(write(tmp_path, tokenizer_config={"chat_template": BOTH[:1]}))
    assert template.render(TALK, tools=TOOLS) == "Dq"
    with pytest.raises(InputError, match="chat_template must be one of the folder's, 'default': got 'tool_use'"):
        template.render(TALK, chat_template="tool_use")


def test_files_of_templates_hide_the_config(tmp_path):
    write(tmp_path, tokenizer_config={"chat_template": "C"})
    template = read_chat_template(with_files(tmp_path, None, tool_use="T", rag="R"))
    assert template.render(TALK, tools=TOOLS) == "T"
    assert template.render(TALK, chat_template="rag") == "R"
    with pytest.raises(InputError, match="one of the folder's, 'rag', 'tool_use': and there is no default one"):
        template.render(TALK)


def test_bad_templates_are_one_error_each(tmp_path):
    with pytest.raises(InputError, match="additional_chat_templates: the one called 'rag' is no template that can be read"):
        read_chat_template(with_files(tmp_path, None, rag="{% for %}"))
    for number in range(MAX_TEMPLATES):
        (tmp_path / "additional_chat_templates" / f"{number}.jinja").write_text("x")
    with pytest.raises(InputError, match=f"holds {MAX_TEMPLATES + 1} templates"):
        read_templates(tmp_path)


@pytest.mark.parametrize(
    "given", [3, [3], [{"name": "default"}], [{"template": "x"}], {"default": 3}, [{"name": [], "template": "x"}]]
)
def test_config_with_what_is_no_template_is_refused(tmp_path, given):
    with pytest.raises(InputError, match="chat_template must be a text, or a list of objects with name and template"):
        read_templates(write(tmp_path, tokenizer_config={"chat_template": given}))


def test_digest_covers_all_templates_and_all_special_tokens():
    variants = [
        ChatTemplate("a", {}),
        ChatTemplate("b", {}),
        ChatTemplate("a", {"think_token": "<t>"}),
        ChatTemplate({"default": "a", "tool_use": "a"}, {}),
        ChatTemplate({"default": "a", "tool_use": "b"}, {}),
        ChatTemplate({"default": "a", "rag": "a"}, {}),
        ChatTemplate({"tool_use": "a"}, {}),
    ]
    assert len({template.digest for template in variants}) == len(variants)
    assert ChatTemplate({"default": "a"}, {}).digest == variants[0].digest


def test_every_token_that_has_a_name_is_a_special_token(tmp_path):
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "think_token": "<think>",
        "image_token": {"__type": "AddedToken", "content": "<image>"},
        "audio_token": {"content": "no token: it lacks the type"},
        "add_bos_token": True,
        "unk_token_id": 3,
        "extra_special_tokens": {"tool_token": "<tool>", "boi": {"__type": "AddedToken", "content": "<boi>"}},
    }
    assert read_special_tokens(write(tmp_path, tokenizer_config=config)) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "think_token": "<think>",
        "image_token": "<image>",
        "tool_token": "<tool>",
        "boi": "<boi>",
    }


@pytest.mark.parametrize("name", ["extra_special_tokens", "additional_special_tokens"])
def test_special_tokens_in_a_list_have_no_names(tmp_path, name):
    assert read_special_tokens(write(tmp_path, tokenizer_config={name: ["<a>"], "bos_token": "<s>"})) == {"bos_token": "<s>"}


def test_map_of_special_tokens_counts_where_the_config_lists_no_added_tokens(tmp_path):
    mapped = {
        "bos_token": "<m>",
        "eos_token": {"content": "</m>"},
        "pad_token": None,
        "x_token": "<mx>",
        "y_token": {"content": "<my>"},
    }
    mapped["extra_special_tokens"] = {"z": "<mz>"}
    config = {
        "bos_token": "<c>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "x_token": "<cx>",
        "extra_special_tokens": {"z": "<cz>"},
    }
    write(tmp_path, special_tokens_map=mapped, tokenizer_config=config)
    usual = {"bos_token": "<m>", "eos_token": "</m>", "unk_token": "<unk>"}
    assert read_special_tokens(tmp_path) == {**usual, "x_token": "<cx>", "y_token": "<my>", "z": "<mz>"}
    write(tmp_path, tokenizer_config={**config, "added_tokens_decoder": {}})
    assert read_special_tokens(tmp_path) == {
        "bos_token": "<c>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "x_token": "<cx>",
        "z": "<cz>",
    }


def test_object_of_the_config_is_a_special_token_by_its_type(tmp_path):
    config = {"boi_token": {"content": "<b>"}, "x_token": {"a": 1}, "y_token": {"__type": "AddedToken", "content": "<y>"}}
    assert read_special_tokens(write(tmp_path, tokenizer_config=config)) == {"y_token": "<y>"}
    write(tmp_path, tokenizer_config={}, special_tokens_map=config | {"y_token": "<y>"})
    assert read_special_tokens(tmp_path) == {"boi_token": "<b>", "x_token": "", "y_token": "<y>"}


def test_map_alone_names_the_tokens(tmp_path):
    write(
        tmp_path, special_tokens_map={"bos_token": "<s>"}, tokenizer_config={"chat_template": "{{ bos_token }}|{{ eos_token }}"}
    )
    assert read_chat_template(tmp_path).render(TALK) == "<s>|"


@pytest.mark.parametrize(
    ("config", "culprit"),
    [({"bos_token": 3}, "bos_token"), ({"eos_token": {"content": []}}, "eos_token"), ({"extra_special_tokens": {"a": 3}}, "a")],
)
def test_special_token_that_is_no_text_is_named(tmp_path, config, culprit):
    with pytest.raises(InputError, match=f"{culprit} must be a text, or an object with a text as content"):
        read_special_tokens(write(tmp_path, tokenizer_config=config))


def test_special_token_cannot_take_the_place_of_the_conversation():
    with pytest.raises(InputError, match="a special token must not be called 'messages'"):
        ChatTemplate("", {"messages": "x"})


def test_variable_of_the_caller_comes_before_a_special_token():
    assert ChatTemplate("{{ bos_token }}", {"bos_token": "<s>"}).render(TALK, bos_token="<b>") == "<b>"


def test_converted_folder_renders_the_same(tmp_path):
    source = tmp_path / "source"
    target = tmp_path / "target"
    source.mkdir()
    target.mkdir()
    write(source, special_tokens_map={"bos_token": "<s>"}, tokenizer_config={})
    with_files(source, "{{ bos_token }}", tool_use="T")
    copy_side_files(source, target)
    assert read_chat_template(target).digest == read_chat_template(source).digest
