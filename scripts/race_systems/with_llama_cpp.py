"""llama.cpp by its C interface: every pass holds all sequences, and the likeliest tokens are chosen here."""

from pathlib import Path

import llama_cpp as lib
import numpy as np

from race_systems import Generate, Limits, Prompts

PASS_TOKENS = 2048  # most tokens of one call; llama.cpp's default


def start(folder: Path, limits: Limits) -> Generate:
    """A context on `folder/model.gguf` with a sequence for each request."""
    lib.llama_backend_init()
    model_params = lib.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(str(folder / "model.gguf").encode(), model_params)
    params = lib.llama_context_default_params()
    params.n_ctx = limits.max_requests * -(-limits.max_len // 256) * 256
    params.n_seq_max = limits.max_requests
    params.n_batch = PASS_TOKENS
    params.n_threads = params.n_threads_batch = limits.num_threads
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp made no context")
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(PASS_TOKENS, 0, 1)

    def decode(tokens: np.ndarray, first_row: int, first_pos: int) -> np.ndarray:
        """Reads `tokens` [B, T] into the sequences from `first_row` on; returns the likeliest next tokens [B]."""
        rows, length = tokens.shape
        number = batch.n_tokens = rows * length
        np.ctypeslib.as_array(batch.token, (number,))[:] = tokens.ravel()
        np.ctypeslib.as_array(batch.pos, (number,))[:] = np.tile(np.arange(first_pos, first_pos + length), rows)
        np.ctypeslib.as_array(batch.n_seq_id, (number,))[:] = 1
        np.ctypeslib.as_array(batch.logits, (number,))[:] = np.tile(np.arange(length) == length - 1, rows)
        for i in range(number):
            batch.seq_id[i][0] = first_row + i // length
        if status := lib.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        return np.ctypeslib.as_array(lib.llama_get_logits(context), (rows, vocab_size)).argmax(axis=1)

    def generate(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        lib.llama_memory_clear(lib.llama_get_memory(context), False)
        ids = np.asarray(prompts, np.int32)
        rows_of_pass = max(1, PASS_TOKENS // ids.shape[1])
        firsts = range(0, len(ids), rows_of_pass)
        chosen = [np.concatenate([decode(ids[first : first + rows_of_pass], first, 0) for first in firsts])]
        for pos in range(ids.shape[1], ids.shape[1] + new_tokens - 1):
            chosen.append(decode(chosen[-1][:, None], 0, pos))
        return np.stack(chosen, axis=1).tolist()

    return generate
