"""The parallel pass of training: its loss and gradients are those of reading chunk by chunk, one thought token at a time."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.config import ModelConfig, ThinkingConfig
from detspec.generation.init import start_state
from detspec.model.params import Params
from detspec.ops.alibi import alibi_slopes
from detspec.ops.rope import rope_frequencies
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Numerics, Schedule
from detspec.state import NO_TOKEN
from detspec.thinking import taught
from detspec.thinking.blocks import compress_sequences
from detspec.thinking.taught import forward_taught
from detspec.thinking.think_prompt import think_prompt
from tests.double import QUICK_COMPILATION, in_float64
from tests.fakes import random_model

THINKING = ThinkingConfig(chunk=4, in_layer=1, out_layer=2, max_thought=3, end_id=0)
PLAIN = ModelConfig(*(31, 16, 3, 2, 2, 8, 24), dtype="float32", thinking=THINKING)
CFGS = {
    "plain": PLAIN,
    "grouped": dataclasses.replace(PLAIN, num_heads=4, num_kv_heads=2, tie_embeddings=True),
    "alibi": dataclasses.replace(PLAIN, position_encoding="alibi"),
    "sliding": dataclasses.replace(PLAIN, sliding_window=3, sliding_layers=(True, False, True)),
    "long thoughts": dataclasses.replace(PLAIN, thinking=dataclasses.replace(THINKING, max_thought=6)),
}
TOKENS = np.asarray([[3, 9, 4, 20, 8, 30, 12, 5, 7, 2, 6, 11, 17, 23]], np.int32)
# A thought that ends early, a trivial one and one that is cut; and of at most 6 tokens, more than fit the compressor's places.
THOUGHTS = {
    3: np.asarray([[[14, 0, -1], [0, -1, -1], [3, 8, 3]]], np.int32),
    6: np.asarray([[[14, 3, 7, 9, 0, -1], [0, -1, -1, -1, -1, -1], [3, 8, 3, 2, 21, 5]]], np.int32),
}
compiled = partial(jax.jit, compiler_options=QUICK_COMPILATION)
EPS32, EPS64 = 2.0**-23, 2.0**-52


def loss_of(logits: jax.Array, thought_logits: jax.Array, tokens: np.ndarray, thoughts: np.ndarray) -> jax.Array:
    """Sum of the cross entropies of the text's next tokens and of the thoughts' tokens."""
    text = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), jnp.asarray(tokens)[:, 1:, None], axis=-1)
    said = jnp.take_along_axis(jax.nn.log_softmax(thought_logits), jnp.maximum(jnp.asarray(thoughts), 0)[..., None], axis=-1)
    return -text.sum() - jnp.where((thoughts != NO_TOKEN)[..., None], said, jnp.zeros_like(said)).sum()


def taught_loss(params: Params, cfg: ModelConfig, tokens: np.ndarray, thoughts: np.ndarray) -> jax.Array:
    return loss_of(*forward_taught(params, cfg, jnp.asarray(tokens), jnp.asarray(thoughts)), tokens, thoughts)


def slow_loss(params: Params, cfg: ModelConfig, tokens: np.ndarray, thoughts: np.ndarray) -> jax.Array:
    """The same by reading: the whole prefix again for each chunk, each thought one token at a time; in the params' dtype."""
    rows = [slow_logits(params, cfg, row, of_row) for row, of_row in zip(tokens, thoughts, strict=True)]
    return loss_of(jnp.stack([row[0] for row in rows]), jnp.stack([row[1] for row in rows]), tokens, thoughts)


def slow_logits(params: Params, cfg: ModelConfig, tokens: np.ndarray, thoughts: np.ndarray) -> tuple[jax.Array, jax.Array]:
    C, D = cfg.thinking.chunk, cfg.d_model
    dtype = params["embed"].dtype
    states, logits, thought_logits = [jnp.zeros((C, D), dtype)], [], []
    head = params["embed"] if cfg.tie_embeddings else params["head"]
    for chunk in range(-(-len(tokens) // C)):
        end = min((chunk + 1) * C, len(tokens))
        x, tapped = params["embed"][tokens[:end]], None
        for depth, layer in enumerate(params["layers"]):
            if depth == cfg.thinking.in_layer:
                x = x + jnp.concatenate(states)[:end]
            if depth == cfg.thinking.out_layer:
                tapped = x
            x = slow_block(layer, cfg, x, cfg.sliding_window_of(depth))
        logits.append(norm(x, params["final_norm"], cfg)[chunk * C :] @ head.T)
        if chunk < len(thoughts):
            thought_logits.append(slow_thought(params, cfg, tapped[chunk * C :], thoughts[chunk]))
            states.append(slow_states(params, cfg, thoughts[chunk]))
    return jnp.concatenate(logits), jnp.stack(thought_logits)


def slow_thought(params: Params, cfg: ModelConfig, tapped: jax.Array, thought: np.ndarray) -> jax.Array:
    """What the thinker says after each token of `thought [M]`: `[M, V]`, zeros behind its end."""
    thinker, said = params["thinking"]["thinker"], []
    for place, token in enumerate(thought):
        if token == NO_TOKEN:
            said.append(jnp.zeros_like(said[0]))
            continue
        x = jnp.concatenate([tapped, params["embed"][thought[:place]]])
        x = slow_block(thinker["layer"], cfg, x, None)
        said.append(norm(x[-1], thinker["final_norm"], cfg) @ thinker["head"].T)
    return jnp.stack(said)


def slow_states(params: Params, cfg: ModelConfig, thought: np.ndarray) -> jax.Array:
    """States `[C, D]`: of the thought, closed if it was cut, and ending tokens up to `C` places; the last `C` of them."""
    C, end_id = cfg.thinking.chunk, cfg.thinking.end_id
    said = [int(token) for token in thought if token != NO_TOKEN]
    if said[0] == end_id:
        return jnp.zeros((C, cfg.d_model), params["embed"].dtype)
    said = [*said[:-1], end_id]
    said += [end_id] * (C - len(said))
    return slow_block(params["thinking"]["compressor"]["layer"], cfg, params["embed"][np.asarray(said)], None)[-C:]


def slow_block(layer: Params, cfg: ModelConfig, x: jax.Array, window: int | None) -> jax.Array:
    """One layer over `x [T, D]` from position 0."""
    T, (N, K, H) = len(x), (cfg.num_heads, cfg.num_kv_heads, cfg.head_dim)
    y = norm(x, layer["attn_norm"], cfg)
    q, k, v = (jnp.reshape(y @ layer[name].T, (T, -1, H)) for name in "qkv")
    if cfg.position_encoding == "rope":
        q, k = rotate(q, cfg), rotate(k, cfg)
    k, v = jnp.repeat(k, N // K, axis=1), jnp.repeat(v, N // K, axis=1)
    distance = np.arange(T)[:, None] - np.arange(T)[None, :]
    scores = jnp.einsum("TNH,SNH->NTS", q, k) * np.asarray(np.float32(H**-0.5), x.dtype)
    if cfg.position_encoding == "alibi":
        scores = scores - np.asarray(alibi_slopes(N), x.dtype)[:, None, None] * np.asarray(distance, x.dtype)[None]
    visible = (distance >= 0) & (distance < (window or T))
    weights = jax.nn.softmax(jnp.where(visible[None], scores, -jnp.inf), axis=-1)
    x = x + jnp.einsum("NTS,SNH->TNH", weights, v).reshape(T, N * H) @ layer["o"].T
    y = norm(x, layer["mlp_norm"], cfg)
    return x + (jax.nn.silu(y @ layer["gate"].T) * (y @ layer["up"].T)) @ layer["down"].T


def norm(x: jax.Array, scale: jax.Array, cfg: ModelConfig) -> jax.Array:
    return (
        x
        / jnp.sqrt((x * x).mean(-1, keepdims=True) + np.asarray(np.float32(cfg.norm_eps), x.dtype))
        * scale.reshape(*[1] * (x.ndim - 1), -1)
    )


def rotate(x: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Rotary positions of `x [T, N, H]`: the first half of a head turns against the second."""
    half = cfg.head_dim // 2
    angle = np.arange(len(x))[:, None] * rope_frequencies(cfg.head_dim, cfg.rope_theta).astype(np.float64)[None, :]
    cos, sin = (np.asarray(f(angle), x.dtype)[:, None, :] for f in (np.cos, np.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def trained_parts(cfg: ModelConfig) -> Params:
    """Random weights with a thinker and a compressor that are not copies."""
    params = random_model(cfg)
    other = jax.tree.map(lambda leaf: leaf[::-1], params["thinking"])
    return {**params, "thinking": other}


SWEPT = ("grouped", "alibi", "sliding")  # as slow as the others; the blocks themselves are tested with them elsewhere


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SWEPT else ()) for name in CFGS])
def test_gradients_of_the_parallel_pass_are_those_of_reading_chunk_by_chunk(name):
    cfg = CFGS[name]
    thoughts, params = THOUGHTS[cfg.thinking.max_thought], trained_parts(cfg)
    loss, grads = in_float64(lambda params: jax.value_and_grad(taught_loss)(params, cfg, TOKENS, thoughts), params)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), params)
        slow = jax.value_and_grad(lambda params: slow_loss(params, cfg, TOKENS, thoughts))
        exact_loss, exact_grads = jax.tree.map(np.asarray, compiled(slow)(exact))
    # Both in float64, with the model's constants as it holds them: some hundred roundings in a row are left. A wrong path
    # through the states or the thinker is off by a percent and more, see the test below.
    assert abs(loss - exact_loss) <= 64 * EPS64 * abs(exact_loss)
    for (path, grad), expected in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(exact_grads), strict=True):
        assert np.linalg.norm(expected) > 0, jax.tree_util.keystr(path)
        error = np.linalg.norm(grad - expected) / np.linalg.norm(expected)
        assert error <= 64 * EPS64, f"{jax.tree_util.keystr(path)}: {error / EPS64:.0f} eps"


@pytest.fixture(scope="module")
def gradients() -> Params:
    """Of the plain model, as it is trained: compiled in float32."""
    return jax.jit(jax.grad(taught_loss), static_argnums=1)(trained_parts(PLAIN), PLAIN, TOKENS, THOUGHTS[3])


def test_gradients_as_trained_with_are_those_in_float64_rounded(gradients):
    exact = in_float64(lambda params: jax.grad(taught_loss)(params, PLAIN, TOKENS, THOUGHTS[3]), trained_parts(PLAIN))
    for found, expected in zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True):
        assert found.dtype == np.float32
        error = np.linalg.norm(np.asarray(found, np.float64) - expected)
        assert error <= 64 * EPS32 * np.linalg.norm(expected)  # some hundred roundings in a row, of either sign


def test_gradients_without_the_path_through_the_states_are_far_from_them(gradients, monkeypatch):
    def blind(*args: object) -> jax.Array:
        return jax.lax.stop_gradient(compress_sequences(*args))

    monkeypatch.setattr(taught, "compress_sequences", blind)
    without = compiled(lambda params: jax.grad(taught_loss)(params, PLAIN, TOKENS, THOUGHTS[3]))(trained_parts(PLAIN))
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(without["thinking"]["compressor"]))
    assert all((leaf != 0).any() for leaf in jax.tree.leaves(gradients["thinking"]["compressor"]))
    error = np.linalg.norm(without["embed"] - gradients["embed"]) / np.linalg.norm(gradients["embed"])
    assert error > 1e-3, error  # rounding is 8e-6 at most


def test_gradient_does_not_go_through_the_generation_of_a_thought():
    """Thoughts that the model generates inside the differentiated function give the bits of the gradients of given ones."""
    params, tokens = trained_parts(PLAIN), jnp.asarray(TOKENS)
    schedule = Schedule(Numerics(page=16), Budget(16, 4))
    state = start_state(PLAIN, TOKENS.tolist(), [SamplingParams(max_tokens=1)], eos_ids=(), max_len=16, schedule=schedule)

    def generated_by(params: Params) -> jax.Array:
        reading = think_prompt(params, PLAIN, state, schedule=schedule).reading
        assert reading is not None
        return reading.thoughts[:, :3]

    def loss(params: Params, thoughts: jax.Array) -> jax.Array:
        logits, said = forward_taught(params, PLAIN, tokens, thoughts)
        return (logits**2).sum() + (said**2).sum()

    thoughts = compiled(generated_by)(params)
    assert len(set(thoughts[0, :, 0].tolist())) > 1
    through = compiled(jax.grad(lambda params: loss(params, generated_by(params))))(params)
    of_given = compiled(jax.grad(loss))
    fixed, other = of_given(params, thoughts), of_given(params, jnp.asarray(THOUGHTS[3]))
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(through), jax.tree.leaves(fixed), strict=True))
    assert all((a != b).any() for a, b in zip(jax.tree.leaves(through), jax.tree.leaves(other), strict=True))


def test_token_of_a_thought_alone_is_felt_where_the_thought_is_read_and_nowhere_else():
    """Its embedding has a gradient through the compressor into later text, and through the thinker into later thoughts."""
    params, token = trained_parts(PLAIN), 14  # said first in the thought after chunk 0 of row 0, and in no text
    assert not np.isin(token, TOKENS)

    def gradients(params: Params) -> dict[str, jax.Array]:
        def values(row: jax.Array) -> dict[str, jax.Array]:
            given = {**params, "embed": params["embed"].at[token].set(row)}
            logits, said = forward_taught(given, PLAIN, jnp.asarray(TOKENS), jnp.asarray(THOUGHTS[3]))
            parts = {"text before": logits[0, :4], "text": logits[0, 4:8], "itself": said[0, 0, 0]}
            parts |= {"rest of the thought": said[0, 0, 1], "next thought": said[0, 1, 0]}
            return jax.tree.map(lambda part: (part**2).sum(), parts)

        return jax.jacrev(values)(params["embed"][token])

    felt = {name: bool((gradient != 0).any()) for name, gradient in compiled(gradients)(params).items()}
    assert felt == {"text before": False, "text": True, "itself": False, "rest of the thought": True, "next thought": True}
