"""An answer piece by piece: updates of the engine as server-sent events in OpenAI's shapes."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from detspec.engine.request import Completion, Update
from detspec.openai.bodies import Parsed
from detspec.openai.logprobs import TokenPlaces, logprobs_of
from detspec.openai.responses import Answerer, choice_of, ending, extras, head, prompt_text, usage
from detspec.riders.counters import Stats
from detspec.serve.calls import HttpCall
from detspec.serve.service import in_one_piece
from detspec.serve.token_ids import ids_chunk

DONE = b"data: [DONE]\n\n"


async def events(parsed: Parsed, call: HttpCall, *, as_ids: bool) -> AsyncIterator[bytes]:
    """Yields the events of a stream, `as_ids` in the shape of `token_ids`."""
    chunks: AnswerChunks | None = None
    async for arrived in call.updates():
        if as_ids:
            yield event(ids_chunk(parsed, arrived.update, arrived.answerer))
            continue
        if chunks is None:  # only now, since weights may change until the call has begun
            chunks = AnswerChunks(parsed, arrived.answerer)
            for chunk in chunks.first():
                yield event(chunk)
        for chunk in chunks.of(arrived.update, arrived.place):
            yield event(chunk)
    if parsed.options.include_usage and chunks is not None:
        yield event(chunks.last())
    yield DONE


def event(content: dict[str, Any]) -> bytes:
    """Encodes a server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


class AnswerChunks:
    """The chunks of one answer, each a part of the body that the whole answer would have."""

    def __init__(self, parsed: Parsed, answerer: Answerer) -> None:
        """`answerer` says what chunks hold besides the text."""
        self.parsed = parsed
        self.answerer = answerer
        self._is_chat = parsed.kind == "chat"
        self._head = head(parsed, answerer, "chat.completion.chunk" if self._is_chat else "text_completion")
        self._num_tokens = 0
        self._places: dict[int, TokenPlaces] = {}  # by the index of the choice

    def first(self) -> Iterator[dict[str, Any]]:
        """Yields the chunks that come before anything is generated: roles of a chat, prompts that are echoed."""
        for index in range(self.parsed.num_choices):
            if self._is_chat:
                yield self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
            elif self.parsed.echo and not in_one_piece(self.parsed):
                text = prompt_text(self.parsed, index // self.parsed.n, self.answerer)
                yield self._chunk({"index": index, "text": text, "logprobs": None, "finish_reason": None})

    def of(self, update: Update, place: int) -> Iterator[dict[str, Any]]:
        """The chunks that hold what is new in `update`, of prompt number `place`."""
        index = place * self.parsed.n + update.request.index
        completion = update.completion
        if in_one_piece(self.parsed):
            if completion is not None:
                yield self._whole(index, completion)
            return
        self._num_tokens += len(update.token_ids)
        choice: dict[str, Any] = {"index": index}
        if self._is_chat:
            choice["delta"] = {"content": update.text} if update.text or completion is None else {}
        else:
            choice["text"] = update.text
        choice |= {"logprobs": self._logprobs(index, update), "finish_reason": None, "stop_reason": None}
        if completion is not None:
            choice |= ending(self.parsed, index, completion, self.answerer)
            choice |= extras(self.parsed, completion, self.answerer)
        if self.parsed.body.return_token_ids:
            choice["token_ids"] = list(update.token_ids)  # new ones alone, also in the last chunk
        yield self._chunk(choice)

    def last(self) -> dict[str, Any]:
        """The chunk of usage."""
        return {**self._chunk(None), "usage": usage(self.parsed, self._num_tokens)}

    def _whole(self, index: int, completion: Completion) -> dict[str, Any]:
        """A whole choice in one chunk."""
        self._num_tokens += len(completion.token_ids)
        choice = choice_of(self.parsed, index, completion, self.answerer)
        if self._is_chat:
            choice["delta"] = {"content": choice.pop("message")["content"]}
        return self._chunk(choice)

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        chunk = {**self._head, "choices": [] if choice is None else [choice]}
        if self.parsed.options.continuous_usage_stats:
            chunk["usage"] = usage(self.parsed, self._num_tokens)
        elif self.parsed.options.include_usage:
            chunk["usage"] = None  # OpenAI's clients tell by it that the last chunk will have it
        return {**chunk, "seed": self.parsed.sampling[0].seed, "system_fingerprint": self.answerer.system_fingerprint}

    def _logprobs(self, index: int, update: Update) -> dict[str, Any] | None:
        """Log-probabilities of the new tokens in `update`."""
        if self.parsed.logprobs is None:
            return None
        if index not in self._places:
            self._places[index] = TokenPlaces(self.answerer.token_texts.tokens, update.request.prompt_token_ids)
        new = Completion(update.request.id, (), update.token_ids, update.logprobs, update.text, "", "", Stats())
        return logprobs_of(self.parsed, new, self.answerer.token_texts, self._places[index])
