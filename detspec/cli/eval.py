"""`detspec eval`: the lm-evaluation-harness over this engine, and old results checked."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from detspec.cli.options import keep_compiled
from detspec.errors import InputError

SUMMARY = "run the lm-evaluation-harness, or check its old results"
DESCRIPTION = """Runs the lm-evaluation-harness with this engine as its model: all arguments but those below are the harness's,
see `lm-eval run --help`. The default of --model is detspec, that of --batch_size auto, and without pretrained=DIR in
--model_args the shipped model runs. Answers do not depend on the batch size, the order of tasks and --limit. Results carry the
engine's fingerprint. With --check, all requests of old results are sent again; neither the tasks nor their data are needed.
The first sample whose answer moved is named. The results need samples, so they must have been written with --log_samples. The
model and its options are those of the old results; --model_args changes some, --batch_size the speed. Exit codes: 0 success;
1 an answer moved; 2 bad input."""
SUBCOMMANDS = ("run", "ls", "validate")
MODEL = "detspec"
SHIPPED = "tiny_python"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds its options; all others are the harness's."""
    parser.allow_abbrev = False  # `--c` is not for us to complete
    parser.set_defaults(rest=[])
    add = parser.add_argument
    add("--check", metavar="RESULTS.json", help="answer the requests of these results again, and compare")
    add("--no-compile-cache", action="store_true", help="do not keep compiled programs for the next start")


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 if `--check` finds an answer that moved."""
    if importlib.util.find_spec("lm_eval") is None:
        from detspec.extras import install_command

        raise InputError(f"detspec eval needs the lm-evaluation-harness, which is not installed: {install_command('eval')}")
    keep_compiled(args)
    return evaluate(args.rest) if args.check is None else check(Path(args.check), args.rest)


def evaluate(arguments: Sequence[str]) -> int:
    """Hands `arguments`, completed, to the harness's command line."""
    if not arguments:
        raise InputError(
            "no task was named: detspec eval --tasks NAME --output_path DIR --log_samples, or detspec eval ls tasks"
        )
    from lm_eval.__main__ import cli_evaluate

    import detspec.adapters.lm_eval  # noqa: F401  # registers the model

    before = sys.argv
    sys.argv = ["lm-eval", *with_defaults(arguments)]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return 0


def check(results: Path, arguments: Sequence[str]) -> int:
    """Prints what moved; returns 1 if anything did."""
    from detspec.adapters.replay import check_results

    parser = argparse.ArgumentParser(prog="detspec eval --check", allow_abbrev=False)
    parser.add_argument("--model_args", "-a", default="")
    parser.add_argument("--batch_size", "-b", default="auto")
    given = parser.parse_args(arguments)
    report = check_results(results, model_args=given.model_args, batch_size=given.batch_size)
    print(report.table())
    return 0 if report.reproduced else 1


def with_defaults(arguments: Sequence[str]) -> list[str]:
    """The harness's arguments with our defaults where nothing else is said, for its subcommand that runs tasks."""
    if arguments[0] in SUBCOMMANDS[1:]:
        return list(arguments)
    rest = list(arguments[1:] if arguments[0] == SUBCOMMANDS[0] else arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", "-C")
    parser.add_argument("--model", "-M")
    parser.add_argument("--batch_size", "-b")
    parser.add_argument("--model_args", "-a", nargs="+", action="extend", default=[])
    given, _ = parser.parse_known_args(rest)
    said = {name for name, value in vars(given).items() if value} | config_keys(given.config)
    defaults = []
    if "model" not in said:
        defaults += ["--model", MODEL]
    if (given.model or MODEL) == MODEL and "batch_size" not in said:
        defaults += ["--batch_size", "auto"]
    named = [pair for pairs in given.model_args for pair in pairs.split(",") if pair.startswith(("pretrained=", "path="))]
    if not named and given.model in (None, MODEL) and given.config is None:
        defaults += ["--model_args", f"pretrained={SHIPPED}"]  # else the folder of the results has a random name
    return [SUBCOMMANDS[0], *defaults, *rest]


def config_keys(path: str | None) -> set[str]:
    """The names that a file of `--config` sets."""
    if path is None:
        return set()
    from lm_eval.config.evaluate_config import EvaluatorConfig

    return set(EvaluatorConfig.load_yaml_config(path))
