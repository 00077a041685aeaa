"""Checks of expected answers in other ways to ask for them: scored, read as prompts, audited; and of ties."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import detspec as ds
from scripts.soak.answers import Answer, Answers, bits_of
from scripts.soak.subjects import Subject

MOST = 8  # samples that are checked in a trial; fewer are filled up, so that one program does


class Check(NamedTuple):
    """How many tokens differ of how many that were compared, and whether the control differs, as it must."""

    differ: int
    compared: int
    control_differs: bool


def scored(subject: Subject, engine: ds.Engine, names: Sequence[str]) -> Check:
    """`ds.score` gives texts the bits that generation reported; of ordinary texts it does not."""

    def differing(answers: Answers, chosen: Sequence[str]) -> tuple[int, int]:
        texts = [[*subject.samples[name].prompt_token_ids, *answers[name].token_ids] for name in chosen]
        room = (texts * MOST)[:MOST]
        params = subject.model.params
        found = ds.score(params, subject.model.cfg, room, schedule=subject.schedule(16), max_len=subject.max_len)
        bits = [
            bits_of(logprobs[len(subject.samples[name].prompt_token_ids) :])
            for name, logprobs in zip(chosen, found, strict=False)
        ]
        return num_other_bits(bits, [answers[name].bits for name in chosen])

    return with_control(subject, names, differing)


def read_as_prompts(subject: Subject, engine: ds.Engine, names: Sequence[str]) -> Check:
    """Log-probabilities of a prompt that holds the answer are those that decoding it gave; of ordinary answers they are not."""

    def differing(answers: Answers, chosen: Sequence[str]) -> tuple[int, int]:
        texts = [(*subject.samples[name].prompt_token_ids, *answers[name].token_ids) for name in chosen]
        asked = ds.SamplingParams(max_tokens=1, prompt_logprobs=0)
        completions = engine.generate(texts, asked)
        found = [
            bits_of(completion.prompt_logprobs[len(subject.samples[name].prompt_token_ids) :])
            for name, completion in zip(chosen, completions, strict=True)
        ]
        return num_other_bits(found, [answers[name].bits for name in chosen])

    return with_control(subject, names, differing)


def audited(subject: Subject, engine: ds.Engine, names: Sequence[str]) -> Check:
    """The canonical pass, replaying answers, gives their tokens and bits; of an answer with one other token it does not."""
    chosen = list(names)[:MOST]
    answers = {name: subject.expected[name] for name in chosen}
    differ, compared = replayed_differently(subject, answers)
    altered = max(chosen, key=lambda name: len(answers[name].token_ids))
    tokens = list(answers[altered].token_ids)
    tokens[len(tokens) // 2] ^= 1
    found, _ = replayed_differently(subject, {altered: answers[altered]._replace(token_ids=tokens)})
    return Check(differ, compared, found > 0)


CHECKS: dict[str, Callable[[Subject, ds.Engine, Sequence[str]], Check]] = {
    "scored": scored,
    "read as prompts": read_as_prompts,
    "audited": audited,
}


def num_ties(subject: Subject, answers: Mapping[str, Answer]) -> tuple[int, int]:
    """Tokens of plain greedy answers that had an equal, see `tied`, and how many of them are not the first of the two."""
    tokens = [
        token
        for name, answer in answers.items()
        if name in subject.samples and is_plain_greedy(subject.samples[name].sampling)
        for token in answer.token_ids
    ]
    return len(tokens), sum(token % 2 for token in tokens)


def is_plain_greedy(sampling: ds.SamplingParams) -> bool:
    """Whether tokens are the likeliest ones of the model itself."""
    return sampling.temperature == 0 and not sampling.needs_processing


def with_control(
    subject: Subject, names: Sequence[str], differing_fn: Callable[[Answers, Sequence[str]], tuple[int, int]]
) -> Check:
    """Compares a few expected answers with raw log-probabilities, and for the control some ordinary ones."""
    raw = [name for name, sample in subject.samples.items() if sample.sampling.logprobs_mode == "raw"]
    chosen = [name for name in names if name in raw][:MOST]
    differ, compared = differing_fn(subject.expected, chosen) if chosen else (0, 0)
    return Check(differ, compared, differing_fn(subject.ordinary_among_others, raw[:MOST])[0] > 0)


def replayed_differently(subject: Subject, answers: Answers) -> tuple[int, int]:
    """In how many tokens or bits replays differ from `answers`, and how many were compared."""
    records = [(subject.samples[name], answer.token_ids) for name, answer in answers.items()]
    differ = 0
    for answer, replay in zip(answers.values(), subject.replaying.replay(records), strict=True):
        number = len(answer.token_ids)
        found = zip(replay.targets[:number].tolist(), bits_of(replay.logprobs[:number]), strict=True)
        differ += sum(one != other for one, other in zip(found, zip(answer.token_ids, answer.bits, strict=True), strict=True))
    return differ, sum(len(answer.token_ids) for answer in answers.values())


def num_other_bits(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> tuple[int, int]:
    """How many numbers of lists of equal lengths have other bits, and how many there are."""
    pairs = [pair for ours, theirs in zip(found, expected, strict=True) for pair in zip(ours, theirs, strict=True)]
    return sum(one != other for one, other in pairs), len(pairs)
