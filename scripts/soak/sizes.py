"""How much the soak's trials are made of."""

from typing import NamedTuple


class Size(NamedTuple):
    """The models and how many requests there are for them.

    Attributes:
        with_shipped: whether the shipped model takes part, next to small random ones.
        engine_requests: requests for the engines of small models; half as many for the shipped one.
        num_shapes: shapes of engines; each needs programs of its own, which take longer to make than a trial.
        num_jobs: jobs for the small model.
        job_requests: requests of each; a quarter as many in the shipped model's job.
        num_options: of the options that starts choose from, so many are used.
    """

    with_shipped: bool
    engine_requests: int
    num_shapes: int
    num_jobs: int
    job_requests: int
    num_options: int | None


SIZES = {"full": Size(True, 96, 16, 4, 240, None), "tiny": Size(False, 16, 1, 1, 12, 2)}
