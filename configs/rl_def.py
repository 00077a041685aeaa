"""Functions that parse: the shipped model learns to finish the function that a head begins. The reward needs no data.

    detspec train --config configs/rl_def.py

Task       eight heads of functions; 1 for a whole function that `ast.parse` takes, within 48 tokens, else 0.
Objective  GRPO, eight texts for each of eight heads, T = 1.
"""

from detspec.rl.config import RLConfig
from detspec.rl.objectives import grpo
from detspec.rl.tasks import FirstDef
from detspec.train.optimizer import OptimizerConfig


def get_config(seed: str = "0") -> RLConfig:
    """The run with this seed."""
    return RLConfig(
        model=None,
        task=FirstDef(),
        prompts=8,
        samples=8,
        max_tokens=48,
        num_steps=40,
        optimizer=OptimizerConfig(peak_lr=1e-4, final_lr=1e-5, warmup_steps=5, weight_decay=0.0),
        objective=grpo(),
        leaf=8,
        seed=int(seed),
    )
