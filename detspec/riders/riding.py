"""The states of all riders of a batch, and the walks along texts that keep them right."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.riders.rider import AdaptFn, Capacity, Committed, Product, Reader, Rider, Rows, Shared, State, TextsFn
from detspec.struct import Struct

ProcessFn = Callable[[jax.Array], jax.Array]  # logits [R, V] of rows to logits


class Followed(Struct):
    """The state of a rider that follows the text."""

    first: State  # [B, ...], before the first new token
    now: State  # [B, ...], after all that is committed


class Riders(Struct):
    """All riders of `B` sequences."""

    states: dict[str, State]  # by name; leaves [B, ...], see `Followed`
    shared: dict[str, Shared]  # by name, passed along whole
    each: tuple[Rider, ...] = struct.field(pytree_node=False)  # in the order in which they work on logits
    # False leaves out of programs all that works on logits: for sequences that ask for nothing but a temperature
    processing: bool = struct.field(pytree_node=False, default=True)

    def of(self, name: str) -> State:
        """The state of the rider called `name`, after all that is committed."""
        state = self.states[name]
        return state.now if isinstance(state, Followed) else state

    def having(self, **states: State) -> "Riders":
        """Returns the riders with other states of some that do not follow the text."""
        return self.replace(states={**self.states, **states})

    def for_draft_model(self) -> "Riders":
        """Returns the riders for another model, which reads prompts as they are and has other weights."""
        each = tuple(rider for rider in self.each if rider.reader is None and rider.linear is None)
        return self.replace(each=each, states={rider.name: self.states[rider.name] for rider in each})

    def begun(
        self,
        packed: Mapping[str, Any],
        put: Callable[[jax.Array, jax.Array], jax.Array],
        tokens: jax.Array,
        first: jax.Array,
        end: jax.Array,
    ) -> "Riders":
        """After requests that brought `packed` were `put` in; of their `tokens [B, T]`, `first .. end - 1` are new ones."""
        states = {}
        for rider in self.each:
            old = self.states[rider.name]
            new = rider.begin(packed[rider.name], self.of(rider.name))
            if rider.follow is not None:
                new = Followed(first=new, now=self._caught_up(rider, new, tokens, first, end))
            states[rider.name] = jax.tree.map(put, old, new)
        return self.replace(states=states)

    def observed(self, committed: Committed) -> "Riders":
        """After a step."""
        states = dict(self.states)
        sequence = jnp.arange(committed.num_new.shape[0], dtype=jnp.int32)
        for rider in self.each:
            now = self.of(rider.name)
            if rider.follow is not None:
                walked = self._walked(rider, now, committed.tokens)
                now = jax.tree.map(lambda x: x[sequence, committed.num_new], walked)
            if rider.observe is not None:
                now = rider.observe(now, committed)
            states[rider.name] = now if rider.follow is None else states[rider.name].replace(now=now)
        return self.replace(states=states)

    @property
    def following(self) -> dict[str, State]:
        """The states of riders that follow the text, after all that is committed; what a loop over tokens carries."""
        return {rider.name: self.of(rider.name) for rider in self.each if rider.follow is not None}

    def at(self, following: Mapping[str, State]) -> "Riders":
        """Returns the riders elsewhere in the text: `following` as in the property."""
        return self.having(**{name: self.states[name].replace(now=now) for name, now in following.items()})

    def after(self, tokens: jax.Array) -> dict[str, State]:
        """`following` after one more of the `tokens [B]` of each sequence."""
        followers = [rider for rider in self.each if rider.follow is not None]
        return {rider.name: self._next(rider, self.of(rider.name), tokens) for rider in followers}

    def walked(self, tokens: jax.Array, begin: jax.Array, number: int, *, anew: bool = False) -> dict[str, State]:
        """The states `[B, number + 1, ...]` before and after each of `number` tokens from `begin [B]` on of `tokens [B, T]`.

        They start with all that is committed or, if they are walked `anew`, before the first new token. Only riders that follow
        the text and work on logits have some.
        """
        walkers = [rider for rider in self.each if rider.follow is not None and rider.logits is not None and self.processing]
        if not walkers:
            return {}
        place = begin[:, None] + jnp.arange(number, dtype=jnp.int32)[None, :]
        along = jnp.take_along_axis(tokens, jnp.minimum(place, tokens.shape[1] - 1), axis=1)
        begun = {name: state.first if anew else state.now for name, state in self.states.items() if isinstance(state, Followed)}
        return {rider.name: self._walked(rider, begun[rider.name], along) for rider in walkers}

    def rows(
        self, of_row: jax.Array | None = None, after: jax.Array | None = None, walked: Mapping[str, State] | None = None
    ) -> dict[str, State]:
        """The states of riders that work on logits, by name.

        Of rows that belong to sequences `of_row [R]`, after the first `after [R]` of the tokens that were `walked`. By default
        a row for each sequence, in order, after all that is committed.
        """
        all_rows = {rider.name: self.of(rider.name) for rider in self.each if rider.logits is not None}
        if of_row is None:
            return all_rows

        def row_of(name: str, state: State) -> State:
            if walked is None or after is None or name not in walked:
                return jax.tree.map(lambda x: x[of_row], state)
            return jax.tree.map(lambda x: x[of_row, jnp.clip(after, 0, x.shape[1] - 1)], walked[name])

        return {name: row_of(name, state) for name, state in all_rows.items()}

    def process_fn(self, rows: Mapping[str, State], position: jax.Array, texts_fn: TextsFn) -> ProcessFn | None:
        """Returns the riders' functions of logits `[R, V]`, composed; None in programs without them. `rows` as in `rows`."""
        if not self.processing:
            return None

        def process(logits_f32: jax.Array) -> jax.Array:
            for rider in self.each:
                if rider.logits is not None:
                    own = Rows(rows[rider.name], position, texts_fn)
                    logits_f32 = rider.logits(self.shared[rider.name], own, logits_f32)
            return logits_f32

        return process

    @property
    def reader(self) -> Reader | None:
        """How prompts are read by the rider that does, if there is one."""
        return next((rider.reader for rider in self.each if rider.reader is not None), None)

    @property
    def read_by_rider(self) -> State:
        """The state of the rider that reads prompts; None without one."""
        return next((self.of(rider.name) for rider in self.each if rider.reader is not None), None)

    @property
    def unread(self) -> jax.Array | None:
        """`[B]` bool, sequences whose prompts a rider has not read to its end; None if none reads."""
        return None if self.reader is None else self.reader.unread(self.read_by_rider)

    def inject(self, windows: Any) -> Any:
        """Vectors that the rider that reads adds to the stream of `windows`, as `Injected`; None if none reads."""
        return None if self.reader is None else self.reader.inject(self.read_by_rider, windows)

    def adapt_fn(self, windows: Any) -> AdaptFn | None:
        """Returns the riders' functions of products, composed, for the rows of `windows`; None if none works on products."""
        adapting = [rider for rider in self.each if rider.linear is not None]
        if not adapting:
            return None
        of_row = jnp.repeat(jnp.maximum(windows.sequence, 0), windows.tokens.shape[1])
        rows = {rider.name: jax.tree.map(lambda x: x[of_row], self.of(rider.name)) for rider in adapting}

        def adapt(product: Product) -> jax.Array:
            for rider in adapting:
                assert rider.linear is not None
                product = product._replace(y_f32=rider.linear(self.shared[rider.name], rows[rider.name], product))
            return product.y_f32

        return adapt

    @property
    def told(self) -> jax.Array | None:
        """Report to the host on the prompts that a rider reads, `[B, ...]`; None if none reads."""
        return None if self.reader is None else self.reader.report(self.read_by_rider)

    def _next(self, rider: Rider, state: State, tokens: jax.Array) -> State:
        """The state after one more of the `tokens [B]`."""
        assert rider.follow is not None
        return rider.follow(self.shared[rider.name], state, tokens)

    def _walked(self, rider: Rider, state: State, tokens: jax.Array) -> State:
        """The states `[B, n + 1, ...]` before and after each of `tokens [B, n]`."""

        def step(state: State, token: jax.Array) -> tuple[State, State]:
            after = self._next(rider, state, token)
            return after, after

        _, later = jax.lax.scan(step, state, tokens.T)
        return jax.tree.map(lambda x, xs: jnp.concatenate([x[:, None], jnp.moveaxis(xs, 0, 1)], axis=1), state, later)

    def _caught_up(self, rider: Rider, state: State, tokens: jax.Array, first: jax.Array, end: jax.Array) -> State:
        """The state after `tokens [B, T]` at places `first .. end - 1`, both `[B]`, of each sequence."""

        def step(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
            place, state = carry
            token = jnp.take_along_axis(tokens, jnp.minimum(place, tokens.shape[1] - 1)[:, None], axis=1)[:, 0]
            after = self._next(rider, state, token)
            is_new = place < end
            kept = jax.tree.map(
                lambda new, old: jnp.where(is_new.reshape((-1,) + (1,) * (new.ndim - 1)), new, old), after, state
            )
            return place + 1, kept

        return jax.lax.while_loop(lambda carry: (carry[0] < end).any(), step, (first, state))[1]


def begin_riders(each: tuple[Rider, ...], cfg: ModelConfig, capacity: Capacity) -> Riders:
    """Riders of sequences to which nothing was brought."""
    states = {}
    for rider in each:
        first = jax.tree.map(jnp.asarray, rider.init(cfg, capacity))
        followed = rider.follow is not None
        states[rider.name] = Followed(first=first, now=jax.tree.map(jnp.copy, first)) if followed else first
    shared = {rider.name: jax.tree.map(jnp.asarray, rider.shared(cfg)) for rider in each}
    return Riders(states=states, shared=shared, each=each)


class Brought(NamedTuple):
    """Checked values of a request for riders."""

    facts: dict[str, Any]  # JSON values by rider, for digests; empty if it brings nothing
    page_key: bytes | None = b""  # what its keys and values depend on besides tokens; None if it shares no pages
    is_read: bool = False  # a rider reads its prompt


NOTHING_BROUGHT = Brought({})


def brought(riders: Sequence[Rider], request: Any) -> Brought:
    """Checks the values of `request` for `riders`; raises `InputError` for a value that no rider takes."""
    takes = {rider.name: rider for rider in riders if rider.takes_values}
    if unknown := [name for name in request.brings if name not in takes]:
        names = f"those of its riders {tuple(takes)}" if takes else "none, because it has no riders that take values"
        raise InputError(f"the request brings {unknown[0]!r}, but the names that this engine takes are {names}")
    facts = {name: takes[name].facts(value) for name, value in sorted(request.brings.items())}
    reader = reader_of(riders)
    if reader is not None and reader.reader is not None and reader.reader.reads(request):
        return Brought(facts, None, is_read=True)
    keys = {rider.name: rider.page_key(request) for rider in riders}
    if None in keys.values():
        return Brought(facts, None)
    named = [name.encode() + b"\0" + key + b"\0" for name, key in sorted(keys.items()) if key]
    return Brought(facts, b"".join(named))


def reader_of(riders: Sequence[Rider]) -> Rider | None:
    """The one of `riders` that reads prompts, if there is one."""
    return next((rider for rider in riders if rider.reader is not None), None)
