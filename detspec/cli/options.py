"""Options that several subcommands share, and what they mean."""

import argparse
import dataclasses
import importlib.metadata
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detspec.choices import CACHE_DTYPES, LOGPROBS_MODES, METHODS, THOUGHTS, WEIGHTS
from detspec.errors import InputError
from detspec.say import say

if TYPE_CHECKING:
    from detspec.checkpoint.load import Model
    from detspec.draft.source import Drafter
    from detspec.engine.engine import Engine
    from detspec.engine.engine_config import EngineConfig
    from detspec.model.loading import Loading
    from detspec.sampling_params import SamplingParams

JOB_PREFILL_PASSES = 16  # a job wants throughput, not low latency
MAX_LEN = 1024
REPORT_KEY = "detspec_report"  # names the version that wrote a report, and tells it from other files


def add_model(parser: argparse.ArgumentParser) -> None:
    """`--model` and `--no-compile-cache`."""
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="a model folder, Hugging Face's or our own, or a shipped model: tiny_python, thinking_parity (default: the one "
        "that fits)",
    )
    parser.add_argument("--no-compile-cache", action="store_true", help="do not keep compiled programs for the next start")


def add_weights(parser: argparse.ArgumentParser) -> None:
    """`--weights` and `--long-texts`."""
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        help="round matrices to int8, or make a model of integers alone, with activations of 15 or of 8 bits: other bits "
        "(default: weights as the folder has them)",
    )
    parser.add_argument(
        "--long-texts",
        action="store_true",
        help="rotations as for texts beyond the original length, for all texts: other bits (Phi-3, Phi-4 mini)",
    )


def loading_of(args: argparse.Namespace) -> "Loading":
    """How `--weights` and `--long-texts` ask for a model; commands without them take a folder as it is."""
    from detspec.model.loading import Loading

    return Loading(getattr(args, "weights", None), getattr(args, "long_texts", False))


def add_cache_dtype(parser: argparse.ArgumentParser) -> None:
    """`--cache-dtype`."""
    parser.add_argument(
        "--cache-dtype",
        choices=CACHE_DTYPES,
        help="dtype of keys and values: int8 has a scale for each token and head, about half of bfloat16's memory and "
        "other bits (default: the device's choice, on a CPU the model's dtype)",
    )


def add_chips(parser: argparse.ArgumentParser) -> None:
    """`--chips`."""
    parser.add_argument(
        "--chips", type=int, metavar="N", help="cut the model over N devices (default: 1; several processes: all)"
    )


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """`--json`; see `write_json`."""
    parser.add_argument(
        "--json", type=report_path, metavar="FILE", help=f"also write {what} to FILE, or over an old report there"
    )


def report_path(text: str) -> str:
    """The path of a report. An old one is written over, as each run makes a new one; any other file is left as it is."""
    try:
        old = Path(text).read_bytes() if Path(text).is_file() else b""
        holds = json.loads(old) if old else {REPORT_KEY: None}
    except (OSError, ValueError, RecursionError):
        holds = None
    if not isinstance(holds, dict) or REPORT_KEY not in holds:
        raise argparse.ArgumentTypeError(f"{text} is there already and holds no report: name another file")
    return text


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Options of sampling; names and meanings are vLLM's."""
    add = parser.add_argument_group("sampling").add_argument
    add("--max-tokens", type=int, default=64, metavar="N", help="most new tokens of a request")
    add("--min-tokens", type=int, default=0, metavar="N", help="least new tokens before a stop token may come")
    add("--n", type=int, default=1, metavar="N", help="samples of each prompt, with seeds SEED, SEED + 1, ...")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    add("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest tokens; 0 and -1 keep all")
    add("--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest tokens up to probability P")
    add("--min-p", type=float, default=0.0, metavar="P", help="keep tokens P times as likely as the likeliest")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="penalty on tokens in prompt or new text; 1 is off")
    add("--presence-penalty", type=float, default=0.0, metavar="X", help="penalty on tokens in new text; 0 is off")
    add("--frequency-penalty", type=float, default=0.0, metavar="X", help="penalty per occurrence in the new text; 0 is off")
    add("--seed", type=int, default=0, help="sampling seed, modulo 2**32; noise depends only on it and the token position")
    add("--ignore-eos", action="store_true", help="do not stop at the model's end-of-text tokens")
    add("--stop-token-ids", type=int, nargs="+", metavar="ID", help="further tokens that end a request")
    add("--stop", nargs="+", metavar="TEXT", help="strings that end a request")
    add("--logprobs", type=int, default=0, metavar="K", help="report the K likeliest tokens at new positions")
    add("--prompt-logprobs", type=int, metavar="K", help="report the prompt's tokens, and the K likeliest at its positions")
    add(
        "--logprobs-mode",
        choices=LOGPROBS_MODES,
        default=LOGPROBS_MODES[0],
        help="log-probabilities of new positions: the model's own, or after penalties, temperature and filters",
    )
    add("--no-thinking", action="store_true", help="read prompts without thoughts, also with a model that thinks")
    add("--ordinary", action="store_true", help="ordinary generation: nothing is verified, and bits depend on the batch")


def add_engine(parser: argparse.ArgumentParser, *, method: Sequence[str] = METHODS[:1]) -> None:
    """How the engine runs: changes speed, never what a deterministic request gives; `method` is the default of `--method`."""
    add = parser.add_argument_group("engine", "changes speed, never the result").add_argument
    add("--max-requests", type=int, default=32, metavar="B", help="most requests in flight")
    add("--max-len", type=int, metavar="S", help=f"most tokens, prompt included (default: {MAX_LEN}, or the model's limit)")
    add("--num-pages", type=int, metavar="N", help="shared cache pages (default: enough for --max-requests at --max-len)")
    add("--no-prefix-sharing", action="store_true", help="compute every prompt by itself")
    add(
        "--method",
        choices=METHODS,
        nargs="+",
        default=method,
        help='the draft: "ngram" is prompt lookup, "int8" the model in int8, "self" the fast path itself; of several names '
        f'whichever is faster; "auto" is several that need no more memory (default: {" ".join(method)})',
    )
    add("--draft-model", metavar="FOLDER", help="a smaller model with the same vocabulary, which drafts where it is faster")
    add("--draft-thoughts", choices=THOUGHTS, default=THOUGHTS[0], help="draft source for the thoughts of a model that thinks")
    add("--num-speculative-tokens", type=int, default=15, metavar="N", help="most drafted tokens of a step: 1, 3, 7, 15, ...")
    add("--prompt-lookup-min", type=int, default=2, metavar="N", help="fewest tokens that prompt lookup finds again")
    add("--prompt-lookup-max", type=int, default=4, metavar="N", help="most tokens that it compares")
    add_chips(parser)


def say_model(args: argparse.Namespace, *, shipped: str | None = None) -> None:
    """Says that the model of `--model`, else the shipped one of that name, is being loaded; of several processes one does."""
    import jax

    from detspec.checkpoint.load import say_loading

    if jax.process_index() == 0:
        say_loading(shipped if args.model is None else args.model)


def load_model(args: argparse.Namespace, *, shipped: str | None = None, is_said: bool = False) -> "Model":
    """The model of `--model`, else the shipped one of that name, on `--chips`, with `--weights` and `--long-texts`.

    Says so first, unless it `is_said`. Keeps compiled programs, as `keep_compiled`.
    """
    import jax

    from detspec.checkpoint.load import load

    if not is_said:
        say_model(args, shipped=shipped)
    keep_compiled(args)
    chips = getattr(args, "chips", None)
    if jax.process_count() > 1 and chips not in (None, jax.device_count()):
        raise InputError(
            f"--chips {chips}: {jax.process_count()} processes cut the model over all their {jax.device_count()} devices; "
            "leave --chips out"
        )
    chips = jax.device_count() if jax.process_count() > 1 else 1 if chips is None else chips
    return load(shipped if args.model is None else args.model, chips=chips, **loading_of(args).keywords)


def make_engine(args: argparse.Namespace, model: "Model") -> "Engine":
    """The engine of `add_engine`'s options; `InputError` if one is out of range, or does not fit the model."""
    from detspec.engine.engine import Engine

    drafters = load_drafters(args, model)
    return Engine(model, engine_config_of(args, model), drafters=drafters, num_replicas=getattr(args, "engines", 1))


def load_drafters(args: argparse.Namespace, model: "Model") -> "dict[str, Drafter]":
    """The draft model of `--draft-model`, if there is one."""
    if args.draft_model is None:
        if "draft_model" in args.method:
            raise InputError("--method draft_model needs --draft-model FOLDER, for example --draft-model Qwen3-0.6B")
        return {}
    import jax

    from detspec.checkpoint.load import load, say_loading
    from detspec.draft.draft_model import draft_model

    if jax.process_index() == 0:
        say_loading(args.draft_model, what="draft model")
    return {"draft_model": draft_model(load(args.draft_model), target=model)}


def keep_compiled(args: argparse.Namespace) -> None:
    """Keeps compiled programs for the next start, unless `--no-compile-cache` is given; call it before compiling."""
    from detspec.compile_cache import OFF, VARIABLE, enable_jax_cache

    if args.no_compile_cache:
        os.environ[VARIABLE] = OFF
    enable_jax_cache()


def write_json(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Writes `result` and our version to the file of `--json`, if it is given; `InputError` if it cannot be written."""
    if args.json is None:
        return
    report = {REPORT_KEY: importlib.metadata.version("detspec"), **result}
    try:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--json {args.json}: {error.strerror}") from error
    say(f"wrote {args.json}")


def sampling_of(args: argparse.Namespace) -> "SamplingParams":
    """The sampling options as parameters; `InputError` if one is out of range."""
    from detspec.sampling_params import SamplingParams

    renamed = {"deterministic": not args.ordinary, "thinking": False if args.no_thinking else None}
    lists = {"stop": args.stop or (), "stop_token_ids": tuple(args.stop_token_ids or ())}
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    return SamplingParams(**{**{name: value for name, value in vars(args).items() if name in names}, **renamed, **lists})


def engine_config_of(args: argparse.Namespace, model: "Model") -> "EngineConfig":
    """The engine options and `--cache-dtype` as a config; `InputError` if one is out of range."""
    from detspec.engine.engine_config import EngineConfig
    from detspec.environment import default_schedule

    schedule = None
    if args.cache_dtype is not None:
        schedule = default_schedule(model.cfg).with_numerics(cache_dtype=args.cache_dtype)
    return EngineConfig(
        max_requests=args.max_requests,
        max_len=min(MAX_LEN, model.cfg.max_position) if args.max_len is None else args.max_len,
        num_pages=args.num_pages,
        prefix_sharing=not args.no_prefix_sharing,
        max_prefill_passes=JOB_PREFILL_PASSES,
        method=args.method[0] if len(args.method) == 1 else tuple(args.method),
        num_speculative_tokens=args.num_speculative_tokens,
        prompt_lookup_min=args.prompt_lookup_min,
        prompt_lookup_max=args.prompt_lookup_max,
        thoughts=args.draft_thoughts,
        schedule=schedule,
    )
