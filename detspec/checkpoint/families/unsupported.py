"""Model types that are well known and not supported: the part that is missing here -> which they are."""

MISSING = {
    "latent attention": """
        deepseek_v2 deepseek_v3 deepseek_vl_v2 kimi_k2 kimi_k25 kimi_vl glm4_moe_lite minicpm3 longcat_flash mistral4
    """,
    "sparse attention": """
        deepseek_v32 deepseek_v4 glm_moe_dsa minimax_m3 minimax_m3_vl minicpm4
    """,
    "recurrent layers": """
        qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen3_next nemotron_h falcon_h1 falcon_mamba lfm2 lfm2_moe lfm2_vl
        kimi_linear olmo_hybrid mamba mamba2 jamba bamba zamba zamba2 rwkv recurrent_gemma minimax
    """,
    "per-layer embeddings": """
        gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified
    """,
    "chunked attention": """
        llama4 llama4_text
    """,
    "queries that are scaled by their position": """
        ministral3
    """,
    "attention with linear biases": """
        bloom mpt
    """,
    "norms without weights": """
        nanochat
    """,
    "an activation with weights of its own": """
        apertus
    """,
    "an encoder": """
        t5 mt5 umt5 bart mbart whisper t5gemma bert roberta modernbert
    """,
}
MISSING_PARTS = {model_type: part for part, model_types in MISSING.items() for model_type in model_types.split()}
