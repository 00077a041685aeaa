"""llama.cpp's server inside this process, in a wheel that is built for many CPUs; one thread waits for each request."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xllamacpp as lib

from race_systems import Generate, Limits, Prompts


def start(folder: Path, limits: Limits) -> Generate:
    """A server on `folder/model.gguf` with a slot for each request and no prompt cache."""
    params = lib.CommonParams()
    params.model.path = str(folder / "model.gguf")
    params.n_parallel = limits.max_requests
    params.n_ctx = limits.max_requests * -(-limits.max_len // 256) * 256
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = limits.num_threads
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.fit_params = False
    params.warmup = False
    server = lib.Server(params)
    pool = ThreadPoolExecutor(limits.max_requests)

    def complete(prompt: list[int], new_tokens: int) -> list[int]:
        request = {
            "prompt": prompt,
            "n_predict": new_tokens,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": False,
        }
        text = server.handle_completions(request)["choices"][0]["text"]
        return [int(number) for number in text.split("t")[1:]]  # "t405t17" is 405 and 17

    def generate(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        return list(pool.map(lambda prompt: complete(list(prompt), new_tokens), prompts))

    return generate
