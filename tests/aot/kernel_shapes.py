"""Named shapes for compiling, testing and timing kernels: those of published models, with the schedules they run under."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from detspec.cache import Int8Pages, slot_bytes
from detspec.config import ModelConfig
from detspec.ops.attention.api import paged_attention
from detspec.ops.attention.scores import Scores
from detspec.ops.linear.api import linear_fn
from detspec.presets import preset
from detspec.roofline import Work
from detspec.schedule import Schedule
from detspec.target_compilers import Compiled, compile_for
from detspec.targets import TARGETS, Target, canonical_schedule, target

MODELS = ("llama3_1_8b", "llama3_3_70b", "qwen3_0_6b", "qwen3_8b", "gemma2_2b", "gemma3_1b", "gemma3_4b", "gemma3_27b")
WITH_KERNELS = tuple(name for name in TARGETS if canonical_schedule(target(name)).numerics.implementation != "reference")
ROWS = (1, 8, 32, 256)  # rows of a product with weights: three for decoding, 256 for a canonical pass


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Attention of `groups` windows of `window` queries over sequences of up to `max_len` positions."""

    # model, kind of layer and pass; "gemma3_1b/sliding/16x16", "qwen3_8b/full/decode32"
    name: str = dataclasses.field(compare=False)
    num_heads: int  # query heads of the layer
    num_kv_heads: int  # KV heads of the layer
    head_dim: int  # head dimension of the layer
    scores: Scores  # how the layer computes scores
    groups: int  # windows of the pass
    window: int  # queries per window
    max_len: int  # most positions of a sequence
    decode: bool  # whether the schedule's fast path decodes one query per sequence
    cfg: ModelConfig = dataclasses.field(compare=False, repr=False)  # the model, for its default schedule
    cache_dtype: str | None = None  # "int8", or None for the target's own

    def schedule(self, target: Target) -> Schedule:
        """The schedule of the pass on `target`."""
        canonical = canonical_schedule(target, self.cfg, window=self.window, groups=self.groups)
        if self.cache_dtype is not None:
            canonical = canonical.with_numerics(cache_dtype=self.cache_dtype)
        return canonical.fast(self.groups) if self.decode else canonical

    def work(self, schedule: Schedule) -> Work:
        """The work for windows at the end of `max_len` positions: each query tile reads the pages it attends to once."""
        page = schedule.numerics.page
        positions = range(max(self.max_len - self.window, 0), self.max_len)
        sliding_window = self.scores.sliding_window
        first_seen = [0 if sliding_window is None else max(p + 1 - sliding_window, 0) for p in positions]
        tiles = range(0, len(positions), schedule.numerics.query_tile)
        lasts = [positions[min(start + schedule.numerics.query_tile, len(positions)) - 1] for start in tiles]
        pages = sum(last // page - first_seen[start] // page + 1 for start, last in zip(tiles, lasts, strict=True))
        q = self.operands(schedule)[0]
        page_bytes = 2 * page * self.num_kv_heads * slot_bytes(self.head_dim, schedule.numerics)
        seen = sum(p + 1 - first for p, first in zip(positions, first_seen, strict=True))
        return Work(
            bytes=float(self.groups * pages * page_bytes + q.size * (q.dtype.itemsize + 4)),
            flop=float(4 * self.groups * self.num_heads * self.head_dim * seen),
        )

    def operands(self, schedule: Schedule) -> tuple[Any, ...]:
        """Shapes of queries, key pages, value pages, page tables and positions; sequences share no pages."""
        max_pages = -(-self.max_len // schedule.numerics.page)
        head_dim = schedule.numerics.cache_head_dim(self.head_dim)
        values = (1 + self.groups * max_pages, self.num_kv_heads, schedule.numerics.page, head_dim)
        keys = values if schedule.numerics.key_slot_axis == 2 else (*values[:2], head_dim, schedule.numerics.page)
        pages = [jax.ShapeDtypeStruct(shape, jnp.dtype(schedule.numerics.cache_dtype)) for shape in (keys, values)]
        if schedule.numerics.cache_dtype == "int8":
            pages = [Int8Pages(each, jax.ShapeDtypeStruct(values[:3], jnp.float32)) for each in pages]
        return (
            jax.ShapeDtypeStruct((self.groups, self.window, self.num_heads, self.head_dim), jnp.bfloat16),
            *pages,
            jax.ShapeDtypeStruct((self.groups, max_pages), jnp.int32),
            jax.ShapeDtypeStruct((self.groups, self.window), jnp.int32),
        )

    def function(self, schedule: Schedule) -> Callable[..., Any]:
        """The attention of `operands(schedule)`."""
        return partial(paged_attention, scores=self.scores, numerics=schedule.numerics)


@dataclasses.dataclass(frozen=True)
class LinearShape:
    """A pinned product of `rows` rows with a weight `[num_out, num_in]`, bfloat16; named "qwen3_8b/down/256"."""

    name: str = dataclasses.field(compare=False)
    rows: int
    num_in: int
    num_out: int

    def schedule(self, target: Target) -> Schedule:
        """The schedule of the product on `target`."""
        return canonical_schedule(target).with_numerics(linear="pinned")

    def work(self, schedule: Schedule) -> Work:
        """The work: weights and rows are read once, float32 results are written once."""
        read = 2 * (self.num_in * self.num_out + self.rows * self.num_in)
        return Work(bytes=float(read + 4 * self.rows * self.num_out), flop=float(2 * self.rows * self.num_in * self.num_out))

    def operands(self, schedule: Schedule) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of rows and weight."""
        shapes = ((self.rows, self.num_in), (self.num_out, self.num_in))
        return tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)

    def function(self, schedule: Schedule) -> Callable[..., Any]:
        """The product of `operands(schedule)`."""
        return linear_fn(schedule.numerics)


KernelShape = AttentionShape | LinearShape


def compile_shape(shape: KernelShape, target: Target) -> Compiled:
    """The kernel of `shape` alone, compiled for `target`."""
    schedule = shape.schedule(target)
    return compile_for(target, shape.function(schedule), *shape.operands(schedule))


def attention_shapes() -> tuple[AttentionShape, ...]:
    """Full and sliding layers of every model, in a canonical pass of 16 windows of 16 and in decoding of 32 sequences.

    One model of each kind adds other splits of 256 rows, an odd length, and decoding of 8 and of 1 sequences. One of these
    models adds layers with linear biases instead of rotations.
    """
    passes = {"16x16": (16, 16, 4096), "decode32": (32, 1, 4096)}
    more = {"256x1": (256, 1, 1024), "1x256": (1, 256, 8192), "5x8 odd": (5, 8, 999)}
    more |= {"decode8": (8, 1, 8191), "decode1": (1, 1, 4096)}
    shapes = []
    for model in MODELS:
        cfg = preset(model)
        kinds = ["full", *["sliding"] * any(cfg.pattern), *["alibi"] * (model == "qwen3_8b")]
        for kind in kinds:
            sliding_window = cfg.kinds[-1].mixer.window if kind == "sliding" else None
            scores = Scores(cfg.layer(0).mixer.scores.scale, cfg.layer(0).mixer.softcap, sliding_window, kind == "alibi")
            for name, (groups, window, max_len) in (passes | (more if model in ("qwen3_8b", "gemma2_2b") else {})).items():
                shapes.append(
                    AttentionShape(
                        name=f"{model}/{kind}/{name}",
                        num_heads=cfg.layer(0).mixer.num_heads,
                        num_kv_heads=cfg.layer(0).mixer.num_kv_heads,
                        head_dim=cfg.layer(0).mixer.head_dim,
                        scores=scores,
                        groups=groups,
                        window=window,
                        max_len=max_len,
                        decode=name.startswith("decode"),
                        cfg=cfg,
                    )
                )
    return tuple(dict.fromkeys(shapes))  # of those that differ in name alone the first


def linear_shapes() -> tuple[LinearShape, ...]:
    """Products with the weights of every model at 256 rows; those of Qwen3 8B at all of `ROWS`."""
    shapes = []
    for model in MODELS:
        cfg = preset(model)
        heads = cfg.layer(0).mixer.num_heads * cfg.layer(0).mixer.head_dim
        products = {
            "q": (cfg.d_model, heads),
            "o": (heads, cfg.d_model),
            "gate": (cfg.d_model, cfg.layer(0).ff.d_ff),
            "down": (cfg.layer(0).ff.d_ff, cfg.d_model),
            "head": (cfg.d_model, cfg.vocab_size),
        }
        for rows in ROWS if model == "qwen3_8b" else ROWS[-1:]:
            for name, (num_in, num_out) in products.items():
                shapes.append(LinearShape(f"{model}/{name}/{rows}", rows, num_in, num_out))
    return tuple(dict.fromkeys(shapes))  # of those that differ in name alone the first
