"""The checks and how they ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from failure import CheckFailed

PASSED, FAILED, NOT_RUN = "pass", "FAIL", "not run"


@dataclass(frozen=True)
class Row:
    group: str
    check: str
    result: str
    figures: str


class Table:
    """Runs checks one after the other; a failed one does not keep the others from running."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def run(self, group: str, check: str, function: Callable[..., str], *arguments: object) -> bool:
        """Calls `function`, which returns figures worth telling and raises when something is wrong.

        Whatever it raises fails the check; only an interruption, which is no `Exception`, ends the run. Returns whether it passed.
        """
        began = time.monotonic()
        try:
            result, figures = PASSED, function(*arguments)
        except Exception as error:
            kind = "" if isinstance(error, CheckFailed) else f"{type(error).__name__}: "
            result, figures = FAILED, f"{kind}{error}"
        self._add(Row(group, check, result, figures), time.monotonic() - began)
        return result == PASSED

    def not_run(self, group: str, check: str, why: str) -> None:
        self._add(Row(group, check, NOT_RUN, why), 0)

    def extend(self, rows: list[dict[str, str]]) -> None:
        """Takes in rows that `plain` gave in another process."""
        self.rows += [Row(**row) for row in rows]

    def plain(self) -> list[dict[str, str]]:
        return [asdict(row) for row in self.rows]

    def count(self, result: str) -> int:
        return sum(row.result == result for row in self.rows)

    def summary(self) -> str:
        return f"{self.count(PASSED)} passed, {self.count(FAILED)} failed, {self.count(NOT_RUN)} not run"

    def markdown(self) -> str:
        """One table for each group."""
        lines: list[str] = []
        for group in dict.fromkeys(row.group for row in self.rows):
            lines += ["", f"## {group}", "", "| check | result | figures |", "|---|---|---|"]
            lines += [f"| {_cell(row.check)} | {row.result} | {_cell(row.figures)} |"
                      for row in self.rows if row.group == group]
        return "\n".join(lines).strip()

    def _add(self, row: Row, seconds: float) -> None:
        self.rows.append(row)
        print(f"{row.result:8} {row.group}: {row.check} ({seconds:.1f} s): {row.figures}", flush=True)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
