"""The panels: titles, and for each the paper's number and ours in one line."""

from collections.abc import Callable
from typing import Any, NamedTuple

from scripts.replications.llm42 import paper
from scripts.replications.llm42.one_request import BASE
from scripts.replications.llm42.spans import DETERMINISTIC, ORDINARY

Found = dict[str, Any]  # the result of one measurement


class Panel(NamedTuple):
    """A panel of the figure and section of the page."""

    title: str
    source: str  # figure of the paper
    run: str  # its measurement
    lines: Callable[[Found], tuple[str, str]]  # the paper's number, ours
    why: str  # what differs and why


def passes(found: Found) -> tuple[str, str]:
    """Panel 1."""
    theirs = paper.PASS_MS["8B"]
    ms = {one["rows"]: one["ms"] for one in found["found"]}
    most = max(ms)
    bounds = {one["rows"]: one["bound"] for one in found["found"]}
    return (
        f"256 rows cost {theirs[256] / theirs[16]:.1f} x 16 rows, 1024 cost {theirs[1024] / theirs[16]:.1f} x",
        f"{most} rows cost {ms[most] / ms[16]:.1f} x 16 rows (16: {bounds[16]}, {most}: {bounds[most]})",
    )


def products(found: Found) -> tuple[str, str]:
    """Panel 2."""
    kernel = [one["ratio"]["kernel"] for one in found["found"]]
    return (
        f"products x 1.00 to 1.36 (DeepGEMM), 1.35 to 3.05 (Triton); norm x {paper.NORM:.1f}",
        f"products x {min(kernel):.2f} to {max(kernel):.2f}; norm x {found['norms']['ratio']['kernel']:.2f}",
    )


def one_request(found: Found) -> tuple[str, str]:
    """Panel 3."""
    sosp = paper.ONE_REQUEST["SOSP"]
    theirs = sosp["one deterministic"] / sosp[BASE]
    ours = found["found"]["one deterministic"]["ratio"]
    return f"one deterministic {theirs:.3f} of ordinary", f"one deterministic {ours:.3f} of ordinary"


def spans(found: Found) -> tuple[str, str]:
    """Panel 4."""

    def share(kind: str, what: str) -> float:
        each = found["found"][kind]
        return sum(one[what] is not None for one in each) / len(each)

    return (
        "80 % of texts differ within 512 tokens; then at most one token agrees in 87 %",
        f"texts that differ: ordinary {share(ORDINARY, 'token'):.0%} (bits {share(ORDINARY, 'bits'):.0%}), "
        f"deterministic {share(DETERMINISTIC, 'bits'):.0%}",
    )


def recompute(found: Found) -> tuple[str, str]:
    """Panel 5."""
    last = {one["method"]: one for one in found["found"]}
    longest = last["self"]["window"]
    drafts = ", ".join(f"{name} {100 * last[name]['recomputed']:.2g} %" for name in ("self", "int8"))
    return (
        f"{paper.RECOMPUTED['8B'][32]:.0%} at W = 32, {paper.RECOMPUTED['8B'][64]:.0%} at W = 64",
        f"W = {longest}: {drafts}; without drafts, the default here, 0",
    )


def throughput(found: Found) -> tuple[str, str]:
    """Panel 6."""
    ours = [one["ratio"]["100"] for one in found["found"]]
    theirs = [each["100"] for each in paper.THROUGHPUT.values()]
    return (
        f"100 % deterministic: {min(theirs):.2f} to {max(theirs):.2f} of ordinary",
        f"100 % deterministic: {min(ours):.2f} to {max(ours):.2f} of ordinary",
    )


def latency(found: Found) -> tuple[str, str]:
    """Panel 7."""
    ours = [one["ratio"]["e2e_p99"] for one in found["found"] if one["share"] == 100]
    theirs = [paper.e2e_ratio(100, load, 1) for load in range(3)]
    return (
        f"P99 at 100 %: {min(theirs):.1f} to {max(theirs):.1f} x ordinary",
        f"P99 at 100 %: {min(ours):.2f} to {max(ours):.2f} x ordinary",
    )


def first_token(found: Found) -> tuple[str, str]:
    """Panel 8."""
    ours = [one["ratio"]["ttft_p99"] for one in found["found"] if one["share"] == 100]
    return ("P99 TTFT at 100 %: 10.4 to 24.7 x ordinary", f"P99 TTFT at 100 %: {min(ours):.2f} to {max(ours):.2f} x ordinary")


def speeds(found: Found) -> tuple[str, str]:
    """Panel 9."""
    best = max(found["found"], key=lambda one: one["ratio"])
    return (
        "best at W x G = 512 rows (W = 16, G = 32)",
        f"best drafting W = {best['window']}, G = {best['groups']}: {best['ratio']:.2f} of ordinary; "
        f"no drafts {found['no_drafts']:.2f}",
    )


PANELS = (
    Panel(
        "Cost of a pass by rows",
        "SOSP figure 9a",
        "passes",
        passes,
        "Their verification runs kernel by kernel, so up to 256 rows its launches are the bound. Here a pass is one compiled "
        "program. A few rows are bound by reading the weights, many rows by arithmetic, and a CPU gets there much "
        "sooner than a GPU.",
    ),
    Panel(
        "Cost of batch-invariant operations",
        "SOSP figure 4, arXiv section on norms",
        "products",
        products,
        "A kernel that gives each row one order of sums by construction needs no tiles that waste rows, and is ahead where "
        "memory is the bound. With many rows arithmetic is. There the kernel multiplies by the processor's matrix tiles, if it "
        "has them, as the library does.",
    ),
    Panel(
        "One deterministic request among B + 1",
        "SOSP figure 5, arXiv figure 1",
        "one_request",
        one_request,
        "There the verification of one request stops all others. Here the deterministic request is one row of the same pass as "
        "the ordinary ones, so nothing waits.",
    ),
    Panel(
        "First token that differs from generation alone",
        "SOSP figure 6",
        "spans",
        spans,
        "Ordinary generation differs where sums follow the shape of the batch. The kernels in C leave only norms, softmax and "
        "log-probabilities to the compiler; compiled products leave it everything. Deterministic sums have one order.",
    ),
    Panel(
        "Recomputed tokens by window",
        "SOSP figure 9b",
        "recompute",
        recompute,
        "Recomputed tokens are about p W / 2 for a chance p that a draft is rejected. Here the fast path runs the kernels of "
        "the canonical pass, so self drafts are hardly ever rejected. Drafts of int8 weights have a p that shows the law.",
    ),
    Panel(
        "Throughput over ordinary, six workloads",
        "SOSP figure 10a",
        "throughput",
        throughput,
        "There each window is computed twice, and deterministic prompts are read one by one. Here a canonical row "
        "costs what an "
        "ordinary row does, and prompts of all requests share passes. The bound is that of ordinary generation.",
    ),
    Panel(
        "End-to-end latency over ordinary, by load",
        "SOSP figure 11",
        "online",
        latency,
        "Loads here are shares of measured ordinary capacity; theirs are 4, 5 and 5.5 requests per second. There, verification "
        "adds work, so queues grow when the machine is nearly full. Here the work is the same. The host visits after "
        "each step.",
    ),
    Panel(
        "P99 time to first token over ordinary",
        "SOSP figure 12",
        "online",
        first_token,
        "There a deterministic prompt is read alone, without others in its pass. Here prompts of all kinds share "
        "canonical passes.",
    ),
    Panel(
        "Speed by window W and groups G, self drafts",
        "SOSP figure 13",
        "speeds",
        speeds,
        "On a CPU the rows of a pass cost arithmetic, and the fast path as much as the canonical one. So drafts by it cannot "
        "save time. Where rows up to some hundred are free, larger W x G pay, as theirs do.",
    ),
)
