"""Options that several subcommands share, and what they mean."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from detspec.checkpoint.load import Model
    from detspec.engine.engine_config import EngineConfig
    from detspec.sampling_params import SamplingParams

METHODS = ("auto", "self", "none")
GUESSES = ("trivial", "sequential")
LOGPROBS_MODES = ("raw", "processed")
JOB_PREFILL_PASSES = 16  # nobody waits for the tokens of a job
MAX_LEN = 1024


def add_subcommand(
    subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, summary: str, description: str
) -> argparse.ArgumentParser:
    """A subcommand whose help shows defaults."""
    return subcommands.add_parser(
        name, help=summary, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """`--model` and `--no-compile-cache`."""
    parser.add_argument(
        "--model",
        metavar="DIR",
        default=argparse.SUPPRESS,
        help="a model folder, Hugging Face's or our own, or a shipped model: tiny_python, thinking_parity (default: the one "
        "that fits)",
    )
    parser.add_argument("--no-compile-cache", action="store_true", help="do not keep compiled programs for the next start")


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int = 64) -> None:
    """What a request asks for; names and meanings are vLLM's."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help="most new tokens of a request")
    group.add_argument("--min-tokens", type=int, default=0, metavar="N", help="no stop token before so many new tokens")
    group.add_argument("--n", type=int, default=1, metavar="N", help="samples of each prompt; seeds SEED, SEED + 1, ...")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest tokens; 0 keeps all")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest tokens up to probability P")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="keep tokens P times as likely as the likeliest")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="of tokens in the text; 1 is off")
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="of tokens in the new text; 0 is off")
    group.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X", help="each time they are in it; 0 is off")
    group.add_argument("--seed", type=int, default=0, help="of the noise; a request's noise depends on seed and position alone")
    group.add_argument("--ignore-eos", action="store_true", help="do not stop at the model's end-of-text tokens")
    group.add_argument(
        "--stop-token-ids",
        type=int,
        nargs="+",
        default=argparse.SUPPRESS,
        metavar="ID",
        help="further tokens that end a request",
    )
    group.add_argument("--stop", nargs="+", default=argparse.SUPPRESS, metavar="TEXT", help="strings that end a request")
    group.add_argument("--logprobs", type=int, default=0, metavar="K", help="report the K likeliest tokens at new positions")
    group.add_argument(
        "--prompt-logprobs", type=int, default=argparse.SUPPRESS, metavar="K", help="the same for the prompt, and its tokens'"
    )
    group.add_argument(
        "--logprobs-mode",
        choices=LOGPROBS_MODES,
        default=LOGPROBS_MODES[0],
        help="log-probabilities of new positions: the model's own, or after penalties, temperature and filters",
    )
    group.add_argument("--no-thinking", action="store_true", help="read prompts without the thoughts of a model that thinks")
    group.add_argument(
        "--ordinary", action="store_true", help="ordinary generation: nothing verified, bits depend on the batch"
    )


def add_engine(parser: argparse.ArgumentParser, *, max_requests: int = 32) -> None:
    """How the engine runs: changes speed, never what a deterministic request gives."""
    group = parser.add_argument_group("engine", "changes speed, never the result")
    group.add_argument("--max-requests", type=int, default=max_requests, metavar="B", help="most requests in flight")
    group.add_argument(
        "--max-len",
        type=int,
        default=argparse.SUPPRESS,
        metavar="S",
        help=f"most tokens of a request, prompt included (default: {MAX_LEN}, or the model's limit)",
    )
    group.add_argument(
        "--num-pages",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="cache pages that the rows share (default: enough for all rows at --max-len)",
    )
    group.add_argument("--no-prefix-sharing", action="store_true", help="compute every prompt by itself")
    group.add_argument(
        "--method", choices=METHODS, default="auto", help="what drafts: the fast path itself, nothing, or what is faster"
    )
    group.add_argument("--guesses", choices=GUESSES, default=GUESSES[0], help="who guesses the thoughts of a model that thinks")
    group.add_argument(
        "--num-speculative-tokens", type=int, default=15, metavar="N", help="drafted tokens of a window: 1, 3, 7, 15, 31, ..."
    )


def load_model(args: argparse.Namespace, *, shipped: str | None = None) -> "Model":
    """The model of `--model`, else the one called `shipped`; compiled programs are kept unless that is turned off."""
    from detspec.checkpoint.load import load

    keep_compiled(args)
    return load(getattr(args, "model", shipped))


def keep_compiled(args: argparse.Namespace) -> None:
    """Keeps compiled programs for the next start, unless that is turned off; before anything is compiled."""
    from detspec.environment import enable_compile_cache

    if not args.no_compile_cache:
        enable_compile_cache()


def sampling_of(args: argparse.Namespace) -> "SamplingParams":
    """The sampling options as parameters; `InputError` if one is out of range."""
    from detspec.sampling_params import SamplingParams

    return SamplingParams(
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        n=args.n,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        stop=getattr(args, "stop", ()),
        logprobs=args.logprobs,
        prompt_logprobs=getattr(args, "prompt_logprobs", None),
        logprobs_mode=args.logprobs_mode,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop_token_ids=tuple(getattr(args, "stop_token_ids", ())),
        ignore_eos=args.ignore_eos,
        deterministic=not args.ordinary,
        thinking=False if args.no_thinking else None,
    )


def engine_config_of(args: argparse.Namespace, model: "Model") -> "EngineConfig":
    """The engine options as a config; `InputError` if one is out of range."""
    from detspec.engine.engine_config import EngineConfig

    return EngineConfig(
        max_requests=args.max_requests,
        max_len=getattr(args, "max_len", min(MAX_LEN, model.cfg.max_position)),
        num_pages=getattr(args, "num_pages", None),
        prefix_sharing=not args.no_prefix_sharing,
        max_prefill_passes=JOB_PREFILL_PASSES,
        method=args.method,
        num_speculative_tokens=args.num_speculative_tokens,
        thoughts=args.guesses,
    )
