"""Questions of the harness to a tokenizer and a template: beginnings, once; conversations that go on."""

import dataclasses

import pytest
from tokenizers import processors

from detspec.adapters.special_tokens import SpecialTokens, special_tokens_of
from detspec.checkpoint.chat import ChatTemplate
from detspec.checkpoint.load import Model
from detspec.checkpoint.tokenizer import Tokenizer
from detspec.errors import InputError
from tests.engine.byte_model import byte_params, byte_tokenizer, without_tokenizer

BEGIN = 300  # a token that no text is cut into
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def model_with(path, *, adds: bool = False, eos: tuple[int, ...] = ()) -> Model:
    """A model with a tokenizer, which puts a token in front of every text if it `adds`."""
    tokenizer = byte_tokenizer()
    begin = tokenizer.id_to_token(BEGIN)
    tokenizer.add_special_tokens([begin])
    if adds:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, BEGIN)])
    (path / "tokenizer.json").write_text(tokenizer.to_str())
    model = without_tokenizer(byte_params())
    return dataclasses.replace(model, tokenizer=Tokenizer(path / "tokenizer.json"), eos_ids=eos)


def tokens_with(path, **changes) -> SpecialTokens:
    return special_tokens_of(model_with(path, **changes), None)


def test_beginning_is_put_in_front_once(tmp_path):
    special = tokens_with(tmp_path, adds=True)
    begin = special.tokenizer.library.id_to_token(BEGIN)
    bare = special.encode("ab", add_special=False)
    assert BEGIN not in bare
    assert special.encode("ab", None) == special.encode(f"{begin}ab", None) == [BEGIN, *bare]
    assert special.encode(f"{begin}ab", add_special=True) == [BEGIN, BEGIN, *bare]
    assert special.prefix == BEGIN


def test_prefix_is_what_is_given_then_the_beginning_then_the_end(tmp_path):
    model = model_with(tmp_path, eos=(9, 4))
    assert special_tokens_of(model, 5).prefix == 5
    assert special_tokens_of(model, None).prefix == 9
    assert special_tokens_of(model, None).end == 9
    named = {"bos_token": model.tokenizer.library.id_to_token(BEGIN)}
    assert special_tokens_of(dataclasses.replace(model, special_tokens=named), None).prefix == BEGIN


def test_prefix_is_never_a_token_without_a_row(tmp_path):
    """Tokenizers may have more tokens than the embedding has rows."""
    model = model_with(tmp_path, eos=(9, 4))
    rows = model.cfg.vocab_size
    model.tokenizer.library.add_special_tokens([f"<{i}>" for i in range(rows)])
    far = next(f"<{i}>" for i in range(rows) if model.tokenizer.library.token_to_id(f"<{i}>") >= rows)
    beyond = dataclasses.replace(model, special_tokens={"bos_token": far})
    assert special_tokens_of(beyond, None).prefix == 9
    with pytest.raises(InputError, match=r"no token that texts could begin with is known, got \d{4}: give prefix_token_id"):
        special_tokens_of(dataclasses.replace(beyond, eos_ids=()), None)
    with pytest.raises(InputError, match=f"got {rows}: give prefix_token_id"):
        special_tokens_of(beyond, rows)


def test_model_without_any_such_token_or_tokenizer_is_refused(tmp_path):
    with pytest.raises(InputError, match="no token that texts could begin with is known, got None: give prefix_token_id"):
        tokens_with(tmp_path)
    with pytest.raises(InputError, match=r"got 5000: give prefix_token_id, 0 \.\. 2047"):
        special_tokens_of(model_with(tmp_path), 5000)
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        special_tokens_of(without_tokenizer(byte_params()), 1)


def test_conversation_is_ready_for_an_answer_or_goes_on_within_the_last_message(tmp_path):
    model = dataclasses.replace(model_with(tmp_path, eos=(1,)), chat_template=ChatTemplate(TEMPLATE, {}))
    special = special_tokens_of(model, None)
    asked = [{"role": "user", "content": "Hi"}]
    begun = [*asked, {"role": "assistant", "content": "Hi, I am "}]
    assert special.render(asked, add_generation_prompt=True) == "<user>Hi</><assistant>"
    assert special.render(begun, add_generation_prompt=False) == "<user>Hi</><assistant>Hi, I am "
    assert special.template_source(True) == TEMPLATE
    assert special.name.endswith(model.chat_template.digest)


def test_template_that_changes_the_last_message_is_refused(tmp_path):
    template = ChatTemplate("{{ messages[-1].content | upper }}", {})
    special = special_tokens_of(dataclasses.replace(model_with(tmp_path, eos=(1,)), chat_template=template), None)
    with pytest.raises(
        InputError, match="the chat template changes the last message, which the answer should go on from: 'ab'"
    ):
        special.render([{"role": "assistant", "content": "ab"}], add_generation_prompt=False)


def test_missing_and_named_templates_are_refused(tmp_path):
    special = tokens_with(tmp_path, eos=(1,))
    for ask in (lambda: special.render([], add_generation_prompt=True), lambda: special.template_source(True)):
        with pytest.raises(InputError, match="no chat template: leave --apply_chat_template out"):
            ask()
    named = dataclasses.replace(special, model=dataclasses.replace(special.model, chat_template=ChatTemplate("", {})))
    with pytest.raises(InputError, match="rendered by the folder's default chat template, got the name 'tools'"):
        named.template_source("tools")
