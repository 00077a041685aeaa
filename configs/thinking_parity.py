"""Coin flips with Thinking States: the model that is shipped as `detspec.load("thinking_parity")`.

    detspec train --config configs/thinking_parity.py            Thinking States
    detspec train --config configs/thinking_parity.py:cot        chain of thought, the same backbone
    detspec train --config configs/thinking_parity.py:no_cot     the answer without steps

Task       up to 20 operations; up to nine in ten do not concern the coin. All problems of all steps are new.
Model      230,272 parameters with thinker and compressor, float32; exported unchanged (0.9 MB). Linear biases: rotary
           positions with a window of 16 tokens fail on long runs of filler operations (0.84 at 100 operations).
Training   1000 steps of 32 rows of 112 tokens.
Hardware   one core of an AMD EPYC (Zen 5) shared with three other jobs, jax 0.10.2: 9 min, median 9800 tok/s.
Accuracy   128 problems each: 1.00 at 5, 10, 20, 40 and 70 operations, 0.99 at 100. With filler shares of 0, 0.5 and 0.8: 1.00
           at 5 to 100 operations; with 0.95: 1.00 up to 40, 0.99 at 70, 0.92 at 100 (96 problems each).
These numbers are from before batches were cut into slices: the same training now ends with other bits.
"""

from detspec.config import ThinkingConfig
from detspec.model.dense import dense_config
from detspec.train.optimizer import OptimizerConfig
from detspec.train.problems.tasks import Parity
from detspec.train.reasoning import ReasoningConfig


def get_config(arm: str = "thinking") -> ReasoningConfig:
    """The config of one arm."""
    return ReasoningConfig(
        backbone=dense_config(
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
