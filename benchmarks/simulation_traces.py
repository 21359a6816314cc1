"""Requests of the public Azure LLM inference traces: when they arrive, and how many tokens they have."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

DATA = Path(__file__).with_name("data")
EXCERPTS = {
    "azure-conv": DATA / "azure_llm_2023_conv.csv",
    "azure-code": DATA / "azure_llm_2023_code.csv",
}


@dataclass(frozen=True)
class Request:
    """One request of a trace."""

    seconds: float
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class Trace:
    """Requests in order, from the first second on."""

    name: str
    requests: Sequence[Request]

    @property
    def seconds(self) -> float:
        """How long it is; the next copy follows a mean interval after its last request."""
        last = self.requests[-1].seconds
        return last * len(self.requests) / max(len(self.requests) - 1, 1)

    @property
    def mean_tokens(self) -> tuple[float, float]:
        """The mean number of prompt tokens and of new tokens."""
        number = len(self.requests)
        return (
            sum(each.prompt_tokens for each in self.requests) / number,
            sum(each.new_tokens for each in self.requests) / number,
        )

    def arrivals(self, per_s: float) -> Iterator[Request]:
        """The requests at another mean rate, with their bursts, again and again."""
        scale = len(self.requests) / self.seconds / per_s
        for copy in count():
            for each in self.requests:
                yield Request(
                    (copy * self.seconds + each.seconds) * scale, each.prompt_tokens, each.new_tokens
                )


def load(path: Path, name: str = "") -> Trace:
    """Read an excerpt, or a file of the data set as it is published."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if rows and "TIMESTAMP" in rows[0]:
        times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
        columns = "ContextTokens", "GeneratedTokens"
    else:
        times = [float(row["seconds"]) for row in rows]
        columns = "context_tokens", "generated_tokens"
    start = min(times)
    requests = [
        Request(at - start, max(int(row[columns[0]]), 1), max(int(row[columns[1]]), 1))
        for at, row in zip(times, rows, strict=True)
    ]
    return Trace(name or path.stem, sorted(requests, key=lambda each: each.seconds))
