"""Frozen configuration values: the shape of a model and the schedule of its passes."""

import dataclasses

import jax.numpy as jnp

from detspec.errors import InputError

IMPLEMENTATIONS = ("reference",)
ALIGNMENTS = ("free", "window")
REDUCTIONS = ("fixed", "native")
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
                raise InputError(f"ModelConfig.{field} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise InputError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise InputError(f"head_dim must be even (rotary pairs), got {self.head_dim}")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype must be one of {sorted(DTYPES)}, got {self.dtype!r}")

    @property
    def jax_dtype(self) -> jnp.dtype:
        """`dtype` as JAX takes it."""
        return jnp.dtype(DTYPES[self.dtype])

    @property
    def num_params(self) -> int:
        """Number of weights, the tied head counted once."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.d_model
        layer = attention + 3 * self.d_ff * self.d_model + 2 * self.d_model
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.d_model
        return embeddings + self.num_layers * layer + self.d_model


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Everything that decides the order of floating-point operations in a pass; frozen, never tuned at run time.

    A canonical pass has `rows = groups * window` token rows. With `alignment="free"` the committed bits depend on neither
    factor, only on `rows`, and not even on that between values of `rows` that a device certifies as equal. The fast path is
    another value of the same class: `schedule.fast(batch)`.

    Attributes:
        rows: `R`, token rows of a canonical pass; a multiple of `window`.
        window: `W`, consecutive positions of one sequence in one window; a power of two.
        page: slots of one cache page, which is the KV block of the attention's reduction; a power of two.
        query_tile: most query rows that attention handles together; a power of two.
        num_splits: parts that the KV sequence is cut into and merged from; 1 in a canonical pass.
        fast_splits: `num_splits` of the fast path. 1 was fastest at every batch on two CPU cores.
        reductions: order of the sums in norms, softmax and log-probabilities: "fixed" by the length of a row alone, as a
            canonical pass needs it, or "native", XLA's own, which may depend on how many rows there are.
        cache_dtype: of keys and values in the cache: "float32", "bfloat16" or "float16".
        alignment: "free": a window starts at the last committed token, wherever that is. "window": it starts at a multiple
            of `window`, and the committed tokens before are verified again; the way out where a device certifies everything
            but the offset inside a window. The bits then depend on `window`.
        implementation: of the attention: "reference".
    """

    rows: int = 64
    window: int = 16
    page: int = 64
    query_tile: int = 16
    num_splits: int = 1
    fast_splits: int = 1
    reductions: str = "fixed"
    cache_dtype: str = "float32"
    alignment: str = "free"
    implementation: str = "reference"

    def __post_init__(self) -> None:
        for field in ("window", "page", "query_tile", "num_splits", "fast_splits"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1 or value & (value - 1):
                raise InputError(f"Schedule.{field} must be a power of two, got {value!r}")
        if not isinstance(self.rows, int) or self.rows < 1 or self.rows % self.window:
            raise InputError(f"Schedule.rows must be a positive multiple of Schedule.window ({self.window}), got {self.rows!r}")
        for field, accepted in (
            ("reductions", REDUCTIONS),
            ("cache_dtype", tuple(DTYPES)),
            ("alignment", ALIGNMENTS),
            ("implementation", IMPLEMENTATIONS),
        ):
            if getattr(self, field) not in accepted:
                raise InputError(f"Schedule.{field} must be one of {accepted}, got {getattr(self, field)!r}")

    @property
    def groups(self) -> int:
        """`G`, windows in one pass."""
        return self.rows // self.window

    def budget(self, rows: int, window: int) -> "Schedule":
        """The same schedule with a budget of `rows` cut into windows of `window`."""
        return dataclasses.replace(self, rows=rows, window=window)

    def fast(self, batch: int) -> "Schedule":
        """The cheapest decode schedule for `batch` live rows: one-row windows, sums in the backend's own order."""
        return dataclasses.replace(
            self, rows=batch, window=1, alignment="free", num_splits=self.fast_splits, reductions="native"
        )
