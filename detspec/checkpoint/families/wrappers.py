"""Models with a text part and towers for images: the text part is one of the families, the towers are named and left out."""

import dataclasses
import json
import re
from typing import Any

from detspec.checkpoint.families.family import Family, HfConfig, respelled
from detspec.checkpoint.families.inert import INERT_KEYS

# Keys that transformers reads next to `text_config`, and that the text part takes over.
SHARED_KEYS = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "compression_config")


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """How a `model_type` of several parts holds its text part: a config of its own, and tensors whose names begin otherwise.

    Attributes:
        model_type: the value of the config key `model_type`.
        architecture: the class in transformers that wrote the checkpoints.
        defaults: values of keys of `text_config` that may be left out here, and not in a folder of the text part alone.
        prefixes: for each way to write the names of tensors, how those of the text part begin there instead.
        towers: how names of the other tensors begin.
        inert: keys about the towers.
        image_ids: keys that hold ids of tokens that stand for images.
        image_tokens: texts of such tokens, as far as the tokenizer has them.
    """

    model_type: str
    architecture: str
    defaults: dict[str, Any]
    prefixes: tuple[dict[str, str], ...]
    towers: tuple[str, ...]
    inert: frozenset[str]
    image_ids: tuple[str, ...]
    image_tokens: tuple[str, ...]

    def around(self, family: Family) -> Family:
        """The `family` of the text part, with the names that its tensors have here; towers are passed over."""
        towers = "|".join(re.escape(tower) for tower in self.towers)
        return dataclasses.replace(
            family, variants=tuple(respelled(prefix) for prefix in self.prefixes), towers=rf"({towers})\..+"
        )

    def text_part(self, hf_config: HfConfig, problems: list[str]) -> HfConfig:
        """The config of the text part; what is unknown around it is a problem."""
        known = {"text_config", "vision_config", *SHARED_KEYS, *self.inert, *self.image_ids, *INERT_KEYS}
        if unknown := {key: value for key, value in hf_config.items() if key not in known and value is not None}:
            problems.append(
                f"config.json: unknown keys {json.dumps(unknown)} next to text_config; they may change the computation"
            )
        text = hf_config.get("text_config")
        if not isinstance(text, dict):
            problems.append(f"config.json: text_config must be a JSON object, got {json.dumps(text)}")
            return {}
        shared = {key: hf_config[key] for key in SHARED_KEYS if hf_config.get(key) is not None}
        return {**self.defaults, **text, **shared}


LLAVA_PREFIXES = (
    {"model.": "model.language_model."},  # transformers 5
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},  # published folders
)
LLAVA_TOWERS = tuple(f"{prefix}{tower}" for prefix in ("", "model.") for tower in ("vision_tower", "multi_modal_projector"))

GEMMA3_IMAGES = Wrapper(
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    defaults={"model_type": "gemma3_text", "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4},
    prefixes=LLAVA_PREFIXES,
    towers=LLAVA_TOWERS,
    inert=frozenset({"mm_tokens_per_image"}),
    image_ids=tuple(f"{what}_token_{key}" for what in ("image", "boi", "eoi") for key in ("index", "id")),
    image_tokens=("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
)
MISTRAL3_IMAGES = Wrapper(
    model_type="mistral3",
    architecture="Mistral3ForConditionalGeneration",
    defaults={},
    prefixes=LLAVA_PREFIXES,
    towers=LLAVA_TOWERS,
    inert=frozenset({"multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_feature_layer"}),
    image_ids=("image_token_index", "image_token_id"),
    image_tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
)
WRAPPERS = (GEMMA3_IMAGES, MISTRAL3_IMAGES)
