"""The requests of one HTTP call on their way, and what ends a call early."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from detspec.engine.request import Request, Update


class QueueFull(Exception):
    """There is no room for further requests; the client should come again."""


class EngineStopped(Exception):
    """The engine answers nothing any more.

    Attributes:
        exit_code: that of the process.
    """

    def __init__(self, why: str, exit_code: int = 1) -> None:
        super().__init__(why)
        self.exit_code = exit_code


class CallFailed(Exception):
    """The engine could not go on with a request; other calls are answered."""


class ClientLeft(Exception):
    """The client of a call does not wait for its answer any more."""


class HttpCall:
    """The requests of one HTTP call.

    Attributes:
        requests: one for each prompt.
        streamed: updates are wanted before a sample ends.
        num_samples: samples of all requests.
        left: number of samples that have not ended, by the id of each request that has not.
        is_held: a pause keeps it from the engine.
        began: when it came, on the monotonic clock.
        last: when each sample last had news.
    """

    def __init__(self, requests: Sequence[Request], *, streamed: bool, arrive: Callable[[Update], Any]) -> None:
        """`arrive` makes of an update what waits to be read. It is called before weights can change, readers may come late."""
        self.requests = requests
        self.streamed = streamed
        self.left = {request.id: request.sampling.n for request in requests}
        self.num_samples = sum(self.left.values())
        self.is_held = False
        self.began = time.monotonic()
        self.last: dict[tuple[str, int], float] = {}
        self._arrive = arrive
        self._inbox: asyncio.Queue[tuple[Any, bool] | Exception] = asyncio.Queue()

    def deliver(self, update: Update) -> None:
        """Hands over an update, or the error that it met on its arrival."""
        try:
            self._inbox.put_nowait((self._arrive(update), update.completion is not None))
        except Exception as failed:  # other calls get theirs all the same
            self.fail(failed)

    def fail(self, error: Exception) -> None:
        """Ends the call early."""
        self._inbox.put_nowait(error)

    async def updates(self) -> AsyncIterator[Any]:
        """Yields what arrived until all samples have ended; raises what ends the call early."""
        num_ended = 0
        while num_ended < self.num_samples:
            item = await self._inbox.get()
            if isinstance(item, Exception):
                raise item
            arrived, is_last = item
            num_ended += is_last
            yield arrived
