"""How attention computes the score of a query and a key."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Scores:
    """The static options of a layer's scores."""

    scale: float  # factor of the product of query and key
    cap: float | None = None  # scaled products are squashed into `+-cap`, see `softcap`; None leaves them
    sliding_window: int | None = None  # number of last positions that a query attends to, its own included; None is all
    alibi: bool = False  # each head lowers its capped scores by its slope times the distance, see `alibi_slopes`
    lse: bool = False  # the logarithm of each query's sum of exponentiated scores is wanted, too
