"""Writes detspec/integer/expected*.json: the hashes of both arithmetics by the oracle alone, which a device must give.

    python scripts/make_conformance.py [--check]

With --check nothing is written, and the exit code is 1 if a file holds others.
"""

import argparse
import json
import sys
from pathlib import Path

import detspec as ds
from detspec.choices import ACTIVATION_BITS
from detspec.doctor.conformance import SHIPPED, digest_of_texts, oracle_texts
from detspec.integer import conformance

FOLDER = Path(conformance.__file__).parent


def main() -> int:
    """Writes or compares the hashes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    args = parser.parse_args()
    made = {conformance.FAMILIES: conformance.family_digests(), conformance.SOFT_CAPS: conformance.soft_cap_digests()}
    for weights, bits in ACTIVATION_BITS.items():
        texts = digest_of_texts(oracle_texts(ds.load(SHIPPED, weights=weights)))
        made[conformance.FILES[bits]] = {**conformance.digests(bits=bits), conformance.TEXTS: texts}
    differs = False
    for name, found in made.items():
        print(name, conformance.of_all(found))
        text = json.dumps(found, indent=1) + "\n"
        if args.check:
            differs |= text != (FOLDER / name).read_text(encoding="utf-8")
        else:
            (FOLDER / name).write_text(text, encoding="utf-8")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
