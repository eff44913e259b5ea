"""Clients that leave: nothing goes on for them on either server."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

from answers import CHAT
from api import ENDLESS_TOKENS, Request, completion, endless, prompt
from client import OpenRequest
from engine import SETTLE_SECONDS, reference, wait_idle
from failure import CheckFailed, expect
from pair import Pair
from table import Table
from waiting import wait_until

CROWD = 30
CROWD_SECONDS = 1.5
"""Longest stay of a client of the crowd: many times what a prompt takes on an idle machine."""


def check_leaving(table: Table, group: str, pair: Pair) -> None:
    table.run(group, "in the middle of a stream", _during_stream, pair)
    table.run(group, "during decode, not streamed", _during_decode, pair)
    table.run(group, "during prefill", _during_prefill, pair)
    table.run(group, f"{CROWD} clients at random moments", _crowd, pair)


def _open(pair: Pair, request: Request) -> OpenRequest:
    return OpenRequest(pair.gateway.port, CHAT, request.body)


def _during_stream(pair: Pair) -> str:
    before = pair.decode.counters()
    client = _open(pair, endless(prompt("leaving a stream"), stream=True))
    try:
        client.read_events(8)
    finally:
        client.leave()
    return _generated_until_idle(pair, before.generated)


def _during_decode(pair: Pair) -> str:
    before = pair.decode.counters()
    client = _open(pair, endless(prompt("leaving a decode"), stream=False))
    try:
        wait_until("decode to run the request", SETTLE_SECONDS, lambda: pair.decode.counters().busy, pause=0.05)
    finally:
        client.leave()
    return _generated_until_idle(pair, before.generated)


def _generated_until_idle(pair: Pair, generated_before: int) -> str:
    seconds = wait_idle(pair.engines)
    generated = pair.decode.counters().generated - generated_before
    expect(generated < ENDLESS_TOKENS, f"decode generated all {generated} tokens")
    _expect_no_claims(pair)
    return f"both servers idle after {seconds:.1f} s, decode generated {generated} of {ENDLESS_TOKENS} tokens"


def _during_prefill(pair: Pair) -> str:
    """The prefill server's engine is held still, so that the client surely leaves before the prompt is computed."""
    before, prefill_before = pair.decode.counters(), pair.prefill.counters()
    core = pair.prefill.process.member_named("EngineCore")
    os.kill(core, signal.SIGSTOP)
    try:
        client = _open(pair, endless(prompt("leaving a prefill"), stream=True))
        try:
            wait_until("the prefill leg to be sent", SETTLE_SECONDS, lambda: pair.gateway.requests_active(pair.prefill))
        finally:
            client.leave()
        wait_until("the gateway to give up", SETTLE_SECONDS, lambda: not pair.gateway.requests_active(pair.prefill))
    finally:
        os.kill(core, signal.SIGCONT)
    # The server's metrics are those of before until its engine has worked off what came meanwhile; it takes things in turn, so
    # when it answers a request that came later, it has seen the one that was left.
    marker = completion(prompt("after the one that left"))
    marked = marker.read(reference(pair.prefill, marker.path, marker.body)).prompt_tokens
    seconds = wait_idle(pair.engines)
    computed = pair.prefill.growth(prefill_before, marked).prompt
    expect(computed == marked, f"prefill computed {computed} prompt tokens, though the client that stayed has {marked}")
    called = (pair.decode.counters() - before).prompt
    expect(called == 0, f"decode was called all the same: {called} prompt tokens")
    _expect_no_claims(pair)
    return (f"claim released while prefill was held; both servers idle after {seconds:.1f} s, prefill computed nothing of it, "
            "decode never called")


def _crowd(pair: Pair) -> str:
    """Shows by the servers' counters that most clients left a request behind, and that none was worked off for nobody."""
    moments = random.Random(3)
    errors: list[OSError] = []

    def come_and_go(number: int, seconds: float) -> None:
        """Every third stays for some tokens however long they take, so that decode surely has a part."""
        try:
            client = _open(pair, endless(prompt(f"one of a crowd, {number}"), stream=number % 3 != 1))
            try:
                time.sleep(seconds)
                if number % 3 == 0:
                    client.read_events(1 + number // 3)
            finally:
                client.leave()
        except OSError as error:
            errors.append(error)
    prefill, decode, dispatched = pair.prefill.counters(), pair.decode.counters(), pair.gateway.mode_count(pair.mode)
    clients = [threading.Thread(target=come_and_go, args=(number, moments.uniform(0, CROWD_SECONDS)))
               for number in range(CROWD)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    if errors:
        raise CheckFailed(f"{len(errors)} of {CROWD} clients failed, one with {errors[0]!r}")
    seconds = wait_idle(pair.engines)
    _expect_no_claims(pair)
    prefilled, decoded = pair.prefill.counters() - prefill, pair.decode.counters() - decode
    dispatched = pair.gateway.mode_count(pair.mode) - dispatched
    found = (f"{dispatched} requests dispatched, prefill counted {prefilled.prompt} prompt tokens, "
             f"decode {decoded.prompt}, and generated {decoded.generated} tokens")
    expect(dispatched >= CROWD / 2 and prefilled.prompt and decoded.prompt and decoded.generated, found)
    expect(decoded.generated < dispatched * ENDLESS_TOKENS / 2, f"answers went on for nobody: {found}")
    return f"{found}; both servers idle {seconds:.1f} s after the last"


def _expect_no_claims(pair: Pair) -> None:
    """The gateway counts no request on either worker any more."""
    active = {engine.role: pair.gateway.requests_active(engine) for engine in pair.engines}
    expect(not any(active.values()), f"the gateway still counts requests: {active}")
