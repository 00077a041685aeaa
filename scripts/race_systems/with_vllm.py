"""vLLM on a CPU, in this process, with compiled passes."""

import os
from pathlib import Path

from race_systems import Generate, Limits, Prompts

CACHE_GB = 1  # the least that can be asked for; as many blocks as all requests need are made of it
BLOCK = 128  # positions


def start(folder: Path, limits: Limits) -> Generate:
    """vLLM on `folder/hf` in bfloat16, without prefix caching; torch compiles its passes."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{limits.num_threads - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "HF_HUB_OFFLINE": "1",
    }
    import vllm

    model = vllm.LLM(
        str(folder / "hf"),
        dtype="bfloat16",
        max_model_len=limits.max_len,
        max_num_seqs=limits.max_requests,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        block_size=BLOCK,
        num_gpu_blocks_override=limits.max_requests * -(-limits.max_len // BLOCK) + 1,
    )

    def generate(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [list(request.outputs[0].token_ids) for request in model.generate(requests, sampling, use_tqdm=False)]

    return generate
