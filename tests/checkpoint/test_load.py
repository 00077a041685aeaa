"""Loading a model with its tokenizer, and the digest that names it."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import tokenizers

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.folder import find_folder
from detspec.checkpoint.hf import save_hf
from detspec.checkpoint.load import load, load_config
from detspec.checkpoint.tokenizer import Tokenizer
from detspec.engine.engine_config import EngineConfig
from detspec.engine.intake import check_request, request_of, tokens_of
from detspec.engine.request import Request
from detspec.errors import InputError
from detspec.model.dense import dense_config, with_fields
from detspec.model.params import init_params
from detspec.openai.fields import BodyError, ChatBody
from detspec.openai.prompts import chat_prompt, token_ids
from detspec.sampling_params import SamplingParams

TINY = dense_config(
    vocab_size=12, d_model=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=16, max_position=64, dtype="float32"
)


def letters_tokenizer(letters: str) -> str:
    """Ids 0, 1, 2, ... for the words `letters`, one letter each."""
    model = tokenizers.models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=letters[0])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return str(tokenizer.to_str())


def make_folder(path: Path, *, letters: str | None = "abcde", eos_ids: tuple[int, ...] = (4,)) -> Path:
    tokenizer_json = letters_tokenizer(letters) if letters else None
    save_hf(path, TINY, init_params(TINY, jax.random.key(0)), tokenizer_json=tokenizer_json, eos_ids=eos_ids)
    return path


def test_load_returns_all_parts(tmp_path: Path):
    model = load(make_folder(tmp_path / "model"))
    assert model.cfg == TINY
    assert model.eos_ids == (4,)
    assert model.tokenizer is not None
    assert model.tokenizer.vocab_size == 5
    assert model.tokenizer.encode("c a b") == [2, 0, 1]
    assert model.tokenizer.decode([2, 0, 1]) == "c a b"


def test_folder_without_a_tokenizer_loads(tmp_path: Path):
    assert load(make_folder(tmp_path / "model", letters=None)).tokenizer is None


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 4]}, 1, (3, 4)),
        ({"eos_token_id": 5}, 1, (5,)),
        ({}, 1, (1,)),
        (None, [1, 2], (1, 2)),
        (None, None, ()),
    ],
)
def test_eos_ids_come_from_generation_config_first(tmp_path: Path, generation, config, expected):
    folder = make_folder(tmp_path / "model")
    hf_config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**hf_config, "eos_token_id": config}))
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert load(folder).eos_ids == expected


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": True, "top_k": 20}, {"temperature": 1.0, "top_k": 20}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({}, {}),
    ],
)
def test_sampling_defaults_are_those_of_generation_config(tmp_path: Path, generation, expected):
    folder = make_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(generation))
    model = load(folder)
    assert model.sampling_defaults == expected
    assert SamplingParams(**model.sampling_defaults, max_tokens=3).temperature == expected.get("temperature", 0)


@pytest.mark.parametrize("content", ["{", "[]", '{"do_sample": true, "top_p": "high"}'])
def test_damaged_generation_config_is_named(tmp_path: Path, content: str):
    folder = make_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(InputError, match=r"generation_config\.json"):
        load(folder)


def test_token_beyond_the_embedding_is_refused_with_the_text_that_holds_it(tmp_path: Path):
    """As `<image_soft_token>` of Gemma 3, and the token for padding of fine-tunes of Llama 2."""
    model = load(make_folder(tmp_path / "model", letters="abcdefghijklm"))
    assert model.tokenizer is not None
    assert model.tokenizer.vocab_size == 1 + model.cfg.vocab_size
    assert model.tokenizer.encode("l a") == [11, 0]
    with pytest.raises(InputError, match=r"the text holds the token 'm' with id 12.* accepted are ids in 0 \.\. 11"):
        model.tokenizer.encode("a m")
    assert Tokenizer(tmp_path / "model" / "tokenizer.json").encode("a m") == [0, 12]


def test_added_token_beyond_the_embedding_is_refused_with_the_conversation(tmp_path: Path):
    folder = make_folder(tmp_path / "model")
    added = {"12": {"content": "<pad>", "special": True}, **{str(5 + i): {"content": f"<{i}>"} for i in range(7)}}
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    config = {"added_tokens_decoder": added, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = load(folder)
    assert model.chat_prompt([{"role": "user", "content": "a <6>"}]) == [0, 11]
    with pytest.raises(InputError, match="holds the token '<pad>' with id 12"):
        model.chat_prompt([{"role": "user", "content": "a<pad>"}])


def test_token_beyond_the_embedding_is_refused_with_every_kind_of_prompt(tmp_path: Path):
    folder = make_folder(tmp_path / "model", letters="abcdefghijklm")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    model = load(folder)
    config = EngineConfig(max_len=16)
    sampling = SamplingParams(max_tokens=1)
    messages = [{"role": "user", "content": "a m"}]
    named = r" holds the token 'm' with id 12, and the model has no embedding for it"
    for refused in (
        lambda: request_of(model, config, "a m", sampling),
        lambda: request_of(model, config, [0, 12], sampling),
        lambda: check_request(model, config, Request("0", (0,), sampling, given_token_ids=(1, 12))),
        lambda: token_ids("a m", model, max_len=16, add_special=True),
        lambda: chat_prompt(ChatBody(messages=messages), model, max_len=16, now=None),
        lambda: chat_prompt(ChatBody(messages=messages, add_special_tokens=True), model, max_len=16, now=None),
    ):
        with pytest.raises(InputError, match=named):
            refused()
    with pytest.raises(InputError, match=r"the prompt holds token id 13; accepted are integers in 0 \.\. 11"):
        request_of(model, config, [0, 13], sampling)
    assert request_of(model, config, "a l", sampling).prompt_token_ids == (0, 11)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("tokenizer.model", r"no tokenizer\.json, and tokenizer\.model is not read \(transformers: AutoTokenizer"),
        ("tekken.json", r"and tekken\.json is not read"),
        (None, r"the checkpoint has no tokenizer\.json, so"),
    ],
)
def test_folder_with_another_kind_of_tokenizer_loads_and_says_how_texts_can_be_read(tmp_path: Path, name, advice):
    folder = make_folder(tmp_path / "model", letters=None)
    if name is not None:
        (folder / name).write_bytes(b"pieces")
    model = load(folder)
    assert model.tokenizer is None
    with pytest.raises(InputError, match=advice):
        tokens_of(model, "text")
    assert tokens_of(model, [1, 2]) == (1, 2)
    with pytest.raises(InputError, match=advice):
        model.chat_prompt([{"role": "user", "content": "text"}])
    with pytest.raises(BodyError, match=advice):
        token_ids("text", model, max_len=8, add_special=True)


def test_eos_id_beyond_the_embedding_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"eos_token_id \[99\]"):
        load(make_folder(tmp_path / "model", eos_ids=(99,)))


@pytest.mark.parametrize("value", ["end", [1, "end"], -1])
def test_eos_id_that_is_no_id_is_refused(tmp_path: Path, value):
    folder = make_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(InputError, match=r"generation_config\.json: eos_token_id"):
        load(folder)


def test_damaged_tokenizer_is_named(tmp_path: Path):
    folder = make_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json is no tokenizer"):
        load(folder)


def test_digest_names_config_and_every_bit_of_the_weights(tmp_path: Path):
    params = init_params(TINY, jax.random.key(0))
    digest = digest_model(TINY, params)
    assert digest == load(make_folder(tmp_path / "model")).digest
    assert len(digest) == 64
    flipped = {**params, "final_norm": params["final_norm"].at[3].set(jnp.nextafter(jnp.float32(1), jnp.float32(2)))}
    other_cfg = with_fields(TINY, rope_theta=500.0)
    assert len({digest, digest_model(TINY, flipped), digest_model(other_cfg, params)}) == 3


def test_shipped_model_loads_and_reads_python():
    model = load()
    assert model.cfg.dtype == "bfloat16"
    assert model.tokenizer is not None
    source = "def fib(n):\n    if n < 2:\n\treturn n  # ½ é 漢\n\n\n    return fib(n - 1) + fib(n-2)   \n"
    assert model.tokenizer.decode(model.tokenizer.encode(source)) == source
    assert len(model.tokenizer.encode("\n        return self")) == 3
    assert model.eos_ids == (0,)
    assert sum(path.stat().st_size for path in find_folder(None).iterdir()) <= 12 * 2**20


def test_missing_tokenizer_file_is_named(tmp_path: Path):
    with pytest.raises(InputError, match="no such tokenizer file"):
        Tokenizer(tmp_path / "tokenizer.json")


def test_config_alone_needs_no_weights(tmp_path: Path):
    config = (make_folder(tmp_path / "whole") / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    assert load_config(tmp_path) == TINY
    assert load_config(find_folder(None)) == load().cfg


def test_config_alone_without_a_dtype_is_refused(tmp_path: Path):
    config = json.loads((make_folder(tmp_path / "whole") / "config.json").read_text())
    del config["dtype" if "dtype" in config else "torch_dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="no dtype"):
        load_config(tmp_path)


def test_config_of_no_folder_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="no such folder"):
        load_config(tmp_path / "nowhere")
