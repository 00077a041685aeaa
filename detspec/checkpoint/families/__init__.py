"""Model families of Hugging Face: what the keys of their `config.json` mean, and how their tensors are called.

A new family is one more `Family`. Weights are not converted: matrices are `[out, in]` here as in every checkpoint, so a table
of names is enough.
"""

from detspec.checkpoint.families.dense import GEMMA2, GEMMA3, LLAMA, MISTRAL, QWEN2, QWEN3
from detspec.checkpoint.families.family import Family
from detspec.checkpoint.families.llama_like import ARCEE, ERNIE, GEMMA, GRANITE, HELIUM, HUNYUAN, MINISTRAL, SEED_OSS, SMOLLM3
from detspec.checkpoint.families.post_norm import EXAONE4, OLMO2, OLMO3
from detspec.checkpoint.families.wrappers import WRAPPERS as WRAPPERS

# A model that several of them can say is written as the first.
FAMILIES: tuple[Family, ...] = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3),
    *(GEMMA, SMOLLM3, GRANITE, SEED_OSS, HUNYUAN, ERNIE, HELIUM, ARCEE, MINISTRAL),
    *(OLMO2, OLMO3, EXAONE4),
)
