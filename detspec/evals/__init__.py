"""What a user measures: certification, benchmarks, traces, the demonstration."""
