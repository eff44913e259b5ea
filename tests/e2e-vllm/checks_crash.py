"""A server that is killed while it works for a client, and comes back.

The client learns of it at once, the worker that died is charged and the other one is not, requests fail fast meanwhile, and
when the server answers again requests flow without anybody's help, with KV that really moves.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Callable

from answers import CHAT
from api import chat, endless, prompt
from checks_handoff import appended, check_handoff, check_listeners
from client import OpenRequest, call
from engine import SETTLE_SECONDS, Engine
from failure import expect
from pair import Pair
from table import Table
from waiting import wait_until

FOLLOWERS = 4
END_SECONDS = 30
"""Longest time between the crash and the end of the client's answer, and for each answer meanwhile."""


def check_decode_crash(table: Table, group: str, pair: Pair) -> None:
    """Decode dies in the middle of a stream. The pair is as before when this is over."""
    table.run(group, "killed in the middle of a stream", _kill_decode, pair)
    _check_return(table, group, pair, pair.decode, pair.prefill)


def check_prefill_crash(table: Table, group: str, pair: Pair,
                        identity: Callable[[Engine], dict[str, object]] | None = None) -> None:
    """Prefill dies while it has a prompt. The pair is as before when this is over.

    `identity` tells what a started prefill must declare anew, for connectors whose servers have another identity then.
    """
    table.run(group, "killed while it has a prompt", _kill_prefill, pair)
    _check_return(table, group, pair, pair.prefill, pair.decode, identity)


def check_unprotected(table: Table, group: str, pair: Pair) -> None:
    """The control of the checks with handoffs of clients: without a gateway the same body ends this very server."""
    table.run(group, "control: the same, straight to the decode server", _ask_unprotected, pair)
    table.run(group, "control: decode back again", _return, pair, pair.decode, None)


def _ask_unprotected(pair: Pair) -> str:
    request = chat(prompt("hostile and straight"))
    pair.decode.process.expect_death()
    try:
        try:
            answer = call(pair.decode.port, "POST", request.path, appended(json.dumps(request.body)), END_SECONDS)
            told = f"it answers {answer.status}"
        except (OSError, http.client.HTTPException) as error:
            told = f"it does not answer ({error!r})"
        wait_until("the decode server to end", SETTLE_SECONDS, pair.decode.process.has_ended)
        return f"{told} and ends"
    finally:
        pair.decode.process.kill()


def _check_return(table: Table, group: str, pair: Pair, victim: Engine, other: Engine,
                  identity: Callable[[Engine], dict[str, object]] | None = None) -> None:
    table.run(group, "requests meanwhile", _meanwhile, pair, other)
    table.run(group, "back again", _return, pair, victim, identity)
    if pair.loopback_only:
        table.run(group, "listeners of the new server too", check_listeners, pair)
    if identity is not None:
        table.run(group, "the new identity is declared", _redeclare, pair, victim, identity)
    table.run(group, "KV moves again", check_handoff, pair, chat(prompt("after the return"), stream=True))


def _kill_decode(pair: Pair) -> str:
    charged = {engine.role: pair.gateway.breaker_failures(engine) for engine in pair.engines}
    client = OpenRequest(pair.gateway.port, CHAT, endless(prompt("a crash"), stream=True).body)
    try:
        client.read_events(8)
        pair.decode.process.expect_death()
        pair.decode.process.kill()
        received, seconds = _rest(client)
    finally:
        client.leave()
    events = [line.removeprefix("data: ") for line in received.splitlines() if line.startswith("data: ")]
    expect('"error"' in received, f"the stream tells of no error; it ends with {events[-2:]}")
    _expect_charged(pair, pair.decode, charged)
    error = next((event for event in events if '"error"' in event), "an error outside of events")
    return f"{seconds:.1f} s later the stream ends with `{error}`; charged to decode alone"


def _kill_prefill(pair: Pair) -> str:
    """The engine is held still, so that it surely has the prompt when it dies."""
    charged = {engine.role: pair.gateway.breaker_failures(engine) for engine in pair.engines}
    os.kill(pair.prefill.process.member_named("EngineCore"), signal.SIGSTOP)
    try:
        client = OpenRequest(pair.gateway.port, CHAT, endless(prompt("a crash"), stream=True).body)
        try:
            wait_until("the prefill leg to be sent", SETTLE_SECONDS, lambda: pair.gateway.requests_active(pair.prefill))
            pair.prefill.process.expect_death()
            pair.prefill.process.kill()
            received, seconds = _rest(client)
        finally:
            client.leave()
    finally:
        pair.prefill.process.kill()
    head = received.partition("\r\n")[0]
    expect(" 502 " in head or " 503 " in head, f"the client's answer is {received[:300]!r}")
    _expect_charged(pair, pair.prefill, charged)
    return f"{seconds:.1f} s later the client has `{head}`; charged to prefill alone"


def _rest(client: OpenRequest) -> tuple[str, float]:
    """What the client received in all, and the seconds from now to the end of it."""
    began = time.monotonic()
    received = client.read_to_end()
    seconds = time.monotonic() - began
    expect(seconds < END_SECONDS, f"the answer ended only {seconds:.0f} s later")
    return received, seconds


def _expect_charged(pair: Pair, victim: Engine, before: dict[str, int]) -> None:
    for engine in pair.engines:
        charged = pair.gateway.breaker_failures(engine) - before[engine.role]
        expect((charged > 0) == (engine is victim), f"{engine.role}'s breaker was charged {charged} times")


def _meanwhile(pair: Pair, other: Engine) -> str:
    """Every answer is an error that says so at once, and none is charged to the worker that lives."""
    before = pair.gateway.breaker_failures(other)
    seen = []
    for _ in range(FOLLOWERS):
        answer = call(pair.gateway.port, "POST", CHAT, chat(prompt("meanwhile")).body, seconds=END_SECONDS)
        seen.append(f"{answer.status} {answer.headers.get('x-smg-error-code')}")
        expect(answer.status in (502, 503), f"answered {answer.status}: {answer.text[:300]}")
    expect(pair.gateway.breaker_failures(other) == before, f"{other.role}'s breaker was charged")
    return ", ".join(seen)


def _return(pair: Pair, victim: Engine, identity: object) -> str:
    """Starts the server again; without anybody's help the gateway finds it, and serves unless it has a new identity."""
    victim.start()
    victim.wait_ready()
    began = time.monotonic()

    def found() -> bool:
        if identity is not None:
            return bool(pair.gateway.worker(victim)["is_healthy"])
        return call(pair.gateway.port, "POST", CHAT, chat(prompt("return")).body).status == 200
    wait_until("the gateway to find it", SETTLE_SECONDS, found)
    done = "healthy" if identity is not None else "served"
    return f"{done} again {time.monotonic() - began:.1f} s after its /health answers, without an admin call"


def _redeclare(pair: Pair, victim: Engine, identity: Callable[[Engine], dict[str, object]]) -> str:
    pair.gateway.register_again(victim, kv_connector=victim.connector, **identity(victim))
    pair.gateway.wait_healthy(2)
    return "PUT /workers/{id}, applied"
