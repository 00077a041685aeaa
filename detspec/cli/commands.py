"""`main`: chooses the subcommand, and turns bad input into one line and exit code 2.

Subcommands import what they run inside themselves, so that `--help` and bad options need no accelerator.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from detspec.cli import (
    audit,
    bench,
    convert,
    convert_output,
    demo,
    doctor,
    eval,
    generate,
    merge,
    plan,
    serve,
    trace,
    train,
    warm,
)
from detspec.errors import InputError
from detspec.say import INTERRUPTED, say

BAD_INPUT = 2
BROKEN_PIPE = 141  # and after the reader of a pipe has left

DESCRIPTION = "Text generation whose tokens and log-probabilities are the same bits in every batch, at full speed."


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except for flags, for options whose default is None, and where the help names it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or "(default: " in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse, but a bad option is one line."""

    def error(self, message: str) -> NoReturn:
        """Says what was wrong and where help is."""
        self.exit(BAD_INPUT, f"detspec: error: {message} (see `{self.prog} --help`)\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; each puts its function into `args.run`."""
    parser = Parser(prog="detspec", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"detspec {version('detspec')}")
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True)
    modules = (demo, generate, merge, serve, audit, eval, convert_output, doctor, trace, bench, plan, train, convert, warm)
    for module in modules:
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        sub = subcommands.add_parser(name, help=module.SUMMARY, description=module.DESCRIPTION, formatter_class=HelpFormatter)
        module.add_options(sub)
        sub.set_defaults(run=module.run)
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of one subcommand; those that it does not know are in `rest`, if it hands them on."""
    parser = make_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not hasattr(args, "rest"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.rest = rest
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code, 0 only on success. Unexpected exceptions keep their traceback."""
    try:
        args = parse(argv)
        return int(args.run(args))
    except InputError as error:
        say(f"error: {' '.join(str(error).split())}")
        return BAD_INPUT
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains once more at exit
        return BROKEN_PIPE
