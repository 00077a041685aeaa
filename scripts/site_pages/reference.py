"""Pages about every public name, and about every command, made from docstrings and parsers."""

import argparse
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import detspec
from detspec import traces
from detspec.cli.commands import DESCRIPTION, make_parser


class Group(NamedTuple):
    """Names that one page documents."""

    title: str
    opening: str
    names: tuple[str, ...]  # dotted paths within detspec


GROUPS = {
    "reference/engines.md": Group(
        "Engines",
        "An engine generates for many requests at once; [Generating from Python](../using.md) shows it at work.",
        ("Engine", "EngineConfig", "Needs"),
    ),
    "reference/requests.md": Group(
        "Requests",
        "What a request asks for, and what comes back; [Sampling](../using.md#sampling) has an example of each parameter, "
        "[Comparing two outputs](../using.md#comparing-two-outputs) one of `compare`.",
        (
            *("SamplingParams", "Request", "Completion", "Update", "Thought", "Stats"),
            *("compare", "jobs.comparison.Comparison", "jobs.comparison.ComparedText", "jobs.comparison.Fork"),
        ),
    ),
    "reference/models.md": Group(
        "Models",
        "A model, its shape, and where it is read from; [Models](../using.md#models) says which families there are.",
        (
            *("load", "Model", "ModelConfig", "dense_config", "ThinkingConfig", "config.RopeScaling"),
            *("model.layers.Layer", "model.layers.Mixer", "model.layers.FeedForward"),
            *("model.attention.Attention", "model.mlp.GatedMLP"),
        ),
    ),
    "reference/functions.md": Group(
        "Functional core",
        "[Generation and scoring](../using.md#the-functional-core) as functions of weights and prompts, for notebooks and "
        "ablations.",
        ("generate", "score", "state.GenState"),
    ),
    "reference/schedules.md": Group(
        "Schedules",
        "What decides bits, and what decides speed alone; [How it works](../how_it_works.md#the-schedule) explains the parts.",
        (
            *("Schedule", "schedule.Numerics", "schedule.Budget", "schedule.FastPath"),
            *("default_schedule", "fingerprint", "InputError"),
        ),
    ),
    "reference/evaluations.md": Group(
        "Evaluations",
        "An engine as a model of the lm-evaluation-harness; [Evaluations](../evals.md) shows the command.",
        ("adapters.lm_eval.DetspecLM", "adapters.eval_options.EvalOptions", "seeds.seed_of"),
    ),
    "reference/drafts.md": Group(
        "Draft sources",
        "What proposes tokens; [Your own draft source](../extending.md#a-draft-source) shows how to write one.",
        ("draft_model", "draft.source.Drafter", "draft.source.DraftSource", "state.Draft"),
    ),
    "reference/rl.md": Group(
        "Reinforcement learning",
        "Rollouts and updates whose log-probabilities are the same bits; [On-policy training](../on_policy.md) shows them at "
        "work.",
        (
            *("logprobs", "rl.policy.Policy", "rl.rollouts.Rollout", "rl.objectives.Objective", "rl.objectives.grpo"),
            *("rl.objectives.dr_grpo", "rl.objectives.rloo", "rl.objectives.reinforce"),
            *("rl.config.RLConfig", "rl.tasks.RewardedTask"),
        ),
    ),
    "reference/rl_trainers.md": Group(
        "Other trainers",
        "A model as a module of flax.nnx, and an engine under Tunix; [Other trainers](../rl_trainers.md) shows both.",
        (
            *("adapters.nnx_policy.DetspecPolicy", "adapters.nnx_policy.Lora"),
            *("adapters.tunix.DetspecRollout", "adapters.tunix.TokenizerOfModel", "adapters.tunix.detspec_loss"),
        ),
    ),
    "reference/riders.md": Group(
        "Riders",
        "What requests bring along; [Your own rider](../extending.md#a-rider) shows how to write one.",
        tuple(f"riders.rider.{name}" for name in ("Rider", "Reader", "Entry", "Capacity", "Rows", "Committed")),
    ),
    "reference/traces.md": Group(
        "Traces",
        "Real runs, recorded and drawn, as the pictures of [How it works](../how_it_works.md#draft-verify-commit).",
        (*(f"traces.{name}" for name in traces.__all__), "traces.acceptance.AcceptanceTable"),
    ),
}


def python_pages() -> dict[str, str]:
    """Markdown by place: a page for each group, into which mkdocstrings puts the docstrings.

    Raises `ValueError` if a public name is on no page.
    """
    named = {name for group in GROUPS.values() for name in group.names}
    if missing := sorted(set(detspec.__all__) - named - {"traces"}):
        raise ValueError(f"no page has the public names {', '.join(missing)}: add them to GROUPS of {__name__}")
    pages = {}
    for page, group in GROUPS.items():
        blocks = [f"# {group.title}", group.opening, *(f"::: detspec.{name}" for name in group.names)]
        pages[page] = "\n\n".join(blocks) + "\n"
    return pages


def overview() -> str:
    """Markdown that links to every documented name, by page."""
    parts = ["# Python", "Names are those of `import detspec as ds`; each page shows how they are used."]
    for page, group in GROUPS.items():
        file = page.rpartition("/")[2]
        names = " · ".join(f"[`{name}`]({file}#detspec.{name})" for name in group.names)
        parts += [f"## [{group.title}]({file})", group.opening, names]
    return "\n\n".join(parts) + "\n"


def places_by_file() -> dict[Path, str]:
    """For each file that defines a documented name: the place of its first name on a page."""
    places: dict[Path, str] = {}
    for page, group in GROUPS.items():
        for name in group.names:
            places.setdefault(file_of(name), f"{page}#detspec.{name}")
    return places


def file_of(name: str) -> Path:
    """The file of the repository that defines `name`, a dotted path within detspec."""
    owner, _, last = name.rpartition(".")
    if owner == "traces":
        owner = f"traces.{traces.FILES[last]}"
    module = owner or detspec.FILES[name]
    return Path("detspec", f"{module.replace('.', '/')}.py")


def commands_page() -> str:
    """Markdown with what `--help` prints, for each command."""
    parts = ["# Command line", DESCRIPTION, "Bad input is one line on standard error, and exit code 2."]
    for name, parser in _commands(make_parser()):
        parts += [f"## detspec {name}", f"```text\n{_help(parser)}\n```"]
    return "\n\n".join(parts) + "\n"


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:  # argparse has no public way to its subparsers
        if isinstance(action.choices, Mapping):
            yield from action.choices.items()


def _help(parser: argparse.ArgumentParser) -> str:
    """Output of `--help` on a terminal 96 columns wide, as a page has."""
    formatter = parser.formatter_class

    def wide(prog: str) -> argparse.HelpFormatter:
        return formatter(prog, width=96, max_help_position=28)

    parser.formatter_class = wide  # type: ignore[assignment]
    return re.sub(r"\x1b\[[0-9;]*m", "", parser.format_help()).strip()
