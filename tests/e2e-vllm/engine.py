"""One vLLM server of a PD pair, and what its own metrics say."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

from client import answers, call
from exposition import Metrics
from failure import CheckFailed
from installation import Installation, clean_environment
from processes import Process, Processes, free_port
from waiting import wait_until

MODEL = "tiny"
START_SECONDS = 900
"""A start takes one minute on an idle machine and six on one with two busy cores."""

QUIET_SECONDS = 1.0
"""A server's count of requests lags behind: it is idle when it says so for this long."""

SETTLE_SECONDS = 60
"""A server's counters follow its answers with some delay, and an abandoned request ends with some."""

_salts = itertools.count(1)

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}

SERVE_OPTIONS = {
    "--host": "127.0.0.1",
    "--served-model-name": MODEL,
    # With bfloat16 the AMX attention kernel crashes when the first forward pass of a server is a one-token decode.
    "--dtype": "float32",
    "--max-model-len": "4096",
    "--max-num-batched-tokens": "4096",
    "--max-num-seqs": "8",
    "--distributed-executor-backend": "uni",
    "--seed": "0",
}

SERVE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Without it the first request for logprobs compiles C++ inside the engine's loop, for minutes.
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "CUDA_VISIBLE_DEVICES": "",
    # Everything on loopback; UCX, which NIXL moves KV with, listens on the machine's own address otherwise.
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_TLS": "tcp,self,sm",
    "UCX_NET_DEVICES": "lo",
}


@dataclass(frozen=True)
class Counters:
    """A server's counters at one moment, or the difference of two moments. All but `busy` only grow."""

    transferred: int
    """Prompt tokens whose KV came from another engine."""
    computed: int
    """Prompt tokens it computed itself."""
    cached: int
    """Prompt tokens whose KV lay in its own prefix cache."""
    generated: int
    bytes_moved: int
    """Bytes that NIXL transferred; 0 with other connectors."""
    failed_transfers: int
    busy: int
    """Requests that run or wait."""

    @property
    def prompt(self) -> int:
        return self.transferred + self.computed + self.cached

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            self.transferred - earlier.transferred, self.computed - earlier.computed, self.cached - earlier.cached,
            self.generated - earlier.generated, self.bytes_moved - earlier.bytes_moved,
            self.failed_transfers - earlier.failed_transfers, self.busy,
        )


class Engine:
    """A server with its ports, which stay the same when it is started anew."""

    def __init__(self, processes: Processes, installation: Installation, role: str, connector: str,
                 connector_options: Mapping[str, object] | None = None,
                 environment: Mapping[str, str] | None = None) -> None:
        self.role = role
        self.connector = connector
        self.port = free_port()
        self.side_port = free_port()
        """NIXL's side channel, or Mooncake's bootstrap server."""
        self.start_seconds: list[float] = []
        self._processes = processes
        self._installation = installation
        self._connector_options = connector_options or {}
        self._environment = environment or {}
        self._started = 0.0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts the server's process; `wait_ready` waits for it."""
        transfer = {"kv_connector": self.connector, "kv_role": ROLES[self.role], "kv_buffer_device": "cpu"}
        command = [str(self._installation.vllm), "serve", str(self._installation.model), "--port", str(self.port)]
        command += [word for option in SERVE_OPTIONS.items() for word in option]
        command += ["--enforce-eager", "--no-enable-log-requests"]
        command += ["--kv-transfer-config", json.dumps(transfer | dict(self._connector_options))]
        side_channel = {name: str(self.side_port)
                        for name in ("VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT")}
        environment = clean_environment() | SERVE_ENVIRONMENT | side_channel | dict(self._environment)
        self._started = time.monotonic()
        name = f"{self.connector}-{self.role}-{len(self.start_seconds)}"
        self.process: Process = self._processes.start(name, command, environment)

    def wait_ready(self) -> None:
        def ready() -> bool:
            self.process.require_alive()
            return answers(self.port, "/health")
        wait_until(f"the {self.role} server's /health", START_SECONDS, ready, pause=0.5)
        self.start_seconds.append(time.monotonic() - self._started)

    def counters(self) -> Counters:
        metrics = Metrics.of(self.port)
        # A name that the engine does not use any more would count as 0: nothing would ever run.
        metrics.require("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens_total")

        def prompt_tokens(source: str) -> int:
            return int(metrics.total("vllm:prompt_tokens_by_source_total", source=source))
        return Counters(
            transferred=prompt_tokens("external_kv_transfer"),
            computed=prompt_tokens("local_compute"),
            cached=prompt_tokens("local_cache_hit"),
            generated=int(metrics.total("vllm:generation_tokens_total")),
            bytes_moved=int(metrics.total("vllm:nixl_bytes_transferred_sum")),
            failed_transfers=int(metrics.total("vllm:nixl_num_failed_transfers_total")),
            busy=int(metrics.total("vllm:num_requests_running") + metrics.total("vllm:num_requests_waiting")),
        )

    def growth(self, earlier: Counters, prompt_tokens: int) -> Counters:
        """What was counted since `earlier`, once the server is idle and has counted `prompt_tokens`.

        A smaller count is returned as it is when it stays: it is the caller's to judge.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            grown = self.counters() - earlier
            if (grown.busy == 0 and grown.prompt >= prompt_tokens) or time.monotonic() > deadline:
                return grown
            time.sleep(0.1)

    def healthy(self) -> bool:
        return answers(self.port, "/health")


def wait_idle(engines: list[Engine]) -> float:
    """Waits until none of the servers has a request that runs or waits, for a while; returns the seconds until that began."""
    began = time.monotonic()
    quiet_since: float | None = None
    while True:
        busy = {engine.role: engine.counters().busy for engine in engines}
        now = time.monotonic()
        if any(busy.values()):
            quiet_since = None
        elif quiet_since is None:
            quiet_since = now
        elif now - quiet_since > QUIET_SECONDS:
            return quiet_since - began
        if now - began > SETTLE_SECONDS:
            raise CheckFailed(f"{SETTLE_SECONDS} s later requests still run or wait: {busy}")
        time.sleep(0.05)


def reference(engine: Engine, path: str, body: Mapping[str, object]) -> str:
    """The raw answer of one server that is asked alone, without any gateway.

    A salt that no other request has keeps it away from prefix caches: the server computes the whole prompt for it.
    """
    answer = call(engine.port, "POST", path, dict(body) | {"cache_salt": f"alone {next(_salts)}"})
    if answer.status != 200:
        raise CheckFailed(f"the {engine.role} server asked alone answered {answer.status}: {answer.text[:300]}")
    return answer.text
