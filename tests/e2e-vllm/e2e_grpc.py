#!/usr/bin/env python3
"""Checks `smg` in front of a real vLLM pair whose servers speak gRPC (`vllm serve --grpc`): `make e2e-vllm-grpc`.

Uses the installation of `make e2e-vllm` and installs the servicer's packages beside it. The servers have NixlConnector and
no HTTP port, so no counters of theirs can be read: what KV moved and about how many tokens were generated is told by the decode
server's own log, and texts are compared with what a second `smg` gets from the prefill server alone. A run writes
`docs/reports/e2e-vllm-grpc.md`.

Exit codes: 0 every check passed, 1 a check failed or the run broke, 2 the machine lacks something or the command line is wrong,
130 interrupted.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import gateway
import prerequisites
import report
from api import ENDLESS_TOKENS, Request, chat, completion, endless, message, prompt, response
from checks_handoff import expect_loopback
from client import OpenRequest, call
from engine import ROLES, SERVE_ENVIRONMENT, SERVE_OPTIONS, START_SECONDS
from engine_logs import check_logs
from failure import Broken, Missing, expect
from gateway import Gateway
from installation import Installation, clean_environment
from processes import Interrupted, Process, Processes, free_port, install_interruption
from table import FAILED, Table
from waiting import wait_until

HERE = pathlib.Path(__file__).resolve().parent
REQUIREMENTS = HERE / "grpc-requirements.txt"
SETTLE_SECONDS = 60
STATISTICS_SECONDS = 2
"""How often a server logs what it did, while it does something."""
GROUP = "NIXL over gRPC"

TEXT = """# A real vLLM pair over gRPC behind `smg launch`

Written by `make e2e-vllm-grpc` on {date}, commit {commit}: **{summary}**.

`vllm serve --grpc` with {pins}; NixlConnector with UCX over TCP and shared memory, a Qwen3 of two layers with random weights,
greedy choices, everything on loopback, `smg` as a debug build: times say nothing about speed. Nothing is declared at
registration: connector, layout and tokenizer come from the servers. What KV moved and about how many tokens were generated is told by
the decode server's own log. Texts are compared with what a second `smg` gets from the prefill server alone: that tells of the handoff, not
of how `smg` makes text of tokens, which is the same on both sides. The abort of a decode that has not answered anything yet is deferred by up
to 30 s, and an answer that is not streamed is one reply at the end: the server's engine is held still meanwhile, so that it cannot be done
before.

{tables}
"""


class Server:
    """A vLLM server that speaks gRPC."""

    def __init__(self, processes: Processes, installation: Installation, packages: pathlib.Path, role: str) -> None:
        self.role = role
        self.port, side_port, events_port = free_port(), free_port(), free_port()
        transfer = {"kv_connector": "NixlConnector", "kv_role": ROLES[role], "kv_buffer_device": "cpu"}
        # The servicer would publish KV events on every address.
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{events_port}"}
        command = [str(installation.vllm), "serve", str(installation.model), "--grpc", "--port", str(self.port)]
        command += [word for option in SERVE_OPTIONS.items() for word in option]
        command += ["--enforce-eager", "--no-enable-log-requests", "--kv-events-config", json.dumps(events)]
        command += ["--kv-transfer-config", json.dumps(transfer)]
        environment = clean_environment() | SERVE_ENVIRONMENT | {
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port), "PYTHONPATH": str(packages),
            "VLLM_LOG_STATS_INTERVAL": str(STATISTICS_SECONDS),
        }
        self.process: Process = processes.start(f"grpc-{role}", command, environment)

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def transfers(self) -> tuple[int, int]:
        """Successful and failed transfers, as far as the server has logged them."""
        log = self.process.log_text()
        counted = [sum(int(number) for number in re.findall(rf"Num {word} transfers=(\d+)", log))
                   for word in ("successful", "failed")]
        return counted[0], counted[1]

    def log_since(self, position: int) -> str:
        return self.process.log_text()[position:]

    def generated(self, position: int) -> tuple[int, bool]:
        """About how many tokens it generated since a position in its log, and whether it has come to rest by now."""
        told = re.findall(r"Avg generation throughput: ([\d.]+) tokens/s, Running: (\d+) reqs", self.log_since(position))
        rests = bool(told) and float(told[-1][0]) == 0 and told[-1][1] == "0"
        return round(sum(float(rate) for rate, _ in told) * STATISTICS_SECONDS), rests


def install_servicer(installation: Installation) -> pathlib.Path:
    """The folder with the servicer's packages, filled if it is not there yet."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    folder = installation.cache / f"grpc-{digest}"
    if not (folder / "finished").exists():
        shutil.rmtree(folder, ignore_errors=True)
        installation.pip_install(REQUIREMENTS, "--target", folder)
        (folder / "finished").touch()
    return folder


class Pair:
    """Both servers, a gateway in front of them, and one in front of the prefill server alone."""

    def __init__(self, processes: Processes, binary: pathlib.Path, prefill: Server, decode: Server) -> None:
        self.prefill, self.decode = prefill, decode
        self.gateway = Gateway(processes, binary)
        self.alone = Gateway(processes, binary, "smg-alone")

    def listeners(self) -> str:
        """Everything listens on loopback."""
        return expect_loopback([part.process for part in (self.prefill, self.decode, self.gateway, self.alone)])

    def register(self) -> str:
        def post(where: Gateway, server: Server, role: str) -> None:
            answer = call(where.port, "POST", "/workers", {"url": server.url, "worker_type": role})
            expect(answer.status == 202, f"POST /workers answered {answer.status}: {answer.text}")

        def healthy(where: Gateway, count: int) -> bool:
            for server in (self.prefill, self.decode):
                server.process.require_alive()
            workers = where.workers()
            return len(workers) == count and all(worker["is_healthy"] for worker in workers)
        for server in (self.prefill, self.decode):
            post(self.gateway, server, server.role)
        post(self.alone, self.prefill, "regular")
        wait_until("the pair to be registered", START_SECONDS, lambda: healthy(self.gateway, 2), pause=1)
        wait_until("the lone prefill to be registered", START_SECONDS, lambda: healthy(self.alone, 1), pause=1)
        keys = {worker.get("pd_pairing") for worker in self.gateway.workers()}
        expect(len(keys) == 1 and "/nixl/" in str(keys), f"the pairing keys are {keys}")
        return f"`{keys.pop()}`, nothing declared"

    def answer(self, request: Request) -> str:
        """Sends a request through the pair, and compares with what the second gateway gets from the prefill server alone."""
        modes = self.gateway.mode_count("nixl")
        answer = call(self.gateway.port, "POST", request.path, request.body)
        expect(answer.status == 200, f"the gateway answered {answer.status}: {answer.text[:300]}")
        alone = call(self.alone.port, "POST", request.path, request.body)
        expect(alone.status == 200, f"the second gateway answered {alone.status}: {alone.text[:300]}")
        texts, expected = request.read(answer.text).texts, request.read(alone.text).texts
        expect(all(texts) and texts == expected, f"the texts differ: {texts!r} and {expected!r}")
        expect(self.gateway.mode_count("nixl") == modes + 1, "the gateway counted no handoff")
        return f"{request.read(answer.text).prompt_tokens} prompt tokens; text equal"

    def transfers(self, requests: int) -> str:
        """Every request had its KV transferred, once."""
        # The server logs what moved only while it works.
        awake = 0
        deadline = time.monotonic() + SETTLE_SECONDS
        while self.decode.transfers()[0] < requests + awake and time.monotonic() < deadline:
            self.serve("Keep it awake")
            awake += 1
            time.sleep(2 * STATISTICS_SECONDS)
        moved, failed = self.decode.transfers()
        found = f"{moved} transfers succeeded, {failed} failed, of {requests} requests and {awake} that made the server log"
        expect((moved, failed) == (requests + awake, 0), found)
        lost = self.gateway.metrics().total("smg_pd_kv_transfer_failures_total")
        expect(lost == 0, f"the gateway counted {lost} handoffs that did not come")
        return found

    def serve(self, about: str) -> None:
        expect(self.is_served(about), "the gateway does not serve")

    def leave(self, stream: bool) -> str:
        """A client leaves: the decode server is told, and ends its request long before it is done."""
        position = len(self.decode.process.log_text())
        request = endless(prompt("A client that leaves"), stream)
        connection = OpenRequest(self.gateway.port, request.path, request.body)
        try:
            if stream:
                connection.read_events(3)
                held = None
            else:
                wait_until("the decode to generate", SETTLE_SECONDS, lambda: self.decode.generated(position)[0])
                held = self.decode.process.member_named("EngineCore")
                os.kill(held, signal.SIGSTOP)
        finally:
            connection.leave()
        left = time.monotonic()
        try:
            wait_until("an abort in the decode server's log", SETTLE_SECONDS,
                       lambda: "Abort requests" in self.decode.log_since(position))
        finally:
            if held is not None:
                os.kill(held, signal.SIGCONT)
        seconds = time.monotonic() - left
        wait_until("no leg is left", SETTLE_SECONDS, lambda: self.gateway.metrics().total("smg_grpc_legs") == 0)
        # Where the abort came before the first token, it takes another request for the server to log anything.
        wait_until("the pair to serve", SETTLE_SECONDS, lambda: self.is_served("After the one that left"), pause=1)
        wait_until("the decode server to rest", SETTLE_SECONDS, lambda: self.decode.generated(position)[1], pause=1)
        generated, _ = self.decode.generated(position)
        expect(0 < generated < ENDLESS_TOKENS / 2, f"the decode server generated about {generated} tokens")
        wait_until("both servers to report no running request", SETTLE_SECONDS, self.reports_idle, pause=1)
        return (f"aborted {seconds:.0f} s later, no leg is left, both servers report no running request; decode generated about "
                f"{generated} of {ENDLESS_TOKENS} tokens")

    def is_served(self, about: str) -> bool:
        request = completion(prompt(about))
        return call(self.gateway.port, "POST", request.path, request.body).status == 200

    def reports_idle(self) -> bool:
        loads = call(self.gateway.port, "GET", "/loads").json()["loads"]
        workers = {load["worker"] for load in loads}
        return workers == {self.prefill.url, self.decode.url} and all(load["num_running_reqs"] == 0 for load in loads)

    def too_long(self) -> str:
        request = completion([5] * 5000)
        answer = call(self.gateway.port, "POST", request.path, request.body)
        code = answer.headers.get("x-smg-error-code")
        expect((answer.status, code) == (400, "context_length_exceeded"), answer.text)
        return f"400 `{code}`"

    def decode_crash(self) -> str:
        self.decode.process.expect_death()
        self.decode.process.kill()
        request = completion(prompt("After a crash"))

        def refused() -> bool:
            answer = call(self.gateway.port, "POST", request.path, request.body)
            return answer.status == 503 and answer.headers.get("x-smg-error-code") == "no_available_workers"
        wait_until("503 no_available_workers", SETTLE_SECONDS, refused, pause=0.5)
        failures = self.gateway.metrics().total("smg_worker_cb_outcomes_total", worker=self.prefill.url, outcome="failure")
        expect(failures == 0, f"the prefill was charged with {failures} failures")
        return "503 `no_available_workers`; the prefill is charged with nothing"


def run(table: Table, installation: Installation, packages: pathlib.Path, binary: pathlib.Path, logs: pathlib.Path) -> None:
    with Processes(logs) as processes:
        print("starting two servers: one to six minutes", flush=True)
        servers = [Server(processes, installation, packages, role) for role in ("prefill", "decode")]
        pair = Pair(processes, binary, *servers)
        table.run(GROUP, "registration", pair.register)
        table.run(GROUP, "listeners", pair.listeners)
        kinds = {"chat": chat, "completion": completion, "message": message, "response": response}
        for name, kind in kinds.items():
            for stream in (False, True):
                what = f"{name}, {'streamed' if stream else 'whole'}"
                table.run(GROUP, what, pair.answer, kind(prompt(what), stream))
        table.run(GROUP, "transfers in the decode server's log", pair.transfers, 8)
        for stream in (True, False):
            table.run(GROUP, f"a client leaves, {'streamed' if stream else 'whole'}", pair.leave, stream)
        table.run(GROUP, "a prompt that is too long", pair.too_long)
        table.run(GROUP, "answers afterwards", pair.answer, chat(prompt("afterwards")))
        table.run(GROUP, "a crash of decode", pair.decode_crash)
        table.run(GROUP, "errors in the servers' own logs", check_logs, [server.process for server in servers])


def write(table: Table, commit: str) -> None:
    pins = ", ".join(line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("smg"))
    report.GRPC_PAGE.write_text(TEXT.format(date=datetime.date.today().isoformat(), commit=commit, summary=table.summary(),
                                          pins=pins, tables=table.markdown()))
    print(f"written to {report.GRPC_PAGE}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, help="check this smg instead of building one, and write no page")
    options = parser.parse_args()
    install_interruption()
    try:
        installation = Installation(prerequisites.cache_directory())
        python = prerequisites.check(installation.cache, installation.is_complete())
        # First what may be missing, then the build, which takes long.
        installation.install(python)
        packages = install_servicer(installation)
        commit = report.current_commit()
        binary = options.binary or gateway.build()
        table = Table()
        run(table, installation, packages, binary, installation.cache / "logs" / "grpc")
        print(f"\n{table.markdown()}\n\n{table.summary()}")
        if options.binary is None:
            write(table, commit)
        return 1 if table.count(FAILED) else 0
    except Missing as missing:
        print(f"e2e-vllm-grpc cannot run here; missing:\n{missing}", file=sys.stderr)
        return 2
    except (Broken, subprocess.SubprocessError, OSError) as error:
        print(f"e2e-vllm-grpc broke: {error}", file=sys.stderr)
        return 1
    except Interrupted as interruption:
        print(f"e2e-vllm-grpc was interrupted by {interruption}; what it started is stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
