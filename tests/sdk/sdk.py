#!/usr/bin/env python3
"""Runs the official OpenAI and Anthropic Python clients against the real `smg` in front of mock engines.

Installs the pinned clients once into `${XDG_CACHE_HOME:-$HOME/.cache}/smg-sdk`, builds the gateway and the mock engines,
and runs `checks.py` with those clients against an SGLang pair and a vLLM pair with the NIXL connector, over HTTP and over
gRPC, and a TokenSpeed pair. In front of gRPC pairs whose engines call a tool it runs `checks_tools.py`: there the gateway
itself reads calls and reasoning out of tokens. Everything that was started is stopped again. The exit code is 0 only when every check of every fleet holds, and 2 when the clients
cannot be installed: that is said, never passed over.
"""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "demo"))
import demo  # noqa: E402  the way to start fleets of mock engines is that of the demonstration

REQUIREMENTS = HERE / "requirements.txt"
INSTALL_SECONDS = 600
CHECK_SECONDS = 120


class NotInstalled(Exception):
    """The clients are not there and cannot be installed; the message says why."""


def clients():
    """The Python interpreter of the environment with the pinned clients, made if it is not there yet."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "smg-sdk"
    digest = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    environment = cache / digest
    python = environment / "bin" / "python"
    if (environment / "complete").exists():
        return python
    shutil.rmtree(environment, ignore_errors=True)
    environment.parent.mkdir(parents=True, exist_ok=True)
    print(f"installing the clients into {environment} ...", flush=True)
    install([sys.executable, "-m", "venv", str(environment)], "python3 with venv and pip (Debian: python3-venv)")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    install([*pip, "--requirement", str(REQUIREMENTS)], "a package index that serves the pinned clients")
    (environment / "complete").touch()
    return python


def install(command, needs):
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=INSTALL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(f"{error}; needed: {needs}") from error
    if done.returncode != 0:
        raise NotInstalled(f"`{' '.join(command)}` failed; needed: {needs}\n{done.stdout[-2000:]}")


def check(python, port, fleet, checks="checks.py"):
    command = [str(python), str(HERE / checks), f"http://127.0.0.1:{port}", demo.MODEL]
    # Keys and addresses of real services are none of this test's business.
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(("OPENAI_", "ANTHROPIC_")) and not name.lower().endswith("_proxy")}
    try:
        done = subprocess.run(command, env=environment, timeout=CHECK_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise demo.DemoFailed(f"the checks of {fleet} did not end within {CHECK_SECONDS} s") from error
    if done.returncode != 0:
        raise demo.DemoFailed(f"checks failed in front of {fleet}")


def sglang(processes, binaries, python):
    print("\nSGLang: both legs at once", flush=True)
    flags = []
    roles = ["prefill", "decode"]
    for role, url, bootstrap in demo.start_engines(processes, binaries["mock-engine"], "sglang", "none", roles):
        flags += [f"--{role}", url] + ([str(bootstrap)] if role == "prefill" else [])
    check(python, demo.start_gateway(processes, binaries["smg"], flags), "SGLang")


def vllm(processes, binaries, python):
    print("\nvLLM with NixlConnector: prefill first", flush=True)
    engines = demo.start_engines(processes, binaries["mock-engine"], "vllm", "nixl", ["prefill", "decode"])
    port = demo.start_gateway(processes, binaries["smg"])
    for role, url, _ in engines:
        spec = {"url": url, "worker_type": role, "runtime_type": "vllm", "kv_connector": "NixlConnector"}
        status, _, text = demo.call(port, "POST", "/workers", spec)
        if status != 202:
            raise demo.DemoFailed(f"POST /workers answered {status}: {text}")
    demo.wait_until("smg to be ready", lambda: demo.is_ready(port))
    check(python, port, "vLLM")


SAID = ("<think>Which city?</think>Let me look.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>')
GRPC = [("SGLang", "sglang", "none"), ("vLLM with NixlConnector", "vllm", "nixl"), ("TokenSpeed", "tokenspeed", "none")]


def over_grpc(name, engine, connector, checks, options=(), flags=()):
    """A pair over gRPC, and the checks in front of it."""
    def fleet(processes, binaries, python):
        print(f"\n{name} over gRPC: {checks}", flush=True)
        workers = []
        engines = demo.start_engines(processes, binaries["mock-engine"], engine, connector, ["prefill", "decode"],
                                     options=["--grpc", *options])
        for role, url, bootstrap in engines:
            workers += [f"--{role}", url] + ([str(bootstrap)] if role == "prefill" else [])
        port = demo.start_gateway(processes, binaries["smg"], [*workers, *flags])
        check(python, port, f"{name} over gRPC", checks)
    return fleet


def fleets():
    """Every fleet with its checks."""
    parsers = ["--reasoning-parser", "qwen3", "--tool-call-parser", "qwen"]
    plain = [over_grpc(*engine, "checks.py") for engine in GRPC]
    calling = [over_grpc(*engine, "checks_tools.py", ["--reply", SAID], parsers) for engine in GRPC]
    return [sglang, vllm, *plain, *calling]


def main():
    try:
        python = clients()
    except NotInstalled as error:
        print(f"the clients are not installed: {error}", file=sys.stderr)
        return 2
    try:
        binaries = demo.build()
        for fleet in fleets():
            with tempfile.TemporaryDirectory(prefix="smg-sdk-") as logs, demo.Processes(logs) as processes:
                fleet(processes, binaries, python)
    except demo.DemoFailed as error:
        print(f"\nsdk checks failed: {error}", file=sys.stderr)
        return 1
    print(f"\nsdk checks passed: 2 clients, {len(fleets())} fleets")
    return 0


if __name__ == "__main__":
    sys.exit(main())
