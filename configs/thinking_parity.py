"""Coin flips by a model that thinks while it reads.

detspec train --config configs/thinking_parity.py            Thinking States
detspec train --config configs/thinking_parity.py:cot        chain of thought, the same backbone
detspec train --config configs/thinking_parity.py:no_cot     the answer at once
"""

from detspec.config import ModelConfig, ThinkingConfig
from detspec.train.optimizer import OptimizerConfig
from detspec.train.problems.parity import Parity
from detspec.train.reasoning import ReasoningConfig


def get_config(arm: str = "thinking") -> ReasoningConfig:
    """One arm."""
    return ReasoningConfig(
        backbone=ModelConfig(
            vocab_size=64,
            d_model=64,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            d_ff=128,
            tie_embeddings=True,
            max_position=1024,
            dtype="float32",
            position_encoding="alibi",
        ),
        thinking=ThinkingConfig(chunk=8, in_layer=1, out_layer=3, max_thought=4, end_id=0),
        task=Parity(filler=0.9, up_to=True),
        arm=arm,
        max_ops=20,
        seq_len=112,
        num_steps=1000,
        batch_size=32,
        optimizer=OptimizerConfig(peak_lr=3e-3, final_lr=1e-4, warmup_steps=50),
    )
