"""A model as a module of flax.nnx: weights that any optimiser of nnx trains, and a forward pass with the engine's bits."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from detspec.checkpoint.load import Model
from detspec.config import check_counts, check_numbers
from detspec.environment import chosen_schedule
from detspec.errors import InputError
from detspec.generation.logprobs import check_trains, logits, logprobs
from detspec.mesh import check_one_chip
from detspec.model.params import Params
from detspec.model.weights import Weight, weights
from detspec.ops.rounding import rounded
from detspec.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Lora:
    """Which matrices get an adapter of low rank, and how it begins: `W` becomes `W + alpha / rank * B @ A.T`.

    Attributes:
        rank: columns of `A [in, rank]` and of `B [out, rank]`.
        alpha: see above, above 0.
        paths: a regular expression that the whole path of a matrix matches, such as "layers/0/q".
        seed: of the normal numbers that `A` begins with, with deviation `1/sqrt(in)`; `B` begins with 0.
    """

    rank: int
    alpha: float
    paths: str = r"layers/\d+/(q|k|v|o|gate|up|down)"
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(self, "rank")
        check_numbers(self, "alpha")


class Adapted(nnx.Module):
    """A matrix with an adapter of low rank.

    Attributes:
        weight: float32 `[out, in]`.
        lora_a, lora_b: float32 `[in, rank]` and `[out, rank]`.
    """

    def __init__(self, weight: jax.Array, lora: Lora, key: jax.Array) -> None:
        """Begins with the product of `weight` alone."""
        out, size = weight.shape
        self.weight = nnx.Param(weight)
        self.lora_a = nnx.LoRAParam(jax.random.normal(key, (size, lora.rank), jnp.float32) * jnp.float32(size**-0.5))
        self.lora_b = nnx.LoRAParam(jnp.zeros((out, lora.rank), jnp.float32))
        self.scale = lora.alpha / lora.rank

    def merged(self) -> jax.Array:
        """The weight that is multiplied with: the same bits in every program."""
        return self.weight[...] + rounded(low_rank(self.lora_a[...], self.lora_b[...]) * jnp.float32(self.scale), jnp.float32)


@jax.custom_vjp
def low_rank(a: jax.Array, b: jax.Array) -> jax.Array:
    """`b @ a.T` of float32 `a [in, rank]` and `b [out, rank]`, added up in the order of the columns.

    XLA would cut the sums of a product as the program around it suggests, and trainer and engine have different programs.
    """

    def add(total: jax.Array, columns: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        of_a, of_b = columns
        return total + rounded(of_b[:, None] * of_a[None, :], jnp.float32), None

    return jax.lax.scan(add, jnp.zeros((b.shape[0], a.shape[0]), jnp.float32), (a.T, b.T), unroll=8)[0]


low_rank.defvjp(lambda a, b: (low_rank(a, b), (a, b)), lambda given, of_sum: (of_sum.T @ given[1], of_sum @ given[0]))


class DetspecPolicy(nnx.Module):
    """A model whose weights are `nnx.Param`s, float32 masters, at the paths that they have in `Model.params`.

        policy = DetspecPolicy(model)
        optimizer = nnx.Optimizer(policy, optax.adamw(1e-5), wrt=nnx.Param)

    Forward passes have the bits of an engine that runs `published()`, in every batch, if both have one schedule.

    Attributes:
        cfg: shape and dtype of the model.
        schedule: numerics of the canonical pass.
        weights: the tree of weights, in `nnx.Dict` and `nnx.List`.
        remat: see `detspec.logprobs`.
    """

    def __init__(
        self, model: Model, *, schedule: Schedule | None = None, lora: Lora | None = None, remat: bool = False
    ) -> None:
        """Copies the weights to float32.

        Args:
            model: what to train, on one chip.
            schedule: numerics of the canonical pass, those of the engine; the device's default if None.
            lora: which weights get an adapter; these are `nnx.LoRAParam`s, for an optimiser with `wrt=nnx.LoRAParam`.
            remat: see `detspec.logprobs`.

        Raises:
            InputError: `detspec.logprobs` does not take the model, or `lora.paths` match no matrix.
        """
        check_one_chip(model.params, "DetspecPolicy")
        self.cfg = model.cfg
        self.schedule = chosen_schedule(schedule, model.cfg)
        self.remat = remat
        check_trains(model.cfg, self.schedule.numerics)
        declared = dict(jax.tree.leaves_with_path(weights(model.cfg)))
        names = {path: jax.tree_util.keystr(path, simple=True, separator="/") for path in declared}
        chosen = [] if lora is None else [path for path, weight in declared.items() if _takes(lora, names[path], weight)]
        if lora is not None and not chosen:
            raise InputError(
                f"Lora.paths {lora.paths!r} matches no matrix; matrices are such as "
                f"{[names[path] for path, weight in declared.items() if _is_matrix(weight)][:8]}"
            )

        def variable(path: Any, leaf: jax.Array) -> Any:
            master = jnp.array(leaf, jnp.float32)  # a copy: optimisers donate
            if path not in chosen:
                return nnx.Param(master)
            assert lora is not None
            return Adapted(master, lora, jax.random.fold_in(jax.random.key(lora.seed), chosen.index(path)))

        self.weights = _as_modules(jax.tree.map_with_path(variable, model.params))

    def __call__(
        self,
        input_tokens: jax.Array,
        positions: jax.Array | None = None,
        cache: None = None,
        attention_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, None]:
        """Logits of texts, with the engine's bits, for trainers that work out log-probabilities by themselves.

        Theirs may then differ from the engine's in the last bits: XLA adds up a softmax in another order, and turns a division
        by a temperature into a product that it joins with the next sum. `logprobs` has the engine's.

        Args:
            input_tokens: `[B, T]` int32, texts from position 0 on, filled up at either end, with anything.
            positions: not looked at: a text has no gaps.
            cache: None; generating is the engine's part.
            attention_mask: bool `[B, T, T]`, which the last row of each text says the tokens of; from the left on if None.

        Returns:
            float32 `[B, T, V]`, nothing of use where there is no token; and None for the cache.

        Raises:
            InputError: a cache is given, or as `detspec.logprobs` does.
        """
        if cache is not None:
            raise InputError("DetspecPolicy keeps no cache: generate with an Engine, such as detspec.adapters.tunix's")
        skipped = jnp.zeros(input_tokens.shape[0], jnp.int32)
        if attention_mask is not None:
            skipped = jnp.argmax(attention_mask[:, -1, :], axis=1).astype(jnp.int32)
        tokens = jnp.clip(shifted(input_tokens, skipped), 0, self.cfg.vocab_size - 1)
        found = logits(self.masters(), self.cfg, tokens, schedule=self.schedule, remat=self.remat)
        return shifted(found, -skipped), None

    def logprobs(self, tokens: jax.Array, lengths: jax.Array, temperature: float | jax.Array = 1.0) -> jax.Array:
        """`detspec.logprobs` of these weights: float32 `[B, T]`, the engine's bits, differentiable."""
        return logprobs(
            self.masters(), self.cfg, tokens, lengths, temperature=temperature, schedule=self.schedule, remat=self.remat
        )

    def masters(self) -> Params:
        """The weights in float32 as `Model.params` has them, adapters merged."""

        def master(path: Any, _: Weight) -> jax.Array:
            found = _at(self.weights, path)
            return found.merged() if isinstance(found, Adapted) else found[...]

        return jax.tree.map_with_path(master, weights(self.cfg))

    def published(self) -> Params:
        """The weights as an engine takes them, `engine.update_params(policy.published())`: copies, in the model's dtypes."""
        return _published(self)


@nnx.jit
def _published(policy: DetspecPolicy) -> Params:
    def copied(declared: Weight, master: jax.Array) -> jax.Array:
        return jnp.array(master, declared.dtype(policy.cfg), copy=True)

    return jax.tree.map(copied, weights(policy.cfg), policy.masters())


def shifted(x: jax.Array, steps: jax.Array) -> jax.Array:
    """`x [B, T, ..]`, each row turned left by its own number of `steps [B]`, round the end."""
    place = (jnp.arange(x.shape[1], dtype=jnp.int32)[None, :] + steps[:, None]) % x.shape[1]
    return jnp.take_along_axis(x, place.reshape(*place.shape, *[1] * (x.ndim - 2)), axis=1)


def _is_matrix(weight: Weight) -> bool:
    return weight.is_matrix and len(weight.shape) == 2


def _takes(lora: Lora, name: str, weight: Weight) -> bool:
    return _is_matrix(weight) and re.fullmatch(lora.paths, name) is not None


def _as_modules(tree: Any) -> Any:
    """A pytree of variables and modules as one module."""
    if isinstance(tree, dict):
        return nnx.Dict({name: _as_modules(part) for name, part in tree.items()})
    return nnx.List([_as_modules(part) for part in tree]) if isinstance(tree, list | tuple) else tree


def _at(node: Any, path: Sequence[Any]) -> Any:
    """The variable or module at the path of a leaf, in a module of `_as_modules`."""
    for key in path:
        node = node[key.key if isinstance(key, jax.tree_util.DictKey) else key.idx]
    return node
