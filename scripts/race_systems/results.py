"""Ratios and tables of a race. Times are compared within a round; the median over the rounds counts."""

import dataclasses
from collections.abc import Collection, Sequence
from itertools import takewhile
from statistics import median
from typing import Any

from race_systems.systems import DETERMINISTIC, REFERENCE

MEASURES = ("decode", "prefill", "whole")


@dataclasses.dataclass(frozen=True)
class Sample:
    """Seconds of whole requests, and of the same requests with one new token."""

    batch: int
    system: str
    round: int
    whole_s: float
    first_s: float

    def seconds(self, measure: str) -> float:
        """Seconds of one of `MEASURES`; decoding is what the whole takes beyond its first tokens."""
        return {"decode": self.whole_s - self.first_s, "prefill": self.first_s, "whole": self.whole_s}[measure]


Samples = Sequence[Sample]


def seconds_of(samples: Samples, batch: int, system: str, measure: str) -> list[float]:
    """A number for each round."""
    chosen = [sample for sample in samples if (sample.batch, sample.system) == (batch, system)]
    return [sample.seconds(measure) for sample in sorted(chosen, key=lambda sample: sample.round)]


def speed_ratio(own_s: Sequence[float], other_s: Sequence[float]) -> float:
    """How many times as fast as the other: the median over rounds; above 1 the own one is faster."""
    return median(other / own for own, other in zip(own_s, other_s, strict=True))


def best_of_others(samples: Samples, batch: int, measure: str) -> str | None:
    """The fastest system that is not detspec's; None if there is none."""
    others = {sample.system for sample in samples if not sample.system.startswith("detspec")}
    return min(sorted(others), key=lambda name: median(seconds_of(samples, batch, name, measure)), default=None)


def ratio(samples: Samples, batch: int, system: str, measure: str) -> float:
    """Speed of detspec deterministic over that of `system`."""
    own_s, other_s = (seconds_of(samples, batch, name, measure) for name in (DETERMINISTIC, system))
    return speed_ratio(own_s, other_s)


def num_changed(alone: Sequence[Sequence[int]], together: Sequence[Sequence[int]]) -> int:
    """Texts that are not the same in both."""
    return sum(list(one) != list(other) for one, other in zip(alone, together, strict=True))


def agreement(texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> dict[str, float]:
    """Share of first tokens that are the same, and mean share of a text before its first difference."""
    lengths = [
        len(list(takewhile(bool, (a == b for a, b in zip(one, other, strict=True)))))
        for one, other in zip(texts, others, strict=True)
    ]
    return {
        "first_token": sum(length > 0 for length in lengths) / len(texts),
        "until_first_difference": sum(length / len(text) for length, text in zip(lengths, texts, strict=True)) / len(texts),
    }


def table(result: dict[str, Any]) -> str:
    """All results as Markdown."""
    samples = [Sample(**sample) for sample in result["samples"]]
    settings = result["settings"]
    machine = result["machine"]
    parts = [
        f"{result['model']['num_params'] / 1e6:.1f} M parameters, {result['model']['dtype']}; prompts of "
        f"{settings['prompt_len']}, {settings['new_tokens']} new tokens, greedy, median of {settings['rounds']} rounds\n"
        f"{machine['cpu']}, {settings['threads']} threads, load {machine['load_average']:.1f} at first",
        speeds(samples, settings),
        "* the best of the others by whole requests. The slowest round is compared with the fastest.\n"
        "decode, prefill, whole: speed of detspec deterministic over that of the system; above 1 detspec is faster.",
        sizes(result),
        f"Texts that change: how many of {settings['texts']} are not the same alone as all at once.\n"
        f"First tokens, texts: the share that agrees with {result['reference']}, of texts until the first difference.",
        summary(result, samples),
        "\n".join(f"not in the race: {name}: {why}" for name, why in result["absent"].items()),
    ]
    return "\n\n".join(filter(None, parts))


def speeds(samples: Samples, settings: dict[str, Any]) -> str:
    """A row for each batch size and system."""
    rows = []
    new_tokens = settings["new_tokens"]
    for batch in settings["batches"]:
        best = best_of_others(samples, batch, "whole")
        for system in dict.fromkeys(sample.system for sample in samples):
            rounds_s = {measure: seconds_of(samples, batch, system, measure) for measure in MEASURES}
            median_s = {measure: median(seconds) for measure, seconds in rounds_s.items()}
            rows.append(
                [
                    str(batch),
                    f"{system} *" if system == best else system,
                    f"{batch * new_tokens / median_s['whole']:.1f}",
                    f"{1e3 * median_s['decode'] / (new_tokens - 1):.2f}",
                    f"{1e3 * median_s['prefill']:.1f}",
                    f"{max(rounds_s['whole']) / min(rounds_s['whole']):.2f}",
                    *(f"{ratio(samples, batch, system, measure):.2f}" for measure in MEASURES),
                ]
            )
    return markdown(["batch", "system", "tok/s", "step ms", "prefill ms", "slowest round", *MEASURES], rows, "rlrrrrrrr")


def sizes(result: dict[str, Any]) -> str:
    """Memory and texts: a row for each system."""
    needed = result["model"]["params_bytes"] + result["model"]["cache_bytes"]
    rows = [
        [
            name,
            f"{found['peak_bytes'] / 1e6:.0f}",
            f"{found['peak_bytes'] / needed:.2f}",
            str(found["num_changed"]),
            f"{found['agreement']['first_token']:.0%}",
            f"{found['agreement']['until_first_difference']:.0%}",
            f"{found['load_s']:.1f}",
            ", ".join(f"{package} {version}" for package, version in found["versions"].items()),
        ]
        for name, found in result["systems"].items()
    ]
    headers = ["system", "peak MB", "/ (weights + cache)", "texts that change", "first tokens", "texts", "load s", "versions"]
    return markdown(headers, rows, "lrrrrrrl")


def summary(result: dict[str, Any], samples: Samples) -> str:
    """Speed of detspec deterministic over the best of the others in each measure, and its memory; "" without others."""
    rows = []
    for batch in result["settings"]["batches"]:
        bests = {measure: best for measure in MEASURES if (best := best_of_others(samples, batch, measure))}
        if bests:
            rows.append([str(batch), *(f"{ratio(samples, batch, best, name):.2f} ({best})" for name, best in bests.items())])
    if not rows:
        return ""
    others = {name: found for name, found in result["systems"].items() if not name.startswith("detspec")}
    least = min(others, key=lambda name: others[name]["peak_bytes"])
    memory = result["systems"][DETERMINISTIC]["peak_bytes"] / others[least]["peak_bytes"]
    return (
        f"{DETERMINISTIC}: speed over that of the best of the others; {memory:.2f} times the memory of {least}\n\n"
        f"{markdown(['batch', *MEASURES], rows, 'rlll')}"
    )


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]], sides: str) -> str:
    """A Markdown table in aligned columns; `sides` has an "l" or "r" for each."""
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if side == "l" else cell.rjust(width)
            for cell, width, side in zip(cells, widths, sides, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = [f"{'-' * (width - 1)}{':' if side == 'r' else '-'}" for width, side in zip(widths, sides, strict=True)]
    return "\n".join([line(headers), line(rule), *map(line, rows)])


def reference_of(systems: Collection[str]) -> str:
    """The system whose texts the others are compared with."""
    return REFERENCE if REFERENCE in systems else DETERMINISTIC
