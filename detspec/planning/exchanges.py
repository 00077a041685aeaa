"""Exchanges of chips in a pass: as optimised programs have it, and by arithmetic, for our layout and for the usual one.

    per layer, R rows               kind          elements     received by each of n chips
    ours    attended heads          all-gather    R x NH       (n-1)/n of the array
            attention's output      all-gather    R x D        the same
            hidden values of MLP    all-gather    R x F        the same
            MLP's output            all-gather    R x D        the same
    sums    attention's output      all-reduce    R x D        2 (n-1)/n of the array, as rings do it
            MLP's output            all-reduce    R x D        the same

Both look up embeddings by one all-reduce, ours of bit patterns in uint32. Before sampling, an all-to-all turns each chip's
columns of the logits, `[R, V/n]`, into whole rows, `[R/n, V]`; what each chip found for its rows is gathered.
"""

import math
import re
from collections import Counter
from typing import NamedTuple

from detspec.config import ModelConfig
from detspec.roofline import Links

HLO_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
ROUNDS = {"all-reduce": 2}  # a reduce-scatter and an all-gather; all others cross the group once
INSTRUCTION = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
SHAPE = re.compile(r"\b([a-z]+\d\w*)\[([\d,]*)\]")
GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\]<=)")
MESH_GROUPS = re.compile(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}")  # mesh['kv'=2,'query'=4] {'query'}, since jax 0.12


class Exchange(NamedTuple):
    """A collective."""

    kind: str  # one of KINDS
    dtype: str  # as HLO writes it: "bf16", "u32"
    elements: int  # elements that each chip gets; in a reduce-scatter, those of all chips together
    chips: int  # that take part

    @property
    def array_bytes(self) -> float:
        """Bytes of `elements`."""
        return self.elements * int(re.findall(r"\d+", self.dtype)[0]) / 8

    @property
    def received_bytes(self) -> float:
        """Bytes that each chip receives."""
        return ROUNDS.get(self.kind, 1) * self.array_bytes * (self.chips - 1) / self.chips

    def seconds(self, links: Links) -> float:
        """Seconds by `links`; in an all-to-all, half of what each half of the chips has goes to the other half."""
        cut_bytes = self.chips * self.array_bytes / 4 if self.kind == "all-to-all" else 0.0
        return links.seconds(self.received_bytes, rounds=ROUNDS.get(self.kind, 1), cut_bytes=cut_bytes)


Exchanges = Counter[Exchange]


def gathers(cfg: ModelConfig, rows: int, chips: int, *, whole_layers: int | None = None, head: bool = True) -> Exchanges:
    """Counts the exchanges of a pass over `rows` in our layout; `whole_layers` is all of them if None.

    Filling the cache needs keys and values of the last layer, but neither its output nor logits: `L - 1` whole layers, no head.
    """
    L = cfg.num_layers if whole_layers is None else whole_layers
    dtype = HLO_DTYPES[cfg.dtype]
    found: Exchanges = Counter()
    found[Exchange("all-reduce", "u32", rows * cfg.d_model, chips)] += 1
    for layer in cfg.layers[:L]:
        for width in (layer.mixer.num_heads * layer.mixer.head_dim, cfg.d_model, layer.ff.d_ff, cfg.d_model):
            found[Exchange("all-gather", dtype, rows * width, chips)] += 1
    return +(found + sampling(cfg, rows, chips)) if head else +found


def sums(cfg: ModelConfig, rows: int, chips: int) -> Exchanges:
    """Counts those of the usual layout: `o` and `down` cut along their inputs, and their partial sums added across chips."""
    found: Exchanges = Counter()
    found[Exchange("all-reduce", HLO_DTYPES[cfg.dtype], rows * cfg.d_model, chips)] += 1 + 2 * cfg.num_layers
    return found + sampling(cfg, rows, chips)


def sampling(cfg: ModelConfig, rows: int, chips: int) -> Exchanges:
    """Counts the exchanges between the head and the commit: whole rows of logits, then tokens and log-probabilities' bits."""
    padded = -(-rows // chips) * chips
    return Counter(
        {
            Exchange("all-to-all", "f32", padded // chips * cfg.vocab_size, chips): 1,
            Exchange("all-gather", "s32", padded, chips): 1,
            Exchange("all-gather", "u32", padded, chips): 1,
        }
    )


def exchange_seconds(exchanges: Exchanges, links: Links) -> float:
    """Seconds of all, one after the other."""
    return sum(count * exchange.seconds(links) for exchange, count in exchanges.items())


def received_bytes(exchanges: Exchanges) -> float:
    """Bytes that each chip receives by all."""
    return sum(count * exchange.received_bytes for exchange, count in exchanges.items())


def found_in(hlo: str) -> Exchanges:
    """The collectives of an optimised program; those of a loop's body once."""
    found: Exchanges = Counter()
    for line in hlo.splitlines():
        if match := INSTRUCTION.search(line):
            result, kind, starts = match.groups()
            shapes = SHAPE.findall(result)
            if starts and kind != "all-reduce":  # operands, results, and what a permutation adds
                shapes = shapes[1:2] if kind == "collective-permute" else shapes[len(shapes) // 2 :]
            chips = _chips(line)
            sizes = [(dtype, math.prod(map(int, shape.split(","))) if shape else 1) for dtype, shape in shapes]
            if kind == "all-to-all":  # its parts may be results of their own
                sizes = [(sizes[0][0], sum(size for _, size in sizes))]
            for dtype, size in sizes:
                found[Exchange(kind, dtype, size * (chips if kind == "reduce-scatter" else 1), chips)] += 1
    return found


def as_gathers(found: Exchanges, by_formula: Exchanges) -> Exchanges:
    """`found` with those all-reduces of integers that the formula has as all-gathers.

    TPUs' compiler turns the gather of a short vector into a sum with zeros of the other chips. Of integers, that is a copy.
    """
    copies: Exchanges = Counter()
    for exchange, count in found.items():
        gather = exchange._replace(kind="all-gather")
        is_copy = exchange.kind == "all-reduce" and "f" not in exchange.dtype and gather in by_formula
        copies[gather if is_copy else exchange] += count
    return copies


def added_floats(exchanges: Exchanges) -> list[Exchange]:
    """Lists those that add floating-point numbers of several chips: their order of additions is not ours."""
    return [exchange for exchange in exchanges if exchange.kind in ("all-reduce", "reduce-scatter") and "f" in exchange.dtype]


def gathered_weights(exchanges: Exchanges, cfg: ModelConfig) -> list[Exchange]:
    """Lists those that bring a whole weight to each chip, by the number of elements; rows must be chosen to make it unique."""
    mixer = cfg.layer(0).mixer
    D = cfg.d_model
    widths = (mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim, cfg.layer(0).ff.d_ff, cfg.vocab_size)
    sizes = {D * width for width in widths}
    return [exchange for exchange in exchanges if exchange.elements in sizes]


def _chips(line: str) -> int:
    """The chips of one replica group of an instruction."""
    if "collective-permute" in line:
        return 2  # a sender and a receiver
    if mesh := MESH_GROUPS.search(line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    match = GROUPS.search(line)
    assert match, f"no replica groups in: {line}"
    return len(match[1].split(",")) if match[1] else int(match[2])
