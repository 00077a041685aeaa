"""Runs one system in a process: reads requests as lines of JSON from stdin, answers each with a line on stdout.

The request `{"prompts": [[int]], "new_tokens": N}` is answered by `{"seconds": S, "tokens": [[int]]}`. The first line, without
a request, says how long loading took and which versions run. `{"error": ...}` is the last answer. What libraries print goes to
stderr.
"""

import importlib
import importlib.metadata
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TextIO

from race_systems import Generate, Limits


def main() -> None:
    """Loads the system that the argument, a JSON object, describes; answers until stdin ends."""
    settings = json.loads(sys.argv[1])
    out = take_stdout()
    try:
        began = time.perf_counter()
        module = importlib.import_module(f"race_systems.{settings['module']}")
        generate = module.start(Path(settings["folder"]), Limits(**settings["limits"]), **settings["options"])
        answer(out, {"load_s": time.perf_counter() - began, "versions": versions(settings["packages"])})
        for line in sys.stdin:
            request = json.loads(line)
            answer(out, timed(generate, request["prompts"], request["new_tokens"]))
    except Exception as error:
        traceback.print_exc()
        answer(out, {"error": f"{type(error).__name__}: {error}".splitlines()[0]})
    os._exit(0)  # some libraries wait for their threads forever


def versions(packages: list[str]) -> dict[str, str]:
    """The versions of those `packages` that are installed."""
    installed = {found.name.replace("_", "-"): found.version for found in importlib.metadata.distributions()}
    return {name: installed[name] for name in packages if name in installed}


def take_stdout() -> TextIO:
    """The real stdout; from now on what is printed goes to stderr, from compiled code, too."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def timed(generate: Generate, prompts: list[list[int]], new_tokens: int) -> dict[str, object]:
    """Seconds and new tokens of one call; raises if a request ended early."""
    began = time.perf_counter()
    tokens = generate(prompts, new_tokens)
    seconds = time.perf_counter() - began
    lengths = {len(row) for row in tokens}
    if len(tokens) != len(prompts) or lengths != {new_tokens}:
        raise RuntimeError(f"{len(prompts)} requests of {new_tokens} new tokens gave {len(tokens)} texts of {lengths} tokens")
    return {"seconds": seconds, "tokens": tokens}


def answer(out: TextIO, content: dict[str, object]) -> None:
    """Writes one line."""
    out.write(f"{json.dumps(content)}\n")
    out.flush()


if __name__ == "__main__":
    main()
