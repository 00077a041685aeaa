"""Figures of LLM-42 that the panels stand next to: Llama 3.1 8B on one H100, unless a name says 70B (on eight).

"SOSP" are figures of the version for SOSP 2026, whose baseline has better batch-invariant products; "arXiv" are those of arXiv
2601.17768 v2. Values of the figures were read off their bars and points, to about 1 %.
"""

PASS_MS = {  # SOSP figure 9a, one forward pass by rows
    "8B": {16: 9.6, 32: 9.6, 64: 9.6, 128: 9.6, 256: 9.6, 512: 13.9, 1024: 25.6},
    "70B": {16: 43.9, 32: 34.8, 64: 28.9, 128: 29.2, 256: 28.2, 512: 33.8, 1024: 61.0},
}
PRODUCT_ROWS = (1, 8, 32, 128, 512, 2048)  # SOSP figure 4, batch-invariant over cuBLAS, 70B shapes on one device
PRODUCTS = {"Triton": (3.05, 2.92, 2.60, 1.35, 1.72, 1.51), "DeepGEMM": (1.04, 1.01, 1.00, 1.36, 1.03, 1.01)}
NORM = 0.040 / 0.029  # arXiv: a batch-invariant norm of 1024 rows in Triton over CUDA
NATIVE_NORM = 0.334 / 0.029  # and the one that verification runs, over the same
ONE_REQUEST = {  # new tokens/s of 8 and 9 requests (SOSP figure 5), of 10 and 11 (arXiv figure 1)
    "SOSP": {"ordinary B": 1495, "ordinary B + 1": 1776, "batch-invariant": 1193, "one deterministic": 1733},
    "arXiv": {"ordinary B": 838, "ordinary B + 1": 938, "batch-invariant": 413, "one deterministic": 913},
}
SPANS_TOKENS = 512  # SOSP figure 6
FIRST_DIFFERENCE = {28: 0.10, 80: 0.25, 187: 0.50, 512: 0.80}  # share of requests that differ by this new token
SECOND_AT_MOST_ONE = 0.87  # share of differing requests with at most one equal token after the first different one
RECOMPUTED = {  # SOSP figure 9b, recomputed over new tokens by window, one window in a pass
    "8B": {16: 0.039, 32: 0.082, 64: 0.166, 128: 0.308, 256: 0.596},
    "70B": {16: 0.030, 32: 0.061, 64: 0.130, 128: 0.260, 256: 0.512},
}
FLIPS = 0.0046  # chance that a drafted token is rejected, from `recomputed = flips * W / 2` in the figure before
THROUGHPUT = {  # SOSP figure 10a over ordinary generation; "invariant" is SGLang with DeepGEMM
    "ShareGPT": {"invariant": 0.82, "10": 0.71, "50": 0.56, "100": 0.46},
    "ArXiv": {"invariant": 0.83, "10": 0.92, "50": 0.88, "100": 0.77},
    "1K/256": {"invariant": 0.84, "10": 0.97, "50": 0.84, "100": 0.74},
    "1K/1K": {"invariant": 0.87, "10": 0.91, "50": 0.80, "100": 0.70},
    "4K/1K": {"invariant": 0.90, "10": 0.94, "50": 0.90, "100": 0.85},
    "4K/4K": {"invariant": 0.96, "10": 0.97, "50": 0.94, "100": 0.90},
}
E2E_S = {  # SOSP figure 11, P50 and P99 in seconds at 4, 5 and 5.5 requests/s
    0: ((5, 51), (9, 88), (16, 109)),
    10: ((6, 65), (14, 111), (24, 125)),
    50: ((12, 119), (49, 179), (62, 193)),
    100: ((34, 166), (79, 226), (100, 255)),
}
TTFT_P99 = {10: (1.6, None, 2.0), 50: (4.9, None, 6.3), 100: (24.7, None, 10.4)}  # SOSP figure 12, over ordinary
SPEED_WINDOWS = (16, 32, 64, 128, 256, 512, 1024)  # SOSP figure 13, throughput over the best, by groups
SPEEDS = {
    16: (0.88, 0.99, 0.92),
    8: (0.67, 0.83, 0.96, 0.84),
    4: (0.46, 0.64, 0.81, 0.84, 0.72),
    2: (0.29, 0.45, 0.61, 0.73, 0.73, 0.52),
    1: (0.16, 0.27, 0.40, 0.52, 0.57, 0.54, 0.39),
}
REPEATS = 12_244


def e2e_ratio(share: int, load: int, quantile: int) -> float:
    """Latency over ordinary at load number `load`; `quantile` is 0 for P50, 1 for P99."""
    return E2E_S[share][load][quantile] / E2E_S[0][load][quantile]


def speed(window: int, groups: int) -> float | None:
    """Throughput over the best of figure 13, None where there is none."""
    row = SPEEDS.get(groups, ())
    index = SPEED_WINDOWS.index(window) if window in SPEED_WINDOWS else len(row)
    return row[index] if index < len(row) else None
