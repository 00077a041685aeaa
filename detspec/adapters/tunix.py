"""Detspec under Tunix's trainers: an engine as the rollout, and a loss whose log-probabilities are the engine's, bit for bit.

    ClusterConfig(rollout_engine=functools.partial(DetspecRollout, engine=engine), ..)
    GRPOConfig(policy_loss_fn="detspec", num_iterations=2, ..)

The actor is a `DetspecPolicy`. Tunix works out log-probabilities of its logits by itself, in XLA's order of additions. The loss
"detspec" does not: it is registered when this file is imported.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from detspec.adapters.nnx_policy import DetspecPolicy, shifted
from detspec.checkpoint.load import Model
from detspec.engine.engine import Engine
from detspec.engine.request import FAILED, Completion
from detspec.errors import InputError
from detspec.extras import install_command
from detspec.sampling_params import SamplingParams
from detspec.seeds import seed_of

try:
    from tunix.rl import common
    from tunix.rl.function_registry import register_policy_loss_fn
    from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
except ImportError as error:
    raise InputError(f"detspec.adapters.tunix needs {error.name}: {install_command('tunix')}") from error

PAD = -1  # no token, so that Tunix's masks lose none: it takes every place with the pad's id for padding


class DetspecRollout(BaseRollout):
    """An engine as Tunix's rollout: texts are a function of weights, prompts and seeds, for any micro-batch.

    Each sample has a seed of its own, `seed_of(seed, version of the weights, prompt, occurrence of the prompt)`, so those of a
    group differ. Log-probabilities are of the distribution that tokens are drawn from, all tokens over the temperature.

    Attributes:
        engine: the engine that runs; nothing else may use it.
        weight_version: how often weights have changed, from what was given on.
    """

    def __init__(
        self,
        rollout_actor: DetspecPolicy,
        tokenizer: Any,
        rollout_config: RolloutConfig,
        *,
        engine: Engine,
        weight_version: int = 0,
        **_: Any,
    ) -> None:
        """Takes what Tunix gives, and by `functools.partial` what it does not.

        Args:
            rollout_actor: the model that is trained.
            tokenizer: Tunix's view of a tokenizer; `TokenizerOfModel` is one of a model's own.
            rollout_config: of training; its `seed` is the base of all seeds, 0 if None.
            engine: an engine of the same model, with the schedule of the actor.
            weight_version: the version of the first weights; a run that resumes at step `s` gives `s`, so that seeds go on.

        Raises:
            InputError: the actor is no `DetspecPolicy`, the engine runs another model or schedule, or as `generate` does.
        """
        if not isinstance(rollout_actor, DetspecPolicy):
            raise InputError(
                f"the actor must be a detspec.adapters.nnx_policy.DetspecPolicy, got {type(rollout_actor).__name__}"
            )
        if (engine.model.cfg, engine.schedule) != (rollout_actor.cfg, rollout_actor.schedule):
            raise InputError(
                "engine and actor have different models or schedules: make both from one model, and the actor with "
                "schedule=engine.schedule"
            )
        self.engine = engine
        self.weight_version = weight_version
        self._tokenizer = tokenizer
        self._seed = _base_seed(rollout_config.seed)
        self._sampling = _sampling(rollout_config, tokenizer)
        self._graph, self._state = nnx.split(rollout_actor)
        self._is_published = False
        self._seen: Counter[str] = Counter()  # prompts since the weights changed

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **_: Any) -> RolloutOutput:
        """Completes `prompts`, each with a seed of its own; log-probabilities are always there.

        Raises `InputError` for top_p and top_k, whose distribution no trainer works out; for a prompt of more than
        `max_prompt_length` tokens, or one that the engine has no room for; and if a sample failed.
        """
        if others := [prompt for prompt in prompts if not isinstance(prompt, str)]:
            raise InputError(
                f"prompts must be texts, got {others[0]!r}: give Tunix the prompts of a batch in one array of numpy, which it "
                "repeats for each group; in a list it repeats each text by itself"
            )
        self._sampling = _sampling(rollout_config, self._tokenizer)
        self._publish()
        texts = [self._token_ids(prompt, rollout_config.max_prompt_length) for prompt in prompts]
        asked = [SamplingParams(**self._sampling, seed=self._next_seed(prompt)) for prompt in prompts]
        found = [_checked(completion) for completion in self.engine.generate(texts, asked)]
        padded = np.full((len(texts), rollout_config.max_prompt_length), PAD, np.int32)
        for row, text in zip(padded, texts, strict=True):
            row[len(row) - len(text) :] = text
        return RolloutOutput(
            text=[self._tokenizer.decode(list(each.token_ids)) for each in found],
            logits=None,
            tokens=[np.asarray(each.token_ids, np.int32) for each in found],
            left_padded_prompt_tokens=padded,
            logprobs=[np.asarray(each.logprobs, np.float32) for each in found],
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """The engine's log-probabilities of given completions: float32, of the shape of `completion_tokens`, 0 for padding."""
        self._publish()
        prompts = [[token for token in row if token != PAD] for row in np.asarray(prompt_tokens).tolist()]
        completions = [[token for token in row if token != PAD] for row in np.asarray(completion_tokens).tolist()]
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        sampling = SamplingParams(temperature=self._sampling["temperature"], logprobs_mode="tempered")
        found = np.zeros(completion_tokens.shape, np.float32)
        for row, each in zip(found, self.engine.score(texts, [len(prompt) for prompt in prompts], sampling), strict=True):
            row[: len(each.logprobs)] = _checked(each).logprobs
        return jnp.asarray(found)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Takes other weights, an `nnx.State` of all of them or of adapters; the engine gets them at the next request.

        Nothing moves between devices here, which Tunix forbids at this moment.
        """
        self._state = nnx.merge_state(self._state, params)
        self._is_published = False
        self.weight_version += 1
        self._seen.clear()

    def pad_id(self) -> int:
        """No token of any vocabulary."""
        return PAD

    def eos_id(self) -> int:
        """The first token that ends a text."""
        return next(iter(self._sampling["stop_token_ids"] or self.engine.model.eos_ids), PAD)

    def model(self) -> None:
        """None: the engine has weights of its own, so Tunix hands over new ones after each step."""

    def _publish(self) -> None:
        """Gives the engine the weights that it lacks, at once or after the last request."""
        if not self._is_published:
            policy = nnx.merge(self._graph, self._state)
            self.engine.update_params(policy.published(), weight_version=f"tunix {self.weight_version}")
            self._is_published = True

    def _next_seed(self, prompt: str) -> int:
        self._seen[prompt] += 1
        return seed_of(*self._seed, self.weight_version, str(prompt), self._seen[prompt])

    def _token_ids(self, prompt: str, longest: int) -> list[int]:
        """A prompt as Tunix's own sampler reads it, with one token in front that begins texts if there is such a token."""
        begin = self._tokenizer.bos_id()
        ids = [
            int(token)
            for token in self._tokenizer.dedup_bos_ids([*([begin] if begin else []), *self._tokenizer.encode(prompt)])
        ]
        if len(ids) > longest:
            raise InputError(f"a prompt has {len(ids)} tokens, RolloutConfig.max_prompt_length allows {longest}: raise it")
        return ids


class TokenizerOfModel:
    """The tokenizer of a detspec model, with the five methods that Tunix asks for."""

    def __init__(self, model: Model) -> None:
        """Raises `InputError` if the model has no tokenizer."""
        if model.tokenizer is None:
            raise InputError(f"{model.no_tokenizer}, and Tunix gives prompts as texts")
        self._model = model
        self._tokenizer = model.tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids, with all that the tokenizer adds."""
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._model.decode(ids)

    def bos_id(self) -> None:
        """None: `encode` adds it."""

    def eos_id(self) -> int | None:
        """The first token that ends a text."""
        return next(iter(self._model.eos_ids), None)

    def pad_id(self) -> int:
        """No token of any vocabulary."""
        return PAD


@register_policy_loss_fn("detspec")
def detspec_loss(
    model: DetspecPolicy, train_example: Any, algo_config: Any, pad_id: int, eos_id: int, **_: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """GRPO's clipped objective on the engine's log-probabilities; `algo_config` is Tunix's `GRPOConfig`.

    Old log-probabilities are those of the rollout where Tunix asks for them, with `num_iterations` above 1; the ratio of the
    first iteration is then 1 exactly, and `logp_diff_max` says so. With one iteration Tunix compares nothing: the ratio is 1
    because both sides are the trainer's.

    Returns the loss and metrics: kl, pg_clipfrac, is_ratio/min, is_ratio/max, logp_diff_max.

    Raises `InputError` for packed sequences, and options of GRPO that it does not know.
    """
    if getattr(train_example, "segment_ids", None) is not None:
        raise InputError("the loss detspec takes no packed sequences: leave max_seq_token_per_tpu None")
    if algo_config.loss_algo != "grpo" or getattr(algo_config, "epsilon_c", None) is not None:
        raise InputError('the loss detspec knows loss_algo "grpo" without epsilon_c: use Tunix\'s loss "grpo" for others')
    is_new = train_example.completion_mask.astype(bool)
    found = completion_logprobs(
        model, train_example.prompt_ids, train_example.completion_ids, pad_id, algo_config.temperature or 1.0
    )
    old = train_example.old_per_token_logps
    old = jax.lax.stop_gradient(found) if old is None else old
    gains = train_example.advantages.astype(jnp.float32)
    gains = gains if gains.ndim == 2 else gains[:, None]
    ratio = jnp.exp(found - old)
    above = getattr(algo_config, "epsilon_high", None) or algo_config.epsilon
    bounded = jnp.clip(ratio, 1 - algo_config.epsilon, 1 + above)
    losses = -jnp.minimum(ratio * gains, bounded * gains)
    count = jnp.maximum(is_new.sum(), 1).astype(jnp.float32)
    loss = common.aggregate_loss(losses, is_new, algo_config.loss_agg_mode)
    kl = jnp.float32(0)
    if train_example.ref_per_token_logps is not None:
        kls = common.compute_kl_divergence(
            found, train_example.ref_per_token_logps, algo_config.kl_loss_mode, clamp_value=algo_config.kl_clamp_value
        )
        kl = jnp.where(is_new, kls, 0.0).sum() / count
        loss = loss + algo_config.beta * common.aggregate_loss(kls, is_new, algo_config.loss_agg_mode)
    metrics = {
        "kl": kl,
        "pg_clipfrac": (is_new & (bounded * gains < ratio * gains)).sum().astype(jnp.float32) / count,
        "is_ratio/min": jnp.where(is_new, ratio, jnp.inf).min(),
        "is_ratio/max": jnp.where(is_new, ratio, 0.0).max(),
        "logp_diff_max": jnp.where(is_new, jnp.abs(found - old), 0.0).max(),
    }
    return loss, metrics


def completion_logprobs(
    policy: DetspecPolicy, prompts: jax.Array, completions: jax.Array, pad_id: int, temperature: float
) -> jax.Array:
    """The engine's log-probabilities of `completions [B, C]` after left-padded `prompts [B, P]`: float32 `[B, C]`."""
    texts = jnp.concatenate([prompts, completions], axis=1).astype(jnp.int32)
    is_token = texts != pad_id
    before = jnp.argmax(is_token, axis=1).astype(jnp.int32)
    tokens = jnp.clip(shifted(texts, before), 0, policy.cfg.vocab_size - 1)
    found = policy.logprobs(tokens, is_token.sum(axis=1, dtype=jnp.int32), temperature)
    return shifted(found, -before)[:, prompts.shape[1] :]


def _sampling(config: RolloutConfig, tokenizer: Any) -> dict[str, Any]:
    """The fields of `SamplingParams` that all samples share; `InputError` for another distribution than a trainer's."""
    if config.top_p not in (None, 1.0) or config.top_k not in (None, -1, 0):
        raise InputError(
            f"RolloutConfig has top_p {config.top_p} and top_k {config.top_k}, but trainers work out log-probabilities of all "
            "tokens: the ratio would be one of two distributions; leave both off"
        )
    eos = tokenizer.eos_id()
    stops = config.eos_tokens if config.eos_tokens is not None else [] if eos is None else [eos]
    return {
        "max_tokens": config.max_tokens_to_generate,
        "temperature": config.temperature,
        "stop_token_ids": tuple(stops),
        "ignore_eos": config.eos_tokens is not None,
        "logprobs_mode": "tempered",
    }


def _base_seed(seed: Any) -> tuple[int, ...]:
    """The numbers of a seed, an integer, an array or a key of jax; (0,) for None."""
    if seed is None:
        return (0,)
    is_key = isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
    return tuple(int(part) for part in np.ravel(np.asarray(jax.random.key_data(seed) if is_key else seed)))


def _checked(completion: Completion) -> Completion:
    if completion.finish_reason == FAILED:
        raise InputError(f"sample {completion.id} failed: {completion.error or 'the model gave logits that are not finite'}")
    return completion
