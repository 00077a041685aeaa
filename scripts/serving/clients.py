"""Many clients that each ask for one whole answer after the other, in a process of their own.

    python -m scripts.serving.clients PORT < bodies.json

Prints the seconds that they took by the clock, and those of their own processor time, as JSON.
"""

import json
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

CLIENTS = 32


def main() -> int:
    """Asks, and prints."""
    address = f"http://127.0.0.1:{int(sys.argv[1])}/v1/completions"

    def ask(body: dict[str, Any]) -> bytes:
        return urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode())).read()

    bodies = json.load(sys.stdin)
    with ThreadPoolExecutor(CLIENTS) as threads:
        began, cpu_began = time.perf_counter(), time.process_time()
        list(threads.map(ask, bodies))
        print(json.dumps([time.perf_counter() - began, time.process_time() - cpu_began]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
