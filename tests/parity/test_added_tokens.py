"""Tokens that stand in other files than tokenizer.json, compared with transformers: the stored cases, and random folders."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from detspec.checkpoint.added_tokens import ADDED_FILE, CONFIG_FILE, DECODER_KEY, EXTRA_KEY, MAP_FILE, NAMES, OLD_EXTRA_KEY
from detspec.checkpoint.tokenizer import Tokenizer
from tests.checkpoint.added_token_folders import FLAGS, FOLDERS, TEXT, TYPED, described, tokenizer, write

TOKENS = ("<A>", "<B>", "<C>", "<D>", "</s>", "<w>", "[PAD]", "<E f>")  # two of them are in the vocabulary
TEXTS = ("x <A> <B>y", "<C><D></s>z <w>", "[PAD] <E f> q", "<a> <b> <e F>x", " ".join(TOKENS))


@pytest.mark.parametrize("name", FOLDERS)
def test_stored_folders_have_the_tokens_that_the_tests_expect(name, tmp_path):
    case = FOLDERS[name]
    write(tmp_path, case)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    own = tokenizer().get_added_tokens_decoder()
    found = {id: described(token.__getstate__()) for id, token in theirs.backend_tokenizer.get_added_tokens_decoder().items()}
    assert found == {**{id: described(token.__getstate__()) for id, token in own.items()}, **case.added}
    assert [id for id in theirs.encode(TEXT) if id] == case.ids


class RandomFolder:
    """Files of tokens that agree about ids, with names, lists and flags drawn at random."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tokenizer = self._tokenizer()
        self.files = {CONFIG_FILE: self._config()}
        if self.rng.random() < 0.6:
            self.files[MAP_FILE] = self._named(typed=False)
            if self.rng.random() < 0.4:
                self.files[MAP_FILE][self.rng.choice((EXTRA_KEY, OLD_EXTRA_KEY))] = self.rng.sample(TOKENS, 2)
        if self.rng.random() < 0.5:
            self.files[ADDED_FILE] = {token: int(id) for id, token in self._numbered().items()}

    def write(self, folder: Path) -> Path:
        for name, content in self.files.items():
            (folder / name).write_text(json.dumps(content))
        self.tokenizer.save(str(folder / "tokenizer.json"))
        return folder / "tokenizer.json"

    def _tokenizer(self) -> tokenizers.Tokenizer:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        made = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, "</s>", "<w>"])}, []))
        made.normalizer = normalizers.Lowercase()
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.add_tokens([AddedToken(text, **self._flags()) for text in self.rng.sample(TOKENS, self.rng.randint(0, 3))])
        if self.rng.random() < 0.25:
            made.enable_padding(pad_token="[PAD]")
        return made

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self._named(typed=True)}
        kind = self.rng.random()
        if kind < 0.3:
            key = self.rng.choice((EXTRA_KEY, OLD_EXTRA_KEY))
            config[key] = [self._token(typed=True) for _ in range(self.rng.randint(0, 2))]
        elif kind < 0.45:
            config[EXTRA_KEY] = {f"n{i}_token": self.rng.choice(TOKENS) for i in range(self.rng.randint(0, 2))}
        if self.rng.random() < 0.5:
            items = [(id, {"content": text, **self._flags()}) for id, text in self._numbered().items()]
            self.rng.shuffle(items)
            config[DECODER_KEY] = dict(items)
        if self.rng.random() < 0.1:
            config["split_special_tokens"] = True
        return config

    def _named(self, *, typed: bool) -> dict[str, Any]:
        names = self.rng.sample((*NAMES, "image_token", "a_token"), self.rng.randint(0, 3))
        return {name: self._token(typed=typed) for name in names}

    def _token(self, *, typed: bool) -> str | dict[str, Any]:
        text = self.rng.choice(TOKENS)
        return text if self.rng.random() < 0.6 else {**(TYPED if typed else {}), "content": text, **self._flags()}

    def _flags(self) -> dict[str, bool]:
        return {flag: self.rng.random() < 0.4 for flag in FLAGS}

    def _numbered(self) -> dict[str, str]:
        """Some tokens with the ids that they have or would get."""
        chosen = self.rng.sample(TOKENS, self.rng.randint(0, 4))
        new = [token for token in chosen if self.tokenizer.token_to_id(token) is None]
        first = max(self.tokenizer.get_vocab().values()) + 1
        ids = {token: self.tokenizer.token_to_id(token) for token in chosen} | {token: first + i for i, token in enumerate(new)}
        return {str(id): token for token, id in ids.items()}


@pytest.mark.parametrize("block", range(4))
def test_random_folders_have_equal_tokens_ids_and_texts(block, tmp_path):
    for seed in range(100 * block, 100 * block + 100):
        folder = tmp_path / str(seed)
        folder.mkdir()
        path = RandomFolder(seed).write(folder)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        ours = Tokenizer(path)
        expected = {id: token.__getstate__() for id, token in theirs.backend_tokenizer.get_added_tokens_decoder().items()}
        assert {id: token.__getstate__() for id, token in ours.library.get_added_tokens_decoder().items()} == expected, seed
        for text in TEXTS:
            assert ours.encode(text) == theirs.encode(text), (seed, text)
        for id in expected:
            for skip in (True, False):
                assert ours.decode([id], skip_special_tokens=skip) == theirs.decode([id], skip_special_tokens=skip), (seed, id)
