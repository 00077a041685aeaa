"""Sizes of all things: an 8B shape for the device, and a tiny one for rehearsals."""

import dataclasses

from detspec.config import ModelConfig
from detspec.model.dense import dense_config, with_fields
from detspec.presets import preset

LLAMA = preset("llama3_1_8b")
SMALL = dense_config(vocab_size=211, d_model=128, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64, d_ff=256)


@dataclasses.dataclass(frozen=True)
class Experts:
    """Experts of a layer: how many there are and a row chooses, and the widths of the model and of one of them."""

    name: str
    num: int
    active: int
    d_model: int
    d_ff: int


@dataclasses.dataclass(frozen=True)
class Size:
    """Everything that stages measure, in one size.

    Attributes:
        name: "tiny" or "full".
        cfg: the model; attention and products have the shape of its layers.
        layers: depth of passes and generation, cut so that compiling fits the time.
        whole_layers: depth of the last stage.
        examined: the model that the doctor examines; four layers, a shorter vocabulary.
        examined_rows: rows of passes that are compared with the anchor's.
        examined_budget: rows and window of the anchor, the device's own if None.
        copy_bytes, side: of the ceilings: bytes copied, rows and columns of a square product.
        kernels: shapes of attention that are compared with float64: (model and layer, groups, window, positions, decode).
        checked_rows: rows of the pinned products that are compared with float64.
        decode: (sequences, positions) of decode attention.
        canonical: (groups, window) of canonical attention.
        context: positions that canonical attention, passes and steps see.
        prefill: positions of a prompt in one window.
        product_rows: rows of the products that are timed, the most valuable first.
        experts, experts_rows: layers of experts, and the rows that choose them, the most valuable first.
        steps, passes: rows of decode steps, canonical ones too, and of canonical passes in windows of the device's own length.
        compared: rows of the pass, and of the step that it is compared with; these run at full depth, too.
        requests: most requests in flight among which one prompt is completed.
        generation: cases that are generated end to end, the most valuable first: requests, and how many are deterministic.
        prompt_len, new_tokens: tokens of each request.
        completed_prompt: tokens of the prompt that is completed many times; several pages, which splits of attention share.
        copies: completions of one prompt.
        repeats: rounds of everything that is timed.
        sample_s: calls are queued until a sample takes this long, which hides dispatch.
    """

    name: str
    cfg: ModelConfig
    layers: int
    whole_layers: int
    examined: ModelConfig
    examined_rows: tuple[int, ...]
    examined_budget: tuple[int, int] | None
    copy_bytes: int
    side: int
    kernels: tuple[tuple[str, int, int, int, bool], ...]
    checked_rows: tuple[int, ...]
    decode: tuple[tuple[int, int], ...]
    canonical: tuple[tuple[int, int], ...]
    context: int
    prefill: int
    product_rows: tuple[int, ...]
    experts: tuple[Experts, ...]
    experts_rows: tuple[int, ...]
    steps: tuple[int, ...]
    passes: tuple[int, ...]
    compared: tuple[int, int]
    requests: int
    generation: tuple[tuple[int, int], ...]
    prompt_len: int
    new_tokens: int
    completed_prompt: int
    copies: int
    repeats: int
    sample_s: float

    @property
    def is_timed(self) -> bool:
        """Whether times mean anything: those of a rehearsal are held to no bar."""
        return self.name == "full"

    @property
    def model(self) -> ModelConfig:
        """The model of passes and generation."""
        return with_fields(self.cfg, num_layers=self.layers)


FULL = Size(
    name="full",
    cfg=LLAMA,
    layers=8,
    whole_layers=32,
    examined=with_fields(LLAMA, num_layers=4, vocab_size=32768),
    examined_rows=(1, 8, 32, 128, 512),
    examined_budget=None,
    copy_bytes=4 << 30,
    side=8192,
    kernels=(
        ("llama3_1_8b/full", 16, 16, 1000, False),
        ("llama3_1_8b/full", 256, 1, 300, False),
        ("llama3_1_8b/full", 1, 256, 1000, False),
        ("qwen3_8b/full", 5, 8, 999, False),
        ("gemma3_1b/sliding", 16, 16, 1000, False),
        ("llama3_1_8b/full", 32, 1, 1000, True),
        ("gemma2_2b/full", 1, 1, 4096, True),
    ),
    checked_rows=(1, 8, 32, 256),
    decode=((32, 4096), (128, 1024), (1, 32768)),
    canonical=((16, 16), (1, 256), (256, 1)),
    context=4096,
    prefill=2048,
    product_rows=(32, 256, 1, 128, 64, 8),
    experts=(Experts("Qwen3 30B-A3B", 128, 8, 2048, 768), Experts("gpt-oss 20B", 32, 4, 2880, 2880)),
    experts_rows=(32, 256, 1),
    steps=(1, 8, 32, 128),
    passes=(64, 256, 1024),
    compared=(256, 32),
    requests=32,
    generation=((32, 32), (8, 8), (9, 1), (128, 128), (1, 1)),
    prompt_len=64,
    new_tokens=128,
    completed_prompt=300,
    copies=1000,
    repeats=7,
    sample_s=0.02,
)
TINY = Size(
    name="tiny",
    cfg=SMALL,
    layers=1,
    whole_layers=2,
    examined=with_fields(SMALL, num_layers=1),
    examined_rows=(16,),
    examined_budget=(8, 4),
    copy_bytes=1 << 20,
    side=128,
    kernels=(
        ("small", 4, 4, 70, False),
        ("small", 3, 8, 99, False),
        ("small/sliding", 4, 4, 70, False),
        ("small", 1, 1, 130, True),
    ),
    checked_rows=(1, 16),
    decode=((2, 64), (4, 32), (1, 128)),
    canonical=((2, 4), (1, 8), (8, 1)),
    context=64,
    prefill=16,
    product_rows=(1, 16),
    experts=(Experts("tiny", 8, 2, 64, 48),),
    experts_rows=(16, 1),
    steps=(1, 4),
    passes=(16, 64),
    compared=(64, 4),
    requests=2,
    generation=((2, 2), (2, 1)),
    prompt_len=8,
    new_tokens=8,
    completed_prompt=8,
    copies=24,
    repeats=3,
    sample_s=0.002,
)
SIZES = {size.name: size for size in (TINY, FULL)}
