"""Folders with the shapes of published ones, which transformers loads, too: equal tokens, logits and greedy texts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from cases import VOCAB_SIZE, greedy, logits, token_rows, write
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

import detspec as ds
from detspec.checkpoint.families.inert import INERT_KEYS
from detspec.model.transformer import forward_sequences

TOLERANCE = 2e-5  # relative to the largest logit: float32 sums in another order
MAX_ID = VOCAB_SIZE - 1
sequences_of = jax.jit(forward_sequences, static_argnames="cfg")


def letters(num_words: int, added: tuple[str, ...]) -> tokenizers.Tokenizer:
    """A tokenizer of `num_words` characters, and special tokens after them."""
    words = [chr(33 + i) for i in range(num_words)]
    made = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="!"))
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(text, normalized=False) for text in added])
    return made


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **changes}))


def gemma3(folder: Path) -> None:
    """gemma-3-1b-it: the tokenizer has one token more than the embedding has rows."""
    letters(VOCAB_SIZE - 1, ("<end_of_turn>", "<image_soft_token>")).save(str(folder / "tokenizer.json"))
    edit(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", image_token="<image_soft_token>")


def padded_llama(folder: Path) -> None:
    """Fine-tunes of Llama 2: added_tokens.json alone has `<pad>`, beyond the embedding; an old config, and old buffers."""
    letters(VOCAB_SIZE, ()).save(str(folder / "tokenizer.json"))
    edit(folder / "added_tokens.json", **{"<pad>": VOCAB_SIZE})
    edit(folder / "special_tokens_map.json", pad_token="<pad>", eos_token="#")
    keys = {"max_length": 4096, "max_sequence_length": 2048, "temperature": 0.9, "top_p": 0.6, "pruned_heads": {}}
    keys |= {"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}, "_model_name_or_path": "x", "_commit_hash": "0"}
    assert keys.keys() - {"pruned_heads"} <= INERT_KEYS.keys()
    edit(folder / "config.json", **keys, key_without_a_value=None)
    store_buffers(folder, "model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")


def openorca(folder: Path) -> None:
    """Mistral-7B-OpenOrca: the tokens of chat stand in added_tokens_decoder alone; a single file next to an equal index."""
    letters(VOCAB_SIZE - 2, ()).save(str(folder / "tokenizer.json"))
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    decoder = {str(MAX_ID - 1 + i): {"content": text, **flags} for i, text in enumerate(("<|im_end|>", "<|im_start|>"))}
    config = {"eos_token": "<|im_end|>", "added_tokens_decoder": decoder}
    edit(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **config)
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "model-00001-of-00001.safetensors")
    (folder / "model-00001-of-00001.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    edit(folder / "model.safetensors.index.json", metadata={}, weight_map=names)


def store_buffers(folder: Path, *names: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, **{name: torch.ones(4) for name in names}}, folder / "model.safetensors", metadata={"format": "pt"})


FOLDERS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "gemma3": ("gemma3", gemma3, "<image_soft_token>"),
    "padded_llama": ("llama", padded_llama, "<pad>"),
    "openorca": ("mistral", openorca, ""),
}
TEXTS = ("#$%", "<|im_start|>#%<|im_end|>", "%<end_of_turn>#", "##<pad<")


@pytest.fixture(scope="module", params=FOLDERS)
def pair(request, tmp_path_factory):
    """The folder, the model in transformers, and the text of a token beyond the embedding."""
    case, change, beyond = FOLDERS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    write(case, folder)
    change(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return folder, theirs, beyond


def test_tokens_are_those_of_transformers(pair):
    folder, _, beyond = pair
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours = ds.load(folder).tokenizer
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
    assert len(theirs) == ours.vocab_size == VOCAB_SIZE + (beyond != "")
    assert max(id for text in TEXTS for id in ours.encode(text)) <= MAX_ID
    if beyond:
        assert theirs.encode(f"#{beyond}")[-1] == VOCAB_SIZE
        with pytest.raises(ds.InputError, match=f"holds the token '{beyond}' with id {VOCAB_SIZE}"):
            ours.encode(f"#{beyond}")


def test_logits_and_greedy_text_are_those_of_transformers(pair):
    folder, theirs, beyond = pair
    model = ds.load(folder)
    rows = list(token_rows(2))
    expected = logits(theirs, rows)
    found = np.asarray(sequences_of(model.params, model.cfg, jnp.asarray(rows))[0])
    assert np.abs(found - expected).max() < TOLERANCE * np.abs(expected).max()
    engine = ds.Engine(model, ds.EngineConfig(max_requests=1, max_len=64))
    (out,) = engine.generate([rows[0][:20]], ds.SamplingParams(max_tokens=16, ignore_eos=True))
    assert list(out.token_ids) == greedy(theirs, rows[0][:20], 16)
    if beyond:
        with pytest.raises(ds.InputError, match=f"the prompt holds the token '{beyond}' with id {VOCAB_SIZE}"):
            engine.generate([[1, VOCAB_SIZE]], ds.SamplingParams(max_tokens=1))
