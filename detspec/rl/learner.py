"""The trainer's side of a step: gradients of leaves of texts, the comparison with the sampler, the update.

    texts, in the order of their ids      0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15
    leaves of 4, a program each             g0    +    g1   +    g2     +     g3         summed as a tree, see `data_parallel`

A leaf's program depends on the leaf alone: its length is the next power of two from 64 on. So how many places the engine had,
and how many chips the leaves were dealt out to, decides nothing. How many texts a leaf has decides the order of sums.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from detspec.config import ModelConfig
from detspec.engine.bits import first_difference, same_bits
from detspec.errors import DivergenceError, InputError
from detspec.generation.logprobs import logprobs
from detspec.model.params import Params
from detspec.model.weights import weights
from detspec.rl.objectives import Objective
from detspec.rl.rollouts import Rollout
from detspec.schedule import Schedule
from detspec.train.data_parallel import require_equal_shares, sum_over_slices
from detspec.train.step import TrainState

SHORTEST = 64  # positions of a leaf


class Leaf(NamedTuple):
    """Texts whose gradient is worked out together, `n` of them, filled up to `T` positions; arrays."""

    tokens: Any  # [n, T] int32
    lengths: Any  # [n] int32
    prompt_lens: Any  # [n] int32
    sampled: Any  # [n, T] float32, log-probabilities that the sampler reported; 0 elsewhere
    advantages: Any  # [n] float32
    weights: Any  # [n] float32, of each token
    temperature: Any  # [n] float32
    reference: Any = None  # [n, T] float32, log-probabilities of the reference

    @property
    def is_new(self) -> Any:
        """The positions of sampled tokens, bool `[n, T]`."""
        position = np.arange(self.tokens.shape[1], dtype=np.int32)[None, :]
        return (position >= self.prompt_lens[:, None]) & (position < self.lengths[:, None])


def leaves_of(
    rollouts: Sequence[Rollout], advantages: np.ndarray, objective: Objective, *, leaf: int, max_position: int
) -> list[Leaf]:
    """Cuts `rollouts` into leaves of `leaf` texts, in their order; texts with the advantage nan weigh nothing.

    A leaf has as many positions as its longest text, rounded up to a power of two from 64 on, at most `max_position`.

    Raises `InputError` if `leaf` does not divide them.
    """
    if len(rollouts) % leaf:
        raise InputError(f"a step has {len(rollouts)} texts, which leaves of {leaf} do not divide: choose another leaf")
    counted = ~np.isnan(advantages)
    num_tokens = np.asarray([len(each.token_ids) for each in rollouts])
    each_weight = objective.weights(np.where(counted, num_tokens, 0), max(each.sampling.max_tokens for each in rollouts))
    gains = np.where(counted, advantages, 0.0).astype(np.float32)
    return [
        _leaf(rollouts[first : first + leaf], gains[first : first + leaf], each_weight[first : first + leaf], max_position)
        for first in range(0, len(rollouts), leaf)
    ]


def _leaf(rollouts: Sequence[Rollout], gains: np.ndarray, each_weight: np.ndarray, max_position: int) -> Leaf:
    lengths = np.asarray([each.length for each in rollouts], np.int32)
    T = min(max_position, max(SHORTEST, 1 << (int(lengths.max()) - 1).bit_length()))
    tokens = np.zeros((len(rollouts), T), np.int32)
    sampled = np.zeros((len(rollouts), T), np.float32)
    prompt_lens = np.asarray([len(each.prompt_token_ids) for each in rollouts], np.int32)
    for row, each in enumerate(rollouts):
        tokens[row, : each.length] = (*each.prompt_token_ids, *each.token_ids)
        sampled[row, prompt_lens[row] : each.length] = each.logprobs
    temperature = np.asarray([each.sampling.temperature for each in rollouts], np.float32)
    return Leaf(tokens, lengths, prompt_lens, sampled, gains, each_weight, temperature)


@dataclasses.dataclass(frozen=True, eq=False)
class Learner:
    """How weights learn from leaves.

    Attributes:
        cfg: shape of the model; `dtype` is what the engine runs, masters are float32.
        schedule: the engine's.
        optimizer: what makes an update of a gradient.
        objective: what is maximised.
        chips: devices that leaves are dealt out to; the state is on the first.
        remat: see `detspec.logprobs`.
        reference: weights that `Objective.kl` keeps near to.
    """

    cfg: ModelConfig
    schedule: Schedule
    optimizer: optax.GradientTransformation
    objective: Objective
    chips: Sequence[jax.Device]
    remat: bool = False
    reference: Params | None = None

    @cached_property
    def _gradient(self) -> Any:
        """`(params, leaf) -> (loss, logprobs [n, T]), gradient`; a program for each length of leaves."""

        def loss_fn(params: Params, leaf: Leaf) -> tuple[jax.Array, jax.Array]:
            found = self._logprobs_of(params, leaf, remat=self.remat)
            losses = self.objective.losses(jnp.where(leaf.is_new, found, 0.0), leaf.sampled, leaf.advantages, leaf.reference)
            return jnp.where(leaf.is_new, losses * leaf.weights[:, None], 0.0).sum(), found

        return jax.jit(jax.value_and_grad(loss_fn, has_aux=True))

    @cached_property
    def _reference_logprobs(self) -> Any:
        return jax.jit(self._logprobs_of)

    def _logprobs_of(self, params: Params, leaf: Leaf, *, remat: bool = False) -> jax.Array:
        return logprobs(
            params, self.cfg, leaf.tokens, leaf.lengths, temperature=leaf.temperature, schedule=self.schedule, remat=remat
        )

    @cached_property
    def _update(self) -> Any:
        @partial(jax.jit, donate_argnums=0)
        def update(state: TrainState, grads: Params) -> TrainState:
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
            return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state)

        return update

    @cached_property
    def skip(self) -> Any:
        """`state -> state`, a step that learns nothing; it donates the state."""

        @partial(jax.jit, donate_argnums=0)
        def skip(state: TrainState) -> TrainState:
            return state.replace(step=state.step + 1)

        return skip

    @cached_property
    def _certified(self) -> set[int]:
        """Lengths of leaves whose program has found the sampler's bits."""
        return set()

    def step(
        self, state: TrainState, leaves: Sequence[Leaf], *, sampled_by: Params | None = None
    ) -> tuple[TrainState, dict[str, float]]:
        """The state after learning from `leaves`, and metrics; it donates `state`.

        `sampled_by` are the weights that sampled the texts, None if they are those of `state`. Then each log-probability that
        the gradient's own program found is compared with the sampler's, in every step. Else each program is compared once,
        with these weights.

        Raises:
            DivergenceError: a log-probability has other bits than the sampler's; the message names text and position.
            FloatingPointError: the loss or the gradient is not finite.
            InputError: the chips cannot share the leaves.
        In all cases `state` is still there.
        """
        require_equal_shares(len(self.chips), len(leaves))
        if self.reference is not None:
            found = [self._reference_logprobs(self.reference, leaf) for leaf in leaves]
            leaves = [leaf._replace(reference=np.asarray(each)) for leaf, each in zip(leaves, found, strict=True)]
        if sampled_by is not None:
            self._certify(sampled_by, leaves)
        found = []

        def gradient(params: Params, leaf: Leaf) -> Any:
            (loss, of_tokens), grads = self._gradient(params, leaf)
            found.append(of_tokens)
            return loss, grads

        loss, grads = sum_over_slices(gradient, state.params, leaves, chips=self.chips)
        each = [np.asarray(of_tokens) for of_tokens in found]
        if sampled_by is None:
            for number, (leaf, of_tokens) in enumerate(zip(leaves, each, strict=True)):
                check_bits(leaf, of_tokens, first=number * len(leaf.lengths))
        metrics = {"loss": float(loss), "grad_norm": float(_norm(grads)), **compared(leaves, each, self.objective)}
        if not np.isfinite([metrics["loss"], metrics["grad_norm"]]).all():
            raise FloatingPointError(
                f"training diverged: loss {metrics['loss']}, norm of the gradient {metrics['grad_norm']} at step "
                f"{int(state.step) + 1}; the weights are those before it. Lower peak_lr or clip_norm"
            )
        return self._update(state, grads), metrics

    def _certify(self, sampled_by: Params, leaves: Sequence[Leaf]) -> None:
        """Compares the program of each length once; weights in the model's dtype are what a master of them is rounded to."""
        for number, leaf in enumerate(leaves):
            if leaf.tokens.shape[1] not in self._certified:
                masters = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), sampled_by)
                (_, found), _ = self._gradient(masters, leaf)
                check_bits(leaf, np.asarray(found), first=number * len(leaf.lengths))
                self._certified.add(leaf.tokens.shape[1])


_norm = jax.jit(optax.tree.norm)


def check_bits(leaf: Leaf, found: np.ndarray, *, first: int) -> None:
    """Raises `DivergenceError` if a sampled token of `leaf`, whose first text is `first`, has other bits in `found [n, T]`."""
    if place := first_difference([(found, leaf.sampled)], leaf.is_new):
        row, at = place
        raise DivergenceError(
            f"text {first + row} at position {at} ({at - leaf.prompt_lens[row]} tokens after the prompt): the trainer has the "
            f"log-probability {found[row, at]!r}, the sampler reported {leaf.sampled[row, at]!r}; the policy is not the one "
            "that sampled, and the weights have not been changed"
        )


def compared(leaves: Sequence[Leaf], found: Sequence[np.ndarray], objective: Objective) -> dict[str, float]:
    """How log-probabilities `found [n, T]` differ from the sampler's, over all sampled tokens, in float64.

    "kl" is their distance from the reference, by k3, where there is one.
    """
    here = np.concatenate([each[leaf.is_new] for leaf, each in zip(leaves, found, strict=True)])
    there = np.concatenate([leaf.sampled[leaf.is_new] for leaf in leaves])
    away = here.astype(np.float64) - there.astype(np.float64)
    ratio = np.exp(away)
    low, high = objective.clip or (np.inf, np.inf)
    distance = {}
    if leaves[0].reference is not None:
        apart = np.concatenate([leaf.reference[leaf.is_new] for leaf in leaves]).astype(np.float64) - here
        distance = {"kl": float((np.exp(apart) - 1 - apart).mean())}
    return {
        **distance,
        "logprob_bits_differ": float((~same_bits(here, there)).sum()),
        "logprob_diff_mean": float(np.abs(away).mean()) if len(away) else 0.0,
        "logprob_diff_max": float(np.abs(away).max(initial=0.0)),
        "k3": float((ratio - 1 - away).mean()) if len(away) else 0.0,
        "ratio_min": float(ratio.min(initial=1.0)),
        "ratio_max": float(ratio.max(initial=1.0)),
        "clipped": float(((ratio < 1 - low) | (ratio > 1 + high)).mean()) if len(away) else 0.0,
        "entropy": float(-there.astype(np.float64).mean()) if len(there) else 0.0,
    }


@partial(jax.jit, static_argnums=1)
def published(params: Params, cfg: ModelConfig) -> Params:
    """A copy of master weights in the dtypes of `cfg`, for the engine: no update of the masters can take it away."""
    return jax.tree.map(lambda declared, leaf: jnp.copy(leaf.astype(declared.dtype(cfg))), weights(cfg), params)


def masters(params: Params) -> Params:
    """Weights in float32, for a trainer: a copy, also of what is in float32."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params)
