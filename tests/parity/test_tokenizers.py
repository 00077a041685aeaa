"""Tokens and rendered chats compared with Hugging Face transformers, on awkward strings."""

import json
import random

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from detspec.checkpoint.chat import read_chat_template
from detspec.checkpoint.folder import find_folder
from detspec.checkpoint.tokenizer import Tokenizer

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>")
PIECES = [
    *(
        "a",
        "B",
        "  ",
        "\n",
        "\t",
        "\r\n",
        " ",
        "\u3000",
        "é",
        "e\u0301",
        "ß",
        "漢字",
        "한국어",
        "עברית",
        "العربية",
        "हिन्दी",
        "ไทย",
        "İ",
        "ﬁ",
    ),
    *(
        "😀",
        "👩‍👩‍👧",
        "🇩🇪",
        "\u200b",
        "\ufeff",
        "\x00",
        "\x7f",
        "\U0010ffff",
        "½",
        "１２３",
        "3.14",
        "1e-9",
        "0x1F",
        "don't",
        "I'LL",
        "__init__",
    ),
    *(
        "```python\n",
        "<b>",
        "&amp;",
        "\\n",
        "…",
        "—",
        "“q”",
        "C:\\dir",
        "https://x.y/z?a=b#c",
        "a_b-c",
        "!!!",
        "$1,000.00",
        "\u202eabc",
    ),
    *SPECIAL,
]


def awkward_texts(count: int = 300) -> list[str]:
    """All single pieces, then random sequences of pieces."""
    rng = random.Random(0)
    runs = ["".join(rng.choices(PIECES, k=rng.randint(2, 12))) for _ in range(count - len(PIECES) - 1)]
    return ["", *PIECES, *runs]


def byte_level() -> tokenizers.Tokenizer:
    """A tokenizer like those of Llama 3 and Qwen: bytes and merges; it adds a beginning-of-text token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(awkward_texts(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """A tokenizer like those of Llama 2, Mistral and Gemma: a space is a letter, unknown characters become bytes."""
    vocabulary = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdeBL", "é", "漢", "▁a", "do"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(vocabulary)}, [("▁", "a"), ("d", "o")][:1], byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.fixture(scope="module", params=["shipped", "byte_level", "metaspace"])
def pair(request, tmp_path_factory):
    """A tokenizer.json loaded by transformers and by us."""
    folder = tmp_path_factory.mktemp(request.param)
    path = find_folder(None) / "tokenizer.json" if request.param == "shipped" else folder / "tokenizer.json"
    if request.param != "shipped":
        {"byte_level": byte_level, "metaspace": metaspace}[request.param]().save(str(path))
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path)), Tokenizer(path)


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_tokens_of_awkward_texts(pair, add_special_tokens):
    theirs, ours = pair
    texts = awkward_texts()
    assert len(texts) == 300
    for text in texts:
        expected = theirs(text, add_special_tokens=add_special_tokens)["input_ids"]
        assert ours.encode(text, add_special_tokens=add_special_tokens) == expected, repr(text)


def test_texts_of_tokens(pair):
    theirs, ours = pair
    for text in awkward_texts():
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False), repr(text)
        for end in range(len(ids)):  # cut at every place, also within a character
            cut = theirs.decode(ids[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert ours.decode(ids[:end]) == cut, repr(text)


CHATML = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are helpful.<|im_end|>
{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
ALTERNATING = """{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}
{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{% for m in rest %}
    {% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- set ns = namespace(text=m.content) -%}
    {% if m.role == 'user' %}[INST] {{ system ~ '\n\n' if loop.first and system }}{{ ns.text }} [/INST]{% else %}
    {% generation %} {{ ns.text | trim }}{{ eos_token }}{% endgeneration %}{% endif %}
{% endfor %}"""
TOOLS = """{{ bos_token }}{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
{% for m in messages %}{% if m.content is string %}{{ m.content }}
{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}
{% if loop.last %}{% break %}{% endif %}|{% endfor %}{{ dict(a=1).a }}{{ date_string | default('no date') }}"""
TEMPLATES = {"chatml": CHATML, "alternating": ALTERNATING, "tools": TOOLS}


def conversations() -> list[list[dict[str, str]]]:
    texts = awkward_texts()
    talks = []
    for i in range(0, 120, 4):
        system, first, answer, second = texts[i : i + 4]
        talks.append([{"role": "user", "content": first}])
        talks.append(
            [{"role": "user", "content": first}, {"role": "assistant", "content": answer}, {"role": "user", "content": second}]
        )
        talks.append([{"role": "system", "content": system}, *talks[-1]])
    return talks


@pytest.mark.parametrize("as_file", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_render_as_in_transformers(tmp_path, name, as_file):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
    }
    if as_file:
        (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name])
    else:
        config["chat_template"] = TEMPLATES[name]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = read_chat_template(tmp_path)
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    tools = [{"type": "function", "function": {"name": "fé", "parameters": {"x": "<int>"}}}]
    for talk in conversations():
        for variables in (
            {"add_generation_prompt": True},
            {"add_generation_prompt": False, "tools": tools, "date_string": "1 May"},
        ):
            expected = theirs.apply_chat_template(talk, tokenize=False, **variables)
            assert ours.render(talk, **variables) == expected
            ids = theirs.apply_chat_template(talk, tokenize=True, return_dict=False, **variables)
            assert tokenizer.encode(expected, add_special_tokens=False) == ids
