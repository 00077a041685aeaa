"""`detspec generate`: a file of prompts in, a file of completions out."""

import argparse
import sys
import time
from pathlib import Path

from detspec.cli.options import add_engine, add_model, add_sampling, add_subcommand, engine_config_of, load_model, sampling_of
from detspec.errors import InputError

DESCRIPTION = """Completes every line of a JSONL file. A line in: {"id": "a", "prompt": "..."} or {"id": "a",
"prompt_token_ids": [...]} or {"id": "a", "messages": [{"role": "user", "content": "..."}]}, rendered by the model's chat
template, with "chat_template_kwargs": {...} for what that reads besides; optionally "sampling": {...} over the options below.
A line out, in the order of the input: id, token_ids, text, logprobs, finish_reason, prompt_len, digest. Beside OUT.jsonl it
writes OUT.stats.json (timings, counters) and OUT.manifest.json (what the bits depend on). All lines are checked before anything
is generated, and no output appears under its name unless it is whole."""
FAILED = 1


def add_to(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = add_subcommand(subcommands, "generate", "complete a file of prompts", DESCRIPTION)
    parser.add_argument("--prompts", required=True, metavar="IN.jsonl", help='"-" reads the standard input')
    parser.add_argument(
        "--out", required=True, metavar="OUT.jsonl", help='"-" writes the standard output, and nothing beside it'
    )
    add_model(parser)
    add_sampling(parser)
    add_engine(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 if requests ended with finish reason "error"."""
    from detspec.engine.batch import check_out, read_requests, run_job
    from detspec.engine.engine import Engine

    sampling = sampling_of(args)
    check_out(args.out, args.prompts)
    lines = read_lines(args.prompts)
    began = time.perf_counter()
    model = load_model(args)
    engine = Engine(model, engine_config_of(args, model))
    requests = read_requests(lines, engine, sampling, source="stdin" if args.prompts == "-" else args.prompts)
    result = run_job(engine, requests, args.out, defaults=sampling, load_s=time.perf_counter() - began)

    stats = result.stats
    print(
        f"detspec: {stats['num_requests']} requests, {stats['num_tokens']} tokens in {stats['generate_s']:.1f} s "
        f"({stats['tok_per_s']:,.0f} tok/s; compiled and certified in {stats['compile_s']:.1f} s)",
        file=sys.stderr,
    )
    if result.failed:
        print(f"detspec: error: the model gave logits that are not finite for: {', '.join(result.failed)}", file=sys.stderr)
        return FAILED
    return 0


def read_lines(prompts: str) -> list[bytes]:
    """The lines of a file or of the standard input."""
    if prompts == "-":
        return sys.stdin.buffer.read().split(b"\n")
    try:
        return Path(prompts).read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"--prompts {prompts}: {error.strerror}") from error
