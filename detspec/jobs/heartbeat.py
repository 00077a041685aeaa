"""Shows other workers that this process lives, from a thread, since a pass or a compilation may take minutes."""

import contextlib
import threading

from detspec.jobs.chunk_folder import ChunkFolder

BEAT_S = 5.0


class Heartbeat:
    """A context manager in which the worker's file is written every five seconds; it is removed at the end."""

    def __init__(self, folder: ChunkFolder) -> None:
        self._folder = folder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._folder.beat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._folder.leave()

    def _run(self) -> None:
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(OSError):  # others will take its chunks, which costs time alone
                self._folder.beat()
