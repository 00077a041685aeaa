"""Writes detspec/integer/expected.json: the hashes of "integer/1" by the oracle alone, which a device must give.

    python scripts/make_conformance.py [--check]

With --check nothing is written, and the exit code is 1 if the file holds others.
"""

import argparse
import json
import sys
from pathlib import Path

import detspec as ds
from detspec.doctor.conformance import SHIPPED, digest_of_texts, oracle_texts
from detspec.integer import conformance

FILE = Path(conformance.__file__).parent / conformance.FILE


def main() -> int:
    """Writes or compares the hashes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    args = parser.parse_args()
    found = conformance.digests()
    found[conformance.TEXTS] = digest_of_texts(oracle_texts(ds.load(SHIPPED, weights="integer")))
    print(conformance.of_all(found))
    if args.check:
        return int(found != conformance.expected())
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
