"""Exit codes, one-line errors, help."""

import ast
import json
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from detspec.__main__ import run as run_process
from detspec.checkpoint.load import load
from detspec.choices import ALIGNMENTS, LINEARS, LOGPROBS_MODES, METHODS, THOUGHTS
from detspec.cli import commands, options
from detspec.cli.commands import main
from detspec.engine.engine_config import EngineConfig
from detspec.environment import default_schedule
from detspec.errors import InputError
from detspec.native.processor import find_compiler
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule

COMMANDS = (
    *("demo", "generate", "merge", "convert-output", "audit", "serve", "eval", "doctor", "bench", "trace", "plan", "train"),
    *("convert", "warm"),
)
CLI = Path(commands.__file__).parent
LIGHT = ("detspec.choices", "detspec.cli", "detspec.errors", "detspec.say")
NEEDED = {
    "merge": ["--out", "out.jsonl"],
    "generate": ["--prompts", "-", "--out", "-"],
    "train": ["--config", "config.py"],
    "convert-output": ["out.jsonl", "out.parquet"],
    "audit": ["--records", "out.jsonl"],
    "convert": ["--model", "folder", "--out", "other"],
    "plan": ["--preset", "qwen3_8b", "--target", "v6e:2x2"],
}


def parsed(*argv: str):
    return commands.make_parser().parse_args(argv)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_shows_its_options(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr()
    assert f"usage: detspec {command}" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_a_command_does_within_ten_lines_of_its_usage(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    usage, description, *_ = capsys.readouterr().out.split("\n\n")
    assert len(description.splitlines()) <= 10
    assert len(usage.splitlines()) <= 7


@pytest.mark.parametrize(("argv", "code"), [(["--help"], 0), ([], 2)])
def test_help_names_every_command(argv, code, capsys):
    """Without a command, too, but then on the standard error."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == code
    shown = capsys.readouterr()[code // 2]
    assert all(f"\n    {command} " in shown for command in COMMANDS)


@pytest.mark.parametrize("path", sorted(CLI.glob("*.py")), ids=lambda path: path.name)
def test_cli_module_imports_nothing_slow_before_it_runs(path):
    """Only the standard library, `LIGHT` and the CLI itself; what a subcommand runs is imported in its function."""
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name.split(".")[0] in sys.stdlib_module_names or name.startswith(LIGHT)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fly"], "there is no command 'fly' (see `detspec --help`)"),
        (["genrate"], "there is no command 'genrate': did you mean generate? (see `detspec --help`)"),
        (["generate", "--prompts", "x"], "required: --out"),
        (["generate", "--prompts", "x", "--out", "y", "--max-tokens", "many"], "invalid int value: 'many'"),
        (["generate", "--prompts", "x", "--out", "y", "--method", "magic"], "invalid choice: 'magic'"),
        (["generate", "--prompts", "x", "--out", "y", "--shard", "4/4"], "must be I/N with 0 <= I < N <= 99999"),
        (["generate", "--prompts", "x", "--out", "y", "--shard", "1"], "such as 0/4, or auto, got '1'"),
        (["demo", "--nonsense"], "unrecognized arguments: --nonsense (see `detspec demo --help`)"),
        (["demo", "--modle=x"], "unrecognized arguments: --modle=x: did you mean --model? (see `detspec demo --help`)"),
        (["demo", "--max-t", "4"], "unrecognized arguments: --max-t 4: did you mean --max-tokens? (see `detspec demo --help`)"),
        (["plan", "--max-re", "4", "--preset", "qwen3_8b", "--target", "v6e:2x2"], "did you mean --max-requests?"),
    ],
)
def test_bad_option_is_one_line_and_exit_code_2(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("detspec: error: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_version_is_that_of_the_project_file(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    project = tomllib.loads((CLI.parents[1] / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"detspec {project['version']}\n"


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (InputError("no such\n  thing: look elsewhere"), 2, "detspec: error: no such thing: look elsewhere\n"),
        (KeyboardInterrupt(), 130, "detspec: interrupted\n"),
    ],
)
def test_exception_of_a_command_becomes_a_line_and_a_code(raised, code, message, monkeypatch, capsys):
    def run(args: object) -> int:
        raise raised

    monkeypatch.setattr("detspec.cli.doctor.run", run)
    assert main(["doctor"]) == code
    assert capsys.readouterr().err == message


def test_unexpected_exception_keeps_its_traceback(monkeypatch):
    def run(args: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr("detspec.cli.doctor.run", run)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["doctor"])


def test_process_that_crashes_shows_the_traceback_and_exits_with_neither_1_nor_2(monkeypatch, capsys):
    """1 would say that requests failed or records differ, and 2 that the input is bad."""

    def run(args: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr("detspec.cli.doctor.run", run)
    monkeypatch.setattr("sys.argv", ["detspec", "doctor"])
    assert run_process() == 70
    assert capsys.readouterr().err.splitlines()[-1] == "RuntimeError: a bug"


@pytest.mark.parametrize("error", [PackageNotFoundError("detspec"), ModuleNotFoundError(name="msgspec")])
def test_package_that_is_not_installed_is_one_line(monkeypatch, capsys, error):
    def run(args: object) -> int:
        raise error

    monkeypatch.setattr("detspec.cli.doctor.run", run)
    monkeypatch.setattr("sys.argv", ["detspec", "doctor"])
    assert run_process() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"detspec: error: {error.name} is not installed for ")
    assert "pip install ." in line


def test_doctor_examines_the_schedule_that_engines_run_unless_another_is_asked_for(monkeypatch, capsys):
    asked = []

    def run_doctor(model, *, schedule: Schedule, **keywords: object) -> SimpleNamespace:
        asked.append(schedule)
        return SimpleNamespace(certified=True, table=lambda: "")

    monkeypatch.setattr("detspec.doctor.doctor.run_doctor", run_doctor)
    assert main(["doctor", "--no-compile-cache"]) == main(["doctor", "--no-compile-cache", "--linear", "xla"]) == 0
    own = default_schedule(load().cfg)
    assert asked == [own, own.with_numerics(linear="xla")]
    assert own.numerics.linear == ("pinned" if find_compiler() else "xla")  # with a compiler the two differ


def test_defaults_are_those_of_the_library():
    args = parsed("generate", *NEEDED["generate"])
    assert options.sampling_of(args) == SamplingParams()
    assert (args.max_requests, tuple(args.method), args.num_speculative_tokens) == (
        EngineConfig().max_requests,
        EngineConfig().methods,
        EngineConfig().num_speculative_tokens,
    )
    assert (METHODS[0], THOUGHTS[0]) == (EngineConfig().method, EngineConfig().thoughts)
    assert LOGPROBS_MODES[0] == SamplingParams().logprobs_mode
    assert (ALIGNMENTS[0], LINEARS[0]) == (Schedule().numerics.alignment, Schedule().numerics.linear)


def test_engine_options_reach_the_config():
    model = SimpleNamespace(cfg=SimpleNamespace(max_position=600))
    assert options.engine_config_of(parsed("generate", *NEEDED["generate"]), model).max_len == 600
    args = parsed("generate", *NEEDED["generate"], "--max-len", "0", "--num-pages", "0")
    with pytest.raises(InputError, match=r"EngineConfig\.max_len must be an integer of at least 1, got 0"):
        options.engine_config_of(args, model)  # 0 is a value, not the default
    args = parsed("generate", *NEEDED["generate"], "--max-len", "64", "--num-pages", "9", "--method", "none")
    config = options.engine_config_of(args, model)
    assert (config.max_len, config.num_pages, config.method) == (64, 9, "none")


def test_report_is_written_over_an_old_one(tmp_path):
    path = tmp_path / "report.json"
    for content in (None, ""):
        if content is not None:
            path.write_text(content)
        options.write_json(parsed("bench", "--json", str(path)), {"samples": []})
        assert parsed("bench", "--json", str(path)).json == str(path)
    assert json.loads(path.read_text())["samples"] == []


@pytest.mark.parametrize(
    "content",
    [
        '{"id": "a"}\n{"id": "b"}\n',
        '{"id": "a"}\n',
        '{"model_type": "qwen3", "vocab_size": 9}',
        "{}",
        "[]",
        '"detspec_report"',
        "x",
    ],
)
def test_report_is_not_written_over_another_file(content, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(SystemExit):
        parsed("bench", "--json", str(path))
    assert "is there already and holds no report: name another file" in capsys.readouterr().err
    assert path.read_text() == content


def test_help_shows_defaults_but_not_none(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "most requests in flight (default: 32)" in shown
    assert "sampling seed, modulo 2**32; noise depends only on it and the token position (default: 0)" in shown
    assert "strings that end a request --" in shown  # the next option follows
    assert "prompt lookup finds again (default: 2) --" in shown
    assert "(default: auto) --" in shown
    assert "default: None" not in shown
    assert "default: False" not in shown


def test_sampling_options_reach_the_parameters():
    args = parsed(
        *("generate", *NEEDED["generate"], "--max-tokens", "5", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.9"),
        *("--min-p", "0.1", "--seed", "7", "--ignore-eos", "--stop-token-ids", "1", "2", "--ordinary"),
        *("--logprobs-mode", "processed"),
    )
    assert options.sampling_of(args) == SamplingParams(
        max_tokens=5,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        seed=7,
        ignore_eos=True,
        stop_token_ids=(1, 2),
        logprobs_mode="processed",
        deterministic=False,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_function(command):
    assert callable(parsed(command, *NEEDED.get(command, [])).run)
