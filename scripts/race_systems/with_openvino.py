"""OpenVINO GenAI with continuous batching."""

from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from race_systems import Generate, Limits, Prompts

CACHE_GB = 1
PASS_TOKENS = 4096


def start(folder: Path, limits: Limits, *, precision: str) -> Generate:
    """A pipeline on `folder/openvino` that computes in `precision`, "bf16" or "f32"."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_batched_tokens = PASS_TOKENS
    scheduler.max_num_seqs = limits.max_requests
    scheduler.enable_prefix_caching = False
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": "f16",  # the default where nothing is quantized
        "INFERENCE_NUM_THREADS": limits.num_threads,
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder / "openvino"), scheduler, "CPU", properties)

    def generate(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        ids = [openvino.Tensor(np.asarray([prompt], np.int64)) for prompt in prompts]
        return [list(result.m_generation_ids[0]) for result in pipeline.generate(ids, [config] * len(ids))]

    return generate
