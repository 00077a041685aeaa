"""`detspec generate`: a file of prompts in, a file of completions out."""

import argparse
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from detspec.cli.options import (
    add_cache_dtype,
    add_engine,
    add_model,
    add_sampling,
    add_weights,
    load_model,
    make_engine,
    sampling_of,
    say_model,
)
from detspec.errors import InputError
from detspec.say import say, stamped

if TYPE_CHECKING:
    from detspec.jobs.generation import StopSignals
    from detspec.jobs.output import JobResult

SUMMARY = "complete a file of prompts"
USAGE = "--prompts IN.jsonl --out OUT.jsonl [options]"
DESCRIPTION = """Completes every line of a JSONL file. A line in is {"id": "a", "prompt": "..."}, or has "prompt_token_ids":
[...] or "messages": [...], which the model's chat template renders. A line out, in the order of the input, has id,
token_ids, text, logprobs, finish_reason, prompt_len and digest. After a kill, the same command resumes and gives the same
bytes."""
DETAILS = """Lines in: "sampling": {...} overrides the options above; "metadata": {...}, an object of yours, is repeated in
the lines out; "chat_template_kwargs": {...} passes the chat template further values, such as tools;
"continue_final_message": true lets an answer go on within the last message. OpenAI's batch lines, known by their
"custom_id", are answered in OpenAI's format; bodies say how they are sampled, and lines that fail go to OUT.errors.jsonl.
All other lines are checked before anything is generated.

Lines out: if the sampling asks for them, also index, logprobs_mode, top_logprobs, prompt_logprobs and prompt_top_logprobs;
and thoughts, if the model thinks.

Files: OUT.stats.json holds timings and counters; those under last_start belong to the start that finished the job.
OUT.manifest.json holds what the bits depend on. No output appears under its name until it is whole; until then, finished
completions are kept in OUT.jsonl.journal, and after a kill, a full disk or a failure the same command goes on from there. A
complete output is left as it is. So are the output of another job, whose differences are named, and a file that no job
wrote, unless --fresh says to write over them.

Signals: SIGTERM and SIGINT finish the running segment, keep what is finished and exit; a second signal kills. Exit codes: 0
success; 1 requests failed or lines were rejected, and the rest is written; 2 bad input; 3 the disk is full; 70 a crash, with a
traceback; 130 and 143 after SIGINT and SIGTERM.

Processes: several, which Slurm or a TPU pod starts, or which JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID
join, share one model; the first writes the files. One that has lost the others exits with 75, and after the same commands
all resume."""
FAILED = 1
ON_ERROR = ("stop", "reject")
AUTO = "auto"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the subcommand."""
    add = parser.add_argument
    add(
        "--prompts",
        required=True,
        metavar="IN.jsonl",
        help='lines of JSON, also packed by gzip or zstd; "-" reads the standard input. Tables are read row by row: parquet, '
        "Arrow's files and streams, and folders of shards or of `Dataset.save_to_disk`",
    )
    add(
        "--column",
        metavar="NAME",
        help="column of prompts: texts, token ids or conversations, also as JSON texts (default: prompt, messages, ...)",
    )
    add("--id-column", metavar="NAME", help="column of ids, texts or integers (default: the number of the row)")
    add(
        "--out",
        required=True,
        metavar="OUT.jsonl",
        help='"-" writes each finished line to the standard output, without journal, statistics and manifest',
    )
    add(
        "--shard",
        type=parse_shard,
        metavar="I/N|auto",
        help="only block I (from 0) of N of the lines, into OUT.0000I-of-0000N.jsonl; or auto: one of any number of workers on "
        "one file system, which take chunks of lines in OUT.jsonl.chunks until all are done. `detspec merge` joins either",
    )
    add(
        "--double-check",
        type=parse_share,
        default=0.0,
        metavar="SHARE",
        help="with --shard auto, a share such as 1%% of the chunks is done twice, best on another host; merge compares",
    )
    add("--chunk-lines", type=int, metavar="N", help="lines of a chunk of --shard auto (default: up to 16, more of long files)")
    add(
        "--on-error",
        choices=ON_ERROR,
        default=ON_ERROR[0],
        help="what to do with malformed lines: stop before generating, or write them to OUT.rejects.jsonl and exit with 1",
    )
    add(
        "--created",
        type=int,
        metavar="SECONDS",
        help="time since 1970 that chat templates print, none by default, and answers to OpenAI's lines give, 0 by default",
    )
    add("--fresh", action="store_true", help="start again, and write over any journal and output")
    add("--dry-run", action="store_true", help="check everything and print the plan; generate and write nothing")
    add_model(parser)
    add_weights(parser)
    add_cache_dtype(parser)
    add_sampling(parser)
    add_engine(parser)
    add(
        "--engines",
        type=int,
        default=1,
        metavar="N",
        help="engines that share the requests, each on --chips devices of its own",
    )


def parse_shard(text: str) -> tuple[int, int] | str:
    """`2/4` -> `(2, 4)`, `auto` -> `auto`."""
    if text == AUTO:
        return text
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count) <= 99999):
        raise argparse.ArgumentTypeError(f"must be I/N with 0 <= I < N <= 99999, such as 0/4, or auto, got {text!r}")
    return int(index), int(count)


def parse_share(text: str) -> float:
    """`1%` -> `0.01`."""
    try:
        share = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"must be a share such as 1% or 0.01, at most 100%, got {text!r}")
    return share


def run(args: argparse.Namespace) -> int:
    """Returns 0; 1 if requests ended with finish reason "error" or lines were rejected; or the code of `Unfinished`."""
    from detspec.jobs.files import NO_ROOM, NO_ROOM_CODE
    from detspec.jobs.generation import Stopped, StopSignals
    from detspec.jobs.job import Unfinished

    try:
        with StopSignals() as signals:  # inside, so that a signal is caught that comes when all is done
            return generate(args, signals)
    except (Unfinished, Stopped) as stopped:
        say(str(stopped))
        return stopped.exit_code
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        say(f"error: cannot write the copy of the input, or the output: {error.strerror}")
        return NO_ROOM_CODE
    except RuntimeError:  # jax raises it when another process has gone, or `DivergenceError`
        leave_others()
        raise


def leave_others() -> None:
    """Ends a process that shares a mesh with others, after the exception being handled; does nothing in one that is alone.

    An orderly end would wait for the others.
    """
    import jax

    from detspec.engine.watchdog import EXIT_CODE

    if jax.process_count() > 1:
        traceback.print_exc()
        say(f"error: process {jax.process_index()} cannot go on without the others: start all of them again, and they resume")
        sys.stderr.flush()
        os._exit(EXIT_CODE)


def generate(args: argparse.Namespace, signals: "StopSignals") -> int:
    """Runs the job; returns the exit code."""
    import jax

    from detspec.distributed import initialize
    from detspec.jobs.dry_run import plan_job
    from detspec.jobs.files import STDIO, check_out, shard_path
    from detspec.jobs.job import run_job, stream_job
    from detspec.jobs.manifest import describe_model
    from detspec.jobs.prompts import UNSHARDED, JobSpec
    from detspec.jobs.scan import is_openai
    from detspec.jobs.tables import open_prompts
    from detspec.jobs.worker import WorkerOptions, run_worker

    sampling = sampling_of(args)
    check_auto(args)
    is_first = initialize() == 1 or jax.process_index() == 0
    if args.shard == AUTO and jax.process_count() > 1:
        raise InputError("--shard auto is for processes that run apart: start them with JAX_NUM_PROCESSES=1")
    shard = UNSHARDED if args.shard in (None, AUTO) else args.shard
    out = str(shard_path(Path(args.out), *shard)) if shard != UNSHARDED or isinstance(args.shard, tuple) else args.out
    out = args.out if args.out == STDIO else out
    if is_first:
        check_out(out, args.prompts)
    if out == STDIO and args.on_error != "stop":
        raise InputError("--on-error reject needs --out FILE: rejected lines are written next to it")
    say_model(args)
    with open_prompts(args.prompts, column=args.column, id_column=args.id_column) as prompts:
        began = time.perf_counter()
        model = load_model(args, is_said=True)
        if is_first:
            say(f"model: {describe_model(model)}")
        if is_first and args.model is None:
            say(f"warning: no --model was given, so the small model that comes with detspec answers {prompts.name}")
        engine = make_engine(args, model)
        spec = JobSpec(prompts, sampling, shard, args.on_error, is_openai(prompts), args.created)
        if args.dry_run:
            journaled = None if out == STDIO or args.fresh else Path(out)
            plan = plan_job(engine, spec, journaled)
            if is_first:
                print(plan)
            return 0
        load_s = time.perf_counter() - began
        if out == STDIO:
            result = stream_job(engine, spec, sys.stdout.buffer, signals=signals)
        elif args.shard == AUTO:
            options = WorkerOptions(args.double_check, args.chunk_lines)
            result = run_worker(engine, spec, Path(out), options, load_s=load_s, signals=signals)
        else:
            result = run_job(engine, spec, Path(out), fresh=args.fresh, load_s=load_s, signals=signals)
    done = f"all chunks of {out} are done: `detspec merge --out {out}` joins them" if args.shard == AUTO else None
    return (
        report(result, out, done, is_openai=spec.is_openai)
        if is_first
        else FAILED * bool(result.num_rejected or result.num_failed)
    )


def check_auto(args: argparse.Namespace) -> None:
    """Raises `InputError` for options that do not go together with `--shard auto`, or do not go without."""
    if args.chunk_lines is not None and args.chunk_lines < 1:
        raise InputError(f"--chunk-lines must be at least 1, got {args.chunk_lines}")
    if args.shard != AUTO:
        if args.double_check or args.chunk_lines is not None:
            raise InputError("--double-check and --chunk-lines are for --shard auto")
    elif args.fresh:
        raise InputError(f"--fresh would discard what other workers do: remove {args.out} and {args.out}.chunks in its place")
    elif args.out == "-":
        raise InputError("--shard auto needs --out FILE: workers meet in the folder FILE.chunks next to it")


def report(result: "JobResult", out: str, done: str | None = None, *, is_openai: bool = False) -> int:
    """Prints the outcome of the job, and `done` after it; returns the exit code."""
    from detspec.jobs.files import sibling

    stats = result.stats
    if not stats:
        say(done or f"{out} is already complete; --fresh generates it again")
    else:
        resumed = f", {stats['num_resumed']} of them before" if stats["num_resumed"] else ""
        last = stats["last_start"]
        speed = f"{last['tok_per_s']:,.0f} tok/s; compiled and certified in {last['compile_s']:.1f} s"
        counts = f"{stats['num_requests']} requests, {stats['num_tokens']} tokens"
        if done is None:
            say(f"{counts} in {last['generate_s']:.1f} s ({speed}){resumed}")
        else:
            mine = f"{last['num_chunks']} chunks, {stats['num_tokens']} tokens by this worker"
            say(stamped(last["worker"], f"{mine} in {last['generate_s']:.1f} s ({speed})"))
            say(done)
    if result.num_rejected:
        rejects = sibling(Path(out), "rejects")
        say(f"error: {result.num_rejected} lines were rejected, see {f'{out}.chunks/rejects.jsonl' if done else rejects}")
    if result.num_failed:
        more = result.num_failed - len(result.failed)
        names = ", ".join([*result.failed, *([f"{more} more"] if more else [])])
        if is_openai:
            where = "merge writes their errors" if done else f"see {sibling(Path(out), 'errors')}"
            say(f"error: {result.num_failed} lines failed, {where}: {names}")
        else:
            say(f"error: {result.num_failed} requests failed, their logits are not finite or their lines say why: {names}")
    return FAILED if result.num_rejected or result.num_failed else 0
