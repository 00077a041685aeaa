"""The prompts in a body: texts, token ids and conversations, as token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from detspec.checkpoint.conversation import check_variables
from detspec.checkpoint.load import Model
from detspec.errors import InputError
from detspec.openai.fields import TOO_LONG, BodyError, all_are

MAX_CHARS_PER_TOKEN = 256  # no text has as many on average; a huge one would be split into tokens for minutes
MAX_PROMPTS = 4096  # in one body
OPTIONS = ("add_generation_prompt", "continue_final_message")  # fields that the chat template gets, too
KWARGS = ("tools", "documents", "chat_template")  # options that chat_template_kwargs hold
Prompt = tuple[int, ...]


def prompt_list(prompt: Any) -> list[str | list[int]]:
    """The prompts in a field `prompt`, each a text or token ids; `BodyError` if it is anything else."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all_are(int, prompt):
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise BodyError(f"prompt has {len(prompt)} prompts, more than {MAX_PROMPTS}: send them in several bodies", "prompt")
        if all(isinstance(one, str) for one in prompt):
            return prompt
        if all(isinstance(one, list) and one and all_are(int, one) for one in prompt):
            return prompt
    raise BodyError(
        "prompt must be a text, a list of texts, a list of token ids or a list of lists of them, none empty", "prompt"
    )


def token_ids(prompt: str | list[int], model: Model, *, max_len: int, add_special: bool) -> Prompt:
    """Token ids of one prompt; `BodyError` for a text that is too long, or cannot be encoded."""
    if isinstance(prompt, list):
        return tuple(prompt)
    _check_chars(len(prompt), max_len, "prompt")
    if model.tokenizer is None:
        raise BodyError(f"{model.no_tokenizer}, so prompts must be token ids, not text", "prompt")
    try:
        return tuple(model.tokenizer.encode(prompt, add_special_tokens=add_special))
    except InputError as error:
        raise BodyError(str(error), "prompt") from error


def chat_prompt(given: Mapping[str, Any], model: Model, *, max_len: int, now: Any) -> Prompt:
    """Token ids of the conversation in the fields `given`; `BodyError` if the model's template does not take it."""
    variables = _variables(given)
    check_messages(given["messages"])
    _check_chars(sum(map(_content_chars, given["messages"])), max_len, "messages")
    try:
        if given.get("add_special_tokens") and model.chat_template is not None and model.tokenizer is not None:
            return tuple(model.tokenizer.encode(model.chat_template.render_parts(given["messages"], now=now, **variables)))
        return tuple(model.chat_prompt(given["messages"], now=now, **variables))
    except InputError as error:
        option = next((name for name in (*OPTIONS, *KWARGS) if str(error).startswith(name)), "messages")
        raise BodyError(str(error), option if option in given else "chat_template_kwargs") from error


def check_messages(messages: Sequence[Any]) -> None:
    """Raises `BodyError` unless each message is an object with a role, its content a text or a list of parts of text."""
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BodyError(f"messages[{place}] must be an object with a role, got {message!r}", "messages")
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                accepted = 'accepted are {"type": "text", "text": ...}'
                raise BodyError(f"messages[{place}] has a part {part!r}; {accepted}", "messages")
        if not isinstance(content, str | list | None):
            raise BodyError(f"messages[{place}].content must be a string or a list of parts, got {content!r}", "messages")


def _variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Gathers what a body's fields hand to the chat template; `BodyError` if two of them disagree."""
    variables = dict(given.get("chat_template_kwargs", {}))
    try:
        check_variables(variables)
    except InputError as error:
        raise BodyError(str(error), "chat_template_kwargs") from error
    for name in OPTIONS:
        if name in given and variables.get(name) not in (None, given[name]):
            raise BodyError(f"{name} and chat_template_kwargs.{name} differ: give one of them", name)
    return variables | {name: given[name] for name in OPTIONS if name in given}


def _content_chars(message: Mapping[str, Any]) -> int:
    """Characters of a message's content."""
    content = message.get("content") or ""
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


def _check_chars(number: int, max_len: int, param: str) -> None:
    if number > MAX_CHARS_PER_TOKEN * max_len:
        raise BodyError(
            f"{param} has {number} characters, more than {MAX_CHARS_PER_TOKEN} for each token that max_len ({max_len}) has "
            "room for: shorten it or raise max_len",
            param,
            TOO_LONG,
        )
