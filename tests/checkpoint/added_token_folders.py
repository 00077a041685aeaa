"""Small folders of tokenizers whose tokens stand in several files, and the tokens that transformers finds in them.

`tests/parity/test_added_tokens.py` compares the expectations with transformers.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from detspec.checkpoint.added_tokens import ADDED_FILE, CONFIG_FILE, DECODER_KEY, MAP_FILE

FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
TEXT = "a <|im_start|> <s>b</s><|IM_END|> <pad>"
TYPED = {"__type": "AddedToken"}


class Folder(NamedTuple):
    """The files next to `tokenizer.json`, which has `<s>` and `</s>` as ids 4 and 5, and what follows from them."""

    files: dict[str, Any]
    added: dict[int, str]  # tokens that are new or have other flags: text, then the flags that are true
    ids: list[int]  # of `TEXT`, unknown characters left out
    padding: str | None = None  # that of `tokenizer.json`


def token(text: str, *flags: str) -> dict[str, Any]:
    return {"content": text, **{flag: flag in flags for flag in FLAGS}}


START = token("<|im_start|>", "special")
END = token("<|im_end|>", "special")
FOLDERS: dict[str, Folder] = {
    "decoder": Folder(
        {CONFIG_FILE: {DECODER_KEY: {"7": END, "6": START}}},
        {6: "<|im_start|> special", 7: "<|im_end|> special"},
        [1, 3, 6, 3, 4, 2, 5, 3, 3, 1],
    ),
    "decoder_of_all": Folder(
        {CONFIG_FILE: {DECODER_KEY: {"4": token("<s>", "special"), "5": token("</s>", "special"), "6": START, "7": END}}},
        {6: "<|im_start|> special", 7: "<|im_end|> special"},
        [1, 3, 6, 3, 4, 2, 5, 3, 3, 1],
    ),
    "decoder_without_special": Folder(
        {
            CONFIG_FILE: {
                DECODER_KEY: {"6": token("<|im_start|>", "normalized"), "7": token("<|im_end|>", "lstrip", "normalized")}
            }
        },
        {6: "<|im_start|> normalized", 7: "<|im_end|> lstrip normalized"},
        [1, 3, 6, 3, 4, 2, 5, 7, 3, 1],
    ),
    "decoder_takes_the_named_for_special": Folder(
        {CONFIG_FILE: {"eos_token": "<|im_end|>", DECODER_KEY: {"6": token("<|im_start|>"), "7": token("<|im_end|>")}}},
        {6: "<|im_start|>", 7: "<|im_end|> special"},
        [1, 3, 6, 3, 4, 2, 5, 3, 3, 1],
    ),
    "flags_of_the_decoder_win": Folder(
        {CONFIG_FILE: {DECODER_KEY: {"4": token("<s>", "lstrip", "rstrip"), "5": token("</s>", "special", "single_word")}}},
        {4: "<s> lstrip rstrip", 5: "</s> special single_word"},
        [1, 3, 3, 1, 4, 2, 3, 3, 1],
    ),
    "capitals": Folder({ADDED_FILE: {"<|IM_START|>": 6}}, {6: "<|IM_START|> normalized"}, [1, 3, 6, 3, 4, 2, 5, 3, 3, 1]),
    "special_in_the_decoder_alone": Folder(
        {CONFIG_FILE: {DECODER_KEY: {"6": token("<pad>", "special")}}}, {6: "<pad> special"}, [1, 3, 3, 1, 3, 4, 2, 5, 3, 3, 6]
    ),
    "added_tokens": Folder(
        {ADDED_FILE: {"<|im_end|>": 7, "<|im_start|>": 6, "<s>": 4}},
        {6: "<|im_start|> normalized", 7: "<|im_end|> normalized"},
        [1, 3, 6, 3, 4, 2, 5, 7, 3, 1],
    ),
    "added_tokens_special_by_config": Folder(
        {
            ADDED_FILE: {"<|im_end|>": 7, "<|im_start|>": 6},
            CONFIG_FILE: {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]},
        },
        {6: "<|im_start|> special", 7: "<|im_end|> special"},
        [1, 3, 6, 3, 4, 2, 5, 3, 3, 1],
    ),
    "added_tokens_special_by_map": Folder(
        {
            ADDED_FILE: {"<|im_end|>": 7, "<|im_start|>": 6},
            MAP_FILE: {"eos_token": token("<|im_end|>", "rstrip"), "additional_special_tokens": ["<|im_start|>"]},
        },
        {6: "<|im_start|> normalized", 7: "<|im_end|> special"},
        [1, 3, 6, 3, 4, 2, 5, 3, 3, 1],
    ),
    "decoder_hides_added_tokens_and_map": Folder(
        {ADDED_FILE: {"<|im_start|>": 6}, MAP_FILE: {"pad_token": "<pad>"}, CONFIG_FILE: {DECODER_KEY: {"6": END}}},
        {6: "<|im_end|> special"},
        [1, 3, 3, 1, 3, 4, 2, 5, 3, 3, 1],
    ),
    "named_in_config": Folder(
        {
            CONFIG_FILE: {
                "pad_token": "<pad>",
                "bos_token": {**TYPED, **token("<|im_start|>", "special", "lstrip")},
                "eos_token": "</s>",
            }
        },
        {6: "<|im_start|> special lstrip", 7: "<pad> special"},
        [1, 6, 3, 4, 2, 5, 3, 3, 7],
    ),
    "named_in_map": Folder(
        {MAP_FILE: {"pad_token": "<pad>", "bos_token": token("<|im_start|>", "lstrip")}, CONFIG_FILE: {"pad_token": "<s>"}},
        {6: "<|im_start|> special lstrip", 7: "<pad> special"},
        [1, 6, 3, 4, 2, 5, 3, 3, 7],
    ),
    "named_in_config_after_the_decoder": Folder(
        {CONFIG_FILE: {"image_token": "<|im_start|>", "pad_token": "<pad>", DECODER_KEY: {"6": END}}},
        {6: "<|im_end|> special", 7: "<pad> special", 8: "<|im_start|> special"},
        [1, 3, 8, 3, 4, 2, 5, 3, 3, 7],
    ),
    "object_without_a_type_is_no_token": Folder(
        {CONFIG_FILE: {"boi_token": START, "x_token": {"a": 1}, "image_token": "<pad>"}},
        {6: "<pad> special"},
        [1, 3, 3, 1, 3, 4, 2, 5, 3, 3, 6],
    ),
    "object_with_a_type_is_a_token": Folder(
        {CONFIG_FILE: {"boi_token": {**TYPED, **START}, "image_token": "<pad>"}},
        {6: "<|im_start|> special", 7: "<pad> special"},
        [1, 3, 6, 3, 4, 2, 5, 3, 3, 7],
    ),
    "object_of_the_map_needs_no_type": Folder(
        {MAP_FILE: {"boi_token": START, "x_token": {"a": 1}}, CONFIG_FILE: {"image_token": "<pad>"}},
        {6: "<|im_start|> special", 7: "<pad> special"},
        [1, 3, 6, 3, 4, 2, 5, 3, 3, 7],
    ),
    "null_text_adds_no_token": Folder(
        {MAP_FILE: {"bos_token": {"content": None}}, CONFIG_FILE: {"eos_token": TYPED, "pad_token": "<pad>"}},
        {6: "<pad> special"},
        [1, 3, 3, 1, 3, 4, 2, 5, 3, 3, 6],
    ),
    "null_text_of_the_decoder_adds_no_token": Folder(
        {CONFIG_FILE: {DECODER_KEY: {"7": {"content": None}, "8": {"special": True}, "6": token("<pad>", "special")}}},
        {6: "<pad> special"},
        [1, 3, 3, 1, 3, 4, 2, 5, 3, 3, 6],
    ),
    "null_of_the_map_hides_the_config": Folder(
        {MAP_FILE: {"bos_token": None}, CONFIG_FILE: {"bos_token": "<|im_start|>", "pad_token": "<pad>"}},
        {6: "<pad> special"},
        [1, 3, 3, 1, 3, 4, 2, 5, 3, 3, 6],
    ),
    "extra_list": Folder(
        {CONFIG_FILE: {"extra_special_tokens": ["<|im_end|>", {**TYPED, **token("<pad>", "rstrip")}]}},
        {6: "<|im_end|> special", 7: "<pad> rstrip"},
        [1, 3, 3, 1, 3, 4, 2, 5, 3, 3, 7],
    ),
    "extra_names": Folder(
        {CONFIG_FILE: {"extra_special_tokens": {"start_token": "<|im_start|>"}, "mask_token": "<pad>"}},
        {6: "<pad> special", 7: "<|im_start|> special"},
        [1, 3, 7, 3, 4, 2, 5, 3, 3, 6],
    ),
    "additional_of_both": Folder(
        {
            CONFIG_FILE: {"additional_special_tokens": ["<pad>"]},
            MAP_FILE: {"additional_special_tokens": ["<|im_start|>"], "extra_special_tokens": ["<|im_end|>"]},
        },
        {6: "<pad> special", 7: "<|im_end|> special"},
        [1, 3, 3, 1, 3, 4, 2, 5, 3, 3, 6],
    ),
    "vocabulary_becomes_special": Folder(
        {CONFIG_FILE: {"eos_token": "b"}}, {2: "b special"}, [1, 3, 3, 1, 3, 4, 2, 5, 3, 3, 1]
    ),
    "token_for_padding": Folder(
        {CONFIG_FILE: {"eos_token": "</s>"}}, {6: "<pad> special"}, [1, 3, 3, 1, 3, 4, 2, 5, 3, 3, 6], padding="<pad>"
    ),
    "no_files": Folder({}, {}, [1, 3, 3, 1, 3, 4, 2, 5, 3, 3, 1]),
    "split": Folder(
        {CONFIG_FILE: {"split_special_tokens": True, DECODER_KEY: {"6": START}}},
        {6: "<|im_start|> special"},
        [1, 3, 3, 1, 3, 2, 3, 3, 1],
    ),
}


def tokenizer(padding: str | None = None) -> tokenizers.Tokenizer:
    """Characters a and b, blank, all else as one unknown token, ids 0 to 3; the normalizer makes letters small."""
    vocabulary = {"?": 0, "a": 1, "b": 2, "_": 3}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(" ", "_")])
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(text, normalized=False) for text in ("<s>", "</s>")])
    if padding is not None:
        made.enable_padding(pad_token=padding)
    return made


def write(folder: Path, case: Folder) -> Path:
    """Writes the files of a case; returns the path of `tokenizer.json`."""
    for name, content in case.files.items():
        kind = {"tokenizer_class": "PreTrainedTokenizerFast"} if name == CONFIG_FILE else {}
        (folder / name).write_text(json.dumps({**kind, **content}))
    path = folder / "tokenizer.json"
    tokenizer(case.padding).save(str(path))
    return path


def described(state: dict[str, Any]) -> str:
    """Text and true flags of a token, as in `Folder.added`."""
    return " ".join([state["content"], *(flag for flag in FLAGS if state[flag])])
