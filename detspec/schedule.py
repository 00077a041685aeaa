"""Settings of a canonical pass, parted into those that decide its bits and those that decide its speed alone.

Schedule
  numerics   Numerics   the order of all floating-point operations: bits
  budget     Budget     R rows in windows of W; the rows name the anchor, the cut into windows changes speed alone
  fast_path  FastPath   how ordinary decoding and drafts read the cache: speed alone
"""

import dataclasses
from typing import Any

from detspec.choices import ALIGNMENTS, CACHE_DTYPES, IMPLEMENTATIONS, LINEARS
from detspec.config import is_count
from detspec.errors import InputError

REDUCTIONS = ("fixed", "native")
HALF_DTYPES = ("bfloat16", "float16")  # dtypes of weights that the GPU kernels multiply


def _check_power_of_two(owner: str, field: str, value: int) -> None:
    if not is_count(value) or value & (value - 1):
        raise InputError(f"{owner}.{field} must be a power of two, got {value!r}")


@dataclasses.dataclass(frozen=True)
class Numerics:
    """The order of the floating-point operations of a pass; frozen, never tuned at run time."""

    page: int = 64  # slots of one cache page, which is the KV block of the attention's reduction; a power of two
    query_tile: int = 16  # most query rows that attention handles together; a power of two
    block_pages: int = 1  # pages that one step of the attention takes together; 1 in a canonical pass
    num_splits: int = 1  # parts that the KV sequence is cut into and merged from; 1 in a canonical pass
    # order of the sums in norms, softmax and log-probabilities. "fixed": given by the length of a row alone, as a canonical
    # pass needs it. "native": XLA's own, which may depend on the number of rows.
    reductions: str = "fixed"
    # dtype of keys and values in the cache: "float32", "bfloat16", "float16", or "int8" with a scale for each token and KV head
    cache_dtype: str = "float32"
    # "free": a window starts at the last committed token. "window": a window starts at a multiple of its length, and committed
    # tokens before that are verified again; the bits then depend on the window. It is the way out where a device certifies
    # everything but the offset inside a window.
    alignment: str = "free"
    # attention and pinned products: "reference" (plain jax.numpy, anywhere), "cpu" (C, compiled on first use), "pallas_tpu"
    # (Mosaic, TPU v4 and newer) or "pallas_gpu" (Mosaic, Hopper GPUs). Nothing falls back to another.
    implementation: str = "reference"
    # products with weights. "xla": as the compiler likes them. "pinned": tiles of one fixed size, each row's sum in one order,
    # for any number of rows; passes are then batch-invariant, at the price of the tiles.
    linear: str = "xla"
    interpret: bool = False  # run the kernels in Pallas's interpreter, on any device: slow, for tests

    def __post_init__(self) -> None:
        for field in ("page", "query_tile", "block_pages", "num_splits"):
            _check_power_of_two("Numerics", field, getattr(self, field))
        for field, accepted in (
            ("reductions", REDUCTIONS),
            ("cache_dtype", CACHE_DTYPES),
            ("alignment", ALIGNMENTS),
            ("implementation", IMPLEMENTATIONS),
            ("linear", LINEARS),
            ("interpret", (True, False)),
        ):
            if getattr(self, field) not in accepted:
                raise InputError(f"Numerics.{field} must be one of {accepted}, got {getattr(self, field)!r}")

    def for_weights(self, dtype: str) -> "Numerics":
        """Numerics for weights of `dtype`: XLA's products where there are no pinned ones, as for float32 on a GPU."""
        lacks = self.linear == "pinned" and self.implementation == "pallas_gpu" and dtype not in HALF_DTYPES
        return dataclasses.replace(self, linear="xla") if lacks else self

    @property
    def key_slot_axis(self) -> int:
        """The axis of the key pages that holds their slots: the last for implementations on the CPU, else as for values."""
        return 3 if self.implementation in ("reference", "cpu") else 2

    def cache_head_dim(self, head_dim: int) -> int:
        """Places of a head in the cache, zeros at its end: kernels read whole registers (CPU, TPU) or swizzled rows (GPU)."""
        unit = {"reference": 1, "cpu": 16, "pallas_tpu": 128, "pallas_gpu": 64}[self.implementation]
        return -(-head_dim // unit) * unit

    def num_pages(self, length: int) -> int:
        """Pages that `length` positions take."""
        return -(-length // self.page)

    def whole_pages(self, length: int) -> int:
        """`length` positions, rounded up to whole pages: the memory is taken anyway, and fewer programs are compiled."""
        return self.num_pages(length) * self.page


@dataclasses.dataclass(frozen=True)
class Budget:
    """The token rows of one canonical pass, and how they are cut into windows."""

    rows: int = 64  # `R`, token rows; a multiple of `window`
    window: int = 16  # `W`, consecutive positions of one sequence in one window; a power of two

    def __post_init__(self) -> None:
        _check_power_of_two("Budget", "window", self.window)
        if not is_count(self.rows) or self.rows % self.window:
            raise InputError(f"Budget.rows must be a positive multiple of Budget.window ({self.window}), got {self.rows!r}")

    @property
    def groups(self) -> int:
        """`G`, windows in one pass."""
        return self.rows // self.window


@dataclasses.dataclass(frozen=True)
class FastPath:
    """How ordinary decoding reads the cache; no deterministic bit depends on it."""

    block_pages: int = 1  # `Numerics.block_pages` of the fast path; a power of two
    # `Numerics.num_splits` for one sequence; a power of two. More sequences share them, so that about as many blocks run at
    # once: 16 are 16, 8, 4, 2 and 1 for 1, 2, 4, 8 and 16 sequences. A sequence of fewer blocks has as many splits as blocks.
    splits: int = 1

    def __post_init__(self) -> None:
        for field in ("block_pages", "splits"):
            _check_power_of_two("FastPath", field, getattr(self, field))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How passes run: numerics, the budget of a pass, and the fast path.

    The schedule of an engine names its anchor: committed bits are those of passes of `budget.rows` rows with `numerics`. Other
    budgets may run in its place if this device certifies that their bits are equal.
    """

    numerics: Numerics = Numerics()  # order of all floating-point operations: bits
    budget: Budget = Budget()  # rows of the anchor, whose bits are committed, and their cut into windows, which changes speed
    fast_path: FastPath = FastPath()  # how ordinary decoding and drafts read the cache: speed alone

    def with_budget(self, rows: int, window: int) -> "Schedule":
        """Returns this schedule with a budget of `rows` cut into windows of `window`."""
        return dataclasses.replace(self, budget=Budget(rows, window))

    def with_numerics(self, **changes: Any) -> "Schedule":
        """Returns this schedule with some fields of `Numerics` changed: `schedule.with_numerics(linear="pinned")`."""
        return dataclasses.replace(self, numerics=dataclasses.replace(self.numerics, **changes))

    def fast(self, batch: int) -> "Schedule":
        """The cheapest decode schedule for `batch` sequences: one row each, sums in XLA's order, and the faster products.

        These are pinned ones where a kernel of the CPU or the GPU makes them: for few rows it reads weights no slower than XLA.
        """
        shared = 1 << (batch - 1).bit_length()
        fast = self.with_numerics(
            query_tile=1,
            block_pages=self.fast_path.block_pages,
            num_splits=max(self.fast_path.splits // shared, 1),
            reductions="native",
            alignment="free",
            linear=self.numerics.linear if self.numerics.implementation in ("cpu", "pallas_gpu") else "xla",
        )
        return fast.with_budget(batch, 1)

    def bits(self) -> dict[str, Any]:
        """Settings that committed bits depend on, for digests: numerics, the anchor's rows, and the window if it aligns."""
        window = {"window": self.budget.window} if self.numerics.alignment == "window" else {}
        return {**dataclasses.asdict(self.numerics), "rows": self.budget.rows, **window}

    @staticmethod
    def from_bits(values: dict[str, Any]) -> "Schedule":
        """A schedule whose committed bits are those that `bits` described as `values`.

        Raises `InputError` if `values` are not of this version.
        """
        numerics = {name: value for name, value in values.items() if name not in ("rows", "window")}
        try:
            rows = values["rows"]
            return Schedule(Numerics(**numerics), Budget(rows, values.get("window", 1)))
        except (KeyError, TypeError) as error:
            raise InputError(f"the recorded schedule is not of this version ({error}): {values}") from error
