"""`detspec trace`: pictures of real windows."""

import argparse

from detspec.cli.options import add_model, add_subcommand, load_model

DESCRIPTION = """Generates from a prompt, records every window of draft, verification and commit, and draws the first window in
which all guesses were accepted and the first with a rollback. Without --prompt it searches the demonstration's prompts and
seeds for a request that has both; if the model's own fast path is never refused, weights rounded to 8 bits draft instead."""


def add_to(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = add_subcommand(subcommands, "trace", "draw a window of draft, verify and rollback", DESCRIPTION)
    add_model(parser)
    parser.add_argument("--prompt", metavar="TEXT", default=argparse.SUPPRESS, help="what to continue (default: search)")
    parser.add_argument(
        "--draft",
        choices=("self", "rounded"),
        default="self",
        help="who guesses: the fast path, or with weights rounded to 8 bits; used with --prompt",
    )
    parser.add_argument("--window", type=int, default=4, metavar="W", help="drafted tokens and one more; a power of two")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="most new tokens")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy; used with --prompt")
    parser.add_argument("--seed", type=int, default=0, help="used with --prompt")
    parser.add_argument("--out", default="out/detspec-trace", metavar="PATH", help="PATH.svg and PATH.png are written")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draws, and prints a line per window."""
    from detspec.evals.demo import demo_prompts
    from detspec.evals.trace import find_rollback, rounded_params, run_trace
    from detspec.sampling import SamplingParams
    from detspec.viz.trace import save_trace

    model = load_model(args)
    if hasattr(args, "prompt"):
        sampling = SamplingParams(temperature=args.temperature, seed=args.seed)
        draft_params = rounded_params(model.params) if args.draft == "rounded" else None
        trace = run_trace(
            model, args.prompt, sampling, window=args.window, max_tokens=args.max_tokens, draft_params=draft_params
        )
    else:
        trace = find_rollback(model, demo_prompts(), window=args.window, max_tokens=args.max_tokens)
    print(trace.title)
    for window in trace.windows:
        verdict = "rolled back to" if window.rolled_back else "length"
        print(
            f"  position {window.start:4}: {window.accepted} of {len(window.drafted)} guesses accepted, "
            f"{len(window.committed)} committed, {verdict} {window.length_after}: {''.join(window.committed)!r}"
        )
    for path in save_trace(trace, args.out):
        print(path)
    return 0
