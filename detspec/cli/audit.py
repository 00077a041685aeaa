"""`detspec audit`: checks that what a job wrote, or a server answered, reproduces."""

import argparse
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from detspec.cli.options import add_chips, add_json, add_model, add_weights, load_model, write_json
from detspec.errors import InputError
from detspec.say import say

if TYPE_CHECKING:
    from detspec.checkpoint.load import Model

SUMMARY = "replay recorded completions bit for bit"
DESCRIPTION = """Replays every line that `detspec generate` wrote through the canonical pass, teacher-forced, many lines at a
time. Compares tokens, bits of all log-probabilities, finish reason, text, digest and metadata. Names each record that
differs, and its first differing token. Exit codes: 0 all deterministic records reproduce; 1 some do not; 2 bad input;
70 a crash."""
DETAILS = """Records of ordinary requests are only counted: their bits are not promised; so are those of requests that
failed, which hold no tokens. The manifest, read from the folder of the records, says where model and prompts lie, unless
--model and --prompts do. Lines in OpenAI's format need not hold tokens, so they are answered again, without drafts, and the
first field that differs is named. --responses takes the log of `detspec serve --log` instead, which holds what was asked,
too. --rl takes the folder of a run of reinforcement learning: the texts of one step are replayed by the weights that sampled
them, and their rewards are given anew.

Records of an integer model may come from any device. --with numpy and --with c audit them by code that shares nothing with
what generated: detspec/integer/spec.py, or detspec/integer/audit.c, compiled here. They compare the tokens and all numbers
that records hold; the text of the tokens, and stop strings in it, are the tokenizer's."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the subcommand."""
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--records", metavar="OUT.jsonl", help="the output of `detspec generate`")
    which.add_argument("--responses", metavar="LOG.jsonl", help="the log of `detspec serve`")
    which.add_argument("--rl", metavar="DIR", help="the work folder of a run of reinforcement learning, see --step")
    add("--step", type=int, metavar="K", help="with --rl: the step whose texts and rewards are replayed, from 1 on")
    add("--config", metavar="FILE[:ARM]", help="with --rl: the run's config (default: the file that it began with)")
    add("--prompts", metavar="IN.jsonl", help="the job's prompts (default: the file that the manifest names)")
    add("--max-requests", type=int, default=32, metavar="B", help="records replayed together; changes only speed")
    add("--with", dest="by", choices=("numpy", "c"), help="for what an integer model wrote: an oracle, not the engine")
    add_json(parser, "the report")
    add_model(parser)
    add_weights(parser)
    add_chips(parser)


def load_recorded(args: argparse.Namespace) -> "Model":
    """The model of `--model`, else the one that the manifest of `--records` names, rounded as the job rounded it.

    Raises `InputError` if there is no such folder any more. A manifest of an older version names none: then the shipped model.
    """
    from detspec.checkpoint.folder import find_folder
    from detspec.jobs.files import sibling
    from detspec.jobs.records import read_origin

    records = Path(args.records)
    origin = read_origin(records)
    if args.model is None and origin.model is not None and not find_folder(origin.model).exists():
        raise InputError(
            f"{sibling(records, 'manifest')} names the model {origin.model}, and there is no such folder (any more): name the "
            "folder where the model lies now by --model"
        )
    model = origin.model if args.model is None else args.model
    kept = {name: getattr(args, name) or recorded for name, recorded in origin.loading.keywords.items()}
    return load_model(argparse.Namespace(**{**vars(args), "model": model, **kept}))


def run_step(args: argparse.Namespace) -> int:
    """Audits a step of a run of reinforcement learning."""
    from detspec.read_json import read_json_object
    from detspec.rl.audit import audit_step
    from detspec.rl.config import RLConfig
    from detspec.train.experiment import load_config
    from detspec.train.run import RUN_NAME

    if args.step is None or args.step < 1:
        raise InputError("--rl needs the step that is audited: --step K, from 1 on")
    workdir = Path(args.rl)
    source = args.config or (read_json_object(workdir / RUN_NAME) or {}).get("config")
    if source is None:
        raise InputError(f"{workdir} does not say which config it is of: name the file with --config")
    config = load_config(source)
    if not isinstance(config, RLConfig):
        raise InputError(f"{source} is no config of reinforcement learning, but a {type(config).__name__}")
    report = audit_step(config, workdir, args.step)
    for difference in report.differences:
        print(difference)
    verdict = "reproduces" if not report.differences else f"has {len(report.differences)} differences"
    print(f"step {report.step}: {report.num_texts} texts of {report.num_tokens} new tokens, {verdict}")
    say(f"replayed in {report.replay_s:.1f} s")
    write_json(args, dataclasses.asdict(report))
    return 1 if report.differences else 0


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns 0 if all deterministic records reproduce, else 1."""
    if args.by == "numpy":  # Read when numpy is imported: on busy cores the threads of its products wait for each other.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from detspec.jobs.audit import run_audit, run_audit_responses

    if args.rl is not None:
        if args.by is not None:
            raise InputError("--with is for --records and --responses: a step of a run is replayed by the engine")
        return run_step(args)
    if args.step is not None or args.config is not None:
        raise InputError("--step and --config are for --rl, the folder of a run of reinforcement learning")
    if args.responses is not None:
        if args.prompts is not None:
            raise InputError("--prompts is for --records: a server's log holds what was asked")
        report = run_audit_responses(load_model(args), Path(args.responses), max_requests=args.max_requests, by=args.by)
    else:
        prompts = None if args.prompts is None else Path(args.prompts)
        model = load_recorded(args)
        report = run_audit(model, Path(args.records), prompts=prompts, max_requests=args.max_requests, by=args.by)
    print(report.table())
    speed = f"{report.num_tokens / report.replay_s:,.0f} tok/s"
    say(f"replayed {report.num_tokens} tokens in {report.replay_s:.1f} s ({speed})")
    write_json(args, dataclasses.asdict(report))
    return 0 if report.reproduced else 1
