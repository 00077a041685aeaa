"""Names that both the library and the command line accept; imports nothing, so that `--help` is quick."""

METHODS = ("auto", "ngram", "int8", "self", "none", "draft_model")  # `EngineConfig.method` is some of them
THOUGHTS = ("none", "self")  # `EngineConfig.thoughts`
LOGPROBS_MODES = ("raw", "processed", "tempered")  # `SamplingParams.logprobs_mode`
ALIGNMENTS = ("free", "window")  # `Numerics.alignment`
ACTIVATION_BITS = {"integer": 15, "integer8": 8}  # of models of integers alone
WEIGHTS = ("int8", *ACTIVATION_BITS)  # `ModelConfig.weights`, besides None
CACHE_DTYPES = ("float32", "bfloat16", "float16", "int8")  # `Numerics.cache_dtype`
IMPLEMENTATIONS = ("reference", "cpu", "pallas_tpu", "pallas_gpu")  # `Numerics.implementation`
LINEARS = ("xla", "pinned")  # `Numerics.linear`
BENCH_MODES = ("ordinary", "canonical", "batch_invariant", "ngram", "dvr", "auto")  # what `detspec bench` measures
