"""The parallel pass of training: its loss and gradients are those of reading chunk by chunk, one thought token at a time."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.config import ModelConfig, ThinkingConfig
from detspec.generation.init import start_state
from detspec.model.dense import dense_config, with_fields
from detspec.model.params import Params
from detspec.ops.alibi import alibi_slopes
from detspec.ops.rope import rope_frequencies
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Numerics, Schedule
from detspec.state import NO_TOKEN
from detspec.thinking import blocks as taught
from detspec.thinking.blocks import compress_sequences, forward_taught
from detspec.thinking.reading import reading_of
from detspec.thinking.think_prompt import think_prompt
from tests.double import QUICK_COMPILATION, in_float64
from tests.fakes import random_model

pytestmark = pytest.mark.slow

THINKING = ThinkingConfig(chunk=4, in_layer=1, out_layer=2, max_thought=3, end_id=0)
PLAIN = dense_config(*(31, 16, 3, 2, 2, 8, 24), dtype="float32", thinking=THINKING)
CFGS = {
    "plain": PLAIN,
    "grouped": with_fields(PLAIN, num_heads=4, num_kv_heads=2, tie_embeddings=True),
    "alibi": with_fields(PLAIN, position_encoding="alibi"),
    "sliding": with_fields(PLAIN, sliding_window=3, sliding_layers=(True, False, True)),
    "long thoughts": with_fields(
        PLAIN, num_layers=2, thinking=dataclasses.replace(THINKING, in_layer=0, out_layer=1, max_thought=6)
    ),
}
TOKENS = np.asarray([[3, 9, 4, 20, 8, 30, 12, 5, 7, 2, 6, 11, 17, 23]], np.int32)
# A thought that ends early, a trivial one and one that is cut; and of at most 6 tokens, more than fit the compressor's places.
THOUGHTS = {
    3: np.asarray([[[14, 0, -1], [0, -1, -1], [3, 8, 3]]], np.int32),
    6: np.asarray([[[14, 3, 7, 9, 0, -1], [0, -1, -1, -1, -1, -1], [3, 8, 3, 2, 21, 5]]], np.int32),
}
compiled = partial(jax.jit, compiler_options=QUICK_COMPILATION)
EPS32, EPS64 = 2.0**-23, 2.0**-52


def taught_loss(params: Params, cfg: ModelConfig, tokens: jax.Array, thoughts: jax.Array) -> jax.Array:
    """Sum of the cross entropies of the text's next tokens and of the thoughts' tokens."""
    logits, thought_logits = forward_taught(params, cfg, jnp.asarray(tokens), jnp.asarray(thoughts))
    text = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), jnp.asarray(tokens)[:, 1:, None], axis=-1)
    said = jnp.take_along_axis(jax.nn.log_softmax(thought_logits), jnp.maximum(jnp.asarray(thoughts), 0)[..., None], axis=-1)
    return -text.sum() - jnp.where((thoughts != NO_TOKEN)[..., None], said, jnp.zeros_like(said)).sum()


def slow_loss(params: Params, cfg: ModelConfig, tokens: np.ndarray, thoughts: np.ndarray) -> np.complex128:
    """Loss by reading, in numpy: the whole prefix again for each chunk, each thought one token at a time."""
    total = np.complex128(0)
    for row, of_row in zip(tokens, thoughts, strict=True):
        logits, said = slow_logits(params, cfg, row, of_row)
        total += cross_entropy(logits[:-1], row[1:])
        total += sum(cross_entropy(of_one, thought[: len(of_one)]) for of_one, thought in zip(said, of_row, strict=True))
    return total


def slow_slope(params: Params, cfg: ModelConfig, thoughts: np.ndarray, leaf: int, direction: np.ndarray) -> float:
    """How `slow_loss` changes along `direction` of one leaf, to the last bits: by a step that is imaginary and tiny."""
    leaves, structure = jax.tree.flatten(params)
    leaves[leaf] = leaves[leaf] + 1e-30j * direction
    return slow_loss(jax.tree.unflatten(structure, leaves), cfg, TOKENS, thoughts).imag / 1e-30


def cross_entropy(logits: np.ndarray, tokens: np.ndarray) -> np.complex128:
    logits = logits - logits.real.max(-1, keepdims=True)
    return (np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(tokens)), tokens]).sum()


def slow_logits(params: Params, cfg: ModelConfig, tokens: np.ndarray, thoughts: np.ndarray) -> tuple[np.ndarray, list]:
    """Logits of the text `[T, V]`, and of each thought."""
    C, D = cfg.thinking.chunk, cfg.d_model
    states, logits, thought_logits = [np.zeros((C, D))], [], []
    head = params["embed"] if cfg.tie_embeddings else params["head"]
    for chunk in range(-(-len(tokens) // C)):
        end = min((chunk + 1) * C, len(tokens))
        x, tapped = params["embed"][tokens[:end]], None
        for depth, layer in enumerate(params["layers"]):
            if depth == cfg.thinking.in_layer:
                x = x + np.concatenate(states)[:end]
            if depth == cfg.thinking.out_layer:
                tapped = x
            x = slow_block(layer, cfg, x, cfg.layer(depth).mixer.window)
        logits.append(norm(x, params["final_norm"], cfg)[chunk * C :] @ head.T)
        if chunk < len(thoughts):
            thought_logits.append(slow_thought(params, cfg, tapped[chunk * C :], thoughts[chunk]))
            states.append(slow_states(params, cfg, thoughts[chunk]))
    return np.concatenate(logits), thought_logits


def slow_thought(params: Params, cfg: ModelConfig, tapped: np.ndarray, thought: np.ndarray) -> np.ndarray:
    """Logits of the thinker in place of each token of `thought [M]` up to its end: `[tokens, V]`."""
    thinker, said = params["thinking"]["thinker"], []
    for place in range((thought != NO_TOKEN).sum()):
        x = np.concatenate([tapped, params["embed"][thought[:place]]])
        x = slow_block(thinker["layer"], cfg, x, None)
        said.append(norm(x[-1], thinker["final_norm"], cfg) @ thinker["head"].T)
    return np.stack(said)


def slow_states(params: Params, cfg: ModelConfig, thought: np.ndarray) -> np.ndarray:
    """States `[C, D]`: of the thought, closed if it was cut, and ending tokens up to `C` places; the last `C` of them."""
    C, end_id = cfg.thinking.chunk, cfg.thinking.end_id
    said = [int(token) for token in thought if token != NO_TOKEN]
    if said[0] == end_id:
        return np.zeros((C, cfg.d_model))
    said = [*said[:-1], end_id]
    said += [end_id] * (C - len(said))
    return slow_block(params["thinking"]["compressor"]["layer"], cfg, params["embed"][said], None)[-C:]


def slow_block(layer: Params, cfg: ModelConfig, x: np.ndarray, window: int | None) -> np.ndarray:
    """A layer over `x [T, D]` from position 0."""
    mixer = cfg.layer(0).mixer
    T, (N, K, H) = len(x), (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim)
    y = norm(x, layer["attn_norm"], cfg)
    q, k, v = (np.reshape(y @ layer[name].T, (T, -1, H)) for name in "qkv")
    if mixer.positions == "rope":
        q, k = rotate(q, cfg), rotate(k, cfg)
    k, v = np.repeat(k, N // K, axis=1), np.repeat(v, N // K, axis=1)
    distance = np.arange(T)[:, None] - np.arange(T)[None, :]
    scores = np.einsum("TNH,SNH->NTS", q, k) * np.float64(np.float32(H**-0.5))
    if mixer.positions == "alibi":
        scores = scores - alibi_slopes(N).astype(np.float64)[:, None, None] * distance
    visible = (distance >= 0) & (distance < (window or T))
    weights = np.where(visible, np.exp(scores - np.where(visible, scores.real, -np.inf).max(-1, keepdims=True)), 0)
    attended = np.einsum("NTS,SNH->TNH", weights / weights.sum(-1, keepdims=True), v)
    x = x + attended.reshape(T, N * H) @ layer["o"].T
    y = norm(x, layer["mlp_norm"], cfg)
    gate = y @ layer["gate"].T
    return x + (gate / (1 + np.exp(-gate)) * (y @ layer["up"].T)) @ layer["down"].T


def norm(x: np.ndarray, scale: np.ndarray, cfg: ModelConfig) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float64(np.float32(cfg.norm_eps))) * scale


def rotate(x: np.ndarray, cfg: ModelConfig) -> np.ndarray:
    """Rotary positions of `x [T, N, H]`: the first half of a head turns against the second."""
    mixer = cfg.layer(0).mixer
    half = mixer.head_dim // 2
    angle = np.arange(len(x))[:, None] * rope_frequencies(mixer.head_dim, mixer.rope.theta).astype(np.float64)[None, :]
    cos, sin = (f(angle)[:, None, :] for f in (np.cos, np.sin))
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def trained_parts(cfg: ModelConfig) -> Params:
    """Random weights with a thinker and a compressor that are not copies."""
    params = random_model(cfg)
    other = jax.tree.map(lambda leaf: leaf[::-1], params["thinking"])
    return {**params, "thinking": other}


gradients_of = compiled(jax.grad(taught_loss), static_argnums=1)


@cache
def exact_gradients(name: str) -> tuple[np.ndarray, Params]:
    """The loss of the parallel pass and its gradients, in float64."""
    cfg = CFGS[name]
    thoughts = THOUGHTS[cfg.thinking.max_thought]
    return in_float64(lambda params: jax.value_and_grad(taught_loss)(params, cfg, TOKENS, thoughts), trained_parts(cfg))


SWEPT = ("grouped", "alibi", "sliding")  # as slow as the others; the blocks themselves are tested with them elsewhere


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SWEPT else ()) for name in CFGS])
def test_gradients_of_the_parallel_pass_are_those_of_reading_chunk_by_chunk(name):
    """Along a random direction of every weight: a gradient that is off shows in it, however it is off."""
    cfg, rng = CFGS[name], np.random.default_rng(0)
    thoughts = THOUGHTS[cfg.thinking.max_thought]
    loss, grads = exact_gradients(name)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), trained_parts(cfg))
    exact_loss = slow_loss(params, cfg, TOKENS, thoughts).real
    # Both in float64, with the model's constants as it holds them: some hundred roundings in a row are left. A wrong path
    # through the states or the thinker is off by a percent and more, see the test below.
    assert abs(loss - exact_loss) <= 64 * EPS64 * abs(exact_loss)
    for leaf, (path, grad) in enumerate(jax.tree.leaves_with_path(grads)):
        direction = rng.standard_normal(grad.shape)
        slope = slow_slope(params, cfg, thoughts, leaf, direction)
        assert slope != 0, jax.tree_util.keystr(path)
        off = abs((grad * direction).sum() - slope) / np.linalg.norm(grad)
        assert off <= 64 * EPS64, f"{jax.tree_util.keystr(path)}: {off / EPS64:.0f} eps"


@pytest.fixture(scope="module")
def gradients() -> Params:
    """Gradients of the plain model in float32, in which it is trained."""
    return gradients_of(trained_parts(PLAIN), PLAIN, TOKENS, THOUGHTS[3])


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """How far `found` is from `expected`, as a share of its length."""
    return float(np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected))


def test_gradients_as_trained_with_are_those_in_float64_rounded(gradients):
    for found, expected in zip(jax.tree.leaves(gradients), jax.tree.leaves(exact_gradients("plain")[1]), strict=True):
        assert found.dtype == np.float32
        assert error(found, expected) <= 64 * EPS32  # some hundred roundings in a row, of either sign


def test_gradients_without_the_path_through_the_states_are_far_from_them(gradients, monkeypatch):
    def blind(*args: object) -> jax.Array:
        return jax.lax.stop_gradient(compress_sequences(*args))

    monkeypatch.setattr(taught, "compress_sequences", blind)
    without = compiled(lambda params: jax.grad(taught_loss)(params, PLAIN, TOKENS, THOUGHTS[3]))(trained_parts(PLAIN))
    without, gradients = jax.tree.map(np.asarray, (without, gradients))
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(without["thinking"]["compressor"]))
    assert all((leaf != 0).any() for leaf in jax.tree.leaves(gradients["thinking"]["compressor"]))
    assert error(without["embed"], gradients["embed"]) > 1e-3  # rounding is 8e-6 at most


def test_gradient_does_not_go_through_the_generation_of_a_thought(gradients):
    """Thoughts that the model generates inside the differentiated function give the gradients of given ones."""
    params = trained_parts(PLAIN)
    schedule = Schedule(Numerics(page=16), Budget(16, 4))
    state = start_state(PLAIN, TOKENS.tolist(), [SamplingParams(max_tokens=1)], eos_ids=(), max_len=16, schedule=schedule)

    def loss(params: Params) -> tuple[jax.Array, jax.Array]:
        reading = reading_of(think_prompt(params, PLAIN, state, schedule=schedule))
        thoughts = reading.thoughts[:, :3]
        return taught_loss(params, PLAIN, TOKENS, thoughts), thoughts

    through, thoughts = jax.tree.map(np.asarray, compiled(jax.grad(loss, has_aux=True))(params))
    assert len(set(thoughts[0, :, 0].tolist())) > 1
    fixed, other = jax.tree.map(np.asarray, (gradients_of(params, PLAIN, TOKENS, thoughts), gradients))
    # Two programs, which the compiler may round differently: as far apart as a gradient and its exact value at most.
    assert max(map(error, jax.tree.leaves(through), jax.tree.leaves(fixed))) <= 64 * EPS32
    assert min(map(error, jax.tree.leaves(through), jax.tree.leaves(other))) > 1000 * EPS32


def test_token_of_a_thought_alone_is_felt_where_the_thought_is_read_and_nowhere_else():
    """The embedding has a gradient through the compressor into later text, and through the thinker into later thoughts."""
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


def test_logits_of_texts_and_of_thoughts_are_divided_alike():
    """A divisor changes no stream, so all logits are a third of those without it."""
    tokens = jnp.asarray(TOKENS)
    thoughts = jnp.asarray(THOUGHTS[3])

    @compiled
    def logits(params: Params) -> list[tuple[jax.Array, jax.Array]]:
        return [forward_taught(params, with_fields(PLAIN, logit_divisor=by), tokens, thoughts) for by in (None, 3.0)]

    for one, third in zip(*logits(random_model(PLAIN)), strict=True):
        np.testing.assert_allclose(third, one / 3, rtol=1e-5, atol=1e-6)  # float32, of streams that are computed twice
        assert np.abs(np.asarray(one)).max() > 0.1
