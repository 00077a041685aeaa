"""Routes of the tokenizer, and generation from token ids to token ids."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from detspec.errors import InputError
from detspec.generation.checks import check_ids
from detspec.openai.fields import BOOL, BOOL_OR_TEXT, INTS, LIST, OBJECT, TEXT, BodyError, given_fields
from detspec.openai.prompts import chat_prompt, token_ids
from detspec.serve.http import answer, off_loop, read_json
from detspec.serve.service import Service

TOKENIZE = {
    "model": TEXT,
    "prompt": TEXT,
    "messages": LIST,
    "add_special_tokens": BOOL,
    "return_token_strs": BOOL,
    "chat_template_kwargs": OBJECT,
    "add_generation_prompt": BOOL,
    "continue_final_message": BOOL_OR_TEXT,
}
DETOKENIZE = {"model": TEXT, "tokens": INTS}


def token_routes(service: Service) -> list[BaseRoute]:
    """`/tokenize`, `/detokenize` and `/tokenizer_info`."""

    async def body_of(request: Request, accepted: dict[str, Any]) -> tuple[dict[str, Any], int]:
        body, num_bytes = await read_json(request, service.options.max_body_bytes)
        return given_fields(body, accepted), num_bytes

    def ids_of(body: dict[str, Any]) -> Sequence[int]:
        max_len = service.engine.config.max_len
        if "messages" in body:
            return chat_prompt(body, service.model, max_len=max_len, now=None)
        if "prompt" in body:
            add_special = body.get("add_special_tokens", True)
            return token_ids(body["prompt"], service.model, max_len=max_len, add_special=add_special)
        raise BodyError("the body needs a prompt, a text, or messages", "prompt")

    async def tokenize(request: Request) -> Response:
        body, num_bytes = await body_of(request, TOKENIZE)
        max_len = service.engine.config.max_len
        ids = await off_loop(num_bytes, lambda: ids_of(body))
        found = {"count": len(ids), "max_model_len": max_len, "tokens": ids}
        if body.get("return_token_strs"):
            found["token_strs"] = [service.answerer.token_texts.text_of(token) for token in ids]
        return answer(found)

    async def detokenize(request: Request) -> Response:
        body, _ = await body_of(request, DETOKENIZE)
        if "tokens" not in body:
            raise BodyError("the body needs tokens, a list of token ids", "tokens")
        if service.model.tokenizer is None:
            raise BodyError(f"{service.model.no_tokenizer}, so there is no text", "tokens")
        if len(body["tokens"]) > (most := service.engine.config.max_len):
            raise BodyError(f"tokens holds {len(body['tokens'])} ids, more than max_len ({most}): send them in parts", "tokens")
        try:
            check_ids(body["tokens"], service.model.cfg, "tokens")
        except InputError as error:
            raise BodyError(str(error), "tokens") from error
        return answer({"prompt": service.model.tokenizer.decode(body["tokens"], skip_special_tokens=False)})

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
