"""What the replication trains; each run is a config: `detspec train --config replications/thinking_states/config.py:NAME`.

parity-thinking-0     TASK-ARM-SEED: the arms of one backbone with linear biases; parity-cot-0, two_hop-no_cot-0, ...
parity-window-0       Thinking States with rotary positions and a sliding window of 16 tokens instead
chunk-4, loop-2       other chunk lengths; other numbers of layers from where states go in to where thoughts are read off
sparse                up to nine of ten operations are fillers
quick-NAME            the same run, so small that it learns nothing: a trial of the steps
"""

import dataclasses

from detspec.config import ModelConfig, ThinkingConfig
from detspec.errors import InputError
from detspec.train.optimizer import OptimizerConfig
from detspec.train.problems.parity import Parity
from detspec.train.problems.two_hop import TwoHop
from detspec.train.problems.variables import Variables
from detspec.train.reasoning import ReasoningConfig

QUICK = "quick-"
SEEDS = {
    "parity": {"thinking": 3, "cot": 3, "no_cot": 3},
    "variables": {"thinking": 3, "cot": 1, "no_cot": 1},
    "two_hop": {"thinking": 1, "cot": 1, "no_cot": 1},
}
TESTED = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
CHUNKS = (2, 4, 16, 32)  # all other runs have 8
LOOPS = (1, 2, 3)

BACKBONE = ModelConfig(
    vocab_size=64,
    d_model=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    d_ff=96,
    tie_embeddings=True,
    max_position=1024,
    dtype="float32",
    position_encoding="alibi",
)
WINDOW = dataclasses.replace(BACKBONE, position_encoding="rope", sliding_window=16, sliding_layers=(True,) * 4)
THINKING = ThinkingConfig(chunk=8, in_layer=1, out_layer=3, max_thought=4, end_id=0)
PARITY = ReasoningConfig(
    backbone=BACKBONE,
    thinking=THINKING,
    task=Parity(),
    arm="thinking",
    max_ops=10,
    seq_len=64,
    num_steps=500,
    batch_size=32,
    optimizer=OptimizerConfig(peak_lr=3e-3, final_lr=1.5e-4, warmup_steps=50),
    eval_ops=TESTED,
    eval_problems=128,
    eval_every=1000,
    checkpoint_every=200,
)
VARIABLES = dataclasses.replace(
    PARITY,
    backbone=dataclasses.replace(BACKBONE, d_model=64, head_dim=16, d_ff=128),
    task=Variables(),
    thinking=dataclasses.replace(THINKING, chunk=4),
    seq_len=96,
    num_steps=1600,
)
TWO_HOP = dataclasses.replace(
    PARITY,
    backbone=VARIABLES.backbone,
    task=TwoHop(),
    eval_task=TwoHop(split="heldout"),
    thinking=dataclasses.replace(THINKING, chunk=4, max_thought=2),
    max_ops=2,
    seq_len=24,
    num_steps=1000,
    batch_size=64,
    eval_ops=(1, 2),
    eval_problems=512,
)
# A chain of thought adds a token for each operation, and needs more training steps to learn to count them.
STEPS = {"thinking": 500, "cot": 1000, "no_cot": 400}
LENGTHS = {"thinking": 64, "cot": 80, "no_cot": 64}


def get_config(name: str) -> ReasoningConfig:
    """The run called `name`; `InputError` if there is none."""
    runs = trainings()
    plain = name.removeprefix(QUICK)
    if plain not in runs:
        raise InputError(f"no run {name!r}; there are {', '.join(runs)}, and each as a trial with {QUICK!r} before its name")
    return runs[plain] if plain == name else quick(runs[plain])


def trainings() -> dict[str, ReasoningConfig]:
    """All runs by name."""
    runs = {
        f"{task}-{arm}-{seed}": of_arm(arm, seed)
        for task, of_arm in (("parity", parity), ("variables", variables), ("two_hop", two_hop))
        for arm, seeds in SEEDS[task].items()
        for seed in range(seeds)
    }
    runs["parity-window-0"] = dataclasses.replace(PARITY, backbone=WINDOW)
    runs |= {f"chunk-{chunk}": of_chunk(chunk) for chunk in CHUNKS}
    runs |= {f"loop-{layers}": of_loop(layers) for layers in LOOPS}
    runs["sparse"] = dataclasses.replace(PARITY, task=Parity(filler=0.9, up_to=True), max_ops=20, seq_len=112, num_steps=1000)
    return runs


def parity(arm: str, seed: int) -> ReasoningConfig:
    """Coin flips."""
    return dataclasses.replace(PARITY, arm=arm, seed=seed, num_steps=STEPS[arm], seq_len=LENGTHS[arm])


def variables(arm: str, seed: int) -> ReasoningConfig:
    """Sums of three variables; a chain of thought writes three tokens for each operation."""
    return dataclasses.replace(VARIABLES, arm=arm, seed=seed, seq_len=128 if arm == "cot" else 96)


def two_hop(arm: str, seed: int) -> ReasoningConfig:
    """Questions that join two memorised facts; the evaluation joins pairs of facts that training never joined."""
    return dataclasses.replace(TWO_HOP, arm=arm, seed=seed)


def of_chunk(chunk: int) -> ReasoningConfig:
    """Coin flips in chunks of `chunk` tokens; a thought holds the steps of all operations that end in its chunk."""
    return dataclasses.replace(
        PARITY,
        thinking=dataclasses.replace(THINKING, chunk=chunk, max_thought=chunk // 4 + 2),
        seq_len=54 + max(chunk, 8) + 2,
        num_steps=300,
        eval_ops=(10, 40, 100),
    )


def of_loop(layers: int) -> ReasoningConfig:
    """Coin flips with `layers` layers from where states are added to where thoughts are read off."""
    return dataclasses.replace(
        PARITY, thinking=dataclasses.replace(THINKING, out_layer=1 + layers), num_steps=300, eval_ops=(10, 40, 100)
    )


def quick(config: ReasoningConfig) -> ReasoningConfig:
    """`config` with two narrow layers, a few steps and a few short problems."""
    backbone = dataclasses.replace(
        config.backbone_cfg,
        d_model=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        d_ff=16,
        sliding_layers=config.backbone_cfg.sliding_layers[:2],
    )
    return dataclasses.replace(
        config,
        backbone=backbone,
        thinking=dataclasses.replace(config.thinking, in_layer=0, out_layer=1),
        num_steps=2,
        batch_size=2,
        optimizer=dataclasses.replace(config.optimizer, warmup_steps=1),
        eval_ops=(1, 2),
        eval_problems=2,
    )
