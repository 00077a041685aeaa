"""Conversations rendered by templates of every kind, and folders' special tokens, compared with Hugging Face transformers."""

import itertools
import json

import pytest
import tokenizers
import transformers

from detspec.checkpoint import chat
from detspec.checkpoint.added_tokens import read_special_tokens
from scripts.compare_templates import main

TURNS = "{{ bos_token }}{%% for m in messages %%}<{{ m.role }}>%s{{ eos_token }}{%% endfor %%}"
OPENING = "{% if add_generation_prompt %}<assistant>{% endif %}"
BODIES = {
    "prints": "{{ m.content }}",
    "adds": "{{ m['content'] + '\n' }}",
    "strips": "{{ m.content | trim }}",
    "asks": "{% if 'content' in m %}{{ m.content }}{% endif %}{% if 'tool_calls' in m %}{{ m.tool_calls | length }}{% endif %}",
    "is_defined": "{% if m.content is defined %}{{ m.content }}{% else %}-{% endif %}{{ m.name is defined }}",
    "json": "{{ m | tojson }}",
    "keys": "{% for key, value in m.items() %}{{ key }}={{ value }};{% endfor %}",
    "parts": "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
    "texts": "{% if m.content is string %}{{ m.content }}{% endif %}",
    "reasoning": "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}",
    "thinking": "{% if m.thinking %}[{{ m.thinking }}]{% endif %}{{ m.content }}",
    "cuts": "{{ (m.content or '').split('</think>')[-1].lstrip('\n') }}",
    "shouts": "{{ m.content | upper }}",
    "sets": "{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}{{ x }}",
    "calls": "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name, c.function.arguments | tojson }}{% endfor %}",
    "last": "{% if loop.last and m.role == 'assistant' %}{{ m.content }}{% break %}{% endif %}{{ m.content }}",
}
WHOLE = {
    "alternates": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}"
    "{% endif %}{{ m.content }}{% endfor %}",
    "tools": "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}",
    "date": "{{ strftime_now('%d %b %Y %H') }}{{ messages[-1].content }}",
    "tokens": "{{ think_token }}{{ bos_token }}{{ sep_token }}{{ messages[0].content }}",
    "thinks": "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ messages[0].content }}",
    "types": "{{ dict(a=1).a }}{{ dict.fromkeys([1]) }}{{ dict['x'] }}{{ dict.x is defined }}{{ messages[0].content }}",
    "documents": "{% for d in documents or [] %}{{ d.title }}{% endfor %}{{ messages[0].content }}",
    "broken": "{% for %}",
}
PAIR = [
    {"name": "default", "template": "D{{ messages[0].content }}"},
    {"name": "tool_use", "template": "T{{ tools | tojson }}"},
]


def write_tokenizer(folder) -> None:
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, "<unk>")).save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """A folder of templates: files, and folders of models with several."""
    folder = tmp_path_factory.mktemp("templates")
    sources = {name: TURNS % body + OPENING for name, body in BODIES.items()} | WHOLE
    for name, source in sources.items():
        (folder / f"{name}.jinja").write_text(source)
    for name in ("listed", "object", "filed", "no_default", "mapped"):
        (folder / name).mkdir()
    (folder / "listed" / "tokenizer_config.json").write_text(json.dumps({"chat_template": PAIR}))
    named = {entry["name"]: entry["template"] for entry in PAIR}
    (folder / "object" / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (folder / "filed" / "chat_template.jinja").write_text("F\r\n{{ messages[0].content }}\n")
    for name in ("filed", "no_default"):
        (folder / name / "tokenizer_config.json").write_text(json.dumps({"chat_template": "C{{ messages[0].content }}"}))
        (folder / name / "additional_chat_templates").mkdir()
        (folder / name / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
    (folder / "mapped" / "tokenizer_config.json").write_text(json.dumps({"chat_template": WHOLE["tokens"]}))
    (folder / "mapped" / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "sep_token": {"content": "|"}}))
    return folder


def test_templates_of_every_kind_render_as_in_transformers(templates, capsys):
    assert main([str(templates), "--all"]) == 0
    said = capsys.readouterr().out.splitlines()
    num_templates = len(BODIES) + len(WHOLE) + 5
    assert sum(line.split()[3] == "0" for line in said[1 : num_templates + 2]) == num_templates + 1
    assert f"{num_templates} templates" in said[num_templates + 1]


@pytest.mark.parametrize(
    ("name", "replacement", "shown"),
    [
        ("plain_messages", lambda messages: [dict(message) for message in messages], ("nulls: ", "reasoning: ", "thinking: ")),
        ("hidden_parts", lambda rendered, probe: set(), ("part in another message: ", "parts like roles: ")),
        ("cut_open", lambda rendered, text: rendered.rstrip(), ("prefill: ",)),
    ],
)
def test_comparison_sees_what_is_left_undone(templates, monkeypatch, capsys, name, replacement, shown):
    monkeypatch.setattr(chat, name, replacement)
    assert main([str(templates)]) == 1
    said = capsys.readouterr().out
    assert all(f"        {case}" in said for case in shown)


def test_comparison_of_no_template_fails(tmp_path):
    assert main([str(tmp_path)]) == 1


TYPED = {"__type": "AddedToken", "content": "<typed>"}
PLACES = {
    "bos_token": ({}, {"bos_token": "<c>"}, {"bos_token": TYPED}, {"bos_token": None}),
    "x_token": ({}, {"x_token": "<c>"}, {"x_token": TYPED}, {"x_token": {"content": "<untyped>"}}, {"x_token": True}),
    "extra": (
        {},
        {"extra_special_tokens": {"x_token": "<extra>", "boi": TYPED}},
        {"extra_special_tokens": ["<e>"]},
        {"additional_special_tokens": {"boi": "<additional>"}},
    ),
    "decoder": ({}, {"added_tokens_decoder": {}}),
}
MAPS = (
    None,
    {"bos_token": "<m>", "x_token": "<m>"},
    {"bos_token": {"content": "<m>"}, "x_token": {"content": "<m>"}, "eos_token": "</m>"},
    {"bos_token": None, "extra_special_tokens": {"x_token": "<m>"}, "additional_special_tokens": ["<a>"]},
)


def test_special_tokens_of_folders_are_those_of_transformers(tmp_path):
    write_tokenizer(tmp_path)
    seen = set()
    for mapped, *parts in itertools.product(MAPS, *PLACES.values()):
        config = {name: value for part in parts for name, value in part.items()}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(mapped or {}))
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path).special_tokens_map
        assert read_special_tokens(tmp_path) == theirs, (config, mapped)
        seen.add(json.dumps(theirs, sort_keys=True))
    assert len(seen) > 30
