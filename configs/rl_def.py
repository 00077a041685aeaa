"""Functions that parse: the shipped model learns to finish the function that a head begins. The reward needs no data.

    detspec train --config configs/rl_def.py        seed 0
    detspec train --config configs/rl_def.py:1      another seed

Task       eight heads of functions; 1 for a whole function that `ast.parse` takes, within 48 tokens, else 0.
Objective  GRPO, eight texts for each of eight heads, T = 1.
Learning   0.05, 0.03 and 0.03 of the texts parse in the first step of seeds 0, 1 and 2; in the mean of the last ten steps
           0.71, 0.61 and 0.83. In every step 0 log-probabilities differ from the sampler's.
Hardware   two cores of an Intel Xeon (family 6, model 167), jax 0.10.2: 113 to 183 s of processor time with all to compile. At
           low priority next to other work that was 10 to 12 minutes.
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
        checkpoint_every=10,
    )
