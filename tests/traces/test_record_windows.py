"""Traces: what is recorded is what the engine commits, and windows with a rollback look like one."""

import jax
import pytest

from detspec.bench.bench import random_model
from detspec.draft.self_draft import INT8
from detspec.draft.source import Drafter
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.errors import InputError
from detspec.model.params import init_params
from detspec.sampling_params import SamplingParams
from detspec.traces.acceptance import counted, measure_acceptance
from detspec.traces.draw_windows import trace_figure
from detspec.traces.record_windows import drafter_of, find_rollback, run_trace, trace_batch
from detspec.traces.windows import Trace
from tests.fakes import RANDOM_CFG

pytestmark = pytest.mark.slow

PROMPT = (5, 17, 9)
OTHERS = ((1, 2), (3, 4, 5, 6))
SAMPLING = SamplingParams(temperature=0.8, seed=7)
MAX_TOKENS = 20


@pytest.fixture(scope="module")
def model():
    return random_model(RANDOM_CFG)


@pytest.fixture(scope="module")
def engine_ids(model) -> tuple[int, ...]:
    """Tokens that the engine commits for the request, alone and without a draft."""
    engine = Engine(model, EngineConfig(max_requests=1, max_len=64, method="none"))
    (completion,) = engine.generate([PROMPT], SamplingParams(temperature=0.8, seed=7, max_tokens=MAX_TOKENS))
    return completion.token_ids


@pytest.fixture(scope="module")
def good(model) -> Trace:
    return run_trace(model, PROMPT, SAMPLING, max_tokens=MAX_TOKENS, other_prompts=OTHERS)


@pytest.fixture(scope="module")
def bad(model) -> Trace:
    """Drafted with the weights of another model; hardly any draft is accepted."""
    other = init_params(RANDOM_CFG, jax.random.key(1))
    return run_trace(model, PROMPT, SAMPLING, max_tokens=MAX_TOKENS, other_prompts=OTHERS, drafter=Drafter(INT8, other))


def committed_ids(trace: Trace) -> tuple[int, ...]:
    """Without a tokenizer token 12 reads <12>."""
    return tuple(int(text.strip("<>")) for window in trace.windows for text in window.committed)


def test_trace_commits_what_the_engine_commits(good: Trace, engine_ids: tuple[int, ...]):
    assert committed_ids(good) == engine_ids


def test_trace_of_bad_drafts_commits_the_same(bad: Trace, engine_ids: tuple[int, ...]):
    assert sum(window.rolled_back for window in bad.windows) > 5
    assert committed_ids(bad) == engine_ids


def test_trace_of_another_seed_commits_something_else(model, engine_ids: tuple[int, ...]):
    trace = run_trace(model, PROMPT, SamplingParams(temperature=0.8, seed=8), max_tokens=MAX_TOKENS, other_prompts=OTHERS)
    assert committed_ids(trace) != engine_ids


@pytest.mark.parametrize("name", ["good", "bad"])
def test_trace_windows_follow_each_other(name: str, request: pytest.FixtureRequest):
    trace: Trace = request.getfixturevalue(name)
    assert trace.prompt == ("<5>", "<17>")
    assert trace.num_others == 2
    start, last = 2, "<9>"  # the prompt's last token opens the first window
    for window in trace.windows:
        assert (window.start, window.last_token, window.length_before) == (start, last, start)
        assert window.length_drafted == start + len(window.drafted)
        assert window.drafted[: window.accepted] == window.targets[: window.accepted]
        assert window.committed == window.targets[: len(window.committed)]
        if window.rolled_back:
            assert window.drafted[window.accepted] != window.targets[window.accepted]
        start, last = start + len(window.committed), window.committed[-1]
        assert window.length_after == start
    assert start == 2 + MAX_TOKENS


def test_acceptance_sums_the_windows_of_all_requests_and_tells_bad_drafts(model, bad: Trace):
    other = Drafter(INT8, init_params(RANDOM_CFG, jax.random.key(1)))
    asked = {"windows": (4,), "temperatures": (0.8,), "max_tokens": MAX_TOKENS, "seed": 7}
    table = measure_acceptance(model, [PROMPT, *OTHERS], drafter=other, **asked)
    traces = trace_batch(model, [PROMPT, *OTHERS], SAMPLING, window=4, max_tokens=MAX_TOKENS, drafter=other)
    assert traces[0].windows == bad.windows
    assert table.cells == ((counted([window for trace in traces for window in trace.windows]),),)
    (cell,) = table.cells[0]
    assert cell.num_committed == 3 * MAX_TOKENS
    own = measure_acceptance(model, [PROMPT, *OTHERS], drafter="int8", **asked).cells[0][0]
    assert cell.rate < 0.5 < own.rate


def test_trace_last_window_drafts_only_what_fits(bad: Trace):
    remaining = MAX_TOKENS
    for window in bad.windows:
        assert len(window.drafted) == min(3, remaining - 1)
        remaining -= len(window.committed)


def test_trace_figure_draws_a_recorded_trace(bad: Trace):
    shown = [text.get_text() for text in trace_figure(bad).axes[0].texts]
    assert "Rollback" in shown


def test_find_rollback_finds_both_kinds_of_window(model):
    trace = find_rollback(model, [PROMPT, *OTHERS], max_tokens=MAX_TOKENS, num_rows=3, num_batches=1)
    assert {window.rolled_back for window in trace.windows if window.drafted} == {True, False}


def test_find_rollback_with_nothing_to_roll_back_returns_a_trace_without(model):
    """A request of one token drafts nothing."""
    prompt = tuple(range(3 + MAX_TOKENS))  # the shapes of the other tests
    trace = find_rollback(model, [prompt], max_tokens=1, num_rows=3, num_batches=1)
    assert [window.rolled_back for window in trace.windows] == [False]


@pytest.mark.parametrize("draft", ["int8", "ngram"])
def test_trace_of_another_draft_commits_the_same(draft: str, model, engine_ids: tuple[int, ...]):
    drafter = drafter_of(model, draft)
    trace = run_trace(model, PROMPT, SAMPLING, max_tokens=MAX_TOKENS, other_prompts=OTHERS, drafter=drafter)
    assert committed_ids(trace) == engine_ids
    assert {"int8": "weights in int8", "ngram": "prompt lookup"}[draft] in trace.title


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 3}, "power of two of at least 2, got 3"),
        ({"window": 1}, "power of two of at least 2, got 1"),
        ({"sampling": SamplingParams(deterministic=False)}, "deterministic=False"),
        ({"prompt": "text"}, "no tokenizer"),
        ({"prompt": ()}, "the prompt is empty"),
        ({"max_tokens": 5000}, "the model was made for 2048"),
    ],
)
def test_run_trace_unsound_request_is_refused(model, changes: dict, message: str):
    arguments = {"prompt": PROMPT, "sampling": SAMPLING, **changes}
    with pytest.raises(InputError, match=message):
        run_trace(model, arguments.pop("prompt"), arguments.pop("sampling"), **arguments)


def test_find_rollback_without_prompts_is_refused(model):
    with pytest.raises(InputError, match="at least one prompt"):
        find_rollback(model, [])
