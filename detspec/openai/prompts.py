"""The prompts in a body: texts, token ids and conversations, as token ids."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from detspec.checkpoint.conversation import check_variables
from detspec.checkpoint.load import Model
from detspec.errors import InputError
from detspec.openai.fields import TOO_LONG, BodyError, ChatBody, TokenizeBody

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


def all_are(kind: type, values: Iterable[Any]) -> bool:
    """Whether each of `values` has the type `kind` itself: true is no integer."""
    return set(map(type, values)) <= {kind}


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


def chat_prompt(body: ChatBody | TokenizeBody, model: Model, *, max_len: int, now: Any = None) -> Prompt:
    """Token ids of the conversation in `body`; `BodyError` if the model's template does not take it.

    `now` is the time that the template prints, the clock's if None.
    """
    messages = body.messages or []
    options = {name: value for name in OPTIONS if (value := getattr(body, name)) is not None}
    variables = _variables(body.chat_template_kwargs, options)
    check_messages(messages)
    _check_chars(sum(map(_content_chars, messages)), max_len, "messages")
    try:
        if body.add_special_tokens and model.chat_template is not None and model.tokenizer is not None:
            return tuple(model.tokenizer.encode(model.chat_template.render_parts(messages, now=now, **variables)))
        return tuple(model.chat_prompt(messages, now=now, **variables))
    except InputError as error:
        name = next((name for name in (*OPTIONS, *KWARGS) if str(error).startswith(name)), "messages")
        raise BodyError(str(error), name if name in (*options, "messages") else "chat_template_kwargs") from error


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


def _variables(kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Gathers what a body hands to the chat template; `BodyError` if its own fields `options` and its `kwargs` disagree."""
    try:
        check_variables(kwargs)
    except InputError as error:
        raise BodyError(str(error), "chat_template_kwargs") from error
    for name, value in options.items():
        if kwargs.get(name) not in (None, value):
            raise BodyError(f"{name} and chat_template_kwargs.{name} differ: give one of them", name)
    return {**kwargs, **options}


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
