"""`detspec trace`: pictures of real windows and thoughts."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from detspec.choices import THOUGHTS
from detspec.cli.options import add_model, load_model
from detspec.say import say

if TYPE_CHECKING:
    from detspec.traces.thoughts import ThoughtTrace

SUMMARY = "draw a window of draft, verify and rollback"
DESCRIPTION = """Generates from a prompt and records every window of draft, verify and commit. Draws the first window in which
all drafted tokens were accepted, and the first with a rollback. Without --prompt it searches the demo's prompts and seeds for a
request that has both. If no draft of the model's own fast path is rejected, weights rounded to 8 bits draft instead.

With --thoughts, a model that thinks reads a prompt. Draws its chunks, states and thoughts, and the passes that drafted,
verified and committed them."""

THINKING_PROMPT = (
    "A coin's state is heads. Alice flips, then Bob sings, then Carol reads, then David naps, then Erin flips, "
    "then Frank hums, then Grace naps, then Henry sings, then Irene flips, then Jack waits. What's the state? A:"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds its options."""
    add = parser.add_argument
    add_model(parser)
    add("--prompt", metavar="TEXT", help="text to continue (default: search)")
    add(
        "--draft",
        choices=("self", "int8", "ngram"),
        default="self",
        help="the draft: the fast path, the model with weights in int8, or prompt lookup; used with --prompt",
    )
    add("--window", type=int, default=4, metavar="W", help="one more than the drafted tokens; a power of two")
    add("--max-tokens", type=int, default=96, metavar="N", help="most new tokens")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy; used with --prompt or --thoughts")
    add("--seed", type=int, default=0, help="used with --prompt or --thoughts")
    add("--thoughts", action="store_true", help="draw how a model that thinks reads a prompt (default model: thinking_parity)")
    add(
        "--draft-thoughts",
        choices=THOUGHTS,
        default=THOUGHTS[0],
        help="drafted thoughts: none, or those of a cheap pass that reads ahead; used with --thoughts",
    )
    add("--out", default="out/detspec-trace", metavar="PATH", help="PATH.svg and PATH.png are written")


def run(args: argparse.Namespace) -> int:
    """Draws, and prints a line per window, or per pass and thought."""
    return run_thoughts(args) if args.thoughts else run_windows(args)


def run_windows(args: argparse.Namespace) -> int:
    """Draws windows of tokens."""
    from detspec.demo.demo import demo_prompts
    from detspec.sampling_params import SamplingParams
    from detspec.traces import find_rollback, run_trace, save_trace
    from detspec.traces.record_windows import drafter_of

    model = load_model(args)
    say("compiling and generating")
    size = {"window": args.window, "max_tokens": args.max_tokens}
    if args.prompt is None:
        trace = find_rollback(model, demo_prompts(), **size)
    else:
        sampling = SamplingParams(temperature=args.temperature, seed=args.seed)
        trace = run_trace(model, args.prompt, sampling, **size, drafter=drafter_of(model, args.draft))
    print(trace.title)
    for window in trace.windows:
        verdict = "rolled back to" if window.rolled_back else "length"
        print(
            f"  position {window.start:4}: {window.accepted} of {len(window.drafted)} drafted tokens accepted, "
            f"{len(window.committed)} committed, {verdict} {window.length_after}: {''.join(window.committed)!r}"
        )
    for path in save_trace(trace, args.out):
        print(path)
    return 0


def run_thoughts(args: argparse.Namespace) -> int:
    """Draws thoughts and their passes."""
    from detspec.sampling_params import SamplingParams
    from detspec.traces import run_thought_trace, save_thoughts

    model = load_model(args, shipped="thinking_parity")
    say("compiling and generating")
    sampling = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    prompt = THINKING_PROMPT if args.prompt is None else args.prompt
    trace = run_thought_trace(model, prompt, sampling, think=args.draft_thoughts)
    print(trace.title)
    for line in thought_lines(trace):
        print(f"  {line}")
    for path in save_thoughts(trace, args.out):
        print(path)
    return 0


def thought_lines(trace: "ThoughtTrace") -> list[str]:
    """A line per pass, a line per thought, and the answer."""
    lines = [
        f"pass {number:2}: chunks {one.first:2} to {one.end - 1:2}, {one.accepted} of {len(one.drafts)} drafts accepted"
        f"{', 1 corrected' if one.rejected else ''}; read {one.read}, length {one.length}"
        for number, one in enumerate(trace.passes, 1)
    ]
    texts = [_spaced(chunk) for chunk in trace.chunks]
    width = max(len(text) for text in texts)
    for number, (text, thought) in enumerate(zip(texts, trace.thoughts, strict=False)):
        said = "nothing" if thought.trivial else _spaced(thought.tokens)
        lines.append(f"chunk {number:2}: {text:{width}} -> {said}{'' if thought.ended else ' (cut)'}")
    return [*lines, f"chunk {len(trace.thoughts):2}: {texts[-1]:{width}} => {_spaced(trace.answer)}"]


def _spaced(tokens: Sequence[str]) -> str:
    """Tokens with one blank between them, on one line."""
    return " ".join(" ".join(tokens).split())
