"""How attention computes the score of a query and a key."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Scores:
    """The static options of a layer's scores.

    Attributes:
        scale: factor of the product of query and key.
        cap: scaled products are squashed into `+-cap`, see `softcap`; None leaves them.
        sliding_window: number of last positions that a query attends to, its own included; None is all.
        alibi: each head lowers its capped scores by its slope times the distance, see `alibi_slopes`.
    """

    scale: float
    cap: float | None = None
    sliding_window: int | None = None
    alibi: bool = False
