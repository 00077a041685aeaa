"""Coin flips with written steps: a model that was taught up to eight operations goes on with up to twelve by rewards alone.

    detspec train --config configs/rl_parity.py:taught      the start: supervised, problems of 1 to 8 operations
    detspec train --config configs/rl_parity.py             problems of 6 to 12; the reward is the share of right words

Taught     400 steps; answers after all steps right: 1.00 at 5 and 6 operations, 0.95 at 8, 0.82 at 10, 0.59 at 12.
Rewards    300 steps of 16 problems with 8 texts each, T = 0.7, 9 minutes on two busy cores of an AMD EPYC, jax 0.10.2. Whole
           texts right in 30 steps each: 0.48, 0.54, 0.51, 0.66, 0.67, 0.71, 0.76, 0.78, 0.80, 0.82. One seed was tried.
Failed     a start of up to 5 operations (0.24 right, no trend at rates of 3e-5 to 1e-3), a reward for the answer alone, which
           is half right by chance, and one for whole texts alone, of which most groups have none. A rate of 5e-4 learns less,
           one of 1e-3 unlearns. T = 1 learns slowly (0.57 to 0.68 in 120 steps), T = 1.5 nothing.
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
            max_ops=8,
            seq_len=96,
            num_steps=400,
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
        num_steps=300,
        optimizer=OptimizerConfig(peak_lr=3e-4, final_lr=3e-5, warmup_steps=5, weight_decay=0.0),
        objective=grpo(),
        temperature=0.7,
        leaf=16,
        max_len=256,
        max_requests=64,
    )
