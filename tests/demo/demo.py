#!/usr/bin/env python3
"""Shows `smg` in front of two prefill and two decode engines, without a GPU.

Builds the gateway and the mock engines, starts them on free ports of 127.0.0.1, sends one plain and one streamed chat
completion through each of two fleets (SGLang, and vLLM with the NIXL connector), and prints the answer, the pair that
was chosen and the time each leg took, as the gateway's decision record tells it.

Everything that was started is stopped again, whatever happens. The exit code is 0 only when every answer arrived, the
streamed text equals the plain one, every request has a decision record, and the gateway shut down cleanly.

Needs python3 (standard library only) and cargo.
"""

import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = "demo-model"
PROMPT = "Why do prefill and decode run on different machines?"
START_SECONDS = 60
REQUEST_SECONDS = 30
STOP_SECONDS = 20


class DemoFailed(Exception):
    """Something is off; the message says what."""


def build():
    """Builds both binaries and returns their paths by name."""
    print("building smg and mock-engine ...", flush=True)
    command = ["cargo", "build", "--locked", "-p", "smg", "-p", "mock-engine", "--bins"]
    command.append("--message-format=json-render-diagnostics")
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode != 0:
        raise DemoFailed("the build failed")
    binaries = {}
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message.get("reason") == "compiler-artifact" and message.get("executable"):
            binaries[message["target"]["name"]] = message["executable"]
    missing = {"smg", "mock-engine"} - binaries.keys()
    if missing:
        raise DemoFailed(f"the build made no binary {', '.join(sorted(missing))}")
    return binaries


def free_ports(count):
    """Distinct ports that were free a moment ago: all are held open until the last one is known."""
    held = []
    try:
        for _ in range(count):
            listener = socket.socket()
            listener.bind(("127.0.0.1", 0))
            held.append(listener)
        return [listener.getsockname()[1] for listener in held]
    finally:
        for listener in held:
            listener.close()


class Processes:
    """The processes of one fleet; stops them in reverse order on leaving the `with` block."""

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        self.running = []

    def __enter__(self):
        return self

    def start(self, name, command):
        log = self.directory / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        self.running.append((name, process, log))
        return process, log

    def wait_for_line(self, name, process, log, start):
        """The first line of a process's output that starts with `start`."""
        def line():
            if process.poll() is not None:
                raise DemoFailed(f"{name} ended with exit code {process.returncode}")
            return next((line for line in log.read_text(errors="replace").splitlines() if line.startswith(start)), None)
        return wait_until(f"{name} to say `{start}`", line)

    def __exit__(self, kind, _error, _trace):
        unclean = []
        for name, process, _ in reversed(self.running):
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                unclean.append(f"{name} did not stop within {STOP_SECONDS} s")
            if name == "smg" and process.returncode != 0:
                unclean.append(f"smg ended with exit code {process.returncode}")
        if kind is not None or unclean:
            for name, _, log in self.running:
                tail = log.read_text(errors="replace").splitlines()[-15:]
                print(f"--- last lines of {name}", *tail, sep="\n", file=sys.stderr)
        if kind is None and unclean:
            raise DemoFailed("; ".join(unclean))


def wait_until(what, probe, seconds=START_SECONDS):
    """The first truthy value of `probe`, asked until the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise DemoFailed(f"waited {seconds} s for {what}")
        time.sleep(0.05)


def call(port, method, path, body=None):
    """One request to the gateway: status, headers, body as text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_SECONDS)
    try:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise DemoFailed(f"{method} {path}: {error}") from error
    finally:
        connection.close()


def is_ready(port):
    try:
        return call(port, "GET", "/readiness")[0] == 200
    except DemoFailed:
        return False


def chat(port, stream):
    """Sends a chat completion; returns its request id and the text of its answer."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "stream": stream}
    status, headers, text = call(port, "POST", "/v1/chat/completions", body)
    if status != 200:
        raise DemoFailed(f"chat completion answered {status}: {text}")
    request_id = headers.get("x-request-id")
    if not request_id:
        raise DemoFailed("the answer carries no x-request-id")
    try:
        return request_id, streamed_text(text) if stream else json.loads(text)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as error:
        raise DemoFailed(f"the answer is not a chat completion ({error!r}): {text[:500]}") from error


def streamed_text(events):
    data = [line[len("data: "):] for line in events.splitlines() if line.startswith("data: ")]
    if not data or data[-1] != "[DONE]":
        raise DemoFailed(f"the stream does not end with [DONE]: {events[-200:]!r}")
    deltas = [choice.get("delta", {}) for event in data[:-1] for choice in json.loads(event).get("choices", [])]
    return "".join(delta.get("content") or "" for delta in deltas)


def decision(port, request_id):
    """The decision record of one request, once it is finished: that may be a moment after the last byte arrived."""
    def record():
        status, _, text = call(port, "GET", f"/fleet/decisions?request_id={request_id}")
        if status != 200:
            raise DemoFailed(f"/fleet/decisions answered {status}: {text}")
        record = next(iter(json.loads(text).get("decisions", [])), {})
        return record if record.get("outcome") else None
    return wait_until(f"the finished decision record of {request_id}", record, 10)


def show_decision(record):
    """Prints pair and timings of the last attempt, and refuses a record that tells of anything but success."""
    attempts = record.get("attempts") or [{}]
    last = attempts[-1]
    if record["outcome"] != "completed" or not last.get("prefill") or not last.get("decode"):
        raise DemoFailed(f"the decision record tells of no completed pair: {record}")
    if last.get("kv_handoff") is False:
        raise DemoFailed(f"decode had to compute the prompt itself: {record}")
    print(f"    pair     prefill {last['prefill']}  ->  decode {last['decode']}  ({last.get('dispatch')})")
    timings = timings_of(last) | timings_of(record)
    print("    ms since arrival:  " + "  ".join(f"{name} {value}" for name, value in timings.items()))


def timings_of(record):
    """Every `*_ms` number of a record but its date, without the suffix."""
    return {name.removesuffix("_ms").replace("_", " "): value for name, value in record.items()
            if name.endswith("_ms") and not name.endswith("unix_ms")}


def exercise(port):
    """One plain and one streamed request, shown and compared."""
    texts = []
    for stream in (False, True):
        request_id, text = chat(port, stream)
        print(f"  {'streamed' if stream else 'plain'} request {request_id}")
        print(f"    answer   {text}")
        show_decision(decision(port, request_id))
        texts.append(text)
    if not texts[0]:
        raise DemoFailed("the answer is empty")
    if texts[0] != texts[1]:
        raise DemoFailed("the streamed text differs from the plain one")


def start_engines(processes, binary, engine, connector, roles, model=MODEL, options=()):
    """Starts one engine for each role and returns `(role, url, bootstrap port)` of each."""
    engines = []
    for number, role in enumerate(roles):
        port, bootstrap, side_channel = free_ports(3)
        name = f"{engine}-{connector}-{role}-{number}"
        command = [binary, "--engine", engine, "--role", role, "--connector", connector, "--port", str(port)]
        command += ["--bootstrap-port", str(bootstrap), "--side-channel-port", str(side_channel), "--model", model]
        command += options
        process, log = processes.start(name, command)
        engines.append((role, name, process, log, bootstrap))
    lines = [(role, processes.wait_for_line(name, process, log, "ready "), bootstrap)
             for role, name, process, log, bootstrap in engines]
    return [(role, line.split()[1], bootstrap) for role, line, bootstrap in lines]


def start_gateway(processes, binary, workers=()):
    """Starts `smg launch` with worker flags and returns its port."""
    port, metrics = free_ports(2)
    command = [binary, "launch", "--pd-disaggregation", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--policy", "round_robin"]
    command += ["--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "5", *workers]
    print("  $", " ".join(["smg", *command[1:]]))
    process, _ = processes.start("smg", command)

    def serving():
        if process.poll() is not None:
            raise DemoFailed(f"smg ended with exit code {process.returncode}")
        return is_ready(port) if workers else is_alive(port)
    wait_until("smg to serve", serving)
    return port


def is_alive(port):
    try:
        return call(port, "GET", "/liveness")[0] == 200
    except DemoFailed:
        return False


ROLES = ["prefill", "prefill", "decode", "decode"]


def sglang_fleet(processes, binaries):
    print("\nSGLang: both legs at once, workers named on the command line")
    flags = []
    for role, url, bootstrap in start_engines(processes, binaries["mock-engine"], "sglang", "none", ROLES):
        flags += [f"--{role}", url] + ([str(bootstrap)] if role == "prefill" else [])
    exercise(start_gateway(processes, binaries["smg"], flags))


def vllm_fleet(processes, binaries):
    print("\nvLLM with NixlConnector: prefill first, workers registered through the API")
    engines = start_engines(processes, binaries["mock-engine"], "vllm", "nixl", ROLES)
    port = start_gateway(processes, binaries["smg"])
    for role, url, _ in engines:
        spec = {"url": url, "worker_type": role, "runtime_type": "vllm", "kv_connector": "NixlConnector"}
        status, _, text = call(port, "POST", "/workers", spec)
        if status != 202:
            raise DemoFailed(f"POST /workers answered {status}: {text}")

    def all_healthy():
        workers = json.loads(call(port, "GET", "/workers")[2]).get("workers", [])
        return len(workers) == len(engines) and all(worker.get("is_healthy") for worker in workers)
    wait_until("the registered workers to be healthy", all_healthy)
    wait_until("smg to be ready", lambda: is_ready(port))
    exercise(port)


def interrupted(number, _frame):
    raise DemoFailed(f"interrupted by {signal.Signals(number).name}")


def main():
    os.environ.pop("RUST_LOG", None)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    try:
        binaries = build()
        for fleet in (sglang_fleet, vllm_fleet):
            with tempfile.TemporaryDirectory(prefix="smg-demo-") as logs, Processes(logs) as processes:
                fleet(processes, binaries)
    except DemoFailed as error:
        print(f"\ndemo failed: {error}", file=sys.stderr)
        return 1
    print("\ndemo passed: 2 fleets, 4 requests, every answer and decision record as expected")
    return 0


if __name__ == "__main__":
    sys.exit(main())
