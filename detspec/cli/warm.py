"""`detspec warm`: compiles before the first job does."""

import argparse
import time

from detspec.cli.options import add_cache_dtype, add_engine, add_model, add_weights, load_model, make_engine
from detspec.say import say

SUMMARY = "compile programs ahead"
USAGE = "[options]"
DESCRIPTION = """Compiles and certifies the programs that jobs with the same options need, and keeps them in the compile cache:
the folder DETSPEC_COMPILE_CACHE, or one in the user's cache folder. For images of containers, and before arrays of jobs, which
would each compile for themselves. Programs are bound to the versions of detspec and jax and to the kind of device, on a CPU
also to its instruction sets: run this where the jobs run."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds its options."""
    add_model(parser)
    add_weights(parser)
    add_cache_dtype(parser)
    parser.add_argument("--ordinary", action="store_true", help="only what jobs with --ordinary need")
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Prints what was compiled, how long that took, and how much the cache holds."""
    import jax

    from detspec.compile_cache import SUFFIX
    from detspec.engine.policy import Needs

    began = time.perf_counter()
    model = load_model(args)
    engine = make_engine(args, model)
    say("compiling and certifying")
    engine.prepare(needs=Needs(deterministic=not args.ordinary, processing=False))
    for certificate in engine.prepare(needs=Needs(deterministic=not args.ordinary)):
        print(f"{certificate.plan.label:20} {certificate.status}{f': {certificate.why}' if certificate.why else ''}")
    cache = engine.device.cache
    if cache is None:
        theirs = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
        kept = f"in jax's own cache, {theirs}" if theirs and not args.no_compile_cache else "nowhere: the compile cache is off"
    else:
        files = list(cache.folder.glob(f"*{SUFFIX}"))
        kept = f"in {cache.folder}: {len(files)} programs, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB"
    print(f"{time.perf_counter() - began:.1f} s; kept {kept}")
    return 0
