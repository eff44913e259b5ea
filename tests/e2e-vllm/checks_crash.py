"""A decode server that dies in the middle of a stream, and comes back."""

from __future__ import annotations

import time

from api import CHAT, chat, endless, prompt
from checks_handoff import check_handoff
from client import OpenRequest, call
from engine import SETTLE_SECONDS
from failure import expect
from pair import Pair
from table import Table
from waiting import wait_until

FOLLOWERS = 4
END_SECONDS = 30
"""Longest time between the crash and the end of the client's stream."""


def check_crash(table: Table, group: str, pair: Pair) -> None:
    """The pair is as before when this is over."""
    table.run(group, "killed in the middle of a stream", _kill, pair)
    table.run(group, "requests meanwhile", _meanwhile, pair)
    table.run(group, "back again", _return, pair)
    request = chat(prompt("after the return"), stream=True)
    table.run(group, "KV moves again", check_handoff, pair, request)


def _kill(pair: Pair) -> str:
    prefill_before, decode_before = (pair.gateway.breaker_failures(engine) for engine in pair.engines)
    client = OpenRequest(pair.gateway.port, CHAT, endless(prompt("a crash"), stream=True).body)
    try:
        client.read_events(8)
        pair.decode.process.kill()
        began = time.monotonic()
        received = client.read_to_end()
    finally:
        client.leave()
    seconds = time.monotonic() - began
    tail = [line for line in received.splitlines() if line.startswith("data: ")][-2:]
    expect(seconds < END_SECONDS, f"the stream ended {seconds:.0f} s later")
    expect('"error"' in received, f"the stream tells of no error; it ends with {tail}")
    prefill, decode = (pair.gateway.breaker_failures(engine) for engine in pair.engines)
    expect(decode > decode_before, "decode's breaker was not charged")
    expect(prefill == prefill_before, "prefill's breaker was charged")
    return f"{seconds:.1f} s later the stream ends with `{tail[0].removeprefix('data: ')}`; charged to decode alone"


def _meanwhile(pair: Pair) -> str:
    """Every answer is an error that says so at once, and none is charged to the prefill worker."""
    before = pair.gateway.breaker_failures(pair.prefill)
    seen = []
    for _ in range(FOLLOWERS):
        answer = call(pair.gateway.port, "POST", CHAT, chat(prompt("meanwhile")).body, seconds=END_SECONDS)
        seen.append(f"{answer.status} {answer.headers.get('x-smg-error-code')}")
        expect(answer.status in (502, 503), f"answered {answer.status}: {answer.text[:300]}")
    expect(pair.gateway.breaker_failures(pair.prefill) == before, "prefill's breaker was charged")
    return ", ".join(seen)


def _return(pair: Pair) -> str:
    pair.decode.start()
    pair.decode.wait_ready()
    began = time.monotonic()

    def served() -> bool:
        return call(pair.gateway.port, "POST", CHAT, chat(prompt("return")).body).status == 200
    wait_until("a request to be served", SETTLE_SECONDS, served)
    return f"served again {time.monotonic() - began:.1f} s after its /health answers, without any call to the gateway"
