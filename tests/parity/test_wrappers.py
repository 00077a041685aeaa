"""Text parts of models with towers for images, in folders that transformers wrote: logits of texts, and greedy texts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from cases import VOCAB_SIZE, logits, token_rows

import detspec as ds
from detspec.model.transformer import forward_sequences

TOLERANCE = 2e-5  # relative to the largest logit: float32 sums in another order
NUM_NEW = 32
TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
IMAGE_ID = VOCAB_SIZE - 1
sequences_of = jax.jit(forward_sequences, static_argnames="cfg")


def gemma3() -> transformers.PreTrainedConfig:
    rope = {"factor": 8.0, "rope_type": "linear"}
    text = {**TEXT, "sliding_window": 16, "query_pre_attn_scalar": 20, "rope_scaling": rope}
    return transformers.Gemma3Config(
        text_config=text,
        vision_config={**TOWER, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
        image_token_index=IMAGE_ID,
        boi_token_index=IMAGE_ID,
        eoi_token_index=IMAGE_ID,
    )


def mistral3() -> transformers.PreTrainedConfig:
    text = {**TEXT, "model_type": "mistral", "sliding_window": None, "rope_theta": 1e6}
    vision = {**TOWER, "model_type": "pixtral", "head_dim": 8}
    return transformers.Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=IMAGE_ID, tie_word_embeddings=False
    )


@pytest.fixture(scope="module", params=[gemma3, mistral3], ids=lambda make: make.__name__)
def pair(request, tmp_path_factory):
    """A transformers model, and ours of the folder that it was saved to."""
    folder = tmp_path_factory.mktemp("wrapped")
    torch.manual_seed(0)
    theirs = transformers.AutoModelForImageTextToText.from_config(request.param(), attn_implementation="eager")
    theirs = theirs.eval().to(torch.float32)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2))
    theirs.save_pretrained(folder)
    return theirs, ds.load(folder)


def texts(number: int, length: int) -> list[list[int]]:
    """Token ids without that of an image."""
    return [[token % IMAGE_ID for token in row] for row in token_rows(number, length)]


def test_logits_of_texts_agree(pair):
    theirs, model = pair
    rows = texts(3, 100)
    expected = logits(theirs, rows)
    ours = np.asarray(sequences_of(model.params, model.cfg, jnp.asarray(rows, jnp.int32))[0])
    assert np.abs(ours - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_greedy_texts_are_equal(pair):
    theirs, model = pair
    (prompt,) = texts(1, 20)
    config = ds.EngineConfig(max_len=64)
    found = ds.Engine(model, config).generate([prompt], ds.SamplingParams(max_tokens=NUM_NEW, ignore_eos=True))[0]
    text = list(prompt)
    for _ in range(NUM_NEW):  # `generate` of transformers 5.24 gives another text than its own logits, for gemma3
        text.append(int(logits(theirs, [text])[0, -1].argmax()))
    assert [*prompt, *found.token_ids] == text
