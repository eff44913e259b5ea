"""A pair whose connector nobody declared: it works, moves no KV, and the gateway says so in three places, and only then."""

from __future__ import annotations

import json

from api import Request, chat, prompt
from checks_handoff import appended, check_hostile_extensions, check_recomputed
from failure import CheckFailed, expect
from pair import Pair, expect_handoff, expect_recomputed, measure
from table import Table


WARNING = "NO KV CONNECTOR IS DECLARED"


def check_declared(pair: Pair) -> str:
    """None of the three says so while connectors are declared. The gateway has served requests of every kind by then."""
    warned = [line for line in pair.gateway.process.log_text().splitlines() if WARNING in line]
    expect(not warned, f"the log warns: {warned[:1]}")
    listed = [worker["warning"] for worker in pair.gateway.workers() if worker.get("warning")]
    expect(not listed, f"/workers warns: {listed[:1]}")
    _expect_metrics(pair, undeclared=0, passthrough=0)
    return "no warning in the log and in `/workers`, both metrics 0"


def check_undeclared(table: Table, group: str, pair: Pair) -> None:
    """Expects an empty gateway; leaves one."""
    table.run(group, "registration", _register, pair)
    plain = chat(prompt("undeclared"))
    table.run(group, "chat recomputes", check_recomputed, pair, plain, "passthrough")
    hostile = chat(prompt("undeclared and hostile"))
    table.run(group, "a client's kv_transfer_params", _harmless, pair, hostile)
    table.run(group, "the handoff check notices", _noticed, pair)
    table.run(group, "the log says so", _log, pair)
    table.run(group, "`/workers` says so", _listing, pair)
    table.run(group, "metrics say so", _metrics, pair)
    check_hostile_extensions(table, group, pair, "passthrough")
    table.run(group, "unregistering", _unregister, pair)


def _register(pair: Pair) -> str:
    for engine in pair.engines:
        pair.gateway.register(engine)
    pair.gateway.wait_healthy(2)
    return "both workers healthy without a declared connector"


def _harmless(pair: Pair, request: Request) -> str:
    measured = measure(pair, request, "passthrough", appended(json.dumps(request.body)))
    figures = expect_recomputed(measured)
    expect(all(engine.healthy() for engine in pair.engines), "a server is not healthy any more")
    return f"{figures}; both servers healthy"


def _noticed(pair: Pair) -> str:
    """The check that the other groups rely on fails here, where no KV moves although the answer is right."""
    measured = measure(pair, chat(prompt("undeclared, though expected")), "passthrough")
    try:
        expect_handoff(pair, measured)
    except CheckFailed as failure:
        return f"refused, text equal all the same: {failure}"
    raise CheckFailed("the handoff check passes although no KV moved")


def _log(pair: Pair) -> str:
    lines = [line for line in pair.gateway.process.log_text().splitlines() if WARNING in line]
    expect(any(pair.prefill.url in line for line in lines), "no line of the log warns about the prefill worker")
    return "a warning that names the prefill worker"


def _listing(pair: Pair) -> str:
    warning = pair.gateway.worker(pair.prefill).get("warning") or ""
    expect("passthrough" in warning, f"the prefill worker's warning is {warning!r}")
    return f"`{warning}`"


def _metrics(pair: Pair) -> str:
    """One prefill worker has no connector, and three requests went by it so far."""
    return _expect_metrics(pair, undeclared=1, passthrough=3)


def _expect_metrics(pair: Pair, undeclared: int, passthrough: int) -> str:
    found = int(pair.gateway.metrics().total("smg_pd_undeclared_connectors")), pair.gateway.mode_count("passthrough")
    figures = f"smg_pd_undeclared_connectors {found[0]}, mode passthrough {found[1]}"
    expect(found == (undeclared, passthrough), figures)
    return figures


def _unregister(pair: Pair) -> str:
    pair.gateway.unregister_all()
    return "no worker left"
