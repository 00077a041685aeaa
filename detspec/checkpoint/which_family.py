"""Which family a `config.json` is of, or the text part that it describes; and why it is of none."""

from typing import TYPE_CHECKING, Any

from detspec.checkpoint.families import FAMILIES, WRAPPERS
from detspec.checkpoint.families.family import Family, HfConfig
from detspec.checkpoint.families.unsupported import MISSING_PARTS
from detspec.checkpoint.families.wrappers import Wrapper

if TYPE_CHECKING:
    from detspec.checkpoint.tokenizer import Tokenizer


def find_family(hf_config: HfConfig, problems: list[str]) -> Family | None:
    """The family that `model_type` and `architectures` name, or None and a problem."""
    model_type = hf_config.get("model_type")
    architectures = hf_config.get("architectures")
    for family in FAMILIES:
        if model_type == family.model_type and architectures in (None, [], [family.architecture]):
            return family
    problems.append(f"config.json: {refusal(model_type, architectures)}")
    return None


def refusal(model_type: Any, architectures: Any) -> str:
    """Why there is no family for these: the part that is missing here, where it is known."""
    names = {family.model_type: family.architecture for family in FAMILIES}
    names |= {wrapper.model_type: wrapper.architecture for wrapper in WRAPPERS}
    if isinstance(model_type, str) and model_type in MISSING_PARTS:
        return f"unsupported model_type {model_type!r}: such models have {MISSING_PARTS[model_type]}, which is missing here"
    if isinstance(model_type, str) and model_type in names:
        return f"unsupported architectures {architectures!r} of model_type {model_type!r}; accepted: {names[model_type]}"
    return f"unsupported model_type {model_type!r}; accepted: {', '.join(names)}"


def find_wrapper(hf_config: HfConfig) -> Wrapper | None:
    """The model of several parts that `model_type` and `architectures` name, if they name one."""
    named = (hf_config.get("model_type"), hf_config.get("architectures"))
    return next((one for one in WRAPPERS if named in ((one.model_type, None), (one.model_type, [one.architecture]))), None)


def image_ids(hf_config: HfConfig, tokenizer: "Tokenizer | None") -> frozenset[int]:
    """Ids of the tokens that stand for images, whose parts of the model are not read: of its config, and of its tokenizer."""
    wrapper = find_wrapper(hf_config)
    if wrapper is None:
        return frozenset()
    named = [hf_config.get(key) for key in wrapper.image_ids]
    found = [] if tokenizer is None else [tokenizer.library.token_to_id(token) for token in wrapper.image_tokens]
    return frozenset(id for id in (*named, *found) if type(id) is int)
