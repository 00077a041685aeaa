"""Model families of Hugging Face: what the keys of their `config.json` mean, and how their tensors are called.

A new family is one more `Family`. Weights are not converted: matrices are `[out, in]` here as in every checkpoint, so a table
of names is enough.
"""

from detspec.checkpoint.families.corrected_experts import ERNIE_MOE, GLM4_MOE, MINIMAX_M2
from detspec.checkpoint.families.dense import GEMMA2, GEMMA3, LLAMA, MISTRAL, QWEN2, QWEN3
from detspec.checkpoint.families.experts import GRANITE_MOE, HUNYUAN_MOE, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from detspec.checkpoint.families.family import Family
from detspec.checkpoint.families.gpt_oss import GPT_OSS
from detspec.checkpoint.families.layer_norm import GPT2, GPT_NEOX, NEMOTRON, OPT, STARCODER2
from detspec.checkpoint.families.llama_like import (
    ARCEE,
    ERNIE,
    GEMMA,
    GRANITE,
    GRANITE4,
    HELIUM,
    HUNYUAN,
    MINISTRAL,
    PHI3,
    SEED_OSS,
    SMOLLM3,
)
from detspec.checkpoint.families.post_norm import EXAONE4, GLM4, OLMO2, OLMO3
from detspec.checkpoint.families.wrappers import WRAPPERS as WRAPPERS

# A model that several of them can say is written as the first.
FAMILIES: tuple[Family, ...] = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3),
    *(GEMMA, SMOLLM3, GRANITE, SEED_OSS, HUNYUAN, ERNIE, HELIUM, ARCEE, MINISTRAL, PHI3, GRANITE4),
    *(OLMO2, OLMO3, EXAONE4, GLM4),
    *(NEMOTRON, STARCODER2, GPT2, GPT_NEOX, OPT),
    *(QWEN3_MOE, QWEN2_MOE, MIXTRAL, OLMOE, GRANITE_MOE, GLM4_MOE, MINIMAX_M2, ERNIE_MOE, HUNYUAN_MOE, GPT_OSS),
)
