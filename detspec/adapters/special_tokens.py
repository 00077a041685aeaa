"""A model's tokenizer and chat template, as the harness asks for them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from detspec.checkpoint.chat import ChatTemplate
from detspec.checkpoint.load import Model
from detspec.checkpoint.tokenizer import Tokenizer
from detspec.errors import InputError


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """Texts as token ids, and conversations as texts.

    Attributes:
        model: the model that they belong to.
        tokenizer: the model's tokenizer.
        added: tokens that the tokenizer puts in front of every text; empty for most models.
        prefix: token that a text without a context is scored after.
        end: token that ends a text.
    """

    model: Model
    tokenizer: Tokenizer
    added: tuple[int, ...]
    prefix: int
    end: int

    @property
    def name(self) -> str:
        """Digests of the tokenizer and the template."""
        template = self.model.chat_template
        return f"{self.tokenizer.digest}-{'none' if template is None else template.digest}"

    def encode(self, text: str, add_special: bool | None) -> list[int]:
        """Token ids of `text`; with None, what the tokenizer adds in front is there once."""
        if add_special is None and self.added:
            bare = self.tokenizer.encode(text, add_special_tokens=False)
            if tuple(bare[: len(self.added)]) == self.added:
                return bare
        return self.tokenizer.encode(text, add_special_tokens=add_special is not False)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """A conversation by the model's template; without a generation prompt it ends with the text of the last message."""
        option = {"add_generation_prompt": True} if add_generation_prompt else {"continue_final_message": True}
        return self._template().render_parts(messages, **option)

    def template_source(self, name: bool | str) -> str | None:
        """The default template, whole; `InputError` if there is none, or another one is asked for."""
        source = self._template().source
        if isinstance(name, str) and name != "default":
            raise InputError(f"tasks are rendered by the folder's default chat template, got the name {name!r}")
        return source

    def _template(self) -> ChatTemplate:
        if self.model.chat_template is None:
            raise InputError("the checkpoint has no chat template: leave --apply_chat_template out")
        return self.model.chat_template


def special_tokens_of(model: Model, prefix: int | None) -> SpecialTokens:
    """Finds those of `model`; `prefix`, if it is given, is taken for the token of that name.

    Raises `InputError` if the model has no tokenizer, or no token of its own could be the prefix.
    """
    if model.tokenizer is None:
        raise InputError(f"{model.no_tokenizer}, and the harness asks with texts")
    added = tuple(model.tokenizer.encode("", add_special_tokens=True))
    named = model.special_tokens.get("bos_token")
    begin = added[0] if added else None if named is None else model.tokenizer.library.token_to_id(named)
    candidates = [token for token in (begin, *model.eos_ids) if token is not None] if prefix is None else [prefix]
    known = next((token for token in candidates if 0 <= token < model.cfg.vocab_size), None)
    if known is None:
        got = candidates[0] if candidates else None
        raise InputError(
            f"no token that texts could begin with is known, got {got}: give prefix_token_id, 0 .. {model.cfg.vocab_size - 1}"
        )
    return SpecialTokens(model, model.tokenizer, added, known, model.eos_ids[0] if model.eos_ids else known)
