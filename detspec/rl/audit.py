"""Audit of a step of a run: its recorded texts are replayed by the weights that sampled them, and its rewards are given anew.

Nothing is generated, so it takes a fraction of the step. Prompts, seeds, tokens, bits of log-probabilities and rewards must be
those of the record, and its digest that of the log.
"""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from detspec.checkpoint.load import Model
from detspec.checkpoint.store import Store
from detspec.engine.bits import same_bits
from detspec.engine.engine import Engine
from detspec.errors import InputError
from detspec.model.params import Params
from detspec.read_json import differing_entries
from detspec.rl.config import RLConfig
from detspec.rl.learner import masters, published
from detspec.rl.rollouts import Rollout, digest_rollouts
from detspec.rl.run import ROLLOUTS
from detspec.seeds import seed_of
from detspec.train.optimizer import make_optimizer
from detspec.train.run import LOG_NAME, read_log, record_of


@dataclasses.dataclass(frozen=True)
class StepReport:
    """The findings of an audit of a step.

    Attributes:
        step: the step, from 1 on.
        num_texts: texts that were replayed.
        num_tokens: their new tokens.
        differences: what differs, in words; none if the step reproduces.
        replay_s: seconds that it took, without loading and compiling.
    """

    step: int
    num_texts: int
    num_tokens: int
    differences: tuple[str, ...]
    replay_s: float


def audit_step(config: RLConfig, workdir: Path, step: int) -> StepReport:
    """Replays `step`, from 1 on, of the run in `workdir`.

    Raises `InputError` if there is no record of it, no checkpoint of the weights before it, or `config` is not the run's.
    """
    lines = [line for line in read_log(workdir / ROLLOUTS) if line["step"] == step]
    logged = [line for line in read_log(workdir / LOG_NAME) if line["step"] == step and "rollouts" in line]
    if not lines or not logged:
        raise InputError(f"{workdir} has no record of step {step}: name a step that the run has made, from 1 on")
    model = config.load()
    version, weights = _sampled_by(config, model, workdir, step - 1)
    engine = config.engine(model)
    engine.update_params(weights, weight_version=config.version(version))
    prompts, known = config.draw(step - 1)
    texts = [_rollout(config, line) for line in lines]
    if len(texts) != len(prompts) * config.samples:
        wanted = len(prompts) * config.samples
        raise InputError(f"the record of step {step} has {len(texts)} texts, not {wanted}: it is cut off")
    engine.prepare_replays()
    began = time.perf_counter()
    found = list(_of_texts(config, engine, texts, prompts, step))
    for at, (each, line) in enumerate(zip(texts, lines, strict=True)):
        prompt = at // config.samples
        reward = config.task.reward(known[prompt], prompts[prompt], each.text)
        if reward != line["reward"]:
            found.append(f"{each.id}: the reward is {reward!r}, recorded is {line['reward']!r}")
    if digest_rollouts(texts) != logged[0]["rollouts"]:
        found.append(f"the texts have the digest {digest_rollouts(texts)}, the log has {logged[0]['rollouts']}")
    seconds = time.perf_counter() - began
    return StepReport(step, len(texts), sum(len(each.token_ids) for each in texts), tuple(found), seconds)


def _of_texts(config: RLConfig, engine: Engine, texts: list[Rollout], prompts: list[str], step: int) -> Iterator[str]:
    """Says what differs in prompts, seeds, tokens and bits of `texts`."""
    requests = []
    for at, each in enumerate(texts):
        prompt, sample = divmod(at, config.samples)
        seed = seed_of(config.name, step - 1, prompt, sample)
        request = engine.request(prompts[prompt], dataclasses.replace(config.sampling, seed=seed), id=each.id)
        if request.prompt_token_ids != each.prompt_token_ids:
            yield f"{each.id}: the prompt is not that of the task"
        if seed != each.sampling.seed:
            yield f"{each.id}: the seed is {seed}, recorded is {each.sampling.seed}"
        requests.append(request)
    replays = engine.replay((request, each.token_ids) for request, each in zip(requests, texts, strict=True))
    for each, replay in zip(texts, replays, strict=True):
        n = len(each.token_ids)
        differs = (replay.targets[:n] != np.asarray(each.token_ids, np.int32)) | ~same_bits(replay.logprobs[:n], each.logprobs)
        if differs.any():
            place = int(differs.argmax())
            yield (
                f"{each.id}: token {place} is {replay.targets[place]} with the log-probability {replay.logprobs[place]!r}, "
                f"recorded is {each.token_ids[place]} with {each.logprobs[place]!r}"
            )


def _sampled_by(config: RLConfig, model: Model, workdir: Path, made: int) -> tuple[int, Params]:
    """The version that sampled the texts of the step after `made` steps, and its weights."""
    version = max(0, made - config.lag)
    experiment = config.experiment(workdir)
    optimizer = make_optimizer(config.optimizer, config.num_steps)
    with Store(workdir / "checkpoints") as store:
        steps = store.steps()
        ours = record_of(experiment)
        if steps and (differing := sorted(name for name, _, _ in differing_entries(store.record(steps[-1]), ours))):
            raise InputError(f"{workdir}: the run was made with another config; differing: {', '.join(differing)}")
        if version == 0:
            return 0, model.params
        if made not in steps:
            there = ", ".join(str(step + 1) for step in (0, *steps) if step < config.num_steps)
            raise InputError(f"no checkpoint has the weights before step {made + 1}: steps that can be audited are {there}")
        like = jax.eval_shape(lambda: experiment.init_state(masters(model.params), optimizer))
        state: Any = store.restore(made, like)
    return version, state.opt_state.earlier[0] if config.lag else published(state.params, model.cfg)


def _rollout(config: RLConfig, line: dict[str, Any]) -> Rollout:
    sampling = dataclasses.replace(config.sampling, seed=line["seed"])
    ids = tuple(line["prompt_token_ids"]), tuple(line["token_ids"])
    logprobs = np.asarray(line["logprobs"], np.float32)
    return Rollout(line["id"], *ids, logprobs, line["text"], line["finish_reason"], sampling, line["version"])
