"""PyTorch in CUDA graphs at the same shapes: its decode steps, its products, and whether a row's bits depend on the batch.

Products are cuBLAS's, attention is `scaled_dot_product_attention`, and nothing is compiled (`torch_llama.py`). It is no serving
engine: no scheduler, no paged cache, one length for all sequences. On a CPU the same code runs without graphs.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from detspec.roofline import Work
from prove_stages import passes
from prove_stages.journal import Entry
from prove_stages.programs import Measurement, Program, Setting
from prove_stages.timing import in_turns, typical

if TYPE_CHECKING:  # measurements have names where torch is not installed, too
    from prove_stages.torch_graphs import DecodeLoop
    from prove_stages.torch_llama import TorchLlama

MATRICES = ("qkv", "o", "gate_up", "down")  # of a layer
MOST_ROWS = 256  # of products: with more, they are bound by arithmetic
PRODUCTS = 40  # in one graph, about


def programs(setting: Setting) -> Iterator[Program]:
    """Yields none: jax compiles nothing here."""
    yield from ()


def measurements(setting: Setting) -> Iterator[Measurement]:
    """Steps by rows, then the bits of their first row, then the products of each matrix of a layer."""

    @cache
    def model() -> "TorchLlama":
        return random_model(setting)

    @cache
    def loops() -> Callable[[int], "DecodeLoop"]:
        return running(setting, model())

    for rows in setting.size.steps:
        yield Measurement(step_name(setting, rows), lambda rows=rows: time_step(setting, loops()(rows), rows))
    yield Measurement(f"{peer(setting)}, bits of a row", lambda: compare_rows(setting, loops()))
    for matrix in MATRICES:
        yield Measurement(f"{peer(setting)}, {matrix}", lambda matrix=matrix: time_products(setting, model(), matrix))


def time_step(setting: Setting, loop: "DecodeLoop", rows: int) -> Iterator[Entry]:
    """The time of a step, and over that of our own step of as many rows, whose roofline is the same."""
    name = step_name(setting, rows)
    seconds = typical(in_turns({name: loop.call}, setting.size), name)
    cfg = setting.size.model
    (schedule,) = passes.schedules(setting, (rows,), ())
    work = passes.work_of(setting, cfg, schedule)
    yield Entry(name, 1e3 * seconds, "ms", bound=setting.bound(work), note=note(), predicted=setting.predicted(work, 1e3))
    own_ms = setting.found("passes", passes.label(cfg, schedule))
    if own_ms is not None:
        yield Entry(
            f"{name}, over detspec's", 1e3 * seconds / own_ms, "", note=f"detspec's takes {own_ms:.3g} ms", predicted=1.0
        )


def compare_rows(setting: Setting, loops: Callable[[int], "DecodeLoop"]) -> Iterator[Entry]:
    """Counts logits of the first sequence that have other bits in a larger batch than alone; control: alone again."""
    from prove_stages.torch_graphs import num_different

    alone = loops(1).first_row()
    for rows in setting.size.steps:
        found = loops(rows).first_row()
        changes = "another greedy token" if found.argmax() != alone.argmax() else "the same greedy token"
        off = float((found.double() - alone.double()).abs().max())
        where = f"among {rows} rows" if rows > 1 else "in a second run"
        details = f"of {len(alone)}, off by up to {off:.2g}, {changes}"
        name = f"{peer(setting)}, logits that change {where}"
        yield Entry(name, float(num_different(alone, found)), "logits", note=note(details))


def time_products(setting: Setting, model: "TorchLlama", matrix: str) -> Iterator[Entry]:
    """The time of one product by rows. All layers' weights take turns, which no cache of a device holds."""
    from prove_stages.torch_graphs import products

    weights = [getattr(layer, matrix) for layer in model.layers]
    num_out, num_in = weights[0].shape
    rounds = -(-PRODUCTS // len(weights))
    for rows in (rows for rows in setting.size.product_rows if rows <= MOST_ROWS):
        name = f"{peer(setting)}, {matrix} {num_out} x {num_in}, {rows} rows"
        seconds = typical(in_turns({name: products(weights, rows, rounds)}, setting.size), name) / (rounds * len(weights))
        num_bytes = weights[0].element_size() * (num_out * num_in + rows * (num_out + num_in))
        work = Work(float(num_bytes), 2.0 * rows * num_out * num_in)
        least_us = setting.predicted(work, 1e6)
        rate = note(f"{num_bytes / seconds / 1e12:.2f} TB/s")
        yield Entry(name, 1e6 * seconds, "us", bound=setting.bound(work), note=rate, predicted=least_us)


def random_model(setting: Setting) -> "TorchLlama":
    """The model on PyTorch's device."""
    from prove_stages.torch_graphs import device_of
    from prove_stages.torch_llama import random_llama

    return random_llama(setting.size.model, setting.size.context // 4, device_of(setting.platform))


def running(setting: Setting, model: "TorchLlama") -> Callable[[int], "DecodeLoop"]:
    """Makes the loop of a number of sequences, once; all loops share one cache, so their first sequences are equal."""
    import torch

    from prove_stages.torch_graphs import DecodeLoop
    from prove_stages.torch_llama import random_cache

    most = max(setting.size.steps)
    device = model.embed.device
    max_len = setting.size.context // 4
    shared = random_cache(model.cfg, most, max_len, device)
    tokens = torch.randint(model.cfg.vocab_size, (most,), generator=torch.Generator().manual_seed(0)).to(device)
    return cache(lambda rows: DecodeLoop(model, shared, tokens[:rows], max_len - 1))


def step_name(setting: Setting, rows: int) -> str:
    """Names a step: "PyTorch in CUDA graphs, step of 32 rows, 8 layers"."""
    (schedule,) = passes.schedules(setting, (rows,), ())
    return f"{peer(setting)}, {passes.label(setting.size.model, schedule)}"


def peer(setting: Setting) -> str:
    """Names the peer, as its figures are named."""
    return "PyTorch in CUDA graphs" if setting.platform == "gpu" else "PyTorch without graphs"


def note(*parts: str) -> str:
    """Joins remarks on a figure, and the version that it is of."""
    import torch

    return ", ".join([*parts, f"torch {torch.__version__}"])
