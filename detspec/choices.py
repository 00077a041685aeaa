"""Names that both the library and the command line accept; imports nothing, so that `--help` is quick."""

METHODS = ("auto", "self", "none")  # `EngineConfig.method`
GUESSES = ("trivial", "sequential")  # `EngineConfig.guesses`
LOGPROBS_MODES = ("raw", "processed")  # `SamplingParams.logprobs_mode`
ALIGNMENTS = ("free", "window")  # `Schedule.alignment`
LINEARS = ("xla", "pinned")  # `Schedule.linear`
BENCH_MODES = ("fast", "canonical", "batch_invariant", "dvr", "auto")  # what `detspec bench` measures
