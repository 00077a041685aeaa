"""Texts that a policy sampled, with their log-probabilities: what a step learns from."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence

import numpy as np

from detspec.config import is_count
from detspec.engine.engine import Engine
from detspec.engine.request import Completion
from detspec.errors import InputError, shown
from detspec.generation.checks import listed_prompts
from detspec.sampling_params import SamplingParams
from detspec.seeds import seed_of


@dataclasses.dataclass(frozen=True, eq=False)
class Rollout:
    """A text that the weights of one version sampled.

    Attributes:
        id: step, prompt and sample.
        prompt_token_ids: the prompt.
        token_ids: new tokens; a stop token is an action, too.
        logprobs: float32 `[n]`, of each of them, at the temperature of `sampling`.
        text: the new tokens as text.
        finish_reason: "stop" or "length".
        sampling: how it was sampled.
        version: which weights sampled it.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: np.ndarray
    text: str
    finish_reason: str
    sampling: SamplingParams
    version: str

    @classmethod
    def of(cls, completion: Completion, sampling: SamplingParams, version: str) -> "Rollout":
        """The rollout that `completion` of a request with `sampling` is; `InputError` if it failed."""
        if completion.finish_reason not in ("stop", "length"):
            why = completion.error or completion.finish_reason
            raise InputError(f"the text {completion.id!r} was not sampled to its end: {why}")
        return cls(
            completion.id,
            completion.prompt_token_ids,
            completion.token_ids,
            np.asarray(completion.logprobs, np.float32),
            completion.text,
            completion.finish_reason,
            sampling,
            version,
        )

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the text."""
        return len(self.prompt_token_ids) + len(self.token_ids)


def digest_rollouts(rollouts: Sequence[Rollout]) -> str:
    """SHA-256 over prompts, tokens, bits of log-probabilities, texts and seeds, in their order."""
    digest = hashlib.sha256()
    for each in rollouts:
        facts = [list(each.prompt_token_ids), list(each.token_ids), each.logprobs.view(np.uint32).tolist()]
        digest.update(json.dumps([*facts, each.text, each.sampling.seed]).encode())
    return digest.hexdigest()


def sample_groups(
    engine: Engine,
    prompts: Sequence[str | Sequence[int]],
    sampling: SamplingParams,
    *,
    samples: int,
    names: tuple[int | str, ...],
    version: str,
) -> list[list[Rollout]]:
    """Samples `samples` texts of each prompt: one group a prompt, in the order of the prompts.

    The seed of a text is `seed_of(*names, number of the prompt, number of the sample)`, so no two texts share their noise.

    Raises `InputError` if `sampling` asks for a distribution that no trainer has, a prompt does not fit, or a text fails.
    """
    if not is_count(samples):
        raise InputError(f"samples must be a positive integer, got {shown(samples)}")
    check_sampling(sampling)
    requests = [
        engine.request(prompt, dataclasses.replace(sampling, seed=seed_of(*names, p, s)), id=f"{names[-1]}/{p}/{s}")
        for p, prompt in enumerate(listed_prompts(prompts))
        for s in range(samples)
    ]
    asked = {request.id: request.sampling for request in requests}
    found = {completion.id: Rollout.of(completion, asked[completion.id], version) for completion in engine.run(requests)}
    in_order = [found[request.id] for request in requests]  # never in the order of finishing
    return [in_order[first : first + samples] for first in range(0, len(in_order), samples)]


def check_sampling(sampling: SamplingParams) -> None:
    """Raises `InputError` unless tokens are drawn from, and reported by, the softmax of logits over the temperature."""
    plain = SamplingParams()
    fields = ["top_k", "top_p", "min_p", "min_tokens", "repetition_penalty", "frequency_penalty", "presence_penalty"]
    fields += ["logit_bias", "n"]
    if changed := [name for name in fields if getattr(sampling, name) != getattr(plain, name)]:
        raise InputError(
            f"rollouts must be drawn from the whole softmax, whose log-probabilities a trainer has: leave out {changed[0]} "
            f"({getattr(sampling, changed[0])!r})"
        )
    if not sampling.temperature > 0:
        raise InputError("rollouts need a temperature above 0: greedy texts have no policy gradient")
    if not sampling.deterministic:
        raise InputError("rollouts must be deterministic: ordinary requests report log-probabilities with other bits")
    if sampling.logprobs_mode != "tempered" and sampling.temperature != 1:
        raise InputError(
            f"rollouts at the temperature {sampling.temperature} must report logprobs_mode='tempered', got "
            f"{sampling.logprobs_mode!r}: the ratio would be one of another distribution"
        )


def check_groups(groups: Sequence[Sequence[Rollout]], *, compares: bool, version: str, temperature: float) -> None:
    """Raises `InputError` unless a step may learn from `groups` of the weights `version`, at one `temperature`."""
    for number, group in enumerate(groups):
        if compares and len(group) < 2:
            raise InputError(f"group {number} has {len(group)} text, and advantages compare texts: sample two or more a prompt")
        seeds = [each.sampling.seed for each in group]
        if len(set(seeds)) < len(seeds):
            raise InputError(f"texts of group {number} share a seed, so they are one text: give each sample a seed of its own")
        for each in group:
            check_sampling(each.sampling)
            if each.version != version:
                raise InputError(f"{each.id!r} was sampled by the weights {each.version!r}, this step learns from {version!r}")
            if each.sampling.temperature != temperature:
                raise InputError(
                    f"{each.id!r} was sampled at the temperature {each.sampling.temperature}, others at {temperature}: "
                    "a step has one"
                )
            is_finite = np.isfinite(np.asarray(each.logprobs, np.float32))  # of None: nan
            if is_finite.shape != (len(each.token_ids),) or not is_finite.all():
                raise InputError(
                    f"{each.id!r} has {len(each.token_ids)} tokens and {is_finite.sum()} finite log-probabilities: "
                    "both must be as many"
                )
