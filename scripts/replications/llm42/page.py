"""The page about all panels."""

from collections.abc import Sequence
from typing import Any

from scripts.replications.llm42 import paper
from scripts.replications.llm42.headlines import PANELS, Found, Panel
from scripts.replications.llm42.one_request import CASES
from scripts.replications.llm42.predicted import CONTEXT, MODEL
from scripts.replications.markdown import percent, table

MIN_THROUGHPUT = 0.95
MAX_TTFT = 1.2


def document(found: dict[str, Any]) -> str:
    """The whole page, from what `write_report` gathers."""
    results = found["results"]
    parts = [head(found), bars(results)]
    for number, panel in enumerate(PANELS, start=1):
        if panel.run in results:
            parts += section(number, panel, results[panel.run], found["predicted"])
    if "repeats" in results:
        parts.append(repeats(results["repeats"]))
    parts += [bits(results), times(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def head(found: dict[str, Any]) -> str:
    """Title, command and machine."""
    mark = next(iter(found["results"].values()))["fingerprint"]
    return (
        "# LLM-42, its figures in ratios\n\n"
        "Written by `python -m scripts.replications.llm42`. The paper is *LLM-42: Enabling Determinism in LLM Inference with "
        "Verified Speculation* (Gond et al., arXiv 2601.17768). It measured Llama 3.1 8B on an H100, in two versions: arXiv "
        "v2, and SOSP with better batch-invariant products. Here random weights run on a CPU, and lengths are theirs over "
        "16. So only ratios within one process are compared, never times. Runs that are compared take turns.\n\n"
        f"{mark['device_kind']}, {found['cores']} cores; jax {mark['jax']}, jaxlib {mark['jaxlib']}, detspec "
        f"{mark['detspec']}. "
        f"All measurements took {found['seconds'] / 60:.1f} minutes. All figures are in [data/llm42.json](data/llm42.json).\n\n"
        "![The nine panels](llm42.png)\n\n"
        f"Dashed curves are predictions for {MODEL} with {CONTEXT} positions of context, from bytes, FLOP and data "
        "sheets: nothing "
        "was run. On v5e four chips share the weights, and what they send each other is left out."
    )


def bars(results: dict[str, Found]) -> str:
    """Bars that were to be reached, and whether they were."""
    lines = []
    for one in results.get("throughput", {}).get("found", ()):
        ratio = one["ratio"]["100"]
        what = f"{one['workload']}: all deterministic, at least {MIN_THROUGHPUT} of ordinary"
        lines.append([what, f"{ratio:.3f}", met(ratio >= MIN_THROUGHPUT)])
    for one in results.get("online", {}).get("found", ()):
        if one["share"] == 100:
            ratio = one["ratio"]["ttft_p99"]
            what = f"load {one['load']}: P99 TTFT, all deterministic, at most {MAX_TTFT} of ordinary"
            lines.append([what, f"{ratio:.3f}", met(ratio <= MAX_TTFT)])
    if "spans" in results:
        differ = sum(one["bits"] is not None for one in results["spans"]["found"]["deterministic"])
        lines.append(["deterministic requests that differ from themselves alone: 0", f"{differ}", met(differ == 0)])
    if "repeats" in results:
        unique = results["repeats"]["unique"]
        lines.append(["one prompt among neighbours: 1 result", f"{unique}", met(unique == 1)])
    return "\n\n".join(["## Bars", table(["bar", "found", ""], lines)]) if lines else ""


def met(is_met: bool) -> str:
    """A word for tables."""
    return "met" if is_met else "missed"


def section(number: int, panel: Panel, result: Found, predicted: dict[str, Any]) -> list[str]:
    """Writes a panel: the paper's number, ours, what differs and why, and a table."""
    theirs, ours = panel.lines(result)
    model, layers = result["settings"]["shape"]
    shown = {
        "passes": pass_table,
        "products": product_table,
        "one_request": one_table,
        "spans": span_table,
        "recompute": recompute_table,
        "throughput": throughput_table,
        "speeds": speed_table,
    }
    parts = [
        f"## {number}. {panel.title}",
        f"* The paper ({panel.source}): {theirs}.\n* Here ({model}, {layers} layers): {ours}.\n* {panel.why}",
    ]
    if panel.run in shown:
        parts.append(shown[panel.run](result))
    elif number == 7:
        parts.append(online_table(result, "e2e"))
    else:
        parts.append(online_table(result, "ttft"))
    if panel.run in ("passes", "speeds"):
        parts.append(predicted_table(panel.run, predicted))
    return parts


def pass_table(result: Found) -> str:
    """Panel 1."""
    rows = [
        [f"{one['rows']}", *(f"{one[name]:.2f}" for name in ("ms", "memory_ms", "compute_ms")), one["bound"]]
        for one in result["found"]
    ]
    return table(["rows", "ms", "least, memory", "least, compute", "bound"], rows)


def product_table(result: Found) -> str:
    """Panel 2."""
    kinds = list(result["norms"]["ratio"])
    rows = [[f"{one['rows']} rows", *(f"{one['ratio'][kind]:.2f}" for kind in kinds)] for one in result["found"]]
    norm = f"norm, {result['settings']['norm_rows']} rows"
    rows.append([norm, *(f"{result['norms']['ratio'][kind]:.2f}" for kind in kinds)])
    rows.append(["bit patterns of one row over all numbers of rows", *(f"{result['row_variants'][kind]}" for kind in kinds)])
    note = (
        "Time over the library's, which is XLA's own product and sum. Kernel: what a canonical pass runs on this "
        "device. Tiles: "
        "products and sums of fixed shape in plain JAX."
    )
    return f"{note}\n\n{table(['', *kinds], rows)}"


def one_table(result: Found) -> str:
    """Panel 3."""
    rows = [
        [name, f"{one['tok_per_s']:.0f}", f"{one['ratio']:.3f}"]
        for name in CASES
        if (one := result["found"].get(name)) is not None
    ]
    batch = result["settings"]["batch"]
    note = f"B = {batch}, new tokens per second." + refused(result)
    return f"{note}\n\n{table(['', 'tok/s', 'over ordinary B + 1'], rows)}"


def refused(result: Found) -> str:
    """A sentence if the compiled batch-invariant engine was refused."""
    if not result["refused"]:
        return ""
    return " This device does not certify products that the compiler makes batch-invariant, so there are no figures for them."


def span_table(result: Found) -> str:
    """Panel 4."""

    def row(kind: str, each: Sequence[dict[str, Any]]) -> list[str]:
        tokens = [one["token"] for one in each if one["token"] is not None]
        second = [one["second"] for one in each if one["second"] is not None]
        bits = sum(one["bits"] is not None for one in each)
        brief = percent(sum(one <= 1 for one in second) / len(second)) if second else "-"
        return [kind, f"{len(each)}", f"{len(tokens)}", f"{min(tokens)}" if tokens else "never", brief, f"{bits}"]

    header = ["generation", "requests", "other tokens", "earliest", "at most 1 token agrees after, %", "other bits"]
    note = "Alone compared with among arrivals. Arrivals count steps, so a second run meets the same batches."
    return f"{note}\n\n{table(header, [row(kind, each) for kind, each in result['found'].items()])}"


def recompute_table(result: Found) -> str:
    """Panel 5."""
    rows = [
        [
            one["method"],
            f"{one['window']}",
            f"{one['rollbacks']}",
            f"{100 * one['recomputed']:.2f}",
            f"{100 * one['flips']:.2f}",
        ]
        for one in result["found"]
    ]
    return table(["draft", "W", "rollbacks", "recomputed, %", "p, %"], rows)


def throughput_table(result: Found) -> str:
    """Panel 6."""
    names = [name for name in result["found"][0]["ratio"] if name != "0"]
    rows = []
    for one in result["found"]:
        theirs = paper.THROUGHPUT[one["workload"]]
        pairs = [f"{one['ratio'][name]:.3f} ({theirs[name]:.2f})" for name in names]
        rows.append([one["workload"], f"{one['mean_prompt']:.0f} + {one['mean_new']:.0f}", *pairs, f"{one['rounds']}"])
    header = ["workload", "mean tokens", *(name if name == "invariant" else f"{name} %" for name in names), "rounds"]
    note = (
        "Prompt and new tokens per second over ordinary generation, medians of rounds in turn, by the share of deterministic "
        "requests; the paper's in brackets. Invariant: all deterministic, with products that the compiler makes "
        "batch-invariant, in one round. Theirs is SGLang with DeepGEMM. Lengths for ShareGPT and ArXiv are drawn, and only "
        "resemble those data sets." + refused(result)
    )
    return f"{note}\n\n{table(header, rows)}"


def online_table(result: Found, what: str) -> str:
    """Panels 7 and 8."""
    rows = []
    for one in result["found"]:
        times = [f"{1e3 * one['seconds'][f'{what}_{q}']:.0f}" for q in ("p50", "p99")]
        ratios = [f"{one['ratio'][f'{what}_{q}']:.3f}" for q in ("p50", "p99")]
        rows.append([f"{one['load']}", f"{one['share']}", *times, *ratios])
    note = f"Loads are shares of {result['capacity_per_s']:.1f} requests per second, the measured ordinary capacity."
    header = ["load", "deterministic, %", "P50, ms", "P99, ms", "P50 over ordinary", "P99 over ordinary"]
    return f"{note}\n\n{table(header, rows)}"


def speed_table(result: Found) -> str:
    """Panel 9."""
    cells = {(one["window"], one["groups"]): one["ratio"] for one in result["found"]}
    windows = sorted({window for window, _ in cells})
    rows = [
        [f"G = {group}", *(f"{cells[w, group]:.2f}" if (w, group) in cells else "-" for w in windows)]
        for group in sorted({group for _, group in cells})
    ]
    return "Over ordinary generation:\n\n" + table(["", *(f"W = {w}" for w in windows)], rows)


def predicted_table(run: str, predicted: dict[str, Any]) -> str:
    """Predictions for panel 1 or 9."""
    if run == "passes":
        rows = [
            [name, *(f"{one['ms']:.2f}" for one in found["passes"] if one["rows"] in (1, 16, 64, 256, 1024))]
            for name, found in predicted.items()
        ]
        return "Predicted ms of a pass, nothing was run:\n\n" + table(["device", "1 row", "16", "64", "256", "1024"], rows)
    rows = []
    for name, found in predicted.items():
        best = max(found["speeds"], key=lambda one: one["ratio"])
        rows.append([name, f"{best['window']}", f"{best['groups']}", f"{best['ratio']:.2f}"])
    header = ["device", "best W", "its G", "speed over ordinary"]
    return "Predicted, nothing was run; 99 % of drafted tokens are assumed to be accepted:\n\n" + table(header, rows)


def repeats(result: Found) -> str:
    """The correctness line."""
    return (
        f"## One prompt, many times\n\nThe paper repeats one prompt {paper.REPEATS:,} times. Here one prompt ran once "
        "alone and "
        f"{result['times'] - 1:,} times among neighbours: {result['unique']} different result(s), log-probability bits "
        "included, and "
        f"{result['unique_digests']} digest(s). The control, ordinary generation once alone and "
        f"{result['control_times'] - 1:,} times among the same neighbours, "
        f"gave {result['control_unique']} different results, of which {result['control_unique_texts']} text(s)."
    )


def bits(results: dict[str, Found]) -> str:
    """The comparison of bits in every panel."""
    rows = [
        [
            *(name, f"{one['bits']['deterministic_results']}", f"{one['bits']['deterministic_variants']}"),
            *(f"{one['bits']['digest_variants']}", f"{one['bits']['ordinary_differ']} of {one['bits']['ordinary_compared']}"),
        ]
        for name, one in results.items()
        if "bits" in one
    ]
    note = (
        "Every deterministic request must have one result, bit for bit, in all runs of a measurement: over loads, shares, "
        "neighbours, drafts and windows. The control counts requests whose ordinary result is another one."
    )
    header = ["measurement", "deterministic results", "most results of a request", "most digests", "ordinary ones that differ"]
    return "\n\n".join(["## Bits", note, table(header, rows)]) if rows else ""


def times(results: dict[str, Found]) -> str:
    """Every measurement with its time."""
    rows = [[name, f"{one['seconds']:.0f}", f"{one['cpu_seconds']:.0f}"] for name, one in results.items()]
    return "\n\n".join(["## Measurements", table(["measurement", "seconds", "CPU s"], rows)])
