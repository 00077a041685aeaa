"""detspec's engine, deterministic or ordinary, as it chooses its draft source by itself."""

from pathlib import Path

from detspec import Engine, EngineConfig, Needs, SamplingParams, default_schedule, load
from race_systems import Generate, Limits, Prompts


def start(folder: Path, limits: Limits, *, deterministic: bool) -> Generate:
    """An engine on `folder/hf` that shares no prefixes, because each prompt is generated from many times."""
    max_len = max(limits.max_len, default_schedule().budget.window)
    engine = Engine(load(folder / "hf"), EngineConfig(max_requests=limits.max_requests, max_len=max_len, prefix_sharing=False))

    def generate(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True, deterministic=deterministic)
        engine.prepare(len(prompts), Needs.of([sampling]))
        return [list(completion.token_ids) for completion in engine.generate(prompts, sampling)]

    return generate
