"""The trainings of the replication by task and arm, with the steps that each arm needs to learn its problems."""

import dataclasses

from detspec.config import ThinkingConfig
from detspec.model.dense import dense_config, with_fields
from detspec.train.optimizer import OptimizerConfig
from detspec.train.problems.tasks import Arithmetic, Parity, Variables
from detspec.train.problems.two_hop import TwoHop
from detspec.train.reasoning import ReasoningConfig

TESTED = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
FEWER = (10, 20, 40, 70, 100)

BACKBONE = dense_config(
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
WIDER = with_fields(BACKBONE, d_model=64, head_dim=16, d_ff=128)
WINDOW = with_fields(BACKBONE, position_encoding="rope", sliding_window=16, sliding_layers=(True,) * 4)
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
    PARITY, backbone=WIDER, task=Variables(), thinking=dataclasses.replace(THINKING, chunk=4), seq_len=96, num_steps=1600
)
# Too few steps for all to be learnt: it shows which order of the question is learnt faster.
FAST = dataclasses.replace(VARIABLES, max_ops=5, seq_len=64, num_steps=600, eval_ops=(5, 10, 20, 40))
TWO_HOP = dataclasses.replace(
    PARITY,
    backbone=WIDER,
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
KNOWN = dataclasses.replace(
    TWO_HOP,
    task=TwoHop(heldout_by="start", heldout_one_in=5),
    eval_task=TwoHop(heldout_by="start", heldout_one_in=5, split="heldout"),
)
# A chunk holds one operation. The model has a layer before the loop, one after it, and four inside.
ARITHMETIC = dataclasses.replace(
    PARITY,
    backbone=with_fields(BACKBONE, num_layers=6),
    task=Arithmetic(),
    thinking=dataclasses.replace(THINKING, chunk=4, out_layer=5, max_thought=5),
    max_ops=8,
    seq_len=56,
    num_steps=400,
    eval_ops=(2, 4, 6, 8, 12, 16),
)
# For runs that go on from another one.
GENTLE = OptimizerConfig(peak_lr=1e-3, final_lr=1e-4, warmup_steps=20)


def arms_of(thinking: ReasoningConfig, steps: tuple[int, int, int, int], chain: int) -> dict[str, ReasoningConfig]:
    """The arms next to `thinking`, each for its number of `steps`, 0 for none; a chain makes rows `chain` tokens longer."""
    arms = {
        arm: dataclasses.replace(thinking, arm=arm, num_steps=number)
        for arm, number in zip(("thinking", "cot", "no_cot"), steps, strict=False)
        if number
    }
    if "cot" in arms:
        arms["cot"] = dataclasses.replace(arms["cot"], seq_len=thinking.seq_len + chain)
    if steps[3]:
        arms["icot"] = dataclasses.replace(thinking, arm="cot", num_steps=steps[3], optimizer=GENTLE, eval_ops=few(thinking))
    return arms


def few(config: ReasoningConfig) -> tuple[int, ...]:
    """Fewer lengths to test: where latents are as many as operations, each length compiles a program of its own."""
    return tuple(n for n in config.eval_ops if n in FEWER or n <= 8)


def longer(config: ReasoningConfig, max_ops: int, seq_len: int, batch_size: int) -> ReasoningConfig:
    """`config` on up to `max_ops` operations, in smaller batches of longer rows."""
    return dataclasses.replace(config, max_ops=max_ops, seq_len=seq_len, batch_size=batch_size, eval_ops=FEWER)


# What is long is not learnt at once: these runs go on from the same arm of a task with shorter problems.
SHORTER = {
    ("parity20", "cot"): "parity",
    ("parity40", "cot"): "parity20",
    ("variables", "cot"): "last",
    **{("variables20", arm): "variables" for arm in ("thinking", "cot", "no_cot")},
    **{("variables40", arm): "variables20" for arm in ("thinking", "cot", "no_cot")},
}
TASKS = {
    # A chain of thought adds a token for each operation, and needs more training steps to learn to count them. No arm has
    # fewer steps than the one with thoughts; those that go on from another run have its steps, too.
    "parity": arms_of(PARITY, (400, 1000, 800, 1000), 16),
    "parity20": arms_of(longer(PARITY, 20, 104, 24), (400, 400, 400, 0), 26),
    "parity40": arms_of(longer(PARITY, 40, 184, 16), (400, 400, 400, 0), 46),
    # Six tokens for each operation.
    "variables": arms_of(VARIABLES, (1600, 1200, 1600, 0), 64),
    "variables20": arms_of(longer(VARIABLES, 20, 152, 16), (400, 600, 400, 0), 124),
    "variables40": arms_of(longer(VARIABLES, 40, 272, 8), (400, 600, 400, 0), 244),
    "first": arms_of(dataclasses.replace(FAST, task=Variables(question="first")), (600, 600, 600, 0), 32),
    "last": arms_of(FAST, (600, 3000, 600, 0), 36),
    "two_hop": arms_of(TWO_HOP, (1000, 1000, 1000, 600), 0),
    "known": arms_of(KNOWN, (800, 800, 800, 600), 0),
    "arithmetic": arms_of(ARITHMETIC, (400, 900, 600, 800), 32),
}
for task, arm in SHORTER:
    TASKS[task][arm] = dataclasses.replace(TASKS[task][arm], optimizer=GENTLE)
for task in ("last", "variables", "variables20", "variables40"):
    # A chain finds its operations where steps are as long as they are. 90 operations with it exceed the models' positions.
    chain = TASKS[task]["cot"]
    TASKS[task]["cot"] = dataclasses.replace(
        chain, task=Variables(steps="named"), eval_ops=tuple(n for n in chain.eval_ops if n in (5, 10, 20, 40, 70))
    )
# Memorises every fact, and is asked for nothing else.
TASKS["two_hop"]["facts"] = dataclasses.replace(TWO_HOP, arm="no_cot", eval_task=None, max_ops=1, eval_ops=(1,), num_steps=500)


def of_chunk(chunk: int) -> ReasoningConfig:
    """Arithmetic in chunks of `chunk` tokens; a thought holds the steps of all operations that end in its chunk."""
    thinking = dataclasses.replace(ARITHMETIC.thinking, chunk=chunk, max_thought=max(chunk, 4) + 1)
    return dataclasses.replace(ARITHMETIC, thinking=thinking, seq_len=48 + max(chunk, 8))


def of_loop(layers: int) -> ReasoningConfig:
    """Two hops with `layers` layers from where states are added to where thoughts are read off.

    All facts were memorised before, without thoughts. Training asks for none about the people of the tests, so a thought about
    them holds what the layers before it know.
    """
    held_out = TwoHop(heldout_by="person", heldout_one_in=5)
    return dataclasses.replace(
        TASKS["known"]["thinking"],
        task=held_out,
        eval_task=dataclasses.replace(held_out, split="heldout"),
        thinking=dataclasses.replace(KNOWN.thinking, out_layer=1 + layers),
        num_steps=400,
    )


def sparse() -> ReasoningConfig:
    """Coin flips among fillers."""
    return dataclasses.replace(PARITY, task=Parity(filler=0.9, up_to=True), max_ops=20, seq_len=112, num_steps=800)
