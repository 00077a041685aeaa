"""`detspec plan`: memory and speed of a model on a TPU or GPU that is not at hand."""

import argparse

from detspec.cli.options import MAX_LEN, add_cache_dtype, add_json, add_weights, loading_of, write_json

SUMMARY = "predict memory and speed on a device that is not here"
DESCRIPTION = """Compiles the draft step and the canonical pass of a model for a TPU or GPU, with the vendor's compiler and
without the device. Prints how much of its memory they need, the least time that their bytes and operations take, and the
speed to expect from that. Plans for one device of the slice, or with --chips for several: then also what they exchange, and
which number of them serves the load best. Needs these compilers, the extra `aot`."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds its options."""
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--preset", metavar="NAME", help="a published shape, e.g. qwen3_8b")
    model.add_argument("--model", metavar="DIR", help="a model folder; only its config is read")
    add("--target", metavar="NAME", required=True, help="e.g. v5e:2x2, v6e:2x2, a100, h100; an unknown name lists all")
    add("--chips", type=int, metavar="N", help="devices of the target that share the model, e.g. 8 of v5p:2x2x2 or h200")
    add("--max-requests", type=int, default=32, metavar="B", help="most requests in flight")
    add("--max-len", type=int, default=MAX_LEN, metavar="S", help="tokens of each request, prompt included")
    add("--window", type=int, metavar="W", help="tokens verified together (default: the target's)")
    add("--group", type=int, metavar="G", help="windows in a canonical pass (default: as many as fill its rows)")
    add_weights(parser)
    add_cache_dtype(parser)
    add_json(parser, "all numbers")


def run(args: argparse.Namespace) -> int:
    """Prints the plan."""
    import jax

    from detspec.checkpoint.load import load_config
    from detspec.environment import widens
    from detspec.planning.mesh_plan import num_stages, plan_chips
    from detspec.planning.planning import plan
    from detspec.planning.programs import Deployment
    from detspec.planning.tables import mesh_table, plan_table
    from detspec.presets import preset
    from detspec.progress import Progress
    from detspec.targets import canonical_schedule, target

    jax.config.update("jax_platforms", "cpu")  # compiling needs no device: leave the ones here free
    device = target(args.target)
    cfg = load_config(args.model) if args.preset is None else preset(args.preset)
    cfg = loading_of(args).config(cfg)
    schedule = canonical_schedule(device, cfg, window=args.window, groups=args.group)
    if args.cache_dtype is not None:
        schedule = schedule.with_numerics(cache_dtype=args.cache_dtype)
    deployed = Deployment(cfg, device, schedule, args.max_requests, args.max_len)
    if args.chips is None:
        with Progress(2, "programs") as progress:
            result = plan(deployed, on_stage=progress.next_stage)
        print(plan_table(result))
    else:
        with Progress(num_stages(cfg, args.chips), "programs") as progress:
            result = plan_chips(deployed, args.chips, on_stage=progress.next_stage)
        print(mesh_table(result))
    if device.gpu and (slower := widens(device.gpu.capability, cfg)):
        print(f"\na {device.name} takes longer than is predicted here. {slower}")
    write_json(args, result)
    return 0
