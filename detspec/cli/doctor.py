"""`detspec doctor`: certifies determinism on this device."""

import argparse
from typing import TYPE_CHECKING

from detspec.choices import ALIGNMENTS, LINEARS
from detspec.cli.options import add_model, add_weights, load_model

if TYPE_CHECKING:
    from detspec.config import ModelConfig
    from detspec.schedule import Schedule

SUMMARY = "certify this device"
DESCRIPTION = """Runs one text through the canonical pass many times and compares bits. Each run changes something that must not
matter: rows, neighbours, window offsets, the cut of the budget, stale cache slots. A model that thinks also reads one prompt
with other drafted thoughts, in other places and pages. Then the engine's own programs are certified. The inverse control must
differ. Exit code 1 if the device is not certified."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    add = parser.add_argument
    add_model(parser)
    add_weights(parser)
    add("--max-requests", type=int, default=8, metavar="B", help="largest batch whose programs are certified")
    add("--alignment", choices=ALIGNMENTS, default=ALIGNMENTS[0], help='use "window" if only the window-offset check fails')
    add(
        "--linear",
        choices=LINEARS,
        help="products with weights (default: those that engines use on this device); pinned ones never depend on the batch",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns 0 if the device is certified, else 1."""
    from detspec.doctor.doctor import run_doctor
    from detspec.progress import Progress

    model = load_model(args)
    schedule = schedule_of(args, model.cfg)
    with Progress(0, "steps") as progress:
        report = run_doctor(model, schedule=schedule, max_requests=args.max_requests, on_progress=progress.stage)
    print(report.table())
    return 0 if report.certified else 1


def schedule_of(args: argparse.Namespace, cfg: "ModelConfig") -> "Schedule":
    """The schedule that engines use on this device, changed by what the options ask for."""
    from detspec.environment import default_schedule

    schedule = default_schedule(cfg).with_numerics(alignment=args.alignment)
    return schedule if args.linear is None else schedule.with_numerics(linear=args.linear)
