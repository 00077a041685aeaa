"""`detspec doctor`: certifies determinism on this device."""

import argparse

from detspec.choices import ACTIVATION_BITS, ALIGNMENTS, LINEARS
from detspec.cli.options import add_cache_dtype, add_model, add_weights, load_model

SUMMARY = "certify this device"
DESCRIPTION = """Runs one text through the canonical pass many times and compares bits. Each run changes something that must not
matter: rows, neighbours, window offsets, the cut of the budget, stale cache slots. A model that thinks also reads one prompt
with other drafted thoughts, in other places and pages. Then the engine's own programs are certified. The inverse control must
differ. Exit code 1 if the device is not certified.

With --operators each operation is compiled alone instead, and a table says which of them are invariant to the number of rows,
to a row's place, and to a query's place in its window. Exit code 1 if one of a canonical pass depends on a place.

With --integer the arithmetic of integer models is run for made-up numbers, and hashes are compared with those that come with
the package: a device that gives them gives the bits of all others. Exit code 1 if one differs; the first is named."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds its options."""
    add = parser.add_argument
    add_model(parser)
    add_weights(parser)
    add_cache_dtype(parser)
    add("--max-requests", type=int, default=8, metavar="B", help="largest batch whose programs are certified")
    add("--operators", action="store_true", help="examine single operations instead of whole programs: seconds, no certificate")
    add("--integer", action="store_true", help="compare the arithmetic of integer models with hashes of the package")
    add("--alignment", choices=ALIGNMENTS, help='use "window" if only the window-offset check fails (default: "free")')
    add("--linear", choices=LINEARS, help="products with weights; pinned ones never depend on the batch (default: by device)")


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns 0 if the device is certified, else 1."""
    if args.integer:
        return run_integer()
    from detspec.doctor.doctor import run_doctor
    from detspec.doctor.operators import examine_operators
    from detspec.environment import default_schedule
    from detspec.progress import Progress

    model = load_model(args)
    chosen = {name: getattr(args, name) for name in ("alignment", "linear", "cache_dtype") if getattr(args, name) is not None}
    schedule = default_schedule(model.cfg).with_numerics(**chosen)
    if args.operators:
        with Progress(0, "operations") as progress:
            operators = examine_operators(model.cfg, schedule=schedule, on_progress=progress.stage)
        print(operators.table())
        return 0 if operators.holds else 1
    with Progress(0, "steps") as progress:
        report = run_doctor(model, schedule=schedule, max_requests=args.max_requests, on_progress=progress.stage)
    print(report.table())
    return 0 if report.certified else 1


def run_integer() -> int:
    """Prints the hashes of integer models' operations, with activations of 8 and of 15 bits; returns 1 if one differs."""
    from detspec.doctor.conformance import run_conformance, run_family_conformance
    from detspec.progress import Progress

    with Progress(0, "steps") as progress:
        reports = [*run_family_conformance(progress.stage)]
        reports += [run_conformance(progress.stage, weights) for weights in reversed(ACTIVATION_BITS)]
    print("\n\n".join(report.table() for report in reports))
    return 1 if any(report.differing for report in reports) else 0
