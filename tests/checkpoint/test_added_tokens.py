"""Tokens that stand in other files than tokenizer.json: added as in transformers, covered by the digest, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from detspec.checkpoint.added_tokens import (
    ADDED_FILE,
    CONFIG_FILE,
    DECODER_KEY,
    EXTRA_KEY,
    MAP_FILE,
    OLD_EXTRA_KEY,
    read_special_tokens,
)
from detspec.checkpoint.tokenizer import Tokenizer
from detspec.errors import InputError
from detspec.openai.logprobs import TokenTexts
from tests.checkpoint.added_token_folders import END, FOLDERS, START, TEXT, Folder, described, token, tokenizer, write
from tests.checkpoint.test_hostile_folders import FILES, with_file
from tests.hostile import damaged

OWN = {id: described(token.__getstate__()) for id, token in tokenizer().get_added_tokens_decoder().items()}


def with_files(folder: Path, files: dict[str, Any]) -> Tokenizer:
    return Tokenizer(write(folder, Folder(files, {}, [])))


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_of_other_files_are_those_of_transformers(tmp_path: Path, name: str):
    case = FOLDERS[name]
    found = Tokenizer(write(tmp_path, case))
    tokens = {id: described(token.__getstate__()) for id, token in found.library.get_added_tokens_decoder().items()}
    assert tokens == {**OWN, **case.added}
    assert [id for id in found.encode(TEXT) if id] == case.ids


def test_folders_differ_in_their_tokens():
    """The control of the above: a reader of tokenizer.json alone would pass few of them."""
    plain = FOLDERS["no_files"]
    assert sum(case.ids == plain.ids for case in FOLDERS.values()) <= 3
    assert sum(case.added == {} for case in FOLDERS.values()) == 1


def test_special_tokens_of_the_config_are_left_out_of_texts(tmp_path: Path):
    files = {CONFIG_FILE: {DECODER_KEY: {"6": START, "7": token("<|im_end|>")}}}
    found = with_files(tmp_path, files)
    assert found.decode([6, 1, 7, 2]) == "a<|im_end|>b"
    assert found.decode([6, 1], skip_special_tokens=False) == "<|im_start|>a"


@pytest.mark.parametrize("name", FOLDERS)
def test_texts_are_those_of_the_library(tmp_path: Path, name: str):
    """Also of tokens that are looked for in small letters, and of special ones that the config makes plain."""
    found = Tokenizer(write(tmp_path, FOLDERS[name]))
    for id in range(found.vocab_size):
        for skip in (True, False):
            expected = found.library.decode([1, id, 2], skip_special_tokens=skip)
            assert found.decode([1, id, 2], skip_special_tokens=skip) == expected


def test_texts_of_single_tokens_know_those_that_were_added(tmp_path: Path):
    found = with_files(tmp_path, {ADDED_FILE: {"<|im_start|>": 6}})
    assert TokenTexts(found).text_of(6) == "<|im_start|>"
    assert found.vocab_size == 7


@pytest.mark.parametrize(
    ("files", "culprit"),
    [
        ({CONFIG_FILE: {DECODER_KEY: {"7": START}}}, "gives the token '<|im_start|>' the id 7, with those of"),
        ({CONFIG_FILE: {DECODER_KEY: {"4": START}}}, "'<|im_start|>' the id 4, with those of tokenizer.json it would have 6"),
        ({CONFIG_FILE: {DECODER_KEY: {"6": token("</s>")}}}, "'</s>' the id 6, with those of tokenizer.json it would have 5"),
        ({CONFIG_FILE: {DECODER_KEY: {"6": START, "8": END}}}, "'<|im_end|>' the id 8, with those of"),
        ({ADDED_FILE: {"<|im_start|>": 32000}}, "added_tokens.json gives the token '<|im_start|>' the id 32000"),
        ({ADDED_FILE: {"<|im_start|>": 4}}, "'<|im_start|>' the id 4, with those of tokenizer.json it would have none"),
        ({ADDED_FILE: {"<|im_start|>": "6"}}, "'<|im_start|>' must have an id in 0 .. 2147483647, got \"6\""),
        ({CONFIG_FILE: {DECODER_KEY: {"-6": START}}}, "has the id '-6'; accepted are whole numbers"),
        ({CONFIG_FILE: {DECODER_KEY: [START]}}, "added_tokens_decoder must be a JSON object of ids and tokens"),
        ({CONFIG_FILE: {DECODER_KEY: {"6": {"content": 1}}}}, "6 must be a text, or an object with a text as content"),
        ({CONFIG_FILE: {DECODER_KEY: {"6": {**START, "lstrip": 1}}}}, "must be true or false"),
        ({MAP_FILE: {"eos_token": 5}}, "special_tokens_map.json: eos_token must be a text"),
        ({ADDED_FILE: {"<x>": 6, "<y>": 6}}, "added_tokens.json gives the id 6 to both '<x>' and '<y>'"),
        ({CONFIG_FILE: {DECODER_KEY: {"06": START, "6": END}}}, "added_tokens_decoder names the id 6 twice, as '6' and with"),
        ({CONFIG_FILE: {"bos_token": {"content": None}}}, "bos_token must be a text, or an object with a text as content"),
        ({CONFIG_FILE: {OLD_EXTRA_KEY: [None]}}, "must be a text, or an object with a text as content, got null"),
        ({CONFIG_FILE: {EXTRA_KEY: "<x>"}}, "extra_special_tokens must be a list or an object of tokens"),
    ],
)
def test_token_that_would_get_another_id_or_is_none_is_refused(tmp_path: Path, files: dict[str, Any], culprit: str):
    with pytest.raises(InputError) as caught:
        with_files(tmp_path, files)
    assert culprit in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_token_that_would_take_the_id_of_another_is_refused(tmp_path: Path):
    """The library counts three tokens, so the next one would have the id 3."""
    made = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 3}, unk_token="a"))
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"pad_token": "<pad>"}))
    with pytest.raises(InputError, match=r"the token '<pad>' would get the id 3 of 'c' in tokenizer\.json"):
        Tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("name", FOLDERS)
def test_names_of_special_tokens_are_those_of_tokens(tmp_path: Path, name: str):
    """Templates print what the tokenizer knows; the empty text is no token."""
    found = Tokenizer(write(tmp_path, FOLDERS[name]))
    assert all(text == "" or found.library.token_to_id(text) is not None for text in read_special_tokens(tmp_path).values())


def test_digest_is_that_of_the_file_unless_tokens_are_added_or_change(tmp_path: Path):
    def digest_with(**config: Any) -> str:
        return with_files(tmp_path, {CONFIG_FILE: config}).digest

    plain = digest_with()
    same = {"4": token("<s>", "special"), "5": token("</s>", "special")}
    assert digest_with(eos_token="</s>", model_max_length=7, added_tokens_decoder=same) == plain
    others = [
        digest_with(added_tokens_decoder={"6": START}),
        digest_with(added_tokens_decoder={"6": token("<|im_start|>")}),
        digest_with(added_tokens_decoder={"6": END}),
        digest_with(added_tokens_decoder={"4": token("<s>")}),
        digest_with(pad_token="<pad>"),
        digest_with(split_special_tokens=True),
    ]
    assert len({plain, *others}) == 1 + len(others)
    assert digest_with() == plain


@FILES
@given(data=st.data(), name=st.sampled_from([CONFIG_FILE, MAP_FILE, ADDED_FILE]))
def test_any_file_of_tokens_is_read_or_is_one_error(tmp_path, data, name):
    content = {
        CONFIG_FILE: {DECODER_KEY: {"6": START, "7": END}, "eos_token": "</s>", EXTRA_KEY: ["<x>", token("<y>")]},
        MAP_FILE: {"eos_token": token("<|im_end|>"), "additional_special_tokens": ["<x>"]},
        ADDED_FILE: {"<|im_start|>": 6},
    }[name]
    path = write(tmp_path, Folder({}, {}, []))

    def use() -> list[int]:
        return Tokenizer(path).encode(TEXT)

    found = with_file(tmp_path / name, data.draw(damaged(content)), use)
    assert isinstance(found, list | InputError)


@pytest.mark.parametrize("count", [20_000])
def test_many_added_tokens_are_read_in_time(tmp_path: Path, count: int):
    """Models of speech have as many; what is slow with so many is quadratic."""
    found = with_files(tmp_path, {ADDED_FILE: {f"<{i}>": 6 + i for i in range(count)}})
    assert found.encode("<19999>") == [20_005]
    assert json.loads(found.library.to_str())["added_tokens"][-1]["id"] == 20_005
