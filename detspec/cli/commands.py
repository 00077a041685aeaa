"""`main`: chooses the subcommand, and turns bad input into one line and exit code 2.

Subcommands import what they run inside themselves, so that `--help` and bad options need no accelerator.
"""

import argparse
import difflib
import os
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any, NoReturn

from detspec.cli import (
    audit,
    bench,
    compare,
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


COMMANDS = {
    "start here": (demo, generate),
    "files of completions": (merge, convert_output, audit, compare),
    "interfaces": (serve, eval),
    "certify and measure": (doctor, bench, trace, plan),
    "models": (train, convert, warm),
}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Keeps paragraphs, and shows defaults, except for flags, for options whose default is None, and where help names it."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(HelpFormatter, self)._fill_text(part, width, indent) for part in text.split("\n\n"))

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or "(default: " in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse, but a bad option is one line, and no option may be cut short: a new one would change what that means."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Says what was wrong and where help is."""
        self.exit(BAD_INPUT, f"detspec: error: {message} (see `{self.prog} --help`)\n")

    def options(self) -> list[str]:
        """The options that it knows, such as "--out"."""
        return list(self._option_string_actions)


class MainParser(Parser):
    """The parser of all subcommands, which its help shows in groups."""

    def format_help(self) -> str:
        """Lists the subcommands below what they are for."""
        lines = [f"usage: {self.prog} COMMAND [options]", "", *textwrap.wrap(DESCRIPTION, 78)]
        for group, modules in COMMANDS.items():
            lines += ["", f"{group}:", *(f"    {name_of(module):16}{module.SUMMARY}" for module in modules)]
        lines += ["", f"`{self.prog} COMMAND --help` shows the options of a command, `{self.prog} --version` the version.", ""]
        return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; each puts its function into `args.run`, and its parser into `args.parser`."""
    parser = MainParser(prog="detspec")
    parser.add_argument("--version", action="version", version=f"detspec {version('detspec')}")
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for module in (module for modules in COMMANDS.values() for module in modules):
        usage = getattr(module, "USAGE", None)
        sub = subcommands.add_parser(
            name_of(module),
            usage=usage and f"%(prog)s {usage}",
            description=module.DESCRIPTION,
            epilog=getattr(module, "DETAILS", None),
            formatter_class=HelpFormatter,
        )
        module.add_options(sub)
        sub.set_defaults(run=module.run, parser=sub)
    return parser


def name_of(module: ModuleType) -> str:
    """The subcommand of a module of the command line."""
    return module.__name__.rpartition(".")[2].replace("_", "-")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of one subcommand; those that it does not know are in `rest`, if it hands them on."""
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    if not argv:
        parser.print_help(sys.stderr)
        parser.exit(BAD_INPUT)
    names = [name_of(module) for modules in COMMANDS.values() for module in modules]
    if not argv[0].startswith("-") and argv[0] not in names:
        parser.error(f"there is no command {argv[0]!r}{meant(argv[0], names)}")
    args, rest = parser.parse_known_args(argv)
    if rest and not hasattr(args, "rest"):
        wrong = rest[0].partition("=")[0]
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}{meant(wrong, args.parser.options())}")
    args.rest = rest
    return args


def meant(given: str, accepted: Sequence[str]) -> str:
    """A question that names what was probably meant by `given`; "" if nothing is like it."""
    begun = [name for name in accepted if given.strip("-") and name.startswith(given)]
    found = begun or difflib.get_close_matches(given, accepted, n=1)
    return f": did you mean {' or '.join(found)}?" if found else ""


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
