"""What an audit found."""

import dataclasses

MOST_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first place where a record differs from the canonical completion."""

    record: str  # id of the record, with the sample's number if the request asks for several: `a[2]`
    # index in `token_ids`, where 0 is the first token after the prompt; None for facts about the whole record
    position: int | None
    what: str  # the recorded and the canonical value


@dataclasses.dataclass
class AuditReport:
    """What an audit found."""

    num_records: int = 0  # deterministic records
    num_failed: int = 0  # records of requests that failed, which hold no tokens: nothing is replayed
    num_ordinary: int = 0  # records of ordinary requests, which promise nothing
    num_ordinary_reproduced: int = 0  # ordinary records that equal the canonical completion nevertheless
    num_tokens: int = 0  # new tokens of all records
    differences: list[Difference] = dataclasses.field(default_factory=list)  # one for each deterministic record that differs
    # differences between this machine's fingerprint and the manifest's, a sentence each
    machine: list[str] = dataclasses.field(default_factory=list)
    replay_s: float = 0.0  # seconds spent on replaying
    num_other_weights: int = 0  # samples in a server's log that other weights gave, which were not replayed

    @property
    def reproduced(self) -> bool:
        """Whether every deterministic record equals the canonical completion."""
        return not self.differences

    def add(self, other: "AuditReport") -> None:
        """Counts what another report found, too."""
        self.num_records += other.num_records
        self.num_failed += other.num_failed
        self.num_ordinary += other.num_ordinary
        self.num_ordinary_reproduced += other.num_ordinary_reproduced
        self.num_tokens += other.num_tokens
        self.differences += other.differences
        self.machine += [line for line in other.machine if line not in self.machine]
        self.replay_s += other.replay_s

    def table(self) -> str:
        """The report as text."""
        lines = [f"another machine: {line}" for line in self.machine]
        lines += [
            f"records      {self.num_records:8}",
            f"  reproduced {self.num_records - len(self.differences):8}",
            f"  differing  {len(self.differences):8}",
        ]
        if self.num_failed:
            lines.append(f"failed       {self.num_failed:8}   these requests hold no tokens, so there is nothing to replay")
        if self.num_ordinary:
            equal = f"{self.num_ordinary_reproduced} of them equal the canonical bits"
            lines.append(f"ordinary     {self.num_ordinary:8}   not promised; {equal}")
        if self.num_other_weights:
            lines.append(f"other weights{self.num_other_weights:7}   not replayed")
        if self.differences:
            lines += ["", "first difference of each record; tokens are counted from 0 after the prompt"]
            for found in self.differences[:MOST_SHOWN]:
                where = "record" if found.position is None else f"token {found.position}"
                lines.append(f"  {found.record:24} {where:10} {found.what}")
            if len(self.differences) > MOST_SHOWN:
                lines.append(f"  and {len(self.differences) - MOST_SHOWN} more")
        return "\n".join(lines)
