"""Drives an engine step by step: requests arrive, some are aborted, and what comes back is put together."""

import dataclasses
from collections.abc import Mapping, Sequence

import detspec as ds
from detspec.engine.request import Update
from scripts.soak.answers import Answer, bits_of, name_of


@dataclasses.dataclass
class Served:
    """The answers that came back.

    Attributes:
        answers: by name of the sample.
        num_broken: samples whose streamed pieces, put together, are not their completion.
    """

    answers: dict[str, Answer] = dataclasses.field(default_factory=dict)
    num_broken: int = 0


def serve(
    engine: ds.Engine,
    requests: Sequence[ds.Request],
    arrivals: Sequence[int] = (),
    aborts: Mapping[str, int] | None = None,
    *,
    stream: bool = False,
) -> Served:
    """Steps until all is done.

    `arrivals` are the numbers of the steps before which the requests arrive, in order, all before the first one by default.
    `aborts` are those before which ids are aborted.
    """
    waiting = [*zip(arrivals or [0] * len(requests), requests, strict=True)][::-1]
    to_abort = dict(aborts or {})
    served = Served()
    pieces: dict[str, list[Update]] = {}
    number = 0
    while waiting or engine.has_work:
        while waiting and waiting[-1][0] <= number:
            engine.add(waiting.pop()[1], stream=stream)
        for id in [id for id, when in to_abort.items() if when <= number]:
            engine.abort(id)
            del to_abort[id]
        for update in engine.step():
            name = name_of(update.request.id, update.request.index)
            pieces.setdefault(name, []).append(update)
            if update.completion is not None:
                answer = served.answers[name] = Answer.of(update.completion)
                served.num_broken += joined(pieces.pop(name)) != answer[:3]
        number += 1
    return served


def joined(updates: Sequence[Update]) -> tuple[list[int], list[int], str]:
    """Tokens, log-probability bits and text of all pieces."""
    tokens = [token for update in updates for token in update.token_ids]
    logprobs = [logprob for update in updates for logprob in update.logprobs]
    return tokens, bits_of(logprobs), "".join(update.text for update in updates)
