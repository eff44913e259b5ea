"""What runs together: a pair of servers with one connector, a gateway, and the checks of that pair."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import mooncake_support
from checks_crash import check_decode_crash, check_prefill_crash, check_unprotected
from checks_handoff import (
    check_answers,
    check_batches,
    check_hostile_fields,
    check_listeners,
    check_unequal_requests,
)
from checks_leaving import check_leaving
from checks_passthrough import check_declared, check_undeclared
from engine import Engine
from engine_logs import check_logs
from gateway import Gateway
from installation import Installation
from pair import Pair
from processes import Process, Processes
from table import Table


def nixl(table: Table, installation: Installation, binary: pathlib.Path, logs: pathlib.Path) -> None:
    """NIXL: decode pulls the KV cache from the place that the prefill's answer names."""
    with Processes(logs) as processes:
        name = "NIXL"
        pair = _start(table, name, processes, lambda: _pair(processes, installation, binary, "NixlConnector", "nixl"))
        if pair is None:
            return
        table.run(name, "listeners", check_listeners, pair)
        _declare(table, name, pair)
        check_answers(table, name, pair)
        check_unequal_requests(table, name, pair)
        check_batches(table, "NIXL, several prompts in one request", pair)
        check_hostile_fields(table, "NIXL, handoffs that clients bring", pair)
        check_unprotected(table, "NIXL, handoffs that clients bring", pair)
        check_leaving(table, "NIXL, clients that leave", pair)
        table.run("No declared connector", "nothing says so of a declared one", check_declared, pair)
        table.run("No declared connector", "the declared pair leaves", _leave, pair)
        check_undeclared(table, "No declared connector", pair)
        _declare(table, "NIXL, a crash of decode", pair)
        check_decode_crash(table, "NIXL, a crash of decode", pair)
        check_prefill_crash(table, "NIXL, a crash of prefill", pair)
        table.run("NIXL, the servers' own logs", "errors", check_logs, _servers(processes))


def mooncake_pair(table: Table, installation: Installation, binary: pathlib.Path, logs: pathlib.Path) -> None:
    """Mooncake: prefill pushes the KV cache to the decode that names it. It listens everywhere: run in a namespace."""
    environment = mooncake_support.environment(installation)
    with Processes(logs) as processes:
        options = mooncake_support.OPTIONS
        name = "Mooncake"
        pair = _start(table, name, processes, lambda: _pair(
            processes, installation, binary, "MooncakeConnector", "mooncake", options, environment))
        if pair is None:
            return
        _declare(table, name, pair, _peer(pair.prefill))
        check_answers(table, name, pair)
        check_unequal_requests(table, name, pair)
        check_batches(table, "Mooncake, several prompts in one request", pair)
        check_hostile_fields(table, "Mooncake, handoffs that clients bring", pair)
        check_leaving(table, "Mooncake, clients that leave", pair)
        check_decode_crash(table, "Mooncake, a crash of decode", pair)
        check_prefill_crash(table, "Mooncake, a crash of prefill", pair, _peer)
        table.run("Mooncake, the servers' own logs", "errors", check_logs, _servers(processes))


STAGES: dict[str, Callable[[Table, Installation, pathlib.Path, pathlib.Path], None]] = {
    "nixl": nixl,
    "mooncake": mooncake_pair,
}


def _start(table: Table, group: str, processes: Processes, make: Callable[[], Pair]) -> Pair | None:
    """Starts a pair as a check of its own; without one, the checks of it are not run, and the table says so."""
    made: list[Pair] = []

    def start() -> str:
        made.append(make())
        return ", ".join(f"{engine.role} ready after {engine.start_seconds[0]:.0f} s" for engine in made[0].engines)
    if not table.run(group, "start", start):
        processes.show_logs()
        table.not_run(group, "everything else", "no pair to check")
        return None
    return made[0]


def _pair(processes: Processes, installation: Installation, binary: pathlib.Path, connector: str, mode: str,
          options: dict[str, object] | None = None, environment: dict[str, str] | None = None) -> Pair:
    print(f"starting two servers with {connector}: one to six minutes", flush=True)
    prefill, decode = (Engine(processes, installation, role, connector, options, environment)
                       for role in ("prefill", "decode"))
    for engine in (prefill, decode):
        engine.wait_ready()
    return Pair(prefill, decode, Gateway(processes, binary), mode, loopback_only=mode == "nixl")


def _declare(table: Table, group: str, pair: Pair, prefill_only: dict[str, object] | None = None) -> None:
    """Registers both servers with the connector they run."""
    def register() -> str:
        pair.gateway.register(pair.prefill, kv_connector=pair.prefill.connector, **(prefill_only or {}))
        pair.gateway.register(pair.decode, kv_connector=pair.decode.connector)
        pair.gateway.wait_healthy(2)
        shown = {key: pair.gateway.worker(pair.prefill).get(key) for key in ("pd_pairing", "model_id")}
        return f"both workers healthy, {json.dumps(shown)}"
    table.run(group, "registration", register)


def _servers(processes: Processes) -> list[Process]:
    """All that were started, also those that ended."""
    return [process for process in processes.started if process.name != "smg"]


def _peer(prefill: Engine) -> dict[str, object]:
    """What a Mooncake prefill declares so that decode servers can name it."""
    return {"kv_engine_id": mooncake_support.engine_id(prefill), "bootstrap_port": prefill.side_port}


def _leave(pair: Pair) -> str:
    pair.gateway.unregister_all()
    return "no worker left"
