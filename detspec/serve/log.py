"""The log of what a server answered, which `detspec audit --responses` replays.

A line that has a fingerprint says what all bits after it depend on. Each further line is one sample that has ended: what was
asked, the prompt's token ids, and the record that a batch job would have written.
"""

import dataclasses
import json
from pathlib import Path

from detspec.engine.engine import Engine
from detspec.engine.request import Completion
from detspec.errors import InputError
from detspec.jobs.lines import completion_line
from detspec.jobs.manifest import text_facts
from detspec.openai.bodies import Parsed
from detspec.openai.responses import response_id


class ResponseLog:
    """A file that lines are appended to; each is whole on disk before the next begins, unless the machine fails."""

    def __init__(self, path: Path, engine: Engine) -> None:
        """Opens `path` and says what bits depend on; `InputError` if it cannot be written."""
        try:
            self._file = path.open("ab")
            self.begin(engine)
        except OSError as error:
            raise InputError(f"--log {path}: {error.strerror}") from error

    def begin(self, engine: Engine) -> None:
        """Says what all bits from here on depend on."""
        config = {**dataclasses.asdict(engine.config), "schedule": engine.schedule.bits()}
        facts = {"fingerprint": engine.fingerprint(), "text": text_facts(engine.model), "engine": config}
        self._write(json.dumps(facts).encode())

    def write(self, *, response_of: Parsed, place: int, completion: Completion) -> None:
        """Appends `completion` of prompt number `place`."""
        sampling = dataclasses.asdict(response_of.sampling[place])
        asked = json.dumps({"prompt_token_ids": completion.prompt_token_ids, "sampling": sampling}).encode()
        record = completion_line(dataclasses.replace(completion, id=f"{response_id(response_of)}/{place}"), response_of.n)
        self._write(asked[:-1] + b', "record": ' + record + b"}")

    def close(self) -> None:
        """No lines follow."""
        self._file.close()

    def _write(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._file.flush()
