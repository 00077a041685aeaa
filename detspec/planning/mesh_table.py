"""The result of `mesh_plan.plan_chips` as text."""

from typing import Any

KEYS = ("draft_step", "canonical_pass")


def mesh_table(result: dict[str, Any]) -> str:
    """Memory, collectives and seconds on the number of chips that was asked for, and a line for each smaller number."""
    settings = result["settings"]
    target = settings["target"]
    budget = settings["schedule"]["budget"]
    depths = " and ".join(map(str, settings["depths"]))
    lines = [
        f"{settings['model']['num_params'] / 1e9:.2f} B parameters, {settings['model']['dtype']}, on {settings['chips']} of "
        f"{target['name']}, each {target['device']}: {target['hbm_bytes'] / 1e9:.0f} GB at {target['bytes_per_s'] / 1e12:.2f} "
        f"TB/s, {target['flop_per_s'] / 1e12:.0f} TFLOP/s",
        f"{settings['max_requests']} requests of {settings['max_len']} positions; a canonical pass of "
        f"{budget['rows'] // budget['window']} x {budget['window']} rows; programs compiled with {depths} layers",
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


def _memory(result: dict[str, Any]) -> list[str]:
    memory = result["numbers"][-1]["memory"]
    temporaries = max(result[key]["compiler"]["temp_bytes"] for key in KEYS)
    sizes = {**{name: memory[f"{name}_bytes"] for name in ("weights", "cache")}, "temporaries": temporaries}
    sizes |= {name: memory[f"{name}_bytes"] for name in ("peak", "usable")}
    return ["memory of each chip", *(f"  {name:<26}{size / 1e9:>9.2f} GB" for name, size in sizes.items())]


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
