"""How an engine runs."""

import dataclasses

from detspec.choices import GUESSES, METHODS
from detspec.errors import InputError
from detspec.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How an engine runs; none of it changes what a deterministic request commits, but for `schedule`.

    Attributes:
        max_requests: most requests in flight.
        max_len: positions a request may take, prompt and new tokens together.
        num_pages: cache pages that requests share, of `Numerics.page` positions each; by default enough for all at `max_len`.
            With fewer, requests wait, or start over when pages run out; their bits stay what they are.
        prefix_sharing: requests that begin with the same tokens share the pages that hold them.
        method: what fills the row budget of deterministic requests. "none": one canonical row each, no draft. "self": the
            model's own fast path drafts, windows of `num_speculative_tokens + 1`. "auto": whichever commits more tokens per
            second with the rows that are live, from measured times.
        num_speculative_tokens: drafted tokens a window under "self" and "auto"; one less than a power of two.
        max_stop_ids: room for stop tokens of one request.
        max_logit_bias: room for tokens of one request's `logit_bias`.
        segment_steps: most tokens a row gains before the host looks.
        max_prefill_passes: most canonical passes over prompts that decoding rows wait for between two steps. 1 is best for
            whoever waits for tokens; more are better for throughput, because rows decode together sooner.
        guesses: who guesses the thoughts of a model that thinks: "trivial", that there are none, as published; "sequential", a
            cheap pass over one chunk of each prompt after the other.
        schedule: of the canonical pass; the device's default if None.
    """

    max_requests: int = 32
    max_len: int = 1024
    num_pages: int | None = None
    prefix_sharing: bool = True
    method: str = "auto"
    num_speculative_tokens: int = 15
    max_stop_ids: int = 16
    max_logit_bias: int = 64
    segment_steps: int = 64
    max_prefill_passes: int = 1
    guesses: str = "trivial"
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        for field in (
            "max_requests",
            "max_len",
            "num_speculative_tokens",
            "max_stop_ids",
            "max_logit_bias",
            "segment_steps",
            "max_prefill_passes",
        ):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"EngineConfig.{field} must be an integer of at least 1, got {value!r}")
        if self.num_pages is not None and (not isinstance(self.num_pages, int) or self.num_pages < 1):
            raise InputError(f"EngineConfig.num_pages must be an integer of at least 1, or None, got {self.num_pages!r}")
        if self.method not in METHODS:
            raise InputError(f"EngineConfig.method must be one of {METHODS}, got {self.method!r}")
        if self.guesses not in GUESSES:
            raise InputError(f"EngineConfig.guesses must be one of {GUESSES}, got {self.guesses!r}")
        window = self.num_speculative_tokens + 1
        if window & (window - 1):
            raise InputError(
                f"num_speculative_tokens must be one less than a power of two (1, 3, 7, ...), got {self.num_speculative_tokens}"
            )
        if window > self.max_len:
            raise InputError(f"a window of {window} tokens is larger than the cache's max_len ({self.max_len})")
