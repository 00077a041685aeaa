"""The prompts in a body: texts, token ids and conversations, as token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from detspec.checkpoint.load import Model
from detspec.errors import InputError
from detspec.openai.fields import TOO_LONG, BodyError, all_are

MAX_CHARS_PER_TOKEN = 256  # no text has as many on average; a huge one would be split into tokens for minutes
MAX_PROMPTS = 4096  # in one body
RESERVED = ("messages", "now")  # names that a body's variables for the chat template must not have
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
        raise BodyError("the checkpoint has no tokenizer.json, so prompts must be token ids, not text", "prompt")
    try:
        return tuple(model.tokenizer.encode(prompt, add_special_tokens=add_special))
    except InputError as error:
        raise BodyError(str(error), "prompt") from error


def chat_prompt(given: Mapping[str, Any], model: Model, *, max_len: int, now: Any) -> Prompt:
    """Token ids of the conversation in the fields `given`; `BodyError` if the model's template does not take it."""
    variables = given.get("chat_template_kwargs", {})
    if reserved := [name for name in RESERVED if name in variables]:
        raise BodyError(f"chat_template_kwargs must not hold {reserved[0]!r}", "chat_template_kwargs")
    messages = flat_messages(given["messages"])
    _check_chars(sum(len(message.get("content") or "") for message in messages), max_len, "messages")
    try:
        if given.get("add_special_tokens") and model.chat_template is not None and model.tokenizer is not None:
            return tuple(model.tokenizer.encode(model.chat_template.render(messages, now=now, **variables)))
        return tuple(model.chat_prompt(messages, now=now, **variables))
    except InputError as error:
        raise BodyError(str(error), "messages") from error


def flat_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as templates take them: parts of text are joined by line ends. `BodyError` for parts of other kinds."""
    flat = []
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BodyError(f"messages[{place}] must be an object with a role, got {message!r}", "messages")
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    accepted = 'accepted are {"type": "text", "text": ...}'
                    raise BodyError(f"messages[{place}] has a part {part!r}; {accepted}", "messages")
            content = "\n".join(part["text"] for part in content)
        elif not isinstance(content, str | None):
            raise BodyError(f"messages[{place}].content must be a string or a list of parts, got {content!r}", "messages")
        flat.append({**message, **({"content": content} if "content" in message else {})})
    return flat


def _check_chars(number: int, max_len: int, param: str) -> None:
    if number > MAX_CHARS_PER_TOKEN * max_len:
        raise BodyError(
            f"{param} has {number} characters, more than {MAX_CHARS_PER_TOKEN} for each token that max_len ({max_len}) has "
            "room for: shorten it or raise max_len",
            param,
            TOO_LONG,
        )
