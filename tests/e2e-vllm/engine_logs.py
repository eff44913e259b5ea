"""What the servers' own logs say about errors.

A server may fail in a way that no answer shows. Errors are counted and told; a server whose engine died fails the run, unless a check
meant it to (`Process.expect_death`). Read before servers are stopped: vLLM logs some ends that were asked for as errors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from failure import expect
from processes import Process

_ERROR = re.compile(r"\b(?:ERROR|CRITICAL) \S+ \S+ \[([^\]]+)\] (.*)")
_DEATH = re.compile(r"EngineDeadError|EngineCore encountered a fatal error|^Process EngineCore|^\(EngineCore[^)]*\) Traceback", re.MULTILINE)
_SHOWN = 60


def check_logs(servers: Iterable[Process]) -> str:
    """How many lines are errors, and of which kinds: the places in vLLM's source that logged them."""
    logs = list(servers)
    texts: dict[str, str] = {}
    kinds: Counter[str] = Counter()
    for log in logs:
        for place, text in _ERROR.findall(log.log_while_it_should_live()):
            texts.setdefault(place, text)
            kinds[place] += 1
    dead = [log.name for log in logs if _DEATH.search(log.log_while_it_should_live())]
    meant = sum(len(_ERROR.findall(log.log_text())) for log in logs) - kinds.total()
    told = "; ".join(f"{count} from `{place}` (`{texts[place][:_SHOWN]}`)" for place, count in kinds.most_common())
    found = f"{kinds.total()} lines of ERROR in {len(logs)} logs" + (f": {told}" if told else "")
    found += f"; {meant} more of servers whose end a check meant" if meant else ""
    expect(not dead, f"an engine died that no check meant to: {', '.join(dead)}; {found}")
    return found
