#!/usr/bin/env python3
"""Checks `smg` in front of a real vLLM pair whose servers speak gRPC (`vllm serve --grpc`): `make e2e-vllm-grpc`.

Uses the installation of `make e2e-vllm` and installs the servicer's packages beside it. The servers have NixlConnector and
no HTTP port, so no counters of theirs can be read: that KV moved is told by the decode server's own log of transfers, and
texts are compared with what a third gateway gets from the prefill server alone. A run writes
`docs/reports/e2e-vllm-grpc.md`.

Exit codes: 0 every check passed, 1 a check failed or the run broke, 2 the machine lacks something, 130 interrupted.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys

import gateway
import prerequisites
import report
from api import Request, chat, completion, endless, message, prompt, response
from client import OpenRequest, call
from engine import ROLES, SERVE_ENVIRONMENT, SERVE_OPTIONS, START_SECONDS
from failure import Broken, Missing, expect
from gateway import ROOT, Gateway
from installation import Installation, clean_environment
from processes import Interrupted, Process, Processes, free_port, install_interruption
from table import FAILED, Table
from waiting import wait_until

HERE = pathlib.Path(__file__).resolve().parent
REQUIREMENTS = HERE / "grpc-requirements.txt"
PAGE = ROOT / "docs" / "reports" / "e2e-vllm-grpc.md"
INSTALL_SECONDS = 600
SETTLE_SECONDS = 60
GROUP = "NIXL over gRPC"

TEXT = """# A real vLLM pair over gRPC behind `smg launch`

Written by `make e2e-vllm-grpc` on {date}, commit {commit}: **{summary}**.

`vllm serve --grpc` with {pins}; NixlConnector with UCX over TCP and shared memory, a Qwen3 of two layers with random weights,
greedy choices, everything on loopback, `smg` as a debug build: times say nothing about speed. Nothing is declared at
registration: connector, layout and tokenizer come from the servers. That KV moved is told by the decode server's own log;
texts are compared with those of the prefill server alone.

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


def install_servicer(installation: Installation) -> pathlib.Path:
    """The folder with the servicer's packages, filled if it is not there yet."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    folder = installation.cache / f"grpc-{digest}"
    if not (folder / "finished").exists():
        shutil.rmtree(folder, ignore_errors=True)
        command = [str(installation.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
                   "--target", str(folder), "-r", str(REQUIREMENTS)]
        subprocess.run(command, env=clean_environment(), check=True, timeout=INSTALL_SECONDS)
        (folder / "finished").touch()
    return folder


class Pair:
    """Both servers, a gateway in front of them, and one in front of the prefill server alone."""

    def __init__(self, processes: Processes, binary: pathlib.Path, prefill: Server, decode: Server) -> None:
        self.prefill, self.decode = prefill, decode
        self.gateway = Gateway(processes, binary)
        self.alone = Gateway(processes, binary)

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
        """Sends a request through the pair, and compares with the prefill server alone."""
        modes = self.gateway.mode_count("nixl")
        answer = call(self.gateway.port, "POST", request.path, request.body)
        expect(answer.status == 200, f"the gateway answered {answer.status}: {answer.text[:300]}")
        alone = call(self.alone.port, "POST", request.path, request.body)
        expect(alone.status == 200, f"the prefill alone answered {alone.status}: {alone.text[:300]}")
        texts, expected = request.read(answer.text).texts, request.read(alone.text).texts
        expect(all(texts) and texts == expected, f"the texts differ: {texts!r} and {expected!r}")
        expect(self.gateway.mode_count("nixl") == modes + 1, "the gateway counted no handoff")
        return f"{request.read(answer.text).prompt_tokens} prompt tokens; text equal"

    def transfers(self, requests: int) -> str:
        """Every request had its KV transferred."""
        # The server logs what moved every ten seconds, and only while it works.
        def logged() -> bool:
            request = completion(prompt("Keep it awake"))
            return self.decode.transfers()[0] >= requests or call(
                self.gateway.port, "POST", request.path, request.body).status != 200
        wait_until("the decode server's log of transfers", SETTLE_SECONDS, logged, pause=2)
        moved, failed = self.decode.transfers()
        expect(moved >= requests and failed == 0, f"{moved} transfers succeeded, {failed} failed")
        lost = self.gateway.metrics().total("smg_pd_kv_transfer_failures_total")
        expect(lost == 0, f"the gateway counted {lost} handoffs that did not come")
        return f"{moved} transfers succeeded, none failed"

    def leave(self, stream: bool) -> str:
        """A client leaves: the servers end its request."""
        request = endless(prompt("A client that leaves"), stream)
        connection = OpenRequest(self.gateway.port, request.path, request.body)
        if stream:
            connection.read_events(3)
        else:
            wait_until("the decode leg", SETTLE_SECONDS,
                       lambda: self.gateway.metrics().total("smg_grpc_legs", leg="decode") > 0)
        connection.leave()
        wait_until("no leg is left", SETTLE_SECONDS, lambda: self.gateway.metrics().total("smg_grpc_legs") == 0)

        def idle() -> bool:
            loads = call(self.gateway.port, "GET", "/loads").json()["loads"]
            return all(load.get("num_running_reqs", load.get("running", 0)) == 0 for load in loads)
        wait_until("idle servers", SETTLE_SECONDS, idle, pause=1)
        return "no leg is left, the servers report no running request"

    def too_long(self) -> str:
        request = completion([5] * 5000)
        answer = call(self.gateway.port, "POST", request.path, request.body)
        code = answer.headers.get("x-smg-error-code")
        expect((answer.status, code) == (400, "context_length_exceeded"), answer.text)
        return f"400 `{code}`"

    def decode_crash(self) -> str:
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


def write(table: Table, commit: str) -> None:
    pins = ", ".join(line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("smg"))
    PAGE.write_text(TEXT.format(date=datetime.date.today().isoformat(), commit=commit, summary=table.summary(), pins=pins,
                                tables=table.markdown()))
    print(f"written to {PAGE}")


def main() -> int:
    install_interruption()
    try:
        installation = Installation(prerequisites.cache_directory())
        python = prerequisites.check(installation.cache, installation.is_complete())
        commit = report.current_commit()
        binary = gateway.build()
        installation.install(python)
        packages = install_servicer(installation)
        table = Table()
        run(table, installation, packages, binary, installation.cache / "logs" / "grpc")
        print(f"\n{table.markdown()}\n\n{table.summary()}")
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
