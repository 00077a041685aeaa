"""Trainings of the replication, a config each: `detspec train --config scripts/replications/thinking_states/config.py:NAME`.

parity-thinking-0       TASK-ARM-SEED: the arms of one backbone with linear biases; two_hop-no_cot-0, arithmetic-cot-0, ...
parity40-thinking-0     trained on up to 40 operations, not 10; a chain of thought goes on from that for 20, and that from 10
variables40-thinking-0  so does every arm of variables
parity-coconut-0        goes on from the model of parity-cot-0: its steps become continuous thoughts; coconut2 has two for each
parity-icot-0           the same without continuous thoughts
two_hop-facts-0         knows all facts and no question of two hops; the runs known-ARM-0 go on from it
first-thinking-0        variables, with the question before the operations; last-thinking-0, trained alike, behind them
parity-window-0         Thinking States with rotary positions and a sliding window of 16 tokens instead
chunk-8                 arithmetic with other chunk lengths
loop-2                  two hops with known facts, by the number of layers from where states go in to where thoughts are read
sparse                  up to nine of ten operations are fillers
quick-NAME              the same run, so small that it learns nothing: a trial of the steps
"""

import dataclasses
from pathlib import Path

from detspec.errors import InputError
from detspec.model.dense import with_fields
from detspec.train.reasoning import ReasoningConfig
from scripts.replications.thinking_states.curriculum import CurriculumConfig
from scripts.replications.thinking_states.tasks import SHORTER, TASKS, WINDOW, of_chunk, of_loop, sparse

Training = ReasoningConfig | CurriculumConfig

QUICK = "quick-"
FOLDER = Path("runs/replication")  # where the command leaves models by default
SEEDS = {
    "parity": {"thinking": 3, "cot": 3, "no_cot": 3, "coconut": 1, "icot": 1},
    "parity20": {"thinking": 1, "cot": 1, "no_cot": 1},
    "parity40": {"thinking": 1, "cot": 1, "no_cot": 1},
    "last": {"thinking": 1, "cot": 1},
    "first": {"thinking": 1},
    "variables": {"thinking": 3, "cot": 1, "no_cot": 1},
    "variables20": {"thinking": 1, "cot": 1, "no_cot": 1},
    "variables40": {"thinking": 1, "cot": 1, "no_cot": 1},
    "two_hop": {"facts": 1, "thinking": 3, "cot": 3, "no_cot": 3, "coconut": 1, "coconut2": 1, "coconut4": 1, "icot": 1},
    "known": {"thinking": 1, "cot": 1, "no_cot": 1, "coconut": 1, "icot": 1},
    "arithmetic": {"thinking": 1, "cot": 1, "no_cot": 1, "coconut": 1, "icot": 1},
}
LATENTS = {"coconut": 1, "coconut2": 2, "coconut4": 4, "icot": 0}  # continuous thoughts in place of a step
CHUNKS = (2, 8, 16, 32)  # arithmetic has 4
LOOPS = (1, 2, 3)


def get_config(name: str, folder: Path = FOLDER) -> Training:
    """The run called `name`; `InputError` if there is none, or if the model that it goes on from is not in `folder`."""
    runs = trainings()
    plain = name.removeprefix(QUICK)
    if plain not in runs:
        raise InputError(f"no run {name!r}; there are {', '.join(runs)}, and each as a trial with {QUICK!r} before its name")
    config = runs[plain] if plain == name else quick(runs[plain])
    start = starts_from(plain)
    return config if start is None else started(config, folder / start / "export")


def trainings() -> dict[str, Training]:
    """All runs by name, as if all of them began with random weights."""
    runs: dict[str, Training] = {
        f"{task}-{arm}-{seed}": of_arm(task, arm, seed)
        for task, arms in SEEDS.items()
        for arm, seeds in arms.items()
        for seed in range(seeds)
    }
    runs["parity-window-0"] = dataclasses.replace(TASKS["parity"]["thinking"], backbone=WINDOW)
    runs |= {f"chunk-{chunk}": of_chunk(chunk) for chunk in CHUNKS}
    runs |= {f"loop-{layers}": of_loop(layers) for layers in LOOPS}
    runs["sparse"] = sparse()
    return runs


def of_arm(task: str, arm: str, seed: int) -> Training:
    """The run of one arm."""
    config = dataclasses.replace(TASKS[task]["icot" if arm in LATENTS else arm], seed=seed)
    if arm not in LATENTS:
        return config
    # The first half of the run takes the chain away, in equal stages.
    return CurriculumConfig(config, latents=LATENTS[arm], stage_steps=config.num_steps // 2 // config.max_ops)


def starts_from(name: str) -> str | None:
    """The run whose model the run called `name` goes on from; None for one that begins with random weights."""
    task, _, rest = name.partition("-")
    if task == "loop":
        return "two_hop-facts-0"
    arm, _, seed = rest.partition("-")
    if arm in LATENTS:
        return f"{task}-cot-{seed}"
    if (task, arm) in SHORTER:
        return f"{SHORTER[task, arm]}-{arm}-{seed}"
    return "two_hop-facts-0" if task == "known" else None


def started(config: Training, export: Path) -> Training:
    """`config`, going on from the model in `export`."""
    if isinstance(config, CurriculumConfig):
        return dataclasses.replace(config, base=dataclasses.replace(config.base, backbone=str(export)))
    return dataclasses.replace(config, backbone=str(export))


def quick(config: Training) -> Training:
    """`config` with two narrow layers, a few steps and a few short problems."""
    if isinstance(config, CurriculumConfig):
        base = quick(config.base)
        assert isinstance(base, ReasoningConfig)
        return dataclasses.replace(config, base=base, stage_steps=1)
    backbone = with_fields(
        config.backbone_cfg,
        d_model=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        d_ff=16,
        sliding_layers=tuple(map(bool, config.backbone_cfg.pattern[:2])),
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
