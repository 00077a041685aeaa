"""Keys of a `config.json` that change no logits in any family, each with the reason why."""

# Keys that do not change the logits in any family: where they come from, or why they are passed over -> which they are. Keys of
# which some values would matter are not here: `FIXED` names the one value that is supported. `pretraining_tp` is in how many
# parts transformers 4 cut matrices.
INERT = {
    "they name the family, which is looked up first": """
        model_type architectures
    """,
    "where a checkpoint comes from and which program wrote it": """
        _name_or_path _model_name_or_path name_or_path _commit_hash transformers_version finetuning_task unsloth_fixed
        unsloth_version is_llama_config
    """,
    "code and settings that other programs would take; the architecture is one of those that are known here": """
        auto_map transformers.js_config
    """,
    "the tokenizer's; eos_token_id is read where a text ends": """
        bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id tokenizer_class prefix
        model_max_length tokenizer_model_max_length tokenizer_padding_side
    """,
    "lengths of training (LLaMA 1 and its fine-tunes); max_position_embeddings is the one that models have": """
        max_sequence_length max_seq_len seq_length
    """,
    "settings of generation from before there was a generation_config.json; a request says how it is sampled": """
        max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
        temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff penalty_alpha repetition_penalty
        encoder_repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
        num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
        remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens use_cache
        cache_implementation
    """,
    "training alone: initial weights, dropout, losses, memory of gradients": """
        attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout hidden_dropout_prob
        attention_probs_dropout_prob initializer_range gradient_checkpointing use_gradient_checkpointing
        tf_legacy_loss keys_to_ignore_at_inference
    """,
    "classifiers' and tasks' settings, which transformers writes for every model; a classifier has another architecture": """
        id2label label2id num_labels _num_labels problem_type task_specific_params
    """,
    "how transformers computes the same numbers": """
        attn_implementation _attn_implementation _attn_implementation_internal _attn_implementation_autoset
        _flash_attn_2_enabled use_flash_attention_2 chunk_size_feed_forward pretraining_tp torchscript use_bfloat16
    """,
    "what a call of transformers returns": """
        output_attentions output_hidden_states return_dict use_return_dict
    """,
    "whether an encoder of the BERT kind may look ahead; these families never do": """
        is_decoder
    """,
}
INERT_KEYS = {key: reason for reason, keys in INERT.items() for key in keys.split()}
