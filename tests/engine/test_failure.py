"""A fault of the host at one request ends that request; the others, and those that come later, have their bits."""

import logging
from pkgutil import resolve_name

import jax
import pytest

from detspec.engine.engine import Engine
from detspec.engine.request import Request
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import facts

BAD = "bad"
BAD_SEED = 4711
PROMPT = tuple(range(40, 60))
# Where an exception is planted: what is called there, and how the call shows that it is about the bad request.
SITES = {
    "packing": (
        "detspec.engine.device.pack_requests",
        lambda state, entries, eos: BAD_SEED in [e.sampling.seed for e in entries],
    ),
    "keys of pages": ("detspec.engine.scheduler.prefix_keys", lambda root, tokens, page: tokens[0] == 99),
    "reading the report": ("detspec.engine.segments.Segments.fetch", lambda self, sequence: sequence.request.id == BAD),
    "looking for its end": ("detspec.engine.sequence.SequenceState.end_at_stop_string", lambda self: self.request.id == BAD),
    "replaying": ("detspec.engine.segments.asked_from", lambda request: request.id == BAD),
    "giving its pages back": (
        "detspec.engine.scheduler.Scheduler.remove",
        lambda self, sequence, *, keep: keep and sequence.request.id == BAD,
    ),
    "the update": ("detspec.engine.engine.update_of", lambda sequence, model, context: sequence.request.id == BAD),
    "the start of its text": ("detspec.engine.sequence.text_of", lambda request, tokens: request.id == BAD),
    "the digest": ("detspec.engine.sequence.completion_digest", lambda request, *rest: request.id == BAD),
}
SCORING = {
    "packing",
    "keys of pages",
    "replaying",
    "giving its pages back",
    "the update",
    "the start of its text",
    "the digest",
}


def plant(monkeypatch: pytest.MonkeyPatch, site: str, error: Exception) -> list[bool]:
    """Raises `error` at `site` for the bad request; returns a list that is no longer empty once it was raised."""
    name, is_meant = SITES[site]
    owner, attribute = name.rsplit(".", 1)
    function = resolve_name(name)
    raised = []

    def planted(*args, **kwargs):
        if is_meant(*args, **kwargs):
            raised.append(True)
            raise error
        return function(*args, **kwargs)

    monkeypatch.setattr(f"{owner}.{attribute}", planted)
    return raised


def asked(*, is_scored: bool = False) -> list[Request]:
    """Five requests that begin alike, in an engine of three places; the bad one begins with a token of its own."""
    made = []
    for number, id in enumerate(("a", "b", BAD, "c", "d")):
        seed = BAD_SEED if id == BAD else number
        sampling = SamplingParams(max_tokens=4 + number, temperature=0.8, seed=seed, stop="\n\n", logprobs=2)
        given = tuple(range(70, 76 + number)) if is_scored else ()
        made.append(Request(id, (99, *PROMPT) if id == BAD else (*PROMPT, number), sampling, given_token_ids=given))
    return made


def stepped(engine: Engine, requests: list[Request], *, stream: bool = False) -> dict[str, list]:
    for request in requests:
        engine.add(request, stream=stream)
    found: dict[str, list] = {}
    while engine.has_work:
        for update in engine.step():
            found.setdefault(update.request.id, []).append(update)
    return found


def ends(found: dict[str, list]) -> dict[str, tuple]:
    """Collects what came of each request, each of which ends once."""
    assert all([u.completion is None for u in updates] == [True] * (len(updates) - 1) + [False] for updates in found.values())
    return {id: facts(updates[-1].completion) for id, updates in found.items()}


@pytest.fixture(scope="module")
def expected(three_rows: Engine) -> dict[bool, dict[str, tuple]]:
    return {is_scored: ends(stepped(three_rows, asked(is_scored=is_scored))) for is_scored in (False, True)}


CASES = [(site, kind) for site in SITES for kind in ("whole", "streamed", "scored") if kind != "scored" or site in SCORING]


@pytest.mark.parametrize(("site", "kind"), CASES)
def test_fault_at_one_request_ends_it_alone(three_rows, expected, monkeypatch, caplog, site, kind):
    is_scored = kind == "scored"
    three_rows.replicas[0].pool.clear()
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "detspec"):
        raised = plant(patch, site, ZeroDivisionError("planted"))
        found = stepped(three_rows, asked(is_scored=is_scored), stream=kind == "streamed")
    assert raised
    assert three_rows.num_pages_held == 0
    assert three_rows.num_live == 0
    last = found[BAD][-1].completion
    assert (last.finish_reason, last.error, last.token_ids) == ("error", "ZeroDivisionError: planted", ())
    assert ends(found) == {**expected[is_scored], BAD: facts(last)}
    assert [(record.getMessage(), record.exc_info[0]) for record in caplog.records] == [
        (f"request {BAD} failed, the others go on", ZeroDivisionError)
    ]
    assert ends(stepped(three_rows, asked(is_scored=is_scored))) == expected[is_scored]


def test_good_requests_have_no_error(three_rows):
    assert [updates[-1].completion.error for updates in stepped(three_rows, asked()).values()] == [""] * 5


def test_generate_returns_what_failed_next_to_what_did_not(three_rows, monkeypatch):
    prompts = [[1, 2, 3], [4, 5, 6]]
    sampling = SamplingParams(max_tokens=3)
    good = three_rows.generate(prompts, sampling)
    SITES["second"] = ("detspec.engine.sequence.completion_digest", lambda request, *rest: request.id == "1")
    plant(monkeypatch, "second", ValueError("planted"))
    first, second = three_rows.generate(prompts, sampling)
    assert (first, second.error) == (good[0], "ValueError: planted")


def test_fault_of_the_device_is_raised(three_rows, monkeypatch):
    """No request is at fault, so none is named."""
    with monkeypatch.context() as patch:
        plant(patch, "the update", jax.errors.JaxRuntimeError("planted"))
        with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
            stepped(three_rows, asked())
    three_rows.stop()
    assert three_rows.num_pages_held == 0
