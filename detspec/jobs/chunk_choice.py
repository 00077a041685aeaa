"""Which chunk a worker does next: pure choices over what it sees in the folder.

1. A chunk that has no claim.
2. One whose workers were all killed or frozen.
3. One to be checked, best on another host than those who did it, else by another worker; by one of them if no other lives.
4. With nothing else to do, one that others are about to do: stragglers get help.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Sequence

from detspec.jobs.chunk_folder import Claim, View, host_of

MOST_LIVE = 3  # workers at one chunk


@dataclasses.dataclass(frozen=True)
class Take:
    """A chunk to claim.

    Attributes:
        chunk: its number.
        attempt: number of the claim.
        check: do it once more to compare, though it is done.
        others: claims of other workers, whose lines need not be done again.
    """

    chunk: int
    attempt: int
    check: bool = False
    others: tuple[Claim, ...] = ()


def choose(
    view: View,
    worker: str,
    num_chunks: int,
    *,
    first: int,
    to_check: Sequence[int] = (),
    authors: Callable[[int], Collection[str]] = lambda chunk: (),
) -> Take | None:
    """What `worker` takes by choices 1 to 3; None for nothing.

    All chunks before `first` have claims. `to_check` are the chunks that have to be done twice, `authors` those who did one.
    """
    for chunk in range(first, num_chunks):
        if chunk not in view.done and chunk not in view.claims:
            return Take(chunk, 0)
    for chunk, claims in sorted(view.claims.items()):
        if not any(claim.is_live or claim.worker == worker for claim in claims):
            return Take(chunk, len(claims), others=claims)
    for chunk in to_check:
        if chunk in view.done and chunk not in view.checked and may_check(worker, authors(chunk), view):
            claims = view.checks.get(chunk, ())
            if not any(claim.is_live or claim.worker == worker for claim in claims):
                return Take(chunk, len(claims), check=True)
    return None


def choose_to_help(view: View, worker: str) -> Take | None:
    """The chunk of other workers that `worker` may do as well, that with the fewest workers; None for none."""
    candidates = []
    for chunk, claims in view.claims.items():
        num_live = sum(claim.is_live for claim in claims)
        if num_live < MOST_LIVE and all(claim.worker != worker for claim in claims):
            candidates.append((num_live, -chunk, Take(chunk, len(claims), others=claims)))
    return min(candidates, key=lambda candidate: candidate[:2])[2] if candidates else None


def may_check(worker: str, authors: Collection[str], view: View) -> bool:
    """Whether `worker` may do again what `authors` did: one of them only if no other worker lives, another one on their hosts
    only if none on other hosts is free."""
    if worker in authors:
        return view.live <= {*authors, worker}
    hosts = set(map(host_of, authors))
    if host_of(worker) not in hosts:
        return True
    busy = {claim.worker for claims in (*view.claims.values(), *view.checks.values()) for claim in claims}
    return not any(host_of(name) not in hosts for name in view.live - busy)


def is_to_check(chunk: int, share: float, job: str) -> bool:
    """Whether a chunk of the `job` is among the `share` that is done twice; the same for all workers, and for larger shares."""
    digest = hashlib.blake2b(f"{job}/{chunk}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
