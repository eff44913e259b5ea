#!/usr/bin/env python3
"""Checks `smg` in front of gRPC engines that are built on the engines' published side of the wire: `make e2e-grpc`.

`smg-grpc-proto` (the message types) and `smg-grpc-servicer` (the tokenizer archive, pairing facts and status codes) come
from PyPI; nothing of them is written here, so a gateway whose own message types differ fails. Each pair is two processes:
the decode engine answers only from what it fetched from its prefill engine.

Installs the packages once into `${XDG_CACHE_HOME:-$HOME/.cache}/smg-e2e-grpc`. A whole run writes `docs/reports/e2e-grpc.md`.
Exit codes: 0 every check passed, 1 a check failed or the run broke, 2 the packages cannot be installed.
"""

import datetime
import hashlib
import http.client
import json
import os
import pathlib
import platform
import shutil
import socket
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "demo"))
import demo  # noqa: E402  the way to start processes is that of the demonstration

REQUIREMENTS = HERE / "requirements.txt"
TOKENIZER = ROOT / "tests" / "mock-engine" / "testdata" / "tokenizer"
REPORT = ROOT / "docs" / "reports" / "e2e-grpc.md"
INSTALL_SECONDS = 600
MODEL = "echo"
REFUSED_TOKEN = 7
"""As in engine.py."""
PROMPT = "Why do prefill and decode run on different machines? Because they are bound by different things."
FLEETS = [("SGLang", "sglang", ""), ("TokenSpeed", "tokenspeed", ""), ("vLLM, NIXL", "vllm", "NixlConnector"),
          ("vLLM, Mooncake", "vllm", "MooncakeConnector")]


class NotInstalled(Exception):
    """The packages are not there and cannot be installed; the message says why."""


def packages():
    """The Python interpreter of the environment with the pinned packages, made if it is not there yet."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "smg-e2e-grpc"
    digest = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    environment = cache / digest
    python = environment / "bin" / "python"
    if (environment / "complete").exists():
        return python
    shutil.rmtree(environment, ignore_errors=True)
    cache.mkdir(parents=True, exist_ok=True)
    print(f"installing the packages into {environment} ...", flush=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    for command in ([sys.executable, "-m", "venv", str(environment)], [*pip, "--requirement", str(REQUIREMENTS)]):
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                  timeout=INSTALL_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotInstalled(str(error)) from error
        if done.returncode != 0:
            raise NotInstalled(f"`{' '.join(command)}` failed\n{done.stdout[-2000:]}")
    (environment / "complete").touch()
    return python


class Engine:
    """A running engine of a pair."""

    def __init__(self, processes, python, engine, role, connector, options=()):
        self.role = role
        self.port, self.kv_port = demo.free_ports(2)
        self.url = f"grpc://127.0.0.1:{self.port}"
        command = [str(python), str(HERE / "engine.py"), "--engine", engine, "--role", role, "--model", MODEL]
        command += ["--port", str(self.port), "--kv-port", str(self.kv_port), "--tokenizer", str(TOKENIZER)]
        command += ["--connector", connector, *options]
        name = f"{engine}-{role}"
        process, log = processes.start(name, command)
        processes.wait_for_line(name, process, log, "ready ")

    def state(self):
        with socket.create_connection(("127.0.0.1", self.kv_port), timeout=10) as connection:
            connection.sendall(b'{"key": null}\n')
            return json.loads(connection.makefile().readline())


class Pair:
    """Two engines behind a gateway that was started without workers."""

    def __init__(self, processes, python, binary, engine, connector):
        self.prefill = Engine(processes, python, engine, "prefill", connector)
        self.decode = Engine(processes, python, engine, "decode", connector, ["--token-delay-ms", "2"])
        self.port = demo.start_gateway(processes, binary)
        self.vllm = engine == "vllm"
        for worker in (self.prefill, self.decode):
            spec = {"url": worker.url, "worker_type": worker.role}
            if worker.role == "prefill":
                spec["bootstrap_port"] = worker.kv_port
            status, _, text = demo.call(self.port, "POST", "/workers", spec)
            expect(status == 202, text)
        demo.wait_until("both workers to be healthy", self._healthy)

    def _healthy(self):
        workers = self.workers()
        return len(workers) == 2 and all(worker.get("is_healthy") for worker in workers)

    def workers(self):
        return json.loads(demo.call(self.port, "GET", "/workers")[2]).get("workers", [])

    def post(self, path, body):
        """The JSON answer, which must be a 200."""
        status, _, text = demo.call(self.port, "POST", path, {"model": MODEL} | body)
        expect(status == 200, f"{path} answered {status}: {text[:500]}")
        return json.loads(text)

    def events(self, path, body):
        status, _, text = demo.call(self.port, "POST", path, {"model": MODEL, "stream": True} | body)
        expect(status == 200 and '"error":{' not in text, f"{path} answered {status}: {text[:500]}")
        data = [line[len("data: "):] for line in text.splitlines() if line.startswith("data: ")]
        return [json.loads(event) for event in data if event != "[DONE]"]

    def wait_clean(self):
        """Waits until nothing is left of any request in either engine."""
        def clean():
            return all(engine.state()["inside"] == engine.state()["held"] == 0 for engine in (self.prefill, self.decode))
        demo.wait_until("the engines to be empty", clean)


def expect(condition, found):
    if not condition:
        raise demo.DemoFailed(f"found {found!r}")


# --- checks: each returns figures worth telling

def registers_with_what_the_engine_reports(pair):
    keys = {worker["worker_type"]: worker.get("pd_pairing") for worker in pair.workers()}
    expect(keys["prefill"] == keys["decode"] and keys["prefill"], keys)
    return f"`{keys['prefill']}`"


def completions_come_from_the_kv_that_was_handed_over(pair):
    before = pair.prefill.state()["taken"]
    whole = pair.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 200})
    expect(whole["choices"][0]["text"] == PROMPT and whole["choices"][0]["finish_reason"] == "stop", whole)
    streamed = pair.events("/v1/completions", {"prompt": PROMPT, "max_tokens": 200})
    text = "".join(choice["text"] for event in streamed for choice in event["choices"])
    expect(text == PROMPT, text)
    short = pair.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 3})
    expect(short["choices"][0]["finish_reason"] == "length" and short["usage"]["completion_tokens"] == 3, short)
    expect(short["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0) == 0, short)
    taken = pair.prefill.state()["taken"] - before
    expect(taken == 3, taken)
    return f"{whole['usage']['prompt_tokens']} prompt tokens, {taken} caches handed over for 3 requests"


def every_api_is_served_whole_and_streamed(pair):
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 200}
    whole = pair.post("/v1/chat/completions", chat)["choices"][0]["message"]["content"]
    expect(PROMPT in whole, whole)
    deltas = pair.events("/v1/chat/completions", chat)
    text = "".join(choice["delta"].get("content") or "" for event in deltas for choice in event["choices"])
    expect(text == whole, text)
    message = pair.post("/v1/messages", chat)
    expect(PROMPT in message["content"][0]["text"] and message["stop_reason"] == "end_turn", message)
    kinds = [event["type"] for event in pair.events("/v1/messages", chat)]
    expect(kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds)
    response = pair.post("/v1/responses", {"input": PROMPT, "max_output_tokens": 200})
    expect(PROMPT in response["output"][0]["content"][0]["text"] and response["status"] == "completed", response)
    kinds = [event["type"] for event in pair.events("/v1/responses", {"input": PROMPT, "max_output_tokens": 200})]
    expect(kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds)
    native = pair.post("/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 200}})
    expect(native["text"] == PROMPT, native)
    counted = pair.post("/v1/messages/count_tokens", {"messages": chat["messages"]})["input_tokens"]
    usage = message["usage"]
    expect(counted == usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0), (counted, usage))
    return f"5 APIs, {counted} tokens counted as the engine counts them"


def samples_have_rooms_of_their_own(pair):
    before = pair.prefill.state()["taken"]
    whole = pair.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 5, "n": 1 if pair.vllm else 3})
    texts = {choice["text"] for choice in whole["choices"]}
    expect(len(texts) == 1, whole)
    taken = pair.prefill.state()["taken"] - before
    expect(taken == len(whole["choices"]), taken)
    return f"{len(whole['choices'])} samples, {taken} caches"


def a_client_that_leaves_is_followed_by_an_abort(pair):
    before = pair.decode.state()["aborted"]
    connection = http.client.HTTPConnection("127.0.0.1", pair.port, timeout=demo.REQUEST_SECONDS)
    body = {"model": MODEL, "prompt": PROMPT * 20, "max_tokens": 2000, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    expect(response.status == 200, response.status)
    response.read(200)
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    demo.wait_until("the decode's abort", lambda: pair.decode.state()["aborted"] > before)
    pair.wait_clean()
    return "one abort; both engines are empty"


def a_prompt_that_is_too_long_reaches_no_engine(pair):
    before = pair.prefill.state()["taken"]
    status, headers, text = demo.call(pair.port, "POST", "/v1/completions",
                                      {"model": MODEL, "prompt": [5] * 5000, "max_tokens": 2})
    expect((status, headers["x-smg-error-code"]) == (400, "context_length_exceeded"), text)
    expect(pair.prefill.state()["taken"] == before, pair.prefill.state())
    return "400 `context_length_exceeded`"


def what_the_engine_refuses_is_told_with_its_status(pair):
    status, headers, text = demo.call(pair.port, "POST", "/v1/completions",
                                      {"model": MODEL, "prompt": [REFUSED_TOKEN], "max_tokens": 2})
    expect(status == 400 and "is refused here" in text, (status, text))
    pair.wait_clean()
    return f"400 `{headers['x-smg-error-code']}`"


def operators_are_answered(pair):
    health = demo.call(pair.port, "GET", "/health_generate")
    expect(health[0] == 200, health)
    server = json.loads(demo.call(pair.port, "GET", "/get_server_info")[2])
    expect(server.get("kv_engine_id") if pair.vllm else server.get("disaggregation_mode") == "prefill", server)
    model = json.loads(demo.call(pair.port, "GET", "/get_model_info")[2])
    expect(model["served_model_name"] == MODEL, model)
    flushed = json.loads(demo.call(pair.port, "POST", "/flush_cache")[2])
    expect(flushed["workers_flushed"] == 2, flushed)
    return "health, server and model info, flush"


CHECKS = [registers_with_what_the_engine_reports, completions_come_from_the_kv_that_was_handed_over,
          every_api_is_served_whole_and_streamed, samples_have_rooms_of_their_own,
          a_client_that_leaves_is_followed_by_an_abort, a_prompt_that_is_too_long_reaches_no_engine,
          what_the_engine_refuses_is_told_with_its_status, operators_are_answered]


def run(name, pair, rows):
    for check in CHECKS:
        try:
            result, figures = "pass", check(pair)
        except (demo.DemoFailed, OSError, LookupError, ValueError) as error:
            result, figures = "FAIL", f"{type(error).__name__}: {error}"
        rows.append((name, check.__name__.replace("_", " "), result, figures))
        print(f"  {result}  {check.__name__}: {figures}", flush=True)


def report(rows):
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    pins = [line for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]
    lines = [
        "# gRPC engines built on the published side of the wire", "",
        f"Written by `make e2e-grpc` on {datetime.date.today()} at commit {commit.stdout.strip() or 'unknown'}, "
        f"Python {platform.python_version()}; {', '.join(pins)}.", "",
        "Each pair is two Python processes that use the message types and helpers that the engines' own servicers use. A "
        "decode engine answers from what it fetched from its prefill over a socket, and from nothing else. What moves is "
        "tokens, not tensors: this shows that the wire is right, not that a GPU engine is fast.", "",
        f"{sum(row[2] == 'pass' for row in rows)} of {len(rows)} checks passed.",
    ]
    for fleet in dict.fromkeys(row[0] for row in rows):
        lines += ["", f"## {fleet}", "", "| check | result | figures |", "|---|---|---|"]
        lines += [f"| {check} | {result} | {' '.join(str(figures).split()).replace('|', chr(92) + '|')} |"
                  for name, check, result, figures in rows if name == fleet]
    REPORT.write_text("\n".join(lines) + "\n")
    print(f"written to {REPORT.relative_to(ROOT)}")


def main():
    os.environ.pop("RUST_LOG", None)
    try:
        python = packages()
    except NotInstalled as error:
        print(f"the packages are not installed: {error}", file=sys.stderr)
        return 2
    rows = []
    try:
        binary = demo.build()["smg"]
        for name, engine, connector in FLEETS:
            print(f"\n{name}", flush=True)
            with tempfile.TemporaryDirectory(prefix="smg-e2e-grpc-") as logs, demo.Processes(logs) as processes:
                run(name, Pair(processes, python, binary, engine, connector), rows)
    except demo.DemoFailed as error:
        print(f"\nthe run broke: {error}", file=sys.stderr)
        return 1
    report(rows)
    return 1 if any(row[2] != "pass" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
