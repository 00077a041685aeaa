"""Hugging Face transformers on torch, with torch's own attention."""

from pathlib import Path

import torch
import transformers

from race_systems import Generate, Limits, Prompts


def start(folder: Path, limits: Limits, *, precision: str) -> Generate:
    """The model of `folder/hf` with weights of `precision`."""
    torch.set_num_threads(limits.num_threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "hf", dtype=getattr(torch, precision), attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None  # every request has the same length

    def generate(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            answer = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, pad_token_id=0
            )
        return answer[:, ids.shape[1] :].tolist()

    return generate
