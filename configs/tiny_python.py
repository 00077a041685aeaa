"""A small Llama trained on the Python standard library, the model that is shipped with the package."""

from detspec.config import ModelConfig
from detspec.train.config import Phase, TrainConfig


def get_config() -> TrainConfig:
    """The run that made `detspec/assets/tiny_python`."""
    return TrainConfig(
        model=ModelConfig(
            vocab_size=2048,
            d_model=256,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            d_ff=688,
            tie_embeddings=True,
            max_position=1024,
            dtype="float32",
        ),
        corpus="python_stdlib",
        phases=(Phase(num_steps=3300, batch_size=8, seq_len=256), Phase(num_steps=450, batch_size=2, seq_len=1024)),
        peak_lr=2e-3,
        final_lr=1e-4,
        warmup_steps=100,
    )
