"""`detspec demo`: the whole product in half a minute."""

import argparse

from detspec.cli.options import add_chips, add_model, load_model
from detspec.say import say

SUMMARY = "which texts change in a crowd, ordinary and deterministic ones"
DESCRIPTION = """Generates 32 requests alone, one after the other, and all at once, ordinary and deterministic. Shows an
ordinary text that is another one in the crowd, counts the texts and the bits of log-probabilities that changed, and how fast
each was. Exit code 1 if a deterministic bit changed, or if no ordinary text did: then the comparison would show nothing.

With --chips N, the same prompts on one chip and on N: no deterministic bit may change. On a machine without chips, simulate
some: `JAX_NUM_CPU_DEVICES=4 detspec demo --chips 4`.

With --integer, an integer model: one hash of its texts, which follow from arithmetic alone, and two audits that share no code
with what generated. Exit code 1 if an audit disagrees.

With --thinking, a model that thinks while it reads answers a question and shows its thoughts."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds its options."""
    add = parser.add_argument
    add_model(parser)
    add_chips(parser)
    add("--max-tokens", type=int, default=256, metavar="N", help="new tokens of each request")
    add("--integer", action="store_true", help="generate in integers, whose bits follow from arithmetic alone")
    add(
        "--thinking",
        nargs="?",
        const="",
        metavar="QUESTION",
        help="answer QUESTION about coin flips instead, thought by thought (default: a question of two flips)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns 1 if a deterministic bit changed or no ordinary one did."""
    if args.thinking is not None:
        return run_thinking(args)
    if args.integer:
        return run_integer(args)
    if args.chips not in (None, 1):
        return run_chips(args)
    from detspec.demo.demo import NUM_STAGES, run_demo
    from detspec.progress import Progress

    model = load_model(args)
    with Progress(NUM_STAGES, "steps") as progress:
        report = run_demo(model, max_tokens=args.max_tokens, show=progress.print, progress=progress.next_stage)
    if not report.held:
        say("error: deterministic generation changed bits between batches")
        return 1
    if not report.control_found:
        say("error: the inverse control found nothing: ordinary generation changed no text either")
        return 1
    print(
        "\nIn a crowd, deterministic requests keep every bit; ordinary ones do not. `detspec trace` draws how, with matplotlib."
    )
    return 0


def run_chips(args: argparse.Namespace) -> int:
    """Compares one chip with several; returns 1 if a bit changed, or none did in the control."""
    from detspec.demo.chips_demo import NUM_STAGES, run_chips_demo
    from detspec.progress import Progress

    model = load_model(args)
    with Progress(NUM_STAGES, "steps") as progress:
        report = run_chips_demo(model, max_tokens=args.max_tokens, show=progress.print, progress=progress.next_stage)
    if not report.held:
        say("error: deterministic generation changed bits between one chip and several")
        return 1
    if not report.num_added:
        say("error: the inverse control found nothing: sums that were added across chips changed no bit either")
        return 1
    print("No bit depends on the number of chips; sums that are added across chips do.")
    return 0


def run_integer(args: argparse.Namespace) -> int:
    """Generates in integers and audits; returns 1 if an audit disagrees."""
    from detspec.demo.integer_demo import run_integer_demo
    from detspec.progress import Progress

    model = load_model(argparse.Namespace(**{**vars(args), "weights": "integer"}))
    with Progress(0, "steps") as progress:
        agrees = run_integer_demo(model, show=progress.print, progress=progress.stage)
    if not agrees:
        say("error: an audit has other tokens or log-probabilities: run `detspec doctor --integer`")
    return 0 if agrees else 1


def run_thinking(args: argparse.Namespace) -> int:
    """Answers one question with thoughts; returns 1 if other bits came out among other requests."""
    from detspec.demo.thinking_demo import QUESTION, run_thinking_demo

    model = load_model(args, shipped="thinking_parity")
    report = run_thinking_demo(model, args.thinking or QUESTION)
    print(report.table())
    if not report.equal:
        say("error: other requests or drafts changed bits of a deterministic answer")
        return 1
    return 0
