"""Model families of Hugging Face: what the keys of their `config.json` mean, and how their tensors are called.

A new family is one more `Family`. Weights are not converted: matrices are `[out, in]` here as in every checkpoint, so a table
of names is enough.
"""

from detspec.checkpoint.families.dense import GEMMA2, GEMMA3, LLAMA, MISTRAL, QWEN2, QWEN3
from detspec.checkpoint.families.family import Family
from detspec.checkpoint.families.wrappers import WRAPPERS as WRAPPERS

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3)
