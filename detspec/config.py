"""Frozen configuration values: the shape of a model and the schedule of its passes."""

import dataclasses

import jax.numpy as jnp

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of one decoder of the Llama family.

    Attributes:
        vocab_size: `V`, rows of the embedding.
        d_model: `D`, width of the residual stream.
        num_layers: `L`.
        num_heads: `N` query heads.
        num_kv_heads: `K` key/value heads; divides `num_heads`.
        head_dim: `H`; need not be `D / N`, must be even (rotary pairs).
        d_ff: `F`, width of the gated MLP.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of every RMSNorm.
        tie_embeddings: the output head is the embedding matrix.
        max_position: longest sequence the model was made for, in tokens.
        dtype: of weights and activations: "float32", "bfloat16" or "float16". Reductions are float32 always.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    max_position: int = 2048
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for field in ("vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff", "max_position"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"ModelConfig.{field} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even (rotary pairs), got {self.head_dim}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {sorted(DTYPES)}, got {self.dtype!r}")

    @property
    def jax_dtype(self) -> jnp.dtype:
        return jnp.dtype(DTYPES[self.dtype])

    @property
    def num_params(self) -> int:
        """Number of weights, the tied head counted once."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.d_model
        layer = attention + 3 * self.d_ff * self.d_model + 2 * self.d_model
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.d_model
        return embeddings + self.num_layers * layer + self.d_model
