"""The settings of an engine."""

import dataclasses
from collections.abc import Sequence

from detspec.choices import THOUGHTS
from detspec.config import is_count
from detspec.errors import InputError
from detspec.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine; of all this, only `schedule` decides the bits of a deterministic request.

    Attributes:
        max_requests: most samples in flight.
        max_len: positions that a request may take, prompt and new tokens together.
        num_pages: cache pages that requests share, of `Numerics.page` positions each; by default enough for `max_requests` of
            `max_len`. With fewer, requests wait, or start over when pages run out; their bits stay the same.
        prefix_sharing: requests that begin with the same tokens share the pages that hold them.
        method: name of the draft source that fills the row budget of deterministic requests. "none": one canonical row each, no
            draft. "ngram": prompt lookup, what followed the last tokens where they stood before. "int8": the model with its
            matrices rounded to int8, which take half of its memory in bfloat16 once more. "self": the model's own fast path. A
            name of the engine's `drafters`, such as a draft model. Several names: whichever of these commits most tokens per
            second with what is live, from measured times and acceptance. "auto": several, which are "none", "ngram", "self" and
            `drafters`, but not "int8", because of its memory.
        num_speculative_tokens: most drafted tokens of a sequence in a step; one less than a power of two.
        prompt_lookup_min: fewest tokens that prompt lookup must find again.
        prompt_lookup_max: most tokens that it compares; of the longest matches it takes the latest.
        max_stop_ids: stop tokens of one request, the model's own included, for which programs have room from the start. A
            request with more makes the room grow to the next power of two: other programs are compiled and certified, once.
        max_logit_bias: tokens of one request's `logit_bias` for which programs have room, as `max_stop_ids`.
        segment_steps: most tokens that a sequence gains before the host looks; 1 while a request is streamed. None is 64, or up
            to 512 where steps are so short that looking would take more than 2 % of the time.
        max_prefill_passes: most canonical passes over prompts that decoding sequences wait for between two steps. 1 minimises
            latency; larger values raise throughput by letting sequences start decoding together.
        thoughts: draft source for the thoughts of a model that thinks. "none": that there are none, as published. "self": the
            model reads ahead, one chunk of each prompt after the other, on its cheapest shape.
        schedule: numerics and budget of the canonical pass; the device's default if None.
        compile_cache: keep compiled programs in the user's cache folder, so that the next process starts fast.
    """

    max_requests: int = 32
    max_len: int = 1024
    num_pages: int | None = None
    prefix_sharing: bool = True
    method: str | Sequence[str] = "auto"
    num_speculative_tokens: int = 15
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    max_stop_ids: int = 16
    max_logit_bias: int = 64
    segment_steps: int | None = None
    max_prefill_passes: int = 1
    thoughts: str = "none"
    schedule: Schedule | None = None
    compile_cache: bool = True

    @property
    def methods(self) -> tuple[str, ...]:
        """The names in `method`."""
        return (self.method,) if isinstance(self.method, str) else tuple(self.method)

    @property
    def chooses(self) -> bool:
        """Whether the engine chooses among several draft sources."""
        return self.method == "auto" or len(self.methods) > 1

    def __post_init__(self) -> None:
        lookups = ("prompt_lookup_min", "prompt_lookup_max")
        given = () if self.segment_steps is None else ("segment_steps",)
        lengths = ("max_len", "num_speculative_tokens", *given, "max_prefill_passes", *lookups)
        for field in ("max_requests", *lengths, "max_stop_ids", "max_logit_bias"):
            if not is_count(getattr(self, field)):
                raise InputError(f"EngineConfig.{field} must be an integer of at least 1, got {getattr(self, field)!r}")
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise InputError(
                f"prompt_lookup_max ({self.prompt_lookup_max}) must be at least prompt_lookup_min ({self.prompt_lookup_min})"
            )
        if self.num_pages is not None and (not isinstance(self.num_pages, int) or self.num_pages < 1):
            raise InputError(f"EngineConfig.num_pages must be an integer of at least 1, or None, got {self.num_pages!r}")
        if not isinstance(self.method, str) and isinstance(self.method, Sequence):  # a list, as in a file of JSON
            object.__setattr__(self, "method", tuple(self.method))
        names = self.methods if isinstance(self.method, Sequence) else ()
        is_list_of_names = all(isinstance(name, str) for name in names) and len(set(names)) == len(names) > 0
        if not is_list_of_names or ("auto" in names and len(names) > 1):
            accepted = '"auto" or the name of a draft source, or different names of several'
            raise InputError(f"EngineConfig.method must be {accepted}, got {self.method!r}")
        if self.thoughts not in THOUGHTS:
            raise InputError(f"EngineConfig.thoughts must be one of {THOUGHTS}, got {self.thoughts!r}")
        window = self.num_speculative_tokens + 1
        if window & (window - 1):
            raise InputError(f"num_speculative_tokens must be one less than a power of two (1, 3, 7, ...), got {window - 1}")
        if window > self.max_len:
            raise InputError(f"a window of {window} tokens is larger than the cache's max_len ({self.max_len})")
