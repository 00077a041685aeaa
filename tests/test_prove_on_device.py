"""The script for the day a device is there: its journal, limits, tables and files, and that a killed run goes on."""

import contextlib
import dataclasses
import errno
import gzip
import importlib
import importlib.util
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from detspec.errors import InputError
from detspec.schedule import Budget, Schedule

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
SCRIPT = SCRIPTS / "prove_on_device.py"
PLANNED = list(json.loads((ROOT / "docs" / "data" / "prove_plan.json").read_text())["targets"])
MACHINE = {"kind": "run", "device": "a device", "size": "full", "jax": "1", "compiler": "c", "run": "1"}


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for folder in (ROOT / "tests" / "aot", SCRIPTS):
            patch.syspath_prepend(folder)
        yield


def part(name: str) -> ModuleType:
    """A module of the script's package."""
    return importlib.import_module(f"prove_stages.{name}")


@pytest.fixture(scope="module")
def script(importable: None) -> ModuleType:
    spec = importlib.util.spec_from_file_location("prove_on_device", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measurement(stage: str, name: str, run: str = "1", error: str = "", value: float = 1.0, bar: float | None = None) -> dict:
    """A line with one entry of the same name."""
    entry = part("journal").Entry(name, value, "us", bar).to_json()
    entries = [] if error else [entry]
    return {"kind": "measurement", "stage": stage, "name": name, "seconds": 0.5, "entries": entries, "error": error, "run": run}


def end(stage: str, status: str, run: str = "1") -> dict:
    return {"kind": "end", "stage": stage, "status": status, "seconds": 2.0, "error": "", "run": run}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--out is needed"),
        ("--out x --minutes 0", "--minutes must be more than 0 and finite, got 0"),
        ("--out x --stages nothing", "invalid choice: 'nothing'"),
        ("--out x --size huge", "invalid choice: 'huge'"),
        ("--out x --wheels /nowhere", "--wheels must be a folder, got /nowhere"),
        ("--plan abacus", "invalid choice: 'abacus'"),
        ("--out x --minutes inf", "--minutes must be more than 0 and finite, got inf"),
        ("--out x --deliver x", "--deliver must be another folder than --out"),
        ("--out x --earlier /nowhere", "there is no results.jsonl in /nowhere"),
        ("--out x --implementation abacus", "invalid choice: 'abacus'"),
        ("--out x --linear abacus", "invalid choice: 'abacus'"),
    ],
)
def test_parse_refuses_bad_input_by_name(script, capsys, arguments, message):
    with pytest.raises(SystemExit):
        script.parse(arguments.split())
    assert message in capsys.readouterr().err


def test_parent_loads_no_jax_and_stages_need_no_package_but_jax_flax_and_numpy():
    names = [name for stage in part("stages").STAGES for name in stage.modules]
    optional = part("packages").OPTIONAL
    program = f"""
import runpy, sys
sys.path[:0] = {[str(ROOT), str(SCRIPTS), str(ROOT / "tests" / "aot")]}
for name in {optional}: sys.modules[name] = None
runpy.run_path({str(SCRIPT)!r})
assert "jax" not in sys.modules
import importlib
for name in {names}: importlib.import_module(f"prove_stages.{{name}}")
assert "jax" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd="/", env={**os.environ, "JAX_PLATFORMS": "cpu"})


def test_journal_leaves_out_what_a_killed_process_wrote_half_and_goes_on_behind_it(tmp_path):
    journal = part("journal").Journal(tmp_path / "new" / "results.jsonl")
    assert journal.lines() == []
    journal.add("run", run="1")
    with journal.path.open("a") as file:
        file.write('{"kind": "end", "sta')
    assert [line["kind"] for line in journal.lines()] == ["run"]
    journal.add("end", stage="ceilings")
    assert [line["kind"] for line in journal.lines()] == ["run", "end"]


@pytest.mark.parametrize(
    ("value", "bar", "at_most", "holds"),
    [
        (1.0, None, False, None),
        (1.0, 1.0, False, True),
        (0.9, 1.0, False, False),
        (0.9, 1.0, True, True),
        (1.1, 1.0, True, False),
        (float("nan"), 1.0, True, False),
        (float("nan"), 1.0, False, False),
    ],
)
def test_entry_holds_at_its_bar_and_never_as_nan(value, bar, at_most, holds):
    assert part("journal").Entry("x", value, "", bar, at_most).holds is holds


def test_what_succeeded_is_known_and_what_failed_is_tried_again_in_another_run():
    history = part("history")
    lines = [measurement("attention", "a"), measurement("attention", "b", error="no"), measurement("passes", "c")]
    assert history.known(lines, "attention", run="1") == {"a", "b"}
    assert history.known(lines, "attention", run="2") == {"a"}
    lines.append(measurement("attention", "a", run="2", error="worse"))
    assert not history.measurements(lines, "attention")["a"]["error"]
    assert list(history.entries(lines, "attention")) == ["a"]


def test_stages_that_were_cut_off_or_failed_are_unfinished_and_others_are_not():
    history = part("history")
    stages = [stage.name for stage in part("stages").STAGES]
    lines = [end("ceilings", "done"), end("kernels", "cut off"), end("doctor", "failed"), end("breakdown", "does not apply")]
    expected = [name for name in stages if name not in ("ceilings", "breakdown")]
    assert history.unfinished(lines) == expected
    assert history.unfinished([*lines, end("kernels", "done", run="2")]) == [name for name in expected if name != "kernels"]


def test_limits_share_what_is_left_by_the_stages_that_are_left(monkeypatch):
    """Shares 20, 30 and 50 of 100 s. The first takes 10 s, so 90 x 30 / 80 are left to the second, which takes them."""
    children = part("children")
    stages = [part("stages").Stage(name, (), "", share, 0) for name, share in (("a", 20), ("b", 30), ("c", 50))]
    clock = [0.0]
    monkeypatch.setattr(children.time, "monotonic", lambda: clock[0])
    limits = children.limits(stages, 100)
    assert next(limits)[1] == 20
    clock[0] = 10.0
    assert next(limits)[1] == 33.75
    clock[0] = 43.75
    assert next(limits)[1] == 56.25


def documented_calls() -> list[tuple[float, list[str]]]:
    """Minutes and stages of the commands above the table of the page, but the one for kernels that fail."""
    page, _, _ = (ROOT / "docs" / "measured_devices.md").read_text().partition(part("docs").BEGIN)
    commands = [text.split("```")[0].replace("\\\n", " ") for text in page.split("```console\n$ python ")[1:]]
    found = [shlex.split(command) for command in commands if "--implementation" not in command]
    return [(float(words[words.index("--minutes") + 1]), words[words.index("--stages") + 1 :]) for words in found]


def test_names_are_different_and_documented_calls_have_all_stages_in_under_twelve_minutes():
    names = [stage.name for stage in part("stages").STAGES]
    assert len({*names}) == len(names)
    calls = documented_calls()
    assert {name for _, chosen in calls for name in chosen} == {*names}
    assert all(chosen[:2] == ["environment", "ceilings"] for _, chosen in calls)
    assert sum(minutes for minutes, _ in calls) < 12


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_plan_of_a_gpu_fits_into_the_minutes_of_the_documented_calls(name):
    for minutes, chosen in documented_calls():
        *_, total = part("plan").table(name, [*map(part("stages").stage_of, chosen)]).splitlines()
        cells = [cell.strip() for cell in total.split("|")[1:-1]]
        assert cells[0] == "all"
        assert 0 < float(cells[7]) <= 60 * minutes


@pytest.mark.parametrize("name", PLANNED)
def test_plan_holds_the_programs_that_stages_have_and_no_other_stages(name):
    targets, stages = importlib.import_module("detspec.targets"), part("stages").STAGES
    setting = part("programs").Setting.of_target(part("sizes").FULL, targets.target(name))
    here = [stage for stage in stages if setting.platform in stage.platforms]
    expected = {
        stage.name: [program.name for module in map(part, stage.modules) for program in module.programs(setting)]
        for stage in here
    }
    found = part("plan").read()["targets"][name]["stages"]
    assert {stage: [row["name"] for row in rows] for stage, rows in found.items()} == expected


def test_plan_counts_each_program_of_shared_caches_once_and_both_processes_of_a_stage():
    plan = part("plan")
    programs = {"a": {"trace_s": 1.0, "compile_s": 8.0}, "b": {"trace_s": 1.0, "compile_s": 4.0}}
    rows = [{"text": text, "calls": 10, "least_s": 0.1} for text in programs]
    stage = part("stages").Stage("x", (), "", 30, 5.0, at_once=2)
    run_s = 2 * 10 * 0.1 * plan.REPEATS / plan.OF_PEAK
    assert plan.seconds(stage, rows, programs, set()) == [2, 12, run_s, 5, 7 + run_s + 5, 30]
    assert plan.seconds(stage, rows, programs, {"a"})[:4] == [1, 4, run_s, 5 + plan.LOAD_S]
    twice = dataclasses.replace(stage, processes=2)
    assert plan.seconds(twice, rows, programs, set()) == [4, 24, 2 * run_s, 10, 2 * (7 + run_s + 5), 30]
    assert plan.different([*rows, *rows]) == rows


def test_plan_of_a_stage_that_compiles_nothing_counts_its_other_seconds(monkeypatch):
    plan = part("plan")
    found = {"platform": "gpu", "stages": {"peer": []}}
    monkeypatch.setattr(plan, "read", lambda: {"cores": 2, "targets": {"x": found}, "programs": {"gpu": {}}})
    row = next(line for line in plan.table("x").splitlines() if line.startswith("| peer "))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    seconds = f"{part('stages').stage_of('peer').run_s:.0f}"
    assert cells[1] == "0"
    assert cells[6:8] == [seconds, seconds]


@pytest.mark.parametrize(
    ("stage", "platform", "why"),
    [
        ("breakdown", "cpu", "it is for gpu, this is cpu"),
        ("breakdown", "gpu", ""),
        ("breakdown", "", ""),
        ("needs packages", "", "not installed: no_such_package, nor_this"),
        ("needs json", "cpu", ""),
    ],
)
def test_stage_does_not_apply_on_other_platforms_or_without_its_packages(script, stage, platform, why):
    stages = part("stages")
    own = {"needs packages": ("json", "no_such_package", "nor_this"), "needs json": ("json",)}
    chosen = stages.Stage(stage, (), "", 1, 0, packages=own[stage]) if stage in own else stages.stage_of(stage)
    assert script.not_here(chosen, platform) == why


def test_environment_adds_variables_and_paths_to_those_given():
    children = part("children")
    given = {"PYTHONPATH": "p", "HOME": "h"}
    found = children.environment(part("stages").stage_of("peer"), given)
    assert found["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert found["PYTHONPATH"].split(os.pathsep)[-1] == "p"
    assert found["HOME"] == "h"
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in children.environment(part("stages").stage_of("products"), given)


def test_stage_that_takes_too_long_is_killed_and_says_so(tmp_path):
    """Importing jax alone takes longer than a tenth of a second."""
    journal = part("journal").Journal(tmp_path / "results.jsonl")
    stage = part("stages").stage_of("ceilings")
    part("children").run_stage(stage, 0.1, journal, arguments=["--size", "tiny"], run="1", say=print)
    (line,) = journal.lines()
    assert (line["status"], line["error"]) == ("cut off", "after 0 s")


def test_stage_whose_process_fails_keeps_its_last_words(tmp_path):
    journal = part("journal").Journal(tmp_path / "results.jsonl")
    stage = part("stages").Stage("no stage", (), "", 1, 0)
    part("children").run_stage(stage, 60, journal, run="1", arguments=["--size", "tiny"], say=print)
    (line,) = journal.lines()
    assert line["status"] == "failed"
    assert "KeyError: 'no stage'" in line["error"]


def test_results_of_another_device_or_size_are_not_added_to(tmp_path):
    journal = part("journal").Journal(tmp_path / "results.jsonl")
    journal.add("run", device="another device", size="tiny")
    part("children").run_stage(part("stages").STAGES[0], 60, journal, run="1", arguments=["--size", "tiny"], say=print)
    (end,) = journal.lines()[1:]
    assert end["status"] == "unusable"
    assert "the results are of device 'another device', this is" in end["error"]


def of_code(run: str, code: str) -> dict:
    return {**MACHINE, "run": run, "code": code}


def test_stage_takes_no_result_of_other_code_for_its_own_and_the_table_mixes_none():
    """Run 1 measured two figures of `passes`, and `ceilings`. Run 2, of other code, has measured one of the two so far."""
    history, tables = part("history"), part("tables")
    before = [of_code("1", "old"), measurement("passes", "a", value=1.0), measurement("passes", "b"), end("passes", "done")]
    before += [measurement("ceilings", "copy")]
    of_run_2 = [*before, of_code("2", "new")]
    assert history.known(history.of_code(of_run_2, "2"), "passes", "2") == set()
    same = [*before, of_code("3", "old")]
    assert history.known(history.of_code(same, "3"), "passes", "3") == {"a", "b"}
    assert list(history.entries(of_run_2, "passes")) == ["a", "b"]
    again = [*of_run_2, measurement("passes", "a", run="2", value=2.0)]
    assert {name: entry["value"] for name, entry in history.entries(again, "passes").items()} == {"a": 2.0}
    assert [history.code_of(again, stage) for stage in ("passes", "ceilings", "kernels")] == ["new", "old", ""]
    (row,) = [row for row in tables.page(again).splitlines() if row.startswith("| passes") and "done" in row]
    assert "| new " in row


def test_gate_shows_what_it_measured_last_and_a_failure_does_not_replace_it():
    history = part("history")
    lines = [measurement("ceilings", "copy", value=1.0), measurement("ceilings", "copy", run="2", value=2.0)]
    lines += [measurement("ceilings", "copy", run="3", error="no")]
    assert history.entries(lines, "ceilings")["copy"]["value"] == 2.0


def test_code_of_results_changes_with_any_module_of_the_package_or_the_stages(tmp_path, monkeypatch):
    worker = part("worker")
    for name in ("detspec/ops/a.py", "scripts/prove_stages/b.py", "tests/aot/kernel_shapes.py", "docs/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(worker, "ROOT", tmp_path)
    seen = [worker.code()]
    for name in ("detspec/ops/a.py", "scripts/prove_stages/b.py", "tests/aot/kernel_shapes.py"):
        (tmp_path / name).write_text("x")
        seen.append(worker.code())
    assert len({*seen}) == 4
    (tmp_path / "docs/c.py").write_text("x")
    assert worker.code() == seen[-1]


@pytest.mark.parametrize(("note", "said"), [("", "a 1 us (misses its bar)"), ("an error", "a 1 us (misses its bar: an error)")])
def test_terminal_says_that_a_figure_misses_its_bar_with_its_note_if_there_is_one(note, said):
    children, journal = part("children"), part("journal")
    for bar, at_most in ((2.0, False), (0.5, True)):
        line = measurement("attention", "a")
        line["entries"] = [journal.Entry("a", 1.0, "us", bar, at_most, note=note).to_json()]
        assert children.described(line).endswith(said)


@pytest.mark.parametrize("name", ["device", "size", "implementation", "linear", "jax"])
def test_results_of_other_switches_are_not_mixed(name):
    worker = part("worker")
    facts = {"device": "a", "size": "full", "implementation": "pallas_gpu", "linear": "pinned", "jax": "1"}
    worker.check_same({}, facts)
    worker.check_same({**facts, "run": "1"}, facts)
    with pytest.raises(
        part("environment").Unusable, match=f"the results are of {name} 'other', this is {facts[name]!r}: name another folder"
    ):
        worker.check_same({**facts, name: "other"}, facts)


@pytest.mark.usefixtures("cpu_kernels")
def test_switches_replace_the_numerics_of_every_schedule_and_what_the_device_lacks_is_refused():
    setting_here = part("programs").Setting.here
    tiny = part("sizes").TINY
    default = setting_here(tiny, {}, {}).schedule_fn(tiny.cfg).numerics
    found = setting_here(tiny, {}, {"implementation": "reference", "linear": "xla"}).schedule_fn(tiny.cfg).numerics
    assert (found.implementation, found.linear) == ("reference", "xla")
    assert (default.implementation, default.linear) != ("reference", "xla")
    with pytest.raises(InputError, match="'pallas_gpu' needs a GPU of compute capability"):
        setting_here(tiny, {}, {"implementation": "pallas_gpu"})


def test_table_shows_ends_figures_missed_bars_and_errors():
    tables = part("tables")
    lines = [
        MACHINE,
        measurement("ceilings", "copy", value=4.25, bar=5.0),
        measurement("attention", "b", error="Trace\nBoom: no"),
    ]
    lines += [end("ceilings", "done"), end("kernels", "cut off")]
    page = tables.page(lines)
    assert "device a device, size full" in page
    assert "4.25 us" in page
    assert ">= 5 MISSED" in page
    assert "stopped after 1 measurements" in page
    assert "FAILED: attention, b:\nTrace\nBoom: no" in page


def test_all_holds_asks_for_every_stage_and_every_bar():
    all_holds = part("tables").all_holds
    lines = [end("ceilings", "done"), end("breakdown", "does not apply")]
    assert all_holds(lines, ["ceilings", "breakdown"])
    assert not all_holds(lines, ["ceilings", "kernels"])
    assert not all_holds([*lines, end("kernels", "cut off")], ["ceilings", "kernels"])
    assert not all_holds([*lines, measurement("ceilings", "copy", value=4.25, bar=5.0)], ["ceilings"])


def test_cache_file_keeps_the_smallest_files_that_fit_and_names_the_others(tmp_path):
    cache_file = part("cache_file")
    folder = tmp_path / "programs"
    (folder / "tuned").mkdir(parents=True)
    sizes = {"large": 50_000, "tuned/middle": 30_000, "small": 20_000}
    contents = {name: os.urandom(size) for name, size in sizes.items()}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    file = tmp_path / "carried" / "programs.tar"
    assert cache_file.pack(folder, file, max_bytes=75_000) == ["large"]
    assert file.stat().st_size <= 75_000
    other = tmp_path / "other"
    assert cache_file.unpack(file, other) == 2
    kept = {str(path.relative_to(other)): path.read_bytes() for path in other.rglob("*") if path.is_file()}
    assert kept == {name: contents[name] for name in ("tuned/middle", "small")}
    assert cache_file.unpack(tmp_path / "none.tar", other) == 0


def test_cache_file_writes_nothing_outside_its_folder(tmp_path):
    with tarfile.open(tmp_path / "hostile.tar", "w") as tar:
        for name in ("../escaped", str(tmp_path / "absolute"), "inside"):
            content = zlib.compress(b"program")
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    assert part("cache_file").unpack(tmp_path / "hostile.tar", tmp_path / "programs") == 1
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "hostile.tar",
        "programs/inside",
    ]


def test_wheels_are_installed_without_an_index_and_a_broken_one_is_named(tmp_path, monkeypatch):
    """A wheel is a zip of modules and of three files about them."""
    packages = part("packages")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "p")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "brought-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought.py", "VALUE = 3")
        wheel.writestr("brought-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
        wheel.writestr("brought-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("brought-1.0.dist-info/RECORD", "")
    assert packages.missing(("brought", "json")) == ["brought"]
    packages.install(wheels, tmp_path / "packages")
    assert packages.missing(("brought", "json")) == []
    assert os.environ["PYTHONPATH"] == os.pathsep.join([str(tmp_path / "packages"), "p"])
    (wheels / "broken-1.0-py3-none-any.whl").write_bytes(b"")
    with pytest.raises(RuntimeError, match="pip could not install the wheels of"):
        packages.install(wheels, tmp_path / "packages")


def test_docs_refuse_a_rehearsal_and_put_a_run_between_the_marks(tmp_path):
    docs = part("docs")
    with pytest.raises(ValueError, match="only full runs are published, this one is 'tiny'"):
        docs.write([{**MACHINE, "size": "tiny"}], tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "measured_devices.md").write_text(f"before\n{docs.BEGIN}\nold\n{docs.END}\nafter\n")
    docs.write(
        [MACHINE, measurement("ceilings", "copy", value=4.25), end("ceilings", "done"), end("doctor", "does not apply")],
        tmp_path,
    )
    text = (tmp_path / "measured_devices.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    copy = next(line for line in text.splitlines() if "device copy" in line)
    assert copy.split("|")[2].strip() == "4.25 us"
    assert copy.count("not run yet") == len(docs.DEVICES)
    assert list(json.loads((tmp_path / "data" / "devices.json").read_text())) == ["a device"]


def test_published_table_is_the_one_of_the_published_results():
    docs = part("docs")
    file = ROOT / "docs" / "data" / "devices.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    text = (ROOT / "docs" / "measured_devices.md").read_text()
    assert docs.with_table(text, docs.table(results)) == text


def without_a_device(patch: pytest.MonkeyPatch) -> None:
    """Times of one second, engines that do nothing, and doctors that find no difference."""
    timed = ("ceilings", "decode", "attention", "vendor", "products", "experts", "integers", "passes", "breakdown")
    stages = {name: part(name) for name in timed}
    for module in stages.values():
        patch.setattr(module, "in_turns", lambda calls, size: {name: [1.0] for name in calls})
    patch.setattr(part("programs").Program, "call", lambda program: lambda: None)
    for name in ("passes", "breakdown", "integers"):
        patch.setattr(stages[name], "running", lambda setting, cfg, params: lambda schedule: lambda: None)
        patch.setattr(stages[name], "random_model", lambda cfg: SimpleNamespace(params=None))
    report = SimpleNamespace(found={"texts": ""}, expected={"texts": ""}, differing=[])
    patch.setattr(stages["integers"], "run_conformance", lambda: report)
    patch.setattr(stages["integers"], "random_integers", lambda cfg: 0)
    patch.setattr(stages["products"], "is_exact", lambda cfg, rows: True)
    for name in ("check_values", "compare_bits"):
        patch.setattr(stages["experts"], name, lambda setting, size: iter(()))
    patch.setattr(stages["breakdown"], "profiled", lambda call: {"kernel": (5, 1e-3)})
    generation, examine = part("generation"), part("examine")
    device = SimpleNamespace(start_compiling=lambda plans, apart: None)
    engine = SimpleNamespace(config=None, device=device, prepare=lambda requests, needs: None, certificates={})
    patch.setattr(generation, "Engine", lambda model, config: engine)
    patch.setattr(generation, "random_model", lambda cfg: None)
    patch.setattr(generation, "bench_prompts", lambda model, number, length: [])
    patch.setattr(generation, "surely_made", lambda setting, config, requests: [])
    stats = importlib.import_module("detspec.riders.counters").Stats()
    patch.setattr(generation, "run_once", lambda engine, prompts, new_tokens, number: (1.0, [b""] * number, stats))
    patch.setattr(examine, "random_model", lambda cfg: None)
    patch.setattr(examine, "examine_budgets", lambda model, schedule, budgets: (None, dict.fromkeys(budgets, "")))
    patch.setattr(examine, "digest", lambda anchor: "")


def test_headlines_are_figures_that_a_full_run_finds(monkeypatch):
    """All measurements of the stages with headlines are run, without their device; completions are counted by themselves."""
    setting = part("programs").Setting.of_target(part("sizes").FULL, importlib.import_module("detspec.targets").target("h200"))
    without_a_device(monkeypatch)
    with_headlines = ("ceilings", "attention", "vendor", "products", "experts", "integers", "passes", "whole")
    names = {
        (stage, entry.name)
        for stage in (*with_headlines, "generation", "doctor")
        for module in map(part, part("stages").stage_of(stage).modules)
        for measurement in module.measurements(setting)
        if measurement.name != "axes"
        for entry in measurement.run()
    }
    counted = [part("completions").counted(setting, Counter(a=1), 1, deterministic=kind) for kind in (True, False)]
    names |= {("completions", entry.name) for entry in counted}
    docs = part("docs")
    wanted = {(stage, name) for stage, name, _ in docs.HEADLINES if name != docs.ALL}
    assert wanted - names == set()
    assert len(wanted) > 20


def test_passes_compare_a_step_of_many_requests_first_and_what_is_compared_is_measured_before():
    setting = part("programs").Setting.of_target(part("sizes").FULL, importlib.import_module("detspec.targets").target("h200"))
    names = [measurement.name for measurement in part("passes").measurements(setting)]
    assert names[:5] == [
        "step of 32 rows, 8 layers",
        "canonical step of 32 rows, 8 layers",
        "canonical step of 32 rows, 8 layers over step of 32 rows, 8 layers",
        "pass of 256 rows, 8 layers",
        "pass of 256 rows, 8 layers over step of 32 rows, 8 layers",
    ]
    assert names[-2:] == ["pass of 64 rows, 8 layers", "pass of 1024 rows, 8 layers"]
    for index, name in enumerate(names):
        assert {*name.split(" over ")} <= {*names[:index]} or " over " not in name
    programs = {program.name for program in part("passes").programs(setting)}
    assert {name for name in names if " over " not in name} == programs


@pytest.mark.slow
def test_passes_that_were_compiled_first_are_not_traced_again_when_they_run(monkeypatch):
    """In a stage, all programs are compiled at the same time; then each runs several times, in contests, too."""
    setting = part("programs").Setting.here(part("sizes").TINY, {}, {})
    passes = part("passes")
    cfg = setting.size.model
    schedules = [setting.schedule_fn(cfg).with_budget(4, 1)]
    traced: list[object] = []
    forward = passes.forward
    monkeypatch.setattr(passes, "forward", lambda *args, **named: traced.append(None) or forward(*args, **named))
    passes.one_pass.clear_cache()
    for schedule in schedules:
        passes.pass_program(setting, cfg, schedule).lower(None).compile()
    runner = passes.running(setting, cfg, passes.random_model(cfg).params)
    for schedule in [*schedules, *schedules]:
        runner(schedule)()
    assert len(traced) == len(schedules)


def test_profile_counts_kernels_of_streams_alone_and_says_if_there_are_none():
    kernels_of = part("breakdown").kernels_of
    named = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "/host:CPU"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "Stream #14(Compute)"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 8, "args": {"name": "Steps"}},
        {"ph": "M", "name": "thread_name", "pid": 2, "tid": 7, "args": {"name": "Stream of the host"}},
    ]
    ran = [
        {"ph": "X", "name": name, "pid": pid, "tid": tid, "dur": dur}
        for name, pid, tid, dur in (
            ("a", 1, 7, 2.0),
            ("b", 1, 7, 30.0),
            ("a", 1, 7, 4.0),
            ("step", 1, 8, 50.0),
            ("a", 2, 7, 60.0),
        )
    ]
    found = kernels_of([*named, *ran])
    assert part("breakdown").number_of(found) == 3
    assert found == {"a": (2, pytest.approx(6e-6)), "b": (1, pytest.approx(30e-6))}
    with pytest.raises(RuntimeError, match="the profile names no kernel"):
        kernels_of([*named, *ran[3:]])


def test_breakdown_says_what_passes_between_kernels(monkeypatch):
    """Five calls run ten kernels in 4 s: 2 kernels in 0.8 s a call, of 1 s by the clock."""
    breakdown = part("breakdown")
    setting = part("programs").Setting.of_target(part("sizes").FULL, importlib.import_module("detspec.targets").target("h200"))
    without_a_device(monkeypatch)
    monkeypatch.setattr(breakdown, "profiled", lambda call: {"a": (5, 3.0), "b": (5, 1.0)})
    schedule = breakdown.several(setting)[0]
    kernels, clock = breakdown.of_pass(setting, schedule, lambda: None)
    assert (kernels.name, kernels.value) == ("kernels of a canonical step of 32 rows, 8 layers", pytest.approx(8e5))
    assert kernels.note == "1 x 600000.0 us a, 1 x 200000.0 us b"
    assert clock.value == pytest.approx(1e6)
    assert clock.note == "200000 us of it between 2 kernels"
    found = [*breakdown.of_products(setting, 32)]
    names = [f"kernels of products of 4 layers, {kind}, 32 rows" for kind in ("pinned", "library")]
    assert [entry.name for entry in found[::2]] == names
    assert all(entry.predicted > 0 for entry in found)


def test_profile_is_of_all_calls_after_those_that_warm_up(monkeypatch):
    """The profiler writes a trace, as a GPU's would be, of the calls that ran while it was on."""
    breakdown, calls, before = part("breakdown"), [], []

    @contextlib.contextmanager
    def trace(folder: str, create_perfetto_trace: bool) -> Iterator[None]:
        before.append(len(calls))
        yield
        events = [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "Stream #14(Compute)"}},
            *({"ph": "X", "name": "a", "pid": 1, "tid": 7, "dur": 2.0} for _ in calls[before[0] :]),
        ]
        (Path(folder) / "plugins").mkdir()
        content = gzip.compress(json.dumps({"traceEvents": events}).encode())
        (Path(folder) / "plugins" / "perfetto_trace.json.gz").write_bytes(content)

    monkeypatch.setattr(breakdown.jax.profiler, "trace", trace)
    assert breakdown.profiled(lambda: calls.append(None)) == {"a": (breakdown.CALLS, pytest.approx(breakdown.CALLS * 2e-6))}
    assert before == [2]


def test_doctor_knows_each_budget_before_the_next_one_runs(monkeypatch):
    examine = part("examine")
    schedule = part("programs").Setting.here(part("sizes").TINY, {}, {}).schedule_fn(part("sizes").TINY.examined)
    budgets = [Budget(rows, 1) for rows in (1, 2, 3)]
    ran: list[object] = []

    def run(model: object, schedule: object, budgets: list) -> tuple[None, dict]:
        ran.extend(budgets)
        return None, {budget: "" if budget.rows == 1 else "logits" for budget in budgets}

    monkeypatch.setattr(examine, "examine_budgets", run)
    monkeypatch.setattr(examine, "digest", lambda anchor: "bits")
    seen = {entry.name: (len(ran), entry) for entry in examine.compare_budgets(lambda: None, schedule, "rows", budgets)}
    rows = schedule.budget.rows
    assert [seen[f"{number} rows as {rows} rows"][0] for number in (1, 2, 3)] == [1, 2, 3]
    assert [seen[f"{number} rows as {rows} rows"][1].value for number in (1, 2, 3)] == [1.0, 0.0, 0.0]
    assert (seen["rows with equal bits"][1].value, seen["rows with equal bits"][1].note) == (pytest.approx(1 / 3), "1")
    first = list(examine.compare_budgets(lambda: None, schedule, "rows", budgets))[2]
    assert first.note == "1; 1 of 3 so far"


def test_second_process_without_bits_of_the_first_finds_no_difference_but_a_failure():
    anchor = part("anchor")
    setting = part("programs").Setting.here(part("sizes").TINY, {}, {})
    with pytest.raises(RuntimeError, match="the first process found no bits of a step of 4 rows"):
        next(anchor.compare(setting))


def test_int8_products_are_exact_and_a_wrong_one_is_found(monkeypatch):
    products, cfg = part("products"), part("sizes").TINY.cfg
    assert products.is_exact(cfg, 3)
    right = products._integers
    monkeypatch.setattr(products, "_integers", lambda x, weight: (right(x, weight)[0] + 1,))
    assert not products.is_exact(cfg, 3)


def test_work_of_products_counts_rows_that_are_read_and_written():
    """A layer of the 8B shape: 218 million weights; each row reads 26,624 numbers and writes 43,008."""
    products, cfg = part("products"), part("sizes").FULL.cfg
    one, more = (products.layers(cfg, rows, "library", lambda *args: ()).work for rows in (1, 257))
    read, written = 2 * 4096 + 4096 + 14336, 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    assert more.bytes - one.bytes == products.LAYERS * 256 * 2 * (read + written)
    eights = [products.layers(cfg, rows, "int8", lambda *args: ()).work.bytes for rows in (1, 257)]
    assert eights[1] - eights[0] == products.LAYERS * 256 * (read + 4 * written)


@pytest.mark.parametrize("name", ["tiny", "full"])
def test_measurements_of_a_stage_have_names_of_their_own(name):
    setting = part("programs").Setting.of_target(
        part("sizes").SIZES[name], importlib.import_module("detspec.targets").target("h200")
    )
    for stage in part("stages").STAGES:
        names = [measurement.name for module in map(part, stage.modules) for measurement in module.measurements(setting)]
        assert len({*names, "compiling"}) == len(names) + 1


def test_checkout_that_is_not_installed_gets_a_version(tmp_path, monkeypatch):
    packages = part("packages")
    metadata = packages.importlib.metadata

    def nothing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", nothing)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    packages.name_checkout(ROOT, tmp_path)
    monkeypatch.undo()
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert metadata.distribution("detspec").version == named
    assert [found.version for found in metadata.distributions(path=[str(tmp_path)])] == [named]


def test_partial_figures_are_kept_until_the_measurement_succeeds():
    """A thousand completions are cut off after 66: what was counted so far is shown, and measured again."""
    history = part("history")
    partial = {**measurement("completions", "all", value=66), "kind": "partial"}
    lines = [{**partial, "entries": []}, partial]
    assert history.entries(lines, "completions")["all"]["value"] == 66
    assert history.known(lines, "completions", run="1") == set()
    failed = measurement("completions", "all", error="Boom")
    assert history.entries([*lines, failed], "completions")["all"]["value"] == 66
    whole = measurement("completions", "all", value=1000)
    assert history.entries([*lines, whole, partial], "completions")["all"]["value"] == 1000


def measured_stage(folder: Path, measurements: list, left_s: float = 100.0, **of_stage: object) -> tuple[int, list[dict]]:
    """Runs made-up measurements in this process: the worker's exit status, and what it wrote."""
    worker = part("worker")
    stage = part("stages").Stage("made up", ("made_up",), "", 1, 0, **of_stage)
    module = ModuleType("prove_stages.made_up")
    module.measurements = lambda setting: measurements
    journal = part("journal").Journal(folder / "results.jsonl")
    setting = part("programs").Setting(part("sizes").TINY, "cpu", lambda cfg: None, ends=time.monotonic() + left_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "prove_stages.made_up", module)
        status = worker.run_stage(stage, setting, journal, began=time.monotonic(), run="1")
    return status, journal.lines()


def figures(name: str, *values: float, seconds: float = 0.0) -> list:
    """A measurement that finds `values` of one figure, one after the other."""
    programs, journal = part("programs"), part("journal")

    def run() -> Iterator[object]:
        time.sleep(seconds)
        for value in values:
            yield journal.Entry("figure", value, "")

    return [programs.Measurement(name, run, costly=seconds > 0)]


def test_each_figure_is_written_before_the_next_one_and_replaces_the_one_of_its_name(tmp_path):
    status, lines = measured_stage(tmp_path, figures("a", 1.0, 2.0))
    assert status == 0
    assert [line["kind"] for line in lines] == ["partial", "partial", "measurement", "end"]
    assert [[entry["value"] for entry in line["entries"]] for line in lines[:3]] == [[1.0], [2.0], [2.0]]


def test_costly_measurement_is_skipped_when_less_time_is_left_than_the_one_before_took(tmp_path):
    """The first case takes 0.3 of 0.5 s, so 0.2 are left for the second. The third is not costly."""
    measurements = [*figures("first", 1.0, seconds=0.3), *figures("second", 1.0, seconds=0.3), *figures("third", 1.0)]
    _, lines = measured_stage(tmp_path, measurements, left_s=0.5)
    assert [line["name"] for line in lines if line["kind"] == "measurement"] == ["first", "third"]
    (skipped,) = [line for line in lines if line["kind"] == "skipped"]
    assert (skipped["name"], skipped["note"]) == ("second", "0 s are left, and the one before took 0")
    assert (lines[-1]["status"], lines[-1]["error"]) == ("cut off", "no time for second")
    _, lines = measured_stage(tmp_path / "more", measurements, left_s=50)
    assert lines[-1]["status"] == "done"


def test_measurement_that_stands_apart_is_followed_by_another_process(tmp_path):
    programs = part("programs")
    first, second = (
        programs.Measurement(name, figures(name, 1.0)[0].run, apart=apart) for name, apart in (("a", True), ("b", False))
    )
    status, lines = measured_stage(tmp_path, [first, second])
    assert status == part("children").RESTART
    assert "end" not in {line["kind"] for line in lines}
    status, lines = measured_stage(tmp_path, [first, second])
    assert status == 0
    assert [line["name"] for line in lines if line["kind"] == "measurement"] == ["a", "b"]


def test_gate_that_finds_the_device_unusable_says_so_in_one_sentence_and_measures_nothing_more(tmp_path):
    environment = part("environment")

    def run() -> Iterator[object]:
        raise environment.Unusable("XLA finds no ptxas: install it.")
        yield

    measurements = [part("programs").Measurement("program", run), *figures("kernel", 1.0)]
    _, lines = measured_stage(tmp_path, measurements, gate=True)
    assert (lines[-1]["status"], lines[-1]["error"]) == ("unusable", "XLA finds no ptxas: install it.")
    assert [line["name"] for line in lines if line["kind"] == "measurement"] == ["program"]


def test_run_ends_at_an_unusable_device_and_not_at_a_stage_that_fails(script, tmp_path, monkeypatch):
    children, stages = part("children"), part("stages")
    ran: list[str] = []

    def run_stage(stage: object, limit_s: float, journal: object, *, run: str, **more: object) -> None:
        ran.append(stage.name)
        status = {"environment": "unusable", "kernels": "failed"}.get(stage.name, "done")
        journal.add("end", stage=stage.name, status=status, seconds=1.0, error="why", run=run)

    monkeypatch.setattr(children, "run_stage", run_stage)
    monkeypatch.setattr(children, "warm_up", lambda: "warm")
    args = script.parse(["--out", str(tmp_path), "--size", "tiny"])
    journal = part("journal").Journal(tmp_path / "results.jsonl")
    delivery = part("delivery").Delivery(tmp_path, None)
    script.run_stages(
        [stages.stage_of(name) for name in ("kernels", "products", "environment", "passes")], args, journal, delivery
    )
    assert ran == ["kernels", "products", "environment"]


@pytest.mark.parametrize(
    ("error", "ptxas", "libdevice", "sentence"),
    [
        ("UNAVAILABLE: No PTX compilation provider is available", None, None, "XLA finds no ptxas, without which"),
        ("No PTX compilation provider", "/p/ptxas", "/l", "XLA does not find or cannot run ptxas, which is at /p/ptxas"),
        ("libdevice not found at ./libdevice.10.bc", "/p/ptxas", None, "XLA finds no libdevice, without which exp"),
        ("libdevice not found at ./libdevice.10.bc", "/p/ptxas", "/l", "XLA does not find libdevice, which is at /l"),
        ("boom\nmore", "/p/ptxas", "/l", "XLA does not compile or run a program of exp, log1p and sin: boom."),
    ],
)
def test_advice_names_in_one_sentence_what_is_missing(error, ptxas, libdevice, sentence):
    found = part("environment").advice(error, "gpu", ptxas, libdevice)
    assert found.startswith(sentence)
    assert found.count(". ") == 0
    assert found.endswith(".")
    assert "CUDA_ROOT" in found or "boom" in found


def test_compilers_are_found_where_they_lie_and_not_elsewhere(tmp_path, monkeypatch):
    environment = part("environment")
    monkeypatch.setattr(environment, "TOOLKITS", (str(tmp_path / "cuda-*"),))
    monkeypatch.setattr(environment, "_jaxs_cuda_path", lambda: "None")  # jax 0.11 where packages of CUDA lack the compiler
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_ROOT", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert environment.find_ptxas() is None
    assert environment.find_libdevice() is None
    ptxas = tmp_path / "cuda-13" / "bin" / "ptxas"
    libdevice = tmp_path / "cuda-13" / environment.LIBDEVICE
    for path in (ptxas, libdevice):
        path.parent.mkdir(parents=True)
        path.touch(mode=0o755)
    assert environment.find_ptxas() == str(ptxas)
    assert environment.find_libdevice() == str(libdevice)


def test_prediction_is_by_measured_ceilings_and_by_the_data_sheet_until_then():
    """An H100's sheet: 3.35 TB/s and 989.5 TFLOP/s. Measured 2 TB/s and 500 TFLOP/s."""
    programs = part("programs")
    target = programs.target_of("NVIDIA H100 80GB HBM3")
    setting = programs.Setting(part("sizes").FULL, "gpu", lambda cfg: None, target=target)
    bytes_alone, both = programs.Work(3.35e12, 0.0), programs.Work(3.35e12, 2 * 989.5e12)
    assert setting.predicted_s(bytes_alone) == 1.0
    assert setting.predicted_s(both) == 2.0
    assert setting.predicted_ratio(both, bytes_alone) == 2.0
    assert [setting.bound(work) for work in (bytes_alone, both)] == ["bandwidth", "arithmetic"]
    earlier = {"ceilings": {"copy": {"value": 2.0}, "product": {"value": 500.0}}}
    measured = programs.Setting(setting.size, "gpu", setting.schedule_fn, earlier, target)
    assert measured.predicted(programs.Work(1e12, 0.0), 1e3) == 500.0
    nowhere = programs.Setting(setting.size, "cpu", setting.schedule_fn)
    assert nowhere.predicted_s(bytes_alone) is None
    assert nowhere.predicted_ratio(both, bytes_alone) is None
    assert programs.target_of("cpu") is None
    assert programs.target_of("TPU v5 lite").name == "v5e:2x2"
    names = {"Tesla T4": "t4", "NVIDIA L4": "l4", "NVIDIA A100-SXM4-40GB": "a100", "TPU v5p": "v5p:2x2x1"}
    assert {kind: programs.target_of(kind).name for kind in names} == names
    assert [programs.target_of(kind) for kind in ("NVIDIA L40S", "NVIDIA L40", "NVIDIA A100-SXM4-80GB")] == [None] * 3


def test_generation_is_predicted_by_the_cheapest_way_to_commit():
    """Products that do not depend on rows cost nothing more; the library's need the anchor's 256 rows, or drafts."""
    generation, programs = part("generation"), part("programs")
    target = programs.target_of("NVIDIA H100 80GB HBM3")
    for linear, least, most in (("pinned", 0.99, 1.01), ("xla", 0.7, 0.95)):
        setting = programs.Setting.of_target(part("sizes").FULL, target, {"linear": linear})
        assert least < generation.predicted_ratio(setting, generation.Case(32, 32)) < most


def test_table_shows_predictions_and_that_times_of_a_rehearsal_are_void():
    tables, journal = part("tables"), part("journal")
    line = measurement("ceilings", "copy", value=3.0)
    line["entries"] = [journal.Entry("copy", 3.0, "TB/s", predicted=3.35).to_json()]
    page = tables.page(
        [{**MACHINE, "size": "tiny", "implementation": "reference", "switches": "implementation reference"}, line]
    )
    assert "size tiny: times void" in page
    assert "switches implementation reference" in page
    (row,) = [row for row in page.splitlines() if row.startswith("| ceilings") and "TB/s" in row]
    assert [cell.strip() for cell in row.split("|")][3:5] == ["3 TB/s", "3.35 TB/s"]
    assert "times void" not in tables.page([MACHINE, line])


def test_delivery_leaves_four_whole_files_and_removes_what_a_killed_run_left(tmp_path):
    delivery, cache_file = part("delivery"), part("cache_file")
    out, kept = tmp_path / "out", tmp_path / "kept"
    (out / "programs").mkdir(parents=True)
    (out / "programs" / "a").write_bytes(b"program")
    (out / "ceilings.log").write_text("a word")
    kept.mkdir()
    (kept / "results.jsonl.part").write_text("half")
    journal = part("journal").Journal(out / "results.jsonl")
    journal.add(**MACHINE)
    delivered = delivery.Delivery(out, kept)
    delivered.results()
    assert sorted(path.name for path in kept.iterdir()) == ["results.jsonl", "table.md"]
    journal.add(**end("ceilings", "done"))
    delivered.all(wait=True)
    assert sorted(path.name for path in kept.iterdir()) == sorted(delivery.FILES)
    assert part("journal").Journal(kept / "results.jsonl").lines() == journal.lines()
    assert "device a device" in (kept / "table.md").read_text()
    assert cache_file.unpack(kept / "programs.tar", tmp_path / "again") == 1
    with tarfile.open(kept / "logs.tgz") as tar:
        assert tar.extractfile("ceilings.log").read() == b"a word"


def test_delivery_says_once_how_many_programs_it_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(part("cache_file"), "pack", lambda folder, file: [file.write_bytes(b""), "a", "b"][1:])
    (tmp_path / "out").mkdir()
    delivered = part("delivery").Delivery(tmp_path / "out", tmp_path / "kept")
    delivered.all()
    delivered.all(wait=True)
    assert capsys.readouterr().out.count("2 programs left out, beyond 16 MiB") == 1


def test_delivery_works_on_another_file_system(tmp_path, monkeypatch):
    delivery = part("delivery")
    replace = Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if self.parent != target.parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    journal = part("journal").Journal(tmp_path / "out" / "results.jsonl")
    journal.add(**MACHINE)
    delivery.Delivery(tmp_path / "out", tmp_path / "kept").all(wait=True)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == sorted(delivery.FILES)


def test_delivery_that_cannot_write_says_so_and_does_not_end_the_run(tmp_path, capsys):
    delivery = part("delivery")
    delivered = delivery.Delivery(tmp_path / "out", tmp_path / "kept")
    part("journal").Journal(tmp_path / "out" / "results.jsonl").add(**MACHINE)
    for path in (tmp_path / "kept", tmp_path / "out" / "table.md"):
        shutil.rmtree(path, ignore_errors=True)
    delivered.all(wait=True)
    assert f"{tmp_path / 'kept'}: not delivered: " in capsys.readouterr().out


def tiny_run(folder: Path, *stages: str, more: tuple[str, ...] = ()) -> list[str]:
    """A command that rehearses some stages."""
    return [sys.executable, str(SCRIPT), "--out", str(folder), "--size", "tiny", *more, "--stages", *stages]


def wait_for(condition: Callable[[], bool]) -> None:
    """Waits until it holds."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_run_that_is_ended_from_outside_has_delivered_what_it_found_and_another_goes_on_from_there(tmp_path, number):
    kept = tmp_path / "kept"
    journal = part("journal").Journal(kept / "results.jsonl")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = tiny_run(tmp_path / "out", "ceilings", "products", more=("--deliver", str(kept)))
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: any(line.get("name") == "copy" for line in journal.lines()))
        process.send_signal(number)
    assert process.returncode != 0
    files = {path.name for path in kept.iterdir()}
    expected = set(part("delivery").FILES)
    assert files <= expected
    assert files == expected or number == signal.SIGKILL
    assert "copy" in (kept / "table.md").read_text()
    command = tiny_run(tmp_path / "out2", "ceilings", more=("--deliver", str(tmp_path / "kept2"), "--earlier", str(kept)))
    subprocess.run(command, env=environment, check=True, timeout=600)
    lines = part("journal").Journal(tmp_path / "kept2" / "results.jsonl").lines()
    names = [line["name"] for line in lines if line["kind"] == "measurement" and line["stage"] == "ceilings"]
    assert names[-3:] == ["copy", "product", "dispatch"]  # measured anew: the machine may be another one


@pytest.mark.parametrize(("linear", "of_step", "holds"), [("pinned", "b", True), ("pinned", "a", False), ("xla", "a", None)])
def test_bits_of_a_step_with_products_of_xla_must_differ_from_pinned_ones(monkeypatch, linear, of_step, holds):
    anchor = part("anchor")
    setting = part("programs").Setting(part("sizes").FULL, "gpu", lambda cfg: Schedule().with_numerics(linear=linear))
    schedules = anchor.schedules(setting)
    assert [schedule.numerics.linear for schedule in schedules] == ["xla", linear, linear]
    monkeypatch.setattr(anchor, "bits_here", lambda setting: zip(schedules, [of_step, "p", "a"], strict=True))
    (control,) = [entry for entry in anchor.find(setting) if entry.name.startswith("control")]
    assert control.holds is holds


@pytest.mark.slow
def test_run_that_is_killed_leaves_a_readable_result_and_goes_on(tmp_path):
    """Killed within its second stage, started again: what that measured is not measured again, but ceilings are."""
    command = tiny_run(tmp_path, "ceilings", "products")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    journal = part("journal").Journal(tmp_path / "results.jsonl")

    def names() -> list[str]:
        return [line["name"] for line in journal.lines() if line["kind"] == "measurement"]

    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: "1 rows" in names())
        process.send_signal(signal.SIGKILL)
    ceilings = ["copy", "product", "dispatch"]
    assert names() == [*ceilings, "1 rows"]
    subprocess.run(command, env=environment, check=True, timeout=600)
    assert names() == [*ceilings, "1 rows", *ceilings, "16 rows"]
    history = part("history")
    assert {history.last_end(journal.lines(), name)["status"] for name in ("ceilings", "products")} == {"done"}
    timed = [entry for entry in history.entries(journal.lines(), "products").values() if entry["unit"] != "yes or no"]
    assert len(timed) == 6
    assert all(entry["predicted"] > 0 for entry in timed)  # by the ceilings that were measured before
