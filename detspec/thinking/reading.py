"""How far prompts have been read by a model that thinks: the state that its rider keeps."""

import jax
import jax.numpy as jnp
from flax import struct

from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.model.attention import Attention
from detspec.riders.rider import Capacity
from detspec.state import GenState, Injected, Windows
from detspec.struct import Struct
from detspec.thinking.blocks import thinking_of
from detspec.thinking.thoughts import trivial_thoughts

NAME = "thoughts"  # name of the rider


class Reading(Struct):
    """How far each prompt has been read by a model that thinks, and what it thought.

    A thought follows each chunk of `C` tokens that ends before the last prompt token. A prompt of 11 tokens, `C = 4`, read up
    to its second chunk:

        chunks    t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9 t10       end 2, for the last chunk has no thought
        thoughts  Z0            Z1                            read 1: Z0 is committed, Z1 is a draft
        states    0             of Z0         of Z1           `states` holds those of Z0, for chunk `read`
    """

    thoughts: jax.Array  # [B, X, M] int32, filled with NO_TOKEN: committed after chunks below `read`, drafted after later ones
    read: jax.Array  # [B] int32, chunks whose thoughts are committed; their keys and values are in the cache
    end: jax.Array  # [B] int32, chunks of the prompt that a thought follows; 0 for a sequence that does not think
    states: jax.Array  # [B, C, D], added to the stream of chunk `read`
    end_id: int = struct.field(pytree_node=False)  # the token that ends a thought
    in_layer: int = struct.field(pytree_node=False)  # how many layers the stream has been through when states are added

    @property
    def chunk(self) -> int:
        """`C`."""
        return self.states.shape[1]

    @property
    def unread(self) -> jax.Array:
        """`[B]` bool, sequences that have chunks left to read and to think about."""
        return self.read < self.end

    def inject(self, windows: Windows) -> Injected:
        """The committed states as they are added to the stream of `windows`: `[G, W, D]`, 0 outside of chunk `read`."""
        sequence = jnp.maximum(windows.sequence, 0)
        C = self.chunk
        offset = windows.positions - (self.read[sequence] * C)[:, None]
        states = self.states[sequence[:, None], jnp.clip(offset, 0, C - 1)]
        inside = (offset >= 0) & (offset < C) & (self.end[sequence] > 0)[:, None]
        return Injected(self.in_layer, jnp.where(inside[:, :, None], states, jnp.zeros_like(states)))


def reading_of(state: GenState) -> Reading:
    """Progress of the sequences of a model that thinks through their prompts."""
    return state.riders.of(NAME)


def init_reading(cfg: ModelConfig, capacity: Capacity) -> Reading:
    """Sequences that have read nothing, with trivial drafts.

    Raises `InputError` if the model does not think, or its chunks and thoughts do not fit the schedule.
    """
    thinking = thinking_of(cfg)
    C = thinking.chunk
    M = thinking.max_thought
    B = capacity.num_sequences
    schedule = capacity.schedule
    if not all(isinstance(cfg.layer(index).mixer, Attention) for index in range(cfg.num_layers)):
        raise InputError("a model that thinks needs attention in all its layers: its prompts cannot be replayed with thoughts")
    if schedule.budget.rows % C:
        raise InputError(
            f"a canonical pass of {schedule.budget.rows} rows cannot be cut into chunks of {C} tokens: choose Budget.rows as a "
            "multiple of ThinkingConfig.chunk"
        )
    if schedule.numerics.page < C + M - 1:
        raise InputError(
            f"a chunk of {C} tokens and a thought of up to {M} do not fit a page of {schedule.numerics.page} slots together: "
            f"raise Numerics.page to at least {C + M - 1}, or lower ThinkingConfig.max_thought"
        )
    if schedule.numerics.alignment != "free":
        raise InputError(
            f'a model that thinks needs Numerics.alignment "free", got {schedule.numerics.alignment!r}: aligned windows would '
            "read chunks again without their states"
        )
    return Reading(
        thoughts=trivial_thoughts((B, max(capacity.max_len // C, 1), M), thinking.end_id),
        read=jnp.zeros(B, jnp.int32),
        end=jnp.zeros(B, jnp.int32),
        states=jnp.zeros((B, C, cfg.d_model), cfg.jax_dtype),
        end_id=thinking.end_id,
        in_layer=thinking.in_layer,
    )
