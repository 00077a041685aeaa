"""Named model shapes for benchmarks with random weights."""

from detspec.config import ModelConfig
from detspec.errors import InputError

# Every head is untied: with random weights a tied one would repeat the last token for ever.
PRESETS = {
    # The shape of the shipped model: 3.9 M weights, which stay in the processor's cache.
    "tiny_python": ModelConfig(
        vocab_size=2048, d_model=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, d_ff=688, max_position=1024
    ),
    # 100.7 M weights, 201 MB: reading them is most of a decode step.
    "random_100m": ModelConfig(
        vocab_size=16384, d_model=768, num_layers=12, num_heads=12, num_kv_heads=4, head_dim=64, d_ff=2048, max_position=4096
    ),
}


def preset(name: str) -> ModelConfig:
    """The config called `name`.

    Raises:
        InputError: there is no such preset.
    """
    if name not in PRESETS:
        raise InputError(f"unknown preset {name!r}; there are {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
