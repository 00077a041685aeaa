"""Counts of the server, as Prometheus reads them; names are vLLM's where it has them."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from detspec.engine.request import Update
from detspec.riders.counters import Stats

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
COUNTED = {
    "spec_decode_num_drafts": ("num_verify_passes", "canonical passes that verified a span of a text"),
    "spec_decode_num_draft_tokens": ("num_draft_tokens", "drafted tokens that were read"),
    "spec_decode_num_accepted_tokens": ("num_accepted_draft_tokens", "drafted tokens that were accepted"),
    "rollbacks": ("num_rollbacks", "passes after which a cache was set back"),
    "recomputed_tokens": ("num_recomputed_tokens", "drafted tokens from the first rejected one on"),
}


class Metrics:
    """Counters, gauges and histograms of one server."""

    def __init__(self) -> None:
        """All at zero."""
        self.registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"detspec:{name}", text, registry=self.registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"detspec:{name}", text, labels, registry=self.registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"detspec:{name}_seconds", text, buckets=SECONDS, registry=self.registry)

        self._running = gauge("num_requests_running", "samples that have a place")
        self._waiting = gauge("num_requests_waiting", "samples that wait for a place")
        self._cache = gauge("kv_cache_usage_perc", "share of the cache pages that requests hold")
        self._compiling = gauge("num_programs_compiling", "programs that are still to be made while requests run")
        self._prompt_tokens = counter("prompt_tokens", "tokens of prompts")
        self._new_tokens = counter("generation_tokens", "tokens that were generated or given to be scored")
        self._deterministic = counter("deterministic_generation_tokens", "those of them that a canonical pass decided")
        self._ended = counter("request_success", "samples that have ended", ("finished_reason",))
        self._first = seconds("time_to_first_token", "from the call to the first token, of streams")
        self._between = seconds("inter_token_latency", "between two tokens, of streams")
        self._whole = seconds("e2e_request_latency", "from the call to the end of a sample")
        self._counted = {field: counter(name, text) for name, (field, text) in COUNTED.items()}

    def observe(self, update: Update, *, since_call: float, since_last: float | None, streamed: bool) -> None:
        """Counts `update`, so many seconds after the call, and after the last news of the sample if there were any."""
        if update.token_ids and streamed:
            if since_last is None:
                self._first.observe(since_call)
            else:
                for _ in update.token_ids:
                    self._between.observe(since_last / len(update.token_ids))
        if (completion := update.completion) is None:
            return
        self._whole.observe(since_call)
        self._ended.labels(finished_reason=completion.finish_reason).inc()
        self._prompt_tokens.inc(len(completion.prompt_token_ids) if completion.index == 0 else 0)
        self._new_tokens.inc(len(completion.token_ids))
        self._deterministic.inc(len(completion.token_ids) if update.request.sampling.deterministic else 0)
        self._add(completion.stats)

    def page(self, *, num_running: int, num_waiting: int, cache_usage: float, num_compiling: int) -> bytes:
        """The text that Prometheus reads; the arguments are what the gauges show."""
        self._running.set(num_running)
        self._waiting.set(num_waiting)
        self._cache.set(cache_usage)
        self._compiling.set(num_compiling)
        return generate_latest(self.registry)

    def _add(self, stats: Stats) -> None:
        for field, counter in self._counted.items():
            counter.inc(getattr(stats, field))
