"""Results of `planning.plan` and `mesh_plan.plan_chips` as text."""

from typing import Any

from detspec.planning.planning import LOOKUP_TOKENS

KEYS = ("draft_step", "canonical_pass")


def plan_table(result: dict[str, Any]) -> str:
    """The result of `plan` as text."""
    settings = result["settings"]
    memory = result["memory"]
    predicted = result["predicted"]
    numerics = settings["schedule"]["numerics"]
    budget = settings["schedule"]["budget"]
    how = f"attention {numerics['implementation']!r}, cache {numerics['cache_dtype']}"
    lines = [
        *_heading(settings, f"{settings['target']['name']}, ", how),
        "",
        "memory, from the compiler",
        *_sizes({name: memory[f"{name}_bytes"] for name in ("weights", "cache", "peak", "usable")}),
        "",
        f"{'one pass':<18}{'GFLOP':>10}{'GB':>9}{'at least':>12}  {'bound by':<12}{'temporaries':>12}{'compiled in':>13}",
    ]
    for key in KEYS:
        row = result[key]
        lines.append(
            f"  {key.replace('_', ' '):<16}{row['flop'] / 1e9:>10,.0f}{row['bytes'] / 1e9:>9.2f}{row['least_ms']:>9.2f} ms  "
            f"{row['bound']:<12}{row['compiler']['temp_bytes'] / 1e6:>9,.0f} MB{row['compiler']['seconds']:>11.1f} s"
        )
    lines += [
        "",
        f"predicted from those times: sequences full, {settings['acceptance']:.0%} of drafted tokens accepted; nothing was run",
        f"  ordinary decoding         {predicted['ordinary_tok_per_s']:>9,.0f} tok/s",
        f"  canonical, windows of 1   {predicted['canonical_tok_per_s']:>9,.0f} tok/s",
        f"  prompt lookup             {predicted['lookup_tok_per_s']:>9,.0f} tok/s, if a step commits {LOOKUP_TOKENS:g} tokens",
        f"  drafting, windows of {budget['window']:<4} {predicted['drafting_tok_per_s']:>9,.0f} tok/s",
        f"  best split of {budget['rows']} rows: {predicted['best_groups']} windows of {predicted['best_window']}, "
        f"{predicted['best_tok_per_s']:,.0f} tok/s",
    ]
    return "\n".join(lines)


def mesh_table(result: dict[str, Any]) -> str:
    """Memory, collectives and seconds on the number of chips that was asked for, and a line for each smaller number."""
    settings = result["settings"]
    how = f"programs compiled with {' and '.join(map(str, settings['depths']))} layers"
    lines = [
        *_heading(settings, f"{settings['chips']} of {settings['target']['name']}, each ", how),
        "",
        *_memory(result),
        "",
        *_collectives(result),
        "",
        f"{'one pass':<18}{'chip':>10}{'exchange':>11}{'all at once':>14}{'in turn':>10}{'over psum':>15}",
    ]
    for key in KEYS:
        row = result[key]
        lines.append(
            f"  {key.replace('_', ' '):<16}{row['chip_ms']:>7.2f} ms{row['exchange_ms']:>8.2f} ms{row['at_once_ms']:>11.2f} ms"
            f"{row['in_turn_ms']:>7.2f} ms{row['over_psum'][0]:>8.2f} .. {row['over_psum'][1]:.2f}"
        )
    return "\n".join([*lines, "", *_numbers(result)])


def _heading(settings: dict[str, Any], devices: str, how: str) -> list[str]:
    """Two lines about the model, the `devices`, the requests, and `how` passes run."""
    target = settings["target"]
    budget = settings["schedule"]["budget"]
    return [
        f"{settings['model']['num_params'] / 1e9:.2f} B parameters, {settings['model']['dtype']}, on {devices}"
        f"{target['device']}: {target['hbm_bytes'] / 1e9:.0f} GB at {target['bytes_per_s'] / 1e12:.2f} TB/s, "
        f"{target['flop_per_s'] / 1e12:.0f} TFLOP/s",
        f"{settings['max_requests']} requests of {settings['max_len']} positions; a canonical pass of "
        f"{budget['rows'] // budget['window']} x {budget['window']} rows; {how}",
    ]


def _sizes(sizes: dict[str, float]) -> list[str]:
    """A line for each kind of memory."""
    return [f"  {name:<26}{size / 1e9:>9.2f} GB" for name, size in sizes.items()]


def _memory(result: dict[str, Any]) -> list[str]:
    memory = result["numbers"][-1]["memory"]
    temporaries = max(result[key]["compiler"]["temp_bytes"] for key in KEYS)
    sizes = {**{name: memory[f"{name}_bytes"] for name in ("weights", "cache")}, "temporaries": temporaries}
    sizes |= {name: memory[f"{name}_bytes"] for name in ("peak", "usable")}
    return ["memory of each chip", *_sizes(sizes)]


def _collectives(result: dict[str, Any]) -> list[str]:
    lines = [f"{'collectives of one pass':<36}{'dtype':>12}{'count':>7}{'received by a chip':>21}  groups"]
    for key in KEYS:
        found = result[key]["exchanges"]
        label = key.replace("_", " ")
        for kind, dtype, chips in sorted({(row["kind"], row["dtype"], row["chips"]) for row in found}):
            rows = [row for row in found if (row["kind"], row["dtype"], row["chips"]) == (kind, dtype, chips)]
            count = sum(row["count"] for row in rows)
            megabytes = sum(row["received_bytes"] for row in rows) / 1e6
            lines.append(f"  {label:<16}{kind:<18}{dtype:>12}{count:>7}{megabytes:>18,.2f} MB  of {chips}")
        agree = "as the formula says" if result[key]["equals_formula"] else "NOT as the formula says"
        lines.append(f"  {label:<16}{agree}; {result[key]['added_floats']} of them add floats")
    return lines


def _numbers(result: dict[str, Any]) -> list[str]:
    """Rates by the number of chips."""
    share = result["settings"]["acceptance"]
    lines = [
        f"predicted tok/s, collectives in turn .. all at once; sequences full, {share:.0%} of drafted tokens accepted; nothing "
        "was run",
        f"  {'chips':<7}{'peak':>9}{'ordinary':>20}{'best split':>20}{'a chip':>16}{'best split with psum':>24}",
    ]
    for found in result["numbers"]:
        chips = found["chips"]
        start = f"  {chips:<7}{found['memory']['peak_bytes'] / 1e9:>6.1f} GB"
        if not found["fits"]:
            lines.append(f"{start}  does not fit: a chip may use {found['memory']['usable_bytes'] / 1e9:.1f} GB")
            continue
        overlapped, in_turn = found["predicted"]["gather"]
        psum = [rates["best_tok_per_s"] for rates in found["predicted"]["psum"]]
        lines.append(
            f"{start}{_between(in_turn['ordinary_tok_per_s'], overlapped['ordinary_tok_per_s']):>20}"
            f"{_between(in_turn['best_tok_per_s'], overlapped['best_tok_per_s']):>20}"
            f"{_between(in_turn['best_tok_per_s'] / chips, overlapped['best_tok_per_s'] / chips):>16}"
            f"{_between(psum[1], psum[0]):>24}"
        )
    best = result["best"]
    if best["tok_per_s"] is not None:
        lines.append(
            f"  most tokens per second: {best['tok_per_s']} chips; most of them per chip: {best['tok_per_s_per_chip']} chips"
        )
    return lines


def _between(low: float, high: float) -> str:
    return f"{low:,.0f} .. {high:,.0f}"
