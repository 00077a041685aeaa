"""The contract of attention over a paged cache; a test class per implementation inherits it."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.cache import Int8Pages, Pages
from detspec.ops.attention.api import NO_POSITION, attention_and_lse, beside_sinks
from detspec.ops.attention.scores import Scores
from detspec.schedule import Numerics
from tests.fakes import bits

TABLE_PAGES = 6  # pages of each sequence; its length decides how many are read
# ALiBi's slopes by number of heads, as its paper gives them; exact, or rounded by float32.
SLOPES = {
    4: (2**-2, 2**-4, 2**-6, 2**-8),
    6: (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3),
    16: tuple(2 ** (-(n + 1) / 2) for n in range(16)),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one problem; `N = K * Q`."""

    G: int
    W: int
    K: int
    Q: int
    H: int
    page: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sequences in scattered pages, and queries at the last `W` positions of each."""

    q: np.ndarray  # [G, W, N, H]
    k: np.ndarray  # [num_pages, K, page, H]; `run` lays keys out as the cache does
    v: np.ndarray  # [num_pages, K, page, H]
    page_tables: np.ndarray  # [G, max_pages]
    positions: np.ndarray  # [G, W]

    def replace(self, **changes) -> "Problem":
        return dataclasses.replace(self, **changes)


def make_problem(shape: Shape, *, dtype: str = "float32", seed: int = 0, ends: tuple[int, ...] | None = None) -> Problem:
    """Numbers of `dtype`, held in float32; sequence `g` ends at `ends[g]`, by default at odd places of different pages.

    With "int8", those of pages are integers times a power of two for each slot and head, so that rounding them loses nothing.
    """
    rng = np.random.default_rng(seed)
    capacity = TABLE_PAGES * shape.page
    ends = tuple(min(capacity, shape.W + 13 * g * g + 7) for g in range(shape.G)) if ends is None else ends
    num_pages = 1 + shape.G * TABLE_PAGES
    pool = (num_pages, shape.K, shape.page, shape.H)

    def normal(size: tuple[int, ...]) -> np.ndarray:
        return rng.standard_normal(size, np.float32).astype("float32" if dtype == "int8" else dtype).astype(np.float32)

    def held(size: tuple[int, ...]) -> np.ndarray:
        if dtype != "int8":
            return normal(size)
        integers = np.clip(np.rint(32 * normal(size)), -126, 126)
        np.put_along_axis(integers, rng.integers(size[3], size=(*size[:3], 1)), 127.0, axis=3)
        return integers * np.exp2(-rng.integers(5, 7, (*size[:3], 1))).astype(np.float32)

    return Problem(
        q=normal((shape.G, shape.W, shape.K * shape.Q, shape.H)),
        k=held(pool),
        v=held(pool),
        page_tables=1 + rng.permutation(num_pages - 1).reshape(shape.G, TABLE_PAGES).astype(np.int32),
        positions=np.stack([np.arange(end - shape.W, end) for end in ends]).astype(np.int32),
    )


@partial(jax.jit, static_argnames=("numerics", "cap", "sliding_window", "alibi", "sinks"))
def attend(
    q, k, v, page_tables, positions, *, numerics: Numerics, cap=None, sliding_window=None, alibi=False, sinks=False
) -> jax.Array:
    scores = Scores(q.shape[-1] ** -0.5, cap, sliding_window, alibi, lse=sinks)
    found, lse = attention_and_lse(q, k, v, page_tables, positions, scores=scores, numerics=numerics)
    return beside_sinks(found, lse, sinks_of(q.shape[2])) if sinks else found


def sinks_of(N: int) -> jax.Array:
    """A score of each head, some far below the others, some far above."""
    return jnp.asarray(np.resize([1.5, -40.0, 3.0, 20.0, 0.0], N), jnp.float32)


def oracle(
    problem: Problem, *, cap: float | None = None, sliding_window: int | None = None, alibi: bool = False, sinks: bool = False
) -> np.ndarray:
    """Plain causal attention in float64, one query at a time."""
    G, W, N, H = problem.q.shape
    K = problem.k.shape[1]
    out = np.zeros((G, W, N, H))
    for g in range(G):
        k, v = (
            x[problem.page_tables[g]].transpose(1, 0, 2, 3).reshape(K, -1, H).astype(np.float64) for x in (problem.k, problem.v)
        )
        for w in range(W):
            seen = slice(max(0, problem.positions[g, w] + 1 - (sliding_window or 10**9)), problem.positions[g, w] + 1)
            for n in range(N):
                head = n // (N // K)
                scores = k[head, seen] @ problem.q[g, w, n].astype(np.float64) / np.sqrt(H)
                scores = scores if cap is None else cap * np.tanh(scores / cap)
                if alibi:
                    scores = scores - SLOPES[N][n] * (problem.positions[g, w] - np.arange(seen.start, seen.stop))
                weights = np.exp(scores - scores.max())
                nothing = np.exp(float(sinks_of(N)[n]) - scores.max()) if sinks else 0.0
                out[g, w, n] = weights @ v[head, seen] / (weights.sum() + nothing)
    return out


def attended(problem: Problem, numerics: Numerics, **rule) -> np.ndarray:
    """Result of the implementation that `numerics` names, with queries and pages of `numerics.cache_dtype`.

    With "int8" queries are in float32.
    """
    q = problem.q.astype("float32" if numerics.cache_dtype == "int8" else jnp.dtype(numerics.cache_dtype))
    k, v = pages_of(problem.k, numerics, numerics.key_slot_axis), pages_of(problem.v, numerics, 2)
    return np.asarray(attend(q, k, v, problem.page_tables, problem.positions, numerics=numerics, **rule))


def pages_of(pool: np.ndarray, numerics: Numerics, slot_axis: int) -> Pages:
    """`pool [num_pages, K, page, H]` as pages of a cache of `numerics`."""
    padded = np.pad(pool, ((0, 0), (0, 0), (0, 0), (0, numerics.cache_head_dim(pool.shape[3]) - pool.shape[3])))
    if numerics.cache_dtype != "int8":
        return np.moveaxis(padded.astype(jnp.dtype(numerics.cache_dtype)), 2, slot_axis)
    largest = np.abs(padded).max(3)
    steps = np.divide(127, largest, out=np.zeros_like(largest), where=largest > 0)
    values = np.rint(np.nan_to_num(padded * steps[..., None])).astype(np.int8)
    return Int8Pages(np.moveaxis(values, 2, slot_axis), largest / np.float32(127))


@cache
def answered(contract: type["AttentionContract"]) -> tuple[Problem, np.ndarray]:
    """The problem of `contract.SHAPE` and the bits of its answer, neither to be written to."""
    self = contract()
    problem = self.problem(self.SHAPE, ends=self.ENDS)
    expected = bits(self.run(problem, self.numerics(self.SHAPE)))
    for array in (*vars(problem).values(), expected):
        array.flags.writeable = False
    return problem, expected


class AttentionContract:
    """Inherit, name the implementation, and give its dtype, and the sizes it takes if they are others."""

    implementation: str
    dtype = "float32"
    interpret = False
    page = 16
    head_dim = 16
    splits = True  # whether it cuts sequences into splits

    def shape(self, **sizes: int) -> Shape:
        return Shape(**{"page": self.page, "H": self.head_dim, **sizes})

    def positions(self, *at_page_16: int) -> tuple[int, ...]:
        """Ends of sequences, given for pages of 16 slots: those past the first page grow with the page."""
        return tuple(end if end <= 16 else end * self.page // 16 for end in at_page_16)

    def numerics(self, shape: Shape, **changes) -> Numerics:
        values = {"page": shape.page, "query_tile": 16, "cache_dtype": self.dtype}
        changes |= {} if self.splits else {"num_splits": 1}
        return Numerics(**{**values, "implementation": self.implementation, "interpret": self.interpret, **changes})

    def problem(self, shape: Shape, **choices) -> Problem:
        return make_problem(shape, dtype=self.dtype, **choices)

    def run(self, problem: Problem, numerics: Numerics, **rule) -> np.ndarray:
        return attended(problem, numerics, **rule)

    def check_value(self, got: np.ndarray, problem: Problem, **rule) -> None:
        """Against float64, at most twice as far from it as the reference is at the same dtypes."""
        exact = oracle(problem, **rule)
        page = problem.v.shape[2]
        plain = attended(problem, Numerics(page=page, cache_dtype=self.dtype), **rule)
        distance = np.abs(plain - exact).max()
        # Averages of numbers of size 1 by weights that sum to 1: float32 keeps them to some 10 of 2**-24. In bfloat16 the
        # weights are rounded by 2**-9 at most before they meet values of up to 5.
        assert distance <= {"float32": 2e-6, "int8": 2e-6, "bfloat16": 1e-2}[self.dtype]
        assert got.dtype == np.float32
        # Beside sinks, a sigmoid of two rounded numbers and a product come after that: 4 of 2**-24 for results of size 1.
        assert np.abs(got - exact).max() <= 2 * distance + (4 * 2**-24 if rule.get("sinks") else 0)

    # In value ---------------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("Q", [1, 3])
    def test_attention_of_grouped_heads_and_odd_lengths_equals_float64(self, Q):
        shape = self.shape(G=3, W=7, K=2, Q=Q)
        problem = self.problem(shape)
        self.check_value(self.run(problem, self.numerics(shape)), problem)

    def test_attention_of_heads_that_fill_no_register_equals_float64(self):
        shape = self.shape(G=2, W=3, K=2, Q=2, H=24)
        problem = self.problem(shape)
        self.check_value(self.run(problem, self.numerics(shape)), problem)

    def test_attention_with_larger_pages_and_heads_equals_float64(self):
        shape = self.shape(G=2, W=5, K=1, Q=2, H=2 * self.head_dim, page=2 * self.page)
        problem = self.problem(shape)
        self.check_value(self.run(problem, self.numerics(shape)), problem)

    @pytest.mark.parametrize(("query_tile", "num_splits"), [(1, 4), (4, 1)])
    def test_attention_in_tiles_and_splits_equals_float64(self, query_tile, num_splits):
        shape = self.shape(G=2, W=5, K=1, Q=2)
        problem = self.problem(shape, ends=self.positions(9, 83))  # one row sees a single block: three splits see nothing
        got = self.run(problem, self.numerics(shape, query_tile=query_tile, num_splits=num_splits))
        self.check_value(got, problem)

    @pytest.mark.parametrize(
        ("rule", "num_splits"),
        [
            ({"cap": 0.8}, 1),
            ({"sinks": True}, 4),
            ({"sinks": True, "sliding_window": 19}, 1),
            ({"sliding_window": 1}, 4),
            ({"sliding_window": 19}, 4),
            ({"sliding_window": 1000}, 1),
        ],
    )
    def test_attention_with_soft_caps_sinks_and_sliding_windows_equals_float64(self, rule, num_splits):
        """Windows of less than a page, across pages, and longer than the sequence."""
        shape = self.shape(G=3, W=7, K=2, Q=2)
        problem = self.problem(shape, ends=self.positions(9, 83, 96))
        got = self.run(problem, self.numerics(shape, num_splits=num_splits), **rule)
        self.check_value(got, problem, **rule)
        assert (np.abs(got - oracle(problem)) > 1e-2).any() == (rule != {"sliding_window": 1000})

    @pytest.mark.parametrize(("Q", "num_splits", "rule"), [(3, 4, {}), (8, 1, {}), (2, 4, {"cap": 0.8, "sliding_window": 19})])
    def test_attention_with_linear_biases_equals_float64(self, Q, num_splits, rule):
        """6, 16 and 4 heads; a cap bounds the product alone."""
        rule = {"alibi": True, **rule}
        shape = self.shape(G=3, W=7, K=2, Q=Q)
        problem = self.problem(shape, ends=self.positions(9, 83, 96))
        got = self.run(problem, self.numerics(shape, num_splits=num_splits), **rule)
        self.check_value(got, problem, **rule)
        assert (np.abs(got - oracle(problem, **{**rule, "alibi": False})) > 1e-2).any()

    def test_attention_at_the_first_position_returns_its_value(self):
        shape = self.shape(G=1, W=1, K=2, Q=2)
        problem = self.problem(shape, ends=(1,))
        got = self.run(problem, self.numerics(shape))
        value = problem.v[problem.page_tables[0, 0], :, 0]
        np.testing.assert_array_equal(got[0, 0], np.repeat(value, 2, axis=0))

    # In bits ----------------------------------------------------------------------------------------------------------------

    @property
    def SHAPE(self) -> Shape:
        return self.shape(G=4, W=8, K=2, Q=2)

    @property
    def ENDS(self) -> tuple[int, ...]:
        return self.positions(8, 21, 47, 90)

    def base(self) -> tuple[Problem, np.ndarray]:
        """The problem that others are compared with, and the bits of its answer; a simulator computes them once."""
        return answered(type(self))

    def test_bits_with_groups_permuted_are_permuted(self):
        problem, expected = self.base()
        order = [2, 0, 3, 1]
        permuted = problem.replace(
            q=problem.q[order], page_tables=problem.page_tables[order], positions=problem.positions[order]
        )
        assert (bits(self.run(permuted, self.numerics(self.SHAPE))) == expected[order]).all()
        assert (expected[order] != expected).any()

    @pytest.mark.parametrize("group", [0, 3])
    def test_bits_with_other_neighbours_stay(self, group):
        problem, expected = self.base()
        other = self.problem(self.SHAPE, seed=1, ends=self.positions(96, 9, 33, 12))
        q, positions, k, v = other.q.copy(), other.positions.copy(), other.k.copy(), other.v.copy()
        q[group], positions[group] = problem.q[group], problem.positions[group]
        pages = problem.page_tables[group]
        k[pages], v[pages] = problem.k[pages], problem.v[pages]
        mixed = problem.replace(q=q, positions=positions, k=k, v=v)
        got = bits(self.run(mixed, self.numerics(self.SHAPE)))
        assert (got[group] == expected[group]).all()
        others = [g for g in range(4) if g != group]
        assert (got[others] != expected[others]).any()

    @pytest.mark.parametrize("split", [1, 4])
    def test_bits_with_windows_cut_shorter_stay(self, split):
        """The shortest and the longest window of 8 as 16 of 1, and as 4 of 4."""
        problem, expected = self.base()
        ends = [0, 3]
        cut = problem.replace(
            q=problem.q[ends].reshape(-1, split, *problem.q.shape[2:]),
            positions=problem.positions[ends].reshape(-1, split),
            page_tables=np.repeat(problem.page_tables[ends], 8 // split, axis=0),
        )
        got = bits(self.run(cut, self.numerics(self.SHAPE)))
        assert (got.reshape(expected[ends].shape) == expected[ends]).all()

    def test_bits_with_linear_biases_in_windows_cut_shorter_and_beside_other_neighbours_stay(self):
        """Most slopes of 16 heads are no powers of two, and their products with a distance are rounded."""
        shape = self.shape(G=3, W=8, K=4, Q=4)
        problem = self.problem(shape, ends=self.positions(8, 47, 90))
        numerics = self.numerics(shape, query_tile=8)
        expected = bits(self.run(problem, numerics, alibi=True))[1:]
        cut = problem.replace(
            q=problem.q[1:].reshape(-1, 2, *problem.q.shape[2:]),
            positions=problem.positions[1:].reshape(-1, 2),
            page_tables=np.repeat(problem.page_tables[1:], 4, axis=0),
        )
        assert (bits(self.run(cut, numerics, alibi=True)).reshape(expected.shape) == expected).all()
        assert (bits(self.run(cut, numerics)).reshape(expected.shape) != expected).any()

    @pytest.mark.parametrize("offset", [1, 7])
    def test_bits_with_queries_at_another_offset_of_their_window_stay(self, offset):
        """The window starts `offset` positions earlier: what stood at places 0 .. W-offset stands `offset` places later."""
        problem, expected = self.base()
        shape = self.SHAPE
        earlier = self.problem(shape, seed=2).q
        q = np.concatenate([earlier[:, :offset], problem.q[:, : shape.W - offset]], axis=1)
        moved = problem.replace(q=q, positions=np.maximum(problem.positions - offset, 0))
        got = bits(self.run(moved, self.numerics(shape)))
        assert (got[1:, offset:] == expected[1:, : shape.W - offset]).all()  # group 0 starts at 0 and cannot move
        assert (got[1:, :offset] != expected[1:, :offset]).any()

    def test_bits_with_pages_elsewhere_stay(self):
        problem, expected = self.base()
        moved = np.random.default_rng(3).permutation(len(problem.k) - 1) + 1  # page p moves to moved[p - 1]
        k, v = problem.k.copy(), problem.v.copy()
        k[moved], v[moved] = problem.k[1:], problem.v[1:]
        elsewhere = problem.replace(k=k, v=v, page_tables=moved[problem.page_tables - 1].astype(np.int32))
        assert (bits(self.run(elsewhere, self.numerics(self.SHAPE))) == expected).all()
        forgotten = elsewhere.replace(page_tables=problem.page_tables)
        assert (bits(self.run(forgotten, self.numerics(self.SHAPE))) != expected).any()

    @pytest.mark.parametrize("size", [1.0, 1e30])
    def test_bits_with_anything_finite_in_stale_slots_stay(self, size):
        problem, expected = self.base()
        k, v = problem.k.copy(), problem.v.copy()
        rng = np.random.default_rng(4)
        stale = np.ones((len(k), self.SHAPE.page), bool)
        for table, positions in zip(problem.page_tables, problem.positions, strict=True):
            for pos in range(positions[-1] + 1):
                stale[table[pos // self.SHAPE.page], pos % self.SHAPE.page] = False
        for pool in (k, v):
            noise = (size * rng.standard_normal(pool.shape)).astype(np.float32)
            np.copyto(pool, noise, where=stale[:, None, :, None])
        assert (bits(self.run(problem.replace(k=k, v=v), self.numerics(self.SHAPE))) == expected).all()
        k[problem.page_tables[3, 0], :, 0] += 1  # a slot that is not stale
        assert (bits(self.run(problem.replace(k=k, v=v), self.numerics(self.SHAPE))) != expected).any()

    def test_bits_of_a_short_row_beside_a_longer_neighbour_stay(self):
        """Blocks past a row's position are run for the neighbour's sake and must be no-ops."""
        problem, expected = self.base()
        alone = problem.replace(positions=np.minimum(problem.positions, np.arange(8, dtype=np.int32)))
        got = bits(self.run(alone, self.numerics(self.SHAPE)))
        assert (got[0] == expected[0]).all()
        assert (got[3] != expected[3]).any()

    def test_bits_beside_a_window_without_positions_stay_and_its_own_are_finite(self):
        problem, expected = self.base()
        positions = problem.positions.copy()
        positions[1] = NO_POSITION
        got = self.run(problem.replace(positions=positions), self.numerics(self.SHAPE))
        assert (bits(got)[[0, 2, 3]] == expected[[0, 2, 3]]).all()
        assert np.isfinite(got[1]).all()
        assert (bits(got)[1] != expected[1]).any()

    def test_windows_without_any_position_are_finite(self):
        problem, _ = self.base()
        assert np.isfinite(self.run(problem.replace(positions=np.full((4, 8), NO_POSITION)), self.numerics(self.SHAPE))).all()

    def test_bits_of_a_partial_window_stay_and_what_it_repeats_is_finite(self):
        """Windows of 8 with 3 positions in tiles of 2: the second tile repeats one position, the others nothing else."""
        problem, _ = self.base()
        numerics = self.numerics(self.SHAPE, query_tile=2)
        whole = bits(self.run(problem, numerics))
        partial_window = problem.replace(positions=np.minimum(problem.positions, problem.positions[:, 2:3]))
        got = self.run(partial_window, numerics)
        assert (bits(got)[:, :3] == whole[:, :3]).all()
        assert (bits(got)[:, 3:] != whole[:, 3:]).any()
        assert np.isfinite(got).all()

    def test_a_nan_key_breaks_who_attends_to_it_and_nobody_else(self):
        """As a token that is not finite is written: its keys nan, its values zeros."""
        problem, expected = self.base()
        at = problem.positions[2, 3]
        k, v = problem.k.copy(), problem.v.copy()
        place = problem.page_tables[2, at // self.page], slice(None), at % self.page
        k[place], v[place] = np.nan, 0.0
        got = self.run(problem.replace(k=k, v=v), self.numerics(self.SHAPE))
        assert np.isnan(got[2, 3:]).all()
        assert (bits(got)[2, :3] == expected[2, :3]).all()
        assert (bits(got)[[0, 1, 3]] == expected[[0, 1, 3]]).all()

    def test_bits_of_a_sliding_window_stay_wherever_the_neighbours_windows_begin(self):
        """The loop starts at the first page that anybody needs: pages before a row's window must be no-ops, or not be run."""
        problem, everything = self.base()
        together = bits(self.run(problem, self.numerics(self.SHAPE), sliding_window=10))
        for group in range(4):
            alone = problem.replace(
                q=problem.q[group : group + 1],
                page_tables=problem.page_tables[group : group + 1],
                positions=problem.positions[group : group + 1],
            )
            assert (bits(self.run(alone, self.numerics(self.SHAPE), sliding_window=10))[0] == together[group]).all(), group
            assert problem.positions[group, -1] < 10 or (everything[group] != together[group]).any(), group

    def test_bits_with_splits_over_the_sequence_differ(self):
        """Why the canonical pass has none."""
        if not self.splits:
            pytest.skip("cuts nothing into splits")
        problem, expected = self.base()
        assert (bits(self.run(problem, self.numerics(self.SHAPE, num_splits=4))) != expected).any()

    def test_bits_with_other_pages_differ(self):
        """The page is the block of the reduction: the same keys and values in pages of 32 add up in another order."""
        problem, expected = self.base()

        def merged(pool: np.ndarray) -> np.ndarray:
            pairs = pool[problem.page_tables].reshape(-1, 2, *pool.shape[1:]).transpose(0, 2, 1, 3, 4)
            return pairs.reshape(len(pairs), pool.shape[1], 2 * self.SHAPE.page, self.SHAPE.H)

        tables = np.arange(self.SHAPE.G * TABLE_PAGES // 2, dtype=np.int32).reshape(self.SHAPE.G, -1)
        paired = problem.replace(k=merged(problem.k), v=merged(problem.v), page_tables=tables)
        got = self.run(paired, self.numerics(self.SHAPE, page=2 * self.page))
        self.check_value(got, paired)
        assert (bits(got) != expected).any()
