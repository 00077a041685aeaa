"""A small random model over bytes, with a tokenizer of its own, and requests for it."""

import dataclasses
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.hf import save_hf
from detspec.checkpoint.load import Model, load
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Completion
from detspec.model.dense import dense_config
from detspec.model.params import Params, init_params
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Numerics, Schedule

# Untied, so that greedy text does not repeat the last token for ever. The vocabulary is large enough for the backend to sum
# its logits in other orders in other batches: ordinary generation must show what verification is for.
BYTE_CFG = dense_config(
    vocab_size=2048, d_model=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=96, max_position=128
)
SCHEDULE = Schedule(Numerics(page=16), Budget(16, 4))
MAX_LEN = 64


def byte_tokenizer(characters: Sequence[str] | None = None) -> Tokenizer:
    """Tokens 0 to 255 are the bytes, the rest pairs of them that text is never cut into but may well be made of.

    `characters`, in byte-level BPE's alphabet, are taken in place of all that.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    characters = characters or [*alphabet, *(a + b for a in alphabet[:7] for b in alphabet)]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@cache
def byte_params() -> Params:
    """Random weights, the same in every run."""
    return init_params(BYTE_CFG, jax.random.key(1))


def broken_params(token: int) -> Params:
    """Finite weights that overflow after `token`: its normed embedding is 8 in the first place, `8 * 5e37` is no float32.

    All other embeddings stay below 6.8 there, so that their logits are large, but finite.
    """
    params = byte_params()
    embed = params["embed"].at[token].set(0).at[token, 0].set(1000)
    return {**params, "embed": embed, "head": params["head"].at[5, 0].set(5e37)}


def counting_params(circle: int = 16) -> Params:
    """Token `(t + 1) % circle` follows token `t < circle`: embeddings are one-hot, and the layer adds nothing."""
    params = jax.tree.map(jnp.zeros_like, byte_params())
    token = np.arange(circle)
    params["embed"] = params["embed"].at[token, token].set(1)
    params["head"] = params["head"].at[(token + 1) % circle, token].set(1)
    params["final_norm"] = jnp.ones_like(params["final_norm"])
    return params


def write_folder(path: Path, params: Params | None = None) -> Path:
    """A Hugging Face folder of the model."""
    save_hf(path, BYTE_CFG, params or byte_params(), tokenizer_json=byte_tokenizer().to_str())
    return path


def load_folder(path: Path) -> Model:
    """The model, through a folder."""
    return load(write_folder(path))


def make_engine(model: Model, max_requests: int, method: str, **changes) -> Engine:
    """An engine with room for requests of `MAX_LEN` tokens. Those of one shape share their compiled programs."""
    shape = {
        "max_requests": max_requests,
        "max_len": MAX_LEN,
        "method": method,
        "num_speculative_tokens": 3,
        "schedule": SCHEDULE,
    }
    return Engine(model, EngineConfig(**{**shape, **changes}))


def without_tokenizer(params: Params) -> Model:
    """A model of these weights for prompts of token ids."""
    return Model(BYTE_CFG, params, None, (), digest_model(BYTE_CFG, params))


def some_prompts(number: int = 8) -> list[list[int]]:
    """Prompts of 1 to 30 tokens."""
    rng = np.random.default_rng(7)
    return [rng.integers(0, 256, 1 + (11 * i) % 30).tolist() for i in range(number)]


def some_sampling(number: int = 8, *, deterministic: bool = True) -> list[SamplingParams]:
    """Greedy and sampled, of 5 to 29 new tokens; nothing that needs logits processing, whose programs are larger."""
    return [
        SamplingParams(max_tokens=5 + (8 * i) % 25, temperature=(0.0, 0.8, 1.2)[i % 3], seed=i, deterministic=deterministic)
        for i in range(number)
    ]


def ordinary(sampling: SamplingParams) -> SamplingParams:
    """Returns the request unverified."""
    return dataclasses.replace(sampling, deterministic=False)


def facts(completion: Completion) -> tuple[tuple[int, ...], bytes, str]:
    """Everything deterministic about a completion: tokens, log-probability bits, why it ended."""
    return completion.token_ids, np.asarray(completion.logprobs, np.float32).tobytes(), completion.finish_reason
