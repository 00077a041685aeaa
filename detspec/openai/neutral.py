"""Fields of request bodies that are not implemented, and the values of each that ask for nothing.

A client may send every field that its own library has, most of them at their defaults. Such values are accepted.
"""

from collections.abc import Sequence
from typing import Any

# Null asks for nothing, too: some have no other such value.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),  # without functions there is none to call
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),  # of a chat
    "flat_logprobs": (False,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "prompt_embeds": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    # SGLang's
    "custom_logit_processor": (),
    "custom_params": (),
    "ebnf": (),
    "json_schema": (),
    "lora_path": (),
    "no_stop_trim": (False,),
    "regex": (),
    "return_hidden_states": (False,),
    "separate_reasoning": (True, False),  # a text is never parted, so both are the same
    "session_params": (),
    "stop_regex": ([],),
    "stream_reasoning": (True,),
    # TGI's
    "adapter_id": (),
    "grammar": (),
    "tool_prompt": (),
    "truncate": (),
    "typical_p": (1,),
    "watermark": (False,),
}
NEUTRAL_OPTIONS: dict[str, tuple[Any, ...]] = {"include_obfuscation": (False,)}  # of `stream_options`; OpenAI's


def asks_for_nothing(value: Any, neutral: Sequence[Any]) -> bool:
    """Whether `value` is one of `neutral`: 1.0 is 1, but true is not."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
