"""Coin flips with written steps: a model that was taught up to five operations learns up to twelve by its rewards alone.

detspec train --config configs/rl_parity.py:taught      the start: supervised, problems of 1 to 5 operations
detspec train --config configs/rl_parity.py             problems of 6 to 12; 1 for all steps and the answer
"""

from detspec.config import ThinkingConfig
from detspec.model.dense import dense_config
from detspec.rl.config import RLConfig
from detspec.rl.objectives import grpo
from detspec.rl.tasks import WrittenSteps
from detspec.train.optimizer import OptimizerConfig
from detspec.train.problems.tasks import Parity
from detspec.train.reasoning import ReasoningConfig

TASK = Parity(filler=0.5, up_to=True)


def get_config(arm: str = "rl") -> ReasoningConfig | RLConfig:
    """The supervised run "taught", or "rl", which starts from what that exported."""
    if arm == "taught":
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
                max_position=256,
                dtype="float32",
                position_encoding="alibi",
            ),
            thinking=ThinkingConfig(chunk=8, in_layer=1, out_layer=3, max_thought=4, end_id=0),
            task=TASK,
            arm="cot",
            max_ops=5,
            seq_len=64,
            num_steps=300,
            batch_size=32,
            optimizer=OptimizerConfig(peak_lr=3e-3, final_lr=1e-4, warmup_steps=50),
            eval_ops=(5, 6, 8, 10, 12),
        )
    return RLConfig(
        model="runs/rl_parity-taught/export",
        task=WrittenSteps(TASK, ops=(6, 12)),
        prompts=16,
        samples=8,
        max_tokens=48,
        num_steps=60,
        optimizer=OptimizerConfig(peak_lr=3e-4, final_lr=3e-5, warmup_steps=5, weight_decay=0.0),
        objective=grpo(),
        leaf=16,
        max_len=256,
        max_requests=64,
    )
