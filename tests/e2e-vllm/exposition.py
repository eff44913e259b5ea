"""Reading Prometheus' text format."""

from __future__ import annotations

import re
from dataclasses import dataclass

from client import call
from failure import CheckFailed

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


class Metrics:
    """What `/metrics` of one server said at one moment."""

    def __init__(self, text: str) -> None:
        matches = filter(None, map(_SAMPLE.match, text.splitlines()))
        self.samples = [Sample(match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])) for match in matches]

    @classmethod
    def of(cls, port: int) -> Metrics:
        return cls(call(port, "GET", "/metrics").text)

    def require(self, *names: str) -> None:
        """Fails the check unless there are samples of every one of these names."""
        absent = set(names) - {sample.name for sample in self.samples}
        if absent:
            raise CheckFailed(f"the server has no metric {', '.join(sorted(absent))}")

    def total(self, name: str, **labels: str) -> float:
        """The sum over every sample called `name` that has these labels; 0 when there is none."""
        wanted = labels.items()
        return sum(sample.value for sample in self.samples if sample.name == name and wanted <= sample.labels.items())
