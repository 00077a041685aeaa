"""The benchmark over the share of deterministic requests: what is run, how it is summed up, and what it refuses."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import matplotlib.image
import numpy as np
import pytest

from detspec.bench.rounds import Variants
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Needs
from detspec.engine.request import Completion, Request, Update
from detspec.environment import fingerprint
from detspec.errors import InputError
from detspec.riders.counters import Stats
from tests.engine.byte_model import without_tokenizer, write_folder

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_share.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_share", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "bytes")


def test_main_writes_table_json_and_plot(
    script: ModuleType, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    seen: list[tuple[Engine, int]] = []
    genuine = script.run_once

    def run_once(engine: Engine, requests: list[Request], variants: Variants, *, stream: bool) -> dict[str, float]:
        seen.append((engine, sum(request.sampling.deterministic for request in requests)))
        assert stream
        return genuine(engine, requests, variants, stream=stream)

    monkeypatch.setattr(script, "run_once", run_once)
    files = ("--json", str(tmp_path / "new" / "share.json"), "--plot", str(tmp_path / "new" / "share.png"))
    assert (
        script.main(
            [
                "--model",
                str(folder),
                "--rows",
                "1",
                "--scale",
                "0.1",
                "--repeats",
                "2",
                "--shares",
                "10",
                "50",
                "100",
                "--stream",
                *files,
            ]
        )
        == 0
    )

    result = json.loads((tmp_path / "new" / "share.json").read_text())
    cells = result["cells"]
    # 2 requests make up a tail at 1 row: 10 % of them is one, as 50 % is, and runs once.
    numbers = {"steady": [0, 0, 5, 25, 50], "tail": [0, 0, 1, 2]}
    assert [(cell["workload"], cell["num_deterministic"]) for cell in cells] == [(w, n) for w in numbers for n in numbers[w]]
    assert [i for i, cell in enumerate(cells) if cell["ordinary_engine"]] == [1, 6]
    turns = [number for some in numbers.values() for number in some]
    assert [number for _, number in seen] == turns + turns + turns[::-1]
    assert len({engine for engine, _ in seen}) == 2
    assert {number for engine, number in seen if engine is seen[1][0]} == {0}  # seen[1]: the ordinary engine

    for cell in cells[2:5]:
        zero = cells[0]["samples"]
        assert cell["ratios"] == [a["tok_per_s"] / b["tok_per_s"] for a, b in zip(cell["samples"], zero, strict=True)]
        assert min(cell["ratios"]) <= cell["ratio"] <= max(cell["ratios"])
        assert all(0 < sample["idle_share"] < 1 and 0 < sample["live_requests"] <= 1 for sample in cell["samples"])
    assert result["bits"]["deterministic_variants"] == 1
    assert result["bits"]["ordinary_differ"] > 0
    assert result["bits"]["ordinary_compared"] == 50 + 2

    table = capsys.readouterr().out
    lines = [line for line in table.splitlines() if line.startswith(("steady", "tail"))]
    assert len(lines) == len(cells)
    assert len({len(line) for line in lines}) == 1
    for target in ("10 % deterministic / 0 % >= 0.98", "100 % deterministic / 0 % >= 0.95", "0 % / ordinary engine >= 0.99"):
        assert f"target {target}: m" in table
    assert matplotlib.image.imread(tmp_path / "new" / "share.png").shape[:2] == (630, 1800)


class FakeEngine:
    """Answers every request with its number, at a log-probability of `-logprob_step` times the number of earlier engines."""

    def __init__(self, earlier: list, logprob_step: float, config: EngineConfig) -> None:
        self.config, self.logprob = config, -logprob_step * len(earlier)
        self.busy_s = self.idle_s = 0.0
        self.num_preemptions = 0
        self.requests: list[Request] = []
        earlier.append(self)

    def fingerprint(self) -> dict[str, object]:
        return fingerprint()

    @property
    def num_live(self) -> int:
        return len(self.requests)

    has_work = num_live

    def prepare(self, num_requests: int | None = None, needs: Needs | None = None) -> None:
        """Compiles nothing."""

    def add(self, request: Request, *, stream: bool) -> None:
        self.requests.append(request)

    def step(self) -> list[Update]:
        self.busy_s += 1.0
        request, *self.requests = self.requests
        answer = ((int(request.id),), (self.logprob,), "")
        completion = Completion(request.id, request.prompt_token_ids, *answer, "length", "", Stats())
        return [Update(request, *answer, completion)]


@pytest.mark.parametrize(("logprob_step", "code"), [(0.0, 0), (1e-9, 1)], ids=("same bits", "other bits in each engine"))
def test_main_exit_code_says_whether_deterministic_results_have_variants(
    script: ModuleType,
    folder: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    logprob_step: float,
    code: int,
):
    engines: list[FakeEngine] = []
    monkeypatch.setattr(script, "Engine", lambda model, config: FakeEngine(engines, logprob_step, config))
    # Requests of 2 rows are among those of 3, which run in other engines.
    arguments = ["--model", str(folder), "--scale", "0.1", "--repeats", "1", "--rows", "2", "3", "--shares", "100"]
    assert script.main(arguments) == code
    assert f"\nbits: {1 + code} different result(s) of any deterministic request" in capsys.readouterr().out


def test_requests_of_fewer_rows_are_the_first_of_those_of_more(script: ModuleType):
    model = without_tokenizer({})
    for workload in script.WORKLOADS:
        shape = {"scale": 1.0, "temperature": 0.5, "seed": 3}
        few, many = (workload.requests(model, number, **shape) for number in (20, 64))
        assert many[:20] == few
        assert {r.sampling.ignore_eos for r in many} == {True}
        lengths = [len(r.prompt_token_ids) for r in many]
        assert workload.prompt_len[0] <= min(lengths) < max(lengths) <= workload.prompt_len[1]
    # The last workload is the tail: one long request in each eight.
    is_long = [r.sampling.max_tokens >= 300 for r in many]
    assert [sum(is_long[i : i + 8]) for i in range(0, 64, 8)] == 8 * [1]


def test_mixed_larger_share_holds_the_smaller_one(script: ModuleType):
    requests = script.WORKLOADS[0].requests(without_tokenizer({}), 50, scale=1.0, temperature=0.0, seed=0)
    chosen = [{r.id for r in script.mixed(requests, number, seed=0) if r.sampling.deterministic} for number in (0, 1, 5, 50)]
    assert [len(ids) for ids in chosen] == [0, 1, 5, 50]
    assert chosen[0] < chosen[1] < chosen[2] < chosen[3]
    assert chosen[2] != {r.id for r in script.mixed(requests, 5, seed=1) if r.sampling.deterministic}


def test_plot_without_matplotlib_is_refused_before_anything_runs(script: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r'--plot needs matplotlib: pip install "\.\[plots\]"'):
        script.main(["--plot", "share.png", "--preset", "no such preset"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shares", "101"), "--shares are percentages from 0 to 100, got 101"),
        (("--rows", "4", "0"), "--rows must be at least 1, got 0"),
        (("--scale", "0"), "--scale must be greater than 0 and at most 8, got 0.0"),
    ],
)
def test_unsound_arguments_are_refused(script: ModuleType, arguments: tuple[str, ...], message: str):
    with pytest.raises(InputError, match=message):
        script.parse(arguments)


def test_median_interval_holds_the_median_and_narrows_with_more_values(script: ModuleType):
    few, many = (np.random.default_rng(0).normal(1.0, 0.1, number) for number in (20, 2000))
    widths = []
    for values in (few, many):
        low, high = script.median_interval(values)
        assert low < np.median(values) < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 4
    assert script.median_interval(np.full(9, 0.5)) == (0.5, 0.5)
