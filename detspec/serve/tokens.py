"""Routes of the tokenizer."""

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from detspec.checkpoint.load import Model
from detspec.errors import InputError
from detspec.generation.checks import check_ids
from detspec.openai.fields import BodyError, TokenizeBody, read_fields
from detspec.openai.prompts import chat_prompt, token_ids
from detspec.serve.http import answer, off_loop, read_json
from detspec.serve.service import Service


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[int] | None = None


def token_routes(service: Service) -> list[BaseRoute]:
    """`/tokenize`, `/detokenize` and `/tokenizer_info`."""

    async def tokenize(request: Request) -> Response:
        value, num_bytes = await read_json(request, service.options.max_body_bytes)
        body = read_fields(value, TokenizeBody)
        max_len = service.engine.config.max_len
        ids = await off_loop(num_bytes, lambda: ids_of(body, service.model, max_len))
        found = {"count": len(ids), "max_model_len": max_len, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = [service.answerer.token_texts.text_of(token) for token in ids]
        return answer(found)

    async def detokenize(request: Request) -> Response:
        value, _ = await read_json(request, service.options.max_body_bytes)
        tokens = read_fields(value, DetokenizeBody).tokens
        if tokens is None:
            raise BodyError("the body needs tokens, a list of token ids", "tokens")
        if service.model.tokenizer is None:
            raise BodyError(f"{service.model.no_tokenizer}, so there is no text", "tokens")
        if len(tokens) > (most := service.engine.config.max_len):
            raise BodyError(f"tokens holds {len(tokens)} ids, more than max_len ({most}): send them in parts", "tokens")
        try:
            check_ids(tokens, service.model.cfg, "tokens")
        except InputError as error:
            raise BodyError(str(error), "tokens") from error
        return answer({"prompt": service.model.tokenizer.decode(tokens, skip_special_tokens=False)})

    async def tokenizer_info(request: Request) -> Response:
        model = service.model
        eos = next(iter(model.eos_ids), None)
        info: dict[str, Any] = {"eos_token": None if eos is None else service.answerer.token_texts.text_of(eos)}
        info |= {"bos_token": None, "pad_token": None, **model.special_tokens}
        return answer({**info, "chat_template": None if model.chat_template is None else model.chat_template.source})

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info),
    ]


def ids_of(body: TokenizeBody, model: Model, max_len: int) -> Sequence[int]:
    """Token ids of the text or the conversation in `body`; `BodyError` if it has neither."""
    if body.messages is not None:
        return chat_prompt(body, model, max_len=max_len)
    if body.prompt is None:
        raise BodyError("the body needs a prompt, a text, or messages", "prompt")
    return token_ids(body.prompt, model, max_len=max_len, add_special=body.add_special_tokens is not False)
