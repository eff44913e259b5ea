"""`smg launch`: building it, running it, and what it says about itself."""

from __future__ import annotations

import json
import pathlib
import subprocess
from typing import Any

from client import answers, call
from engine import Engine
from exposition import Metrics
from failure import Broken
from installation import clean_environment
from processes import Processes, free_port, run_step
from waiting import wait_until

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD_SECONDS = 3600
START_SECONDS = 60
REGISTER_SECONDS = 60


def build() -> pathlib.Path:
    """Builds the binary and returns its path."""
    command = ["cargo", "build", "--locked", "-p", "smg", "--bin", "smg", "--message-format=json-render-diagnostics"]
    try:
        built, _ = run_step(command, BUILD_SECONDS, folder=ROOT, output=subprocess.PIPE)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise Broken(str(error)) from error
    for line in built.splitlines():
        message = json.loads(line)
        if message.get("reason") == "compiler-artifact" and message["target"]["name"] == "smg" and message["executable"]:
            return pathlib.Path(message["executable"])
    raise Broken("cargo built no binary called smg")


class Gateway:
    """A running `smg launch` on loopback without workers."""

    def __init__(self, processes: Processes, binary: pathlib.Path, name: str = "smg") -> None:
        self.port = free_port()
        self._metrics_port = free_port()
        command = [str(binary), "launch", "--pd-disaggregation", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(self._metrics_port)]
        command += ["--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "5"]
        self.process = processes.start(name, command, clean_environment())

        def alive() -> bool:
            self.process.require_alive()
            return answers(self.port, "/liveness")
        wait_until("smg to serve", START_SECONDS, alive)

    def register(self, engine: Engine, **declared: object) -> None:
        """Registers a server as an operator does; `declared` are further members of the worker's description."""
        self._declare("POST", "/workers", engine, declared)

    def register_again(self, engine: Engine, **declared: object) -> None:
        """Replaces the description of a registered worker, and waits until the new one is in force."""
        self._declare("PUT", f"/workers/{self.worker(engine)['id']}", engine, declared)

        def applied() -> bool:
            if not declared.items() <= self.worker(engine).items():
                return False
            revision = int(call(self.port, "GET", "/workers").headers.get("x-smg-revision", 0))
            return self.metrics().total("smg_config_revision") >= revision
        wait_until("the worker's new description", REGISTER_SECONDS, applied)

    def _declare(self, method: str, path: str, engine: Engine, declared: dict[str, object]) -> None:
        body = {"url": engine.url, "worker_type": engine.role, "runtime_type": "vllm"} | declared
        answer = call(self.port, method, path, body)
        if answer.status != 202:
            raise Broken(f"{method} {path} answered {answer.status}: {answer.text}")

    def wait_healthy(self, count: int) -> None:
        """Waits until `count` workers are registered and every one of them is healthy."""
        def healthy() -> bool:
            workers = self.workers()
            return len(workers) == count and all(worker["is_healthy"] for worker in workers)
        wait_until(f"{count} healthy workers", REGISTER_SECONDS, healthy)

    def unregister_all(self) -> None:
        for worker in self.workers():
            answer = call(self.port, "DELETE", f"/workers/{worker['id']}")
            if answer.status >= 300:
                raise Broken(f"DELETE /workers answered {answer.status}: {answer.text}")
        wait_until("an empty list of workers", REGISTER_SECONDS, lambda: not self.workers())

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = call(self.port, "GET", "/workers").json()["workers"]
        return workers

    def worker(self, engine: Engine) -> dict[str, Any]:
        for worker in self.workers():
            if worker["url"] == engine.url:
                return worker
        raise Broken(f"the gateway does not list {engine.url}")

    def metrics(self) -> Metrics:
        return Metrics.of(self._metrics_port)

    def requests_active(self, engine: Engine) -> int:
        return int(self.metrics().total("smg_worker_requests_active", worker=engine.url))

    def breaker_failures(self, engine: Engine) -> int:
        return int(self.metrics().total("smg_worker_cb_outcomes_total", worker=engine.url, outcome="failure"))

    def mode_count(self, mode: str) -> int:
        """Dispatches to vLLM pairs by KV connector mode."""
        return int(self.metrics().total("smg_pd_kv_connector_mode_total", mode=mode))
