"""Bounds of every value of a traced function, from bounds of its arguments: a proof that no line leaves its type.

`Bounds.of(fn, arguments)` traces `fn` and walks its program in JAX's own words (a jaxpr). Each value is an interval that holds
all that the value can be; an operation whose exact result may lie outside its type raises `Leaves`. Sums count their terms, so
all their partial sums are inside, too, in whatever order a device adds.

Intervals alone forget that two values hang together, so four things are remembered:

    cases      bounds are arrays, one entry for each case; all values of a case hang together. `largest = max(abs(x))` makes
               cases of its own: in each, `abs(x)` is at most what `largest` can be. So does a bit length
    squares    `x * x` is not negative
    prefixes   `cumsum(x) - x` is not negative, if `x` is not
    pieces     words that are joined for one product have their own bounds again where its sums are split

Functions with a contract are not walked where they are called: their arguments must lie in the contract's domain, and the
contract says what comes out. Each contract has a proof of its own.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.integer.spec import LIMIT

Contract = Callable[..., Any]  # (bounds, *intervals) -> an interval, or a tuple of them
EXACT = 2**15  # up to this largest magnitude there is a case for each
SAME = {"broadcast_in_dim", "reshape", "squeeze", "transpose", "copy", "sort", "slice", "dynamic_slice", "split", "tile"}
COMPARED = {
    "lt": lambda a, b: (a.hi < b.lo, a.lo >= b.hi),
    "le": lambda a, b: (a.hi <= b.lo, a.lo > b.hi),
    "gt": lambda a, b: (a.lo > b.hi, a.hi <= b.lo),
    "ge": lambda a, b: (a.lo >= b.hi, a.hi < b.lo),
    "eq": lambda a, b: ((a.lo == a.hi) & (b.lo == b.hi) & (a.lo == b.lo), (a.hi < b.lo) | (a.lo > b.hi)),
    "ne": lambda a, b: ((a.hi < b.lo) | (a.lo > b.hi), (a.lo == a.hi) & (b.lo == b.hi) & (a.lo == b.lo)),
}  # when a comparison surely holds, and when it surely does not


class Leaves(Exception):
    """A value may lie outside its type, or an argument outside the domain of a contract."""


class Interval:
    """All values from `lo` to `hi`, in each case; of a float those of its bits, as an integer, and None for any float.

    A table has its values, too.
    """

    def __init__(self, lo: Any, hi: Any, table: np.ndarray | None = None) -> None:
        self.lo = np.atleast_1d(np.asarray(lo, np.int64))
        self.hi = np.atleast_1d(np.asarray(hi, np.int64))
        self.table = table
        self.size_of: Interval | None = None  # it is the magnitude of that
        self.prefix_of: Interval | None = None  # it is the running sum of that
        self.shifted_by: Interval | None = None  # so many of its lowest bits are 0
        self.parts: tuple[Interval, ...] = ()  # its lower 16 bits, and the rest
        self.pieces: tuple[Interval, ...] = ()  # it is these, of one size, one after the other along `axis`
        self.axis = 0

    def copy(self) -> "Interval":
        """An interval of its own, which new cases may part."""
        found = Interval(self.lo, self.hi, self.table)
        found.parts = tuple(part.copy() for part in self.parts)
        return found

    def __repr__(self) -> str:
        return f"[{self.lo.min()}, {self.hi.max()}]"


class Bounds:
    """A walk through a function.

    Args:
        contracts: what comes out of functions that are traced as `jax.jit` of these names.
        drops_bits: whether shifts to the left may push bits out; what comes of it can then be anything.
    """

    def __init__(self, contracts: Mapping[str, Contract] | None = None, *, drops_bits: bool = False) -> None:
        self.contracts = contracts or {}
        self.drops_bits = drops_bits
        self.known: dict[int, Interval] = {}
        self.lines = 0

    def of(self, fn: Callable[..., Any], *arguments: tuple[Any, Interval | None]) -> Any:
        """Walks `fn` of arguments of these shapes and bounds; returns the bounds of its results, in its tree."""
        shapes = [shape for shape, _ in arguments]
        closed, result = jax.make_jaxpr(fn, return_shape=True)(*shapes)
        leaves = [None if interval is None else self.keep(interval.copy()) for _, interval in arguments]
        found = self.walk(closed.jaxpr, [self.constant(const) for const in closed.consts], leaves)
        return jax.tree.unflatten(jax.tree.structure(result), found)

    def keep(self, interval: Interval | None) -> Interval | None:
        """Remembers an interval, for new cases to part it."""
        if interval is not None:
            self.known[id(interval)] = interval
            for part in interval.parts:
                self.known[id(part)] = part
        return interval

    def constant(self, value: Any) -> Interval | None:
        array = np.asarray(value)
        if not np.issubdtype(array.dtype, np.integer) and array.dtype != np.dtype(bool):
            return None
        array = array.astype(np.int64)
        return self.keep(Interval(array.min(initial=2**40), array.max(initial=-(2**40)), array if array.ndim else None))

    def walk(self, jaxpr: Any, consts: list[Any], arguments: list[Any]) -> list[Any]:
        """The bounds of the results of a jaxpr."""
        env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Interval | None:
            return self.constant(atom.val) if hasattr(atom, "val") else env[atom]

        for eqn in jaxpr.eqns:
            found = self.step(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def step(self, eqn: Any, given: list[Any]) -> list[Any]:
        """The bounds of the results of one operation, which must fit their types."""
        name = eqn.primitive.name
        if name in ("jit", "pjit", "closed_call", "custom_jvp_call"):
            inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
            called = eqn.params.get("name", "")
            if called in self.contracts:
                found = self.contracts[called](self, *given)
                return [self.keep(each) for each in (found if isinstance(found, tuple) else (found,))]
            return self.walk(inner.jaxpr, [self.constant(const) for const in inner.consts], given)
        if name == "while":
            return self.loop(eqn, given)
        self.lines += 1
        kinds = [var.aval.dtype for var in eqn.outvars]
        if not any(np.issubdtype(kind, np.integer) or kind == np.dtype(bool) for kind in kinds):
            return [None] * len(kinds)
        found = self.result(name, eqn, given)
        results = [found] * len(kinds)
        if name == "split" and len(given[0].pieces) == len(kinds) and given[0].axis == eqn.params["axis"]:
            results = list(given[0].pieces) if len(set(eqn.params["sizes"])) == 1 else results
        return [self.keep(self.fitted(each, kind, eqn)) for each, kind in zip(results, kinds, strict=True)]

    def fitted(self, found: Interval, kind: Any, eqn: Any) -> Interval:
        least, most = (0, 1) if kind == np.dtype(bool) else (np.iinfo(kind).min, np.iinfo(kind).max)
        if found.lo.min() >= least and found.hi.max() <= most:
            return found
        if self.drops_bits and eqn.primitive.name == "shift_left":
            return Interval(least, most)
        raise Leaves(f"{eqn.primitive.name} {found!r} leaves {kind} {line_of(eqn)}")

    def result(self, name: str, eqn: Any, given: list[Any]) -> Interval:
        """The exact bounds of an operation on integers."""
        a = given[0] if given else None
        b = given[1] if len(given) > 1 else None
        if name in COMPARED:
            if a is None or b is None:
                return Interval(0, 1)
            holds, fails = COMPARED[name](a, b)
            return Interval(np.where(holds, 1, 0), np.where(fails, 0, 1))
        if name == "reduce_max" and a.size_of is not None:
            return self.parted(a, a.size_of)
        if name in SAME or name in ("convert_element_type", "reduce_max"):
            return a
        if name == "iota":
            return Interval(0, eqn.outvars[0].aval.shape[eqn.params["dimension"]] - 1)
        if name in ("add", "add_any"):
            return Interval(a.lo + b.lo, a.hi + b.hi)
        if name == "sub":
            if a.prefix_of is not None and a.prefix_of is b and b.lo.min() >= 0:
                return Interval(np.zeros_like(a.hi), a.hi)
            return Interval(a.lo - b.hi, a.hi - b.lo)
        if name == "neg":
            return Interval(-a.hi, -a.lo)
        if name == "abs":
            found = magnitude(a)
            found.size_of = a
            return found
        if name == "sign":
            return Interval(np.sign(a.lo), np.sign(a.hi))
        if name == "square" or (name == "mul" and a is b):
            size = magnitude(a)
            return Interval(size.lo * size.lo, size.hi * size.hi)
        if name == "mul":
            return corners(np.multiply, a, b)
        if name == "div":
            require(b.lo.min() > 0, f"division of {a!r} by {b!r}")
            return corners(lambda a, b: np.sign(a) * (np.abs(a) // b), a, b)
        if name == "rem":
            require(b.lo.min() > 0, f"rest of {a!r} by {b!r}")
            return Interval(np.where(a.lo < 0, 1 - b.hi, 0), np.where(a.hi > 0, b.hi - 1, 0))
        if name in ("max", "min"):
            best = np.maximum if name == "max" else np.minimum
            return Interval(best(a.lo, b.lo), best(a.hi, b.hi))
        if name == "clamp":
            low, x, high = given
            return Interval(np.minimum(np.maximum(x.lo, low.lo), high.lo), np.minimum(np.maximum(x.hi, low.hi), high.hi))
        if name in ("shift_left", "shift_right_arithmetic", "shift_right_logical"):
            require(b.lo.min() >= 0 and b.hi.max() <= 31, f"{name} by {b!r}")
            require(name != "shift_right_logical" or a.lo.min() >= 0, f"{name} of {a!r}")
            if a.parts and name != "shift_left" and (b.lo == 16).all() and (b.hi == 16).all():
                return a.parts[1]
            found = corners(np.left_shift if name == "shift_left" else np.right_shift, a, b)
            found.shifted_by = b if name == "shift_left" else None
            return found
        if name == "clz":
            if (bits_of(a.lo) != bits_of(a.hi)).any():
                found = Interval(0, 0)
                self.divide(a, np.asarray([-(2**31), 0, *(2**k for k in range(34))]), found)
                a.lo = found.lo
                a.hi = found.hi
            width = np.iinfo(eqn.outvars[0].aval.dtype).bits
            return Interval(width - bits_of(a.hi), width - bits_of(a.lo))
        if name == "and" and a.parts and (b.lo == 0xFFFF).all() and (b.hi == 0xFFFF).all():
            return a.parts[0]
        if name in ("and", "or", "xor", "not"):
            return logical(name, a, b, eqn.outvars[0].aval.dtype)
        if name == "select_n":
            return selected(*given)
        if name in ("concatenate", "pad"):
            found = joined(*given)
            sizes = {var.aval.shape for var in eqn.invars}
            if name == "concatenate" and len(sizes) == 1:
                found.pieces = tuple(given)
                found.axis = eqn.params["dimension"]
            return found
        if name in ("reduce_sum", "cumsum"):
            axes = eqn.params.get("axes", (eqn.params.get("axis"),))
            terms = math.prod(eqn.invars[0].aval.shape[axis] for axis in axes)
            found = Interval(np.minimum(a.lo, 0) * terms, np.maximum(a.hi, 0) * terms)
            found.prefix_of = a if name == "cumsum" else None
            return found
        if name == "dot_general":
            (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
            terms = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)

            def sums(a: Interval) -> Interval:
                each = corners(np.multiply, a, b)
                return Interval(np.minimum(each.lo, 0) * terms, np.maximum(each.hi, 0) * terms)

            found = sums(a)
            free = [axis for axis in range(eqn.invars[0].aval.ndim) if axis not in (*contracted, *batch)]
            if a.pieces and a.axis in free:
                found.pieces = tuple(self.keep(sums(piece)) for piece in a.pieces)  # type: ignore[misc]
                found.axis = len(batch) + free.index(a.axis)
            return found
        if name in ("reduce_or", "reduce_and", "is_finite"):
            return Interval(0, 1) if name == "is_finite" else a
        if name == "bitcast_convert_type" and a is not None:
            return a
        if name == "bitcast_convert_type":
            return Interval(np.iinfo(np.int32).min, np.iinfo(np.int32).max)
        if name == "gather":
            return gathered(a, b, eqn)
        raise NotImplementedError(f"no rule for {name}: {eqn}")

    def parted(self, size: Interval, x: Interval) -> Interval:
        """The largest of `size`, magnitudes of `x`; makes a case of each bit length that it may have, or of each value."""
        most = int(size.hi.max())
        edges = np.arange(most + 2) if most <= EXACT else np.asarray([0, *(2**k for k in range(33)), LIMIT])
        found = Interval(0, 0)
        new = self.divide(size, np.unique(np.minimum(edges, most + 1)), found)
        x.lo = np.maximum(x.lo, -found.hi)
        x.hi = np.minimum(x.hi, found.hi)
        assert new == x.hi.size
        return found

    def divide(self, x: Interval, edges: np.ndarray, found: Interval) -> int:
        """Makes cases of `x` lying between edges; `found` becomes its bounds there. Returns how many cases there are."""
        cases = max(interval.lo.size for interval in self.known.values())
        lo = np.broadcast_to(x.lo, cases)
        hi = np.broadcast_to(x.hi, cases)
        first = np.searchsorted(edges, lo, side="right") - 1
        last = np.searchsorted(edges, hi, side="right") - 1
        counts = last - first + 1
        old = np.repeat(np.arange(cases), counts)
        new = np.arange(len(old)) - np.repeat(np.cumsum(counts) - counts, counts) + first[old]
        for interval in self.known.values():
            if interval.lo.size > 1 or interval.hi.size > 1:
                interval.lo = np.broadcast_to(interval.lo, cases)[old]
                interval.hi = np.broadcast_to(interval.hi, cases)[old]
        found.lo = np.maximum(lo[old], edges[new])
        found.hi = np.minimum(hi[old], edges[new + 1] - 1)
        return len(old)

    def loop(self, eqn: Any, given: list[Any]) -> list[Any]:
        """Walks a loop turn by turn, as long as its condition may hold; each value is all that it was after any turn."""
        params = eqn.params
        of_cond = given[: params["cond_nconsts"]]
        of_body = given[params["cond_nconsts"] : params["cond_nconsts"] + params["body_nconsts"]]
        carry = given[params["cond_nconsts"] + params["body_nconsts"] :]
        ever = carry
        while True:
            (goes_on,) = self.walk(params["cond_jaxpr"].jaxpr, [], [*of_cond, *carry])
            if goes_on.hi.max() == 0:
                return [None if each is None else self.keep(each) for each in ever]
            cases = max(interval.lo.size for interval in self.known.values())
            carry = self.walk(params["body_jaxpr"].jaxpr, [], [*of_body, *carry])
            assert max(interval.lo.size for interval in self.known.values()) == cases  # a loop makes no cases
            ever = [a if a is None else joined(a, b) for a, b in zip(ever, carry, strict=True)]


def require(holds: Any, what: str) -> None:
    """Raises `Leaves` unless a condition holds in all cases."""
    if not np.all(holds):
        raise Leaves(what)


def corners(fn: Callable[..., np.ndarray], *given: Interval) -> Interval:
    """The bounds of a function that is monotone in each argument while the others stay."""
    ends: list[list[np.ndarray]] = [[]]
    for interval in given:
        ends = [[*before, end] for before in ends for end in (interval.lo, interval.hi)]
    values = [fn(*each) for each in ends]
    lo = hi = values[0]
    for value in values[1:]:
        lo = np.minimum(lo, value)
        hi = np.maximum(hi, value)
    return Interval(lo, hi)


def magnitude(a: Interval) -> Interval:
    """Bounds of `abs`."""
    least = np.where((a.lo <= 0) & (a.hi >= 0), 0, np.minimum(np.abs(a.lo), np.abs(a.hi)))
    return Interval(least, np.maximum(np.abs(a.lo), np.abs(a.hi)))


def bits_of(x: np.ndarray) -> np.ndarray:
    """Bit lengths; 32 of negative numbers, whose first bit is 1."""
    return np.where(x < 0, 32, np.frexp(np.maximum(x, 0).astype(np.float64))[1])


def logical(name: str, a: Interval, b: Interval | None, dtype: Any) -> Interval:
    """Bounds of operations on bits, and on what is true."""
    if name == "not":
        require(dtype == np.dtype(bool), "not of bits")
        return Interval(1 - a.hi, 1 - a.lo)
    assert b is not None
    if dtype == np.dtype(bool) and name != "xor":
        best = np.minimum if name == "and" else np.maximum
        return Interval(best(a.lo, b.lo), best(a.hi, b.hi))
    if name == "and":
        for x, mask in ((a, b), (b, a)):
            ones = int(mask.hi.max())
            if (mask.lo == mask.hi).all() and (mask.lo == ones).all() and ones >= 0 and (ones & (ones + 1)) == 0:
                together = (x.lo // (ones + 1)) == (x.hi // (ones + 1))  # the lowest bits do not begin anew
                return Interval(np.where(together, x.lo & ones, 0), np.where(together, x.hi & ones, ones))
        require((a.lo >= 0) | (b.lo >= 0), f"and of {a!r} and {b!r}")
        return Interval(0, np.where(a.lo < 0, b.hi, np.where(b.lo < 0, a.hi, np.minimum(a.hi, b.hi))))
    if min(a.lo.min(), b.lo.min()) < 0:
        kind = np.iinfo(dtype)
        return Interval(kind.min, kind.max)
    if name == "or":
        for x, y in ((a, b), (b, a)):
            if x.shifted_by is not None and (y.hi < np.int64(1) << x.shifted_by.lo).all():
                return Interval(x.lo + y.lo, x.hi + y.hi)
    most = (np.int64(1) << bits_of(a.hi | b.hi).astype(np.int64)) - 1
    return Interval(np.maximum(a.lo, b.lo) if name == "or" else 0, np.minimum(most, a.hi + b.hi))


def joined(*given: Interval) -> Interval:
    """All values of several intervals."""
    found = given[0]
    for other in given[1:]:
        found = Interval(np.minimum(found.lo, other.lo), np.maximum(found.hi, other.hi))
    return found


def selected(which: Interval, *given: Interval) -> Interval:
    """Bounds of `select_n`: of what can be selected."""
    if len(given) == 2 and None not in given and which is not None:
        first, second = given
        if (which.hi == 0).all() or (which.lo == 1).all():
            return first if (which.hi == 0).all() else second
        both = joined(first, second)
        lo = np.where(which.hi == 0, first.lo, np.where(which.lo == 1, second.lo, both.lo))
        hi = np.where(which.hi == 0, first.hi, np.where(which.lo == 1, second.hi, both.hi))
        return Interval(lo, hi)
    return joined(*given)


def gathered(operand: Interval, index: Interval, eqn: Any) -> Interval:
    """Bounds of the entries of a table whose indices lie in an interval; no index may lie outside the table."""
    sizes = [eqn.invars[0].aval.shape[axis] for axis in eqn.params["dimension_numbers"].start_index_map]
    if operand.table is None or operand.table.ndim != 1:
        require(len(sizes) == 1 or index.lo.min() >= 0, f"gather at {index!r}")
        require(len(sizes) > 1 or (index.lo.min() >= 0 and index.hi.max() < sizes[0]), f"gather at {index!r} of {sizes}")
        return operand
    table = operand.table
    require(index.lo.min() >= 0 and index.hi.max() < len(table), f"gather at {index!r} of {len(table)}")
    width = index.hi - index.lo + 1
    level = bits_of(width) - 1
    least = [table]
    most = [table]
    for k in range(int(level.max())):
        ahead = np.minimum(np.arange(len(table)) + 2**k, len(table) - 1)
        least.append(np.minimum(least[-1], least[-1][ahead]))
        most.append(np.maximum(most[-1], most[-1][ahead]))
    last = index.hi - (np.int64(1) << level.astype(np.int64)) + 1
    of_least = np.stack(least)
    of_most = np.stack(most)
    return Interval(
        np.minimum(of_least[level, index.lo], of_least[level, last]), np.maximum(of_most[level, index.lo], of_most[level, last])
    )


def line_of(eqn: Any) -> str:
    """The lines of the package that an operation comes from."""
    frames = eqn.source_info.traceback.frames
    return " < ".join(
        f"{frame.function_name}:{frame.line_num}"
        for frame in frames
        if "detspec/" in frame.file_name and "tests/" not in frame.file_name
    )


def array(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """The shape of an argument."""
    return jax.ShapeDtypeStruct(sizes, dtype)
