#!/usr/bin/env python3
"""Checks the metrics of a live `smg` with Prometheus' own tools.

Starts a vLLM pair with and one without a KV connector behind `smg launch`, drives traffic through both, and then
  * lints the exposition with `promtool check metrics`: only names that the documented system fixes may be criticised;
  * lets a real Prometheus scrape it and asks it the documented queries: each must return data.

Needs `prometheus` and `promtool` (Debian: `apt-get install --no-install-recommends prometheus`); ends with 2 without them.
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import urllib.parse

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "demo"))
import demo  # noqa: E402  the way to start fleets of mock engines is that of the demonstration

LINT_SECONDS = 30

# The documented queries (SMG PD docs, "PromQL Queries"), and the labels that each result must carry.
QUERIES = {
    "time to first token":
        ("histogram_quantile(0.95, sum by (le, model) (rate(smg_pd_ttft_seconds_bucket[5m])))", {"model"}),
    "share of dispatches without a KV connector":
        ('sum(rate(smg_pd_kv_connector_mode_total{mode="passthrough"}[5m]))'
         " / sum(rate(smg_pd_kv_connector_mode_total[5m]))", set()),
    "decode admission sheds": ("rate(smg_pd_admission_sheds_total[5m])", set()),
    "active requests by worker": ("smg_worker_requests_active", {"worker"}),
}

# Complaints of promtool about names that are not ours to choose, each with where the name is fixed.
FIXED_NAMES = {
    'smg_http_inflight_request_age_count non-histogram and non-summary metrics should not have "_count" suffix':
        "SMG metrics reference, HTTP requests",
    'smg_http_inflight_request_age_count non-histogram metrics should not have "le" label':
        "SMG metrics reference, HTTP requests",
}


def tools():
    found = {name: shutil.which(name) for name in ("prometheus", "promtool")}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise FileNotFoundError(f"not installed: {', '.join(missing)}; Debian: apt-get install "
                                "--no-install-recommends prometheus")
    return found


def start_fleet(processes, binaries):
    """Two models behind one gateway: one whose KV moves, one whose connector nobody declared. Its API and metrics ports."""
    port, metrics = demo.free_ports(2)
    command = [binaries["smg"], "launch", "--pd-disaggregation", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    command += ["--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1"]
    processes.start("smg", command)
    demo.wait_until("smg to serve", lambda: demo.is_alive(port))
    specs = []
    for connector, declared in (("nixl", "NixlConnector"), ("none", None)):
        engines = demo.start_engines(
            processes, binaries["mock-engine"], "vllm", connector, ["prefill", "decode"], model=f"model-{connector}")
        for role, url, _ in engines:
            spec = {"url": url, "worker_type": role, "runtime_type": "vllm"}
            specs.append(spec | ({"kv_connector": declared} if declared else {}))
    for spec in specs:
        status, _, text = demo.call(port, "POST", "/workers", spec)
        if status != 202:
            raise demo.DemoFailed(f"POST /workers answered {status}: {text}")

    def all_healthy():
        workers = json.loads(demo.call(port, "GET", "/workers")[2]).get("workers", [])
        return len(workers) == len(specs) and all(worker.get("is_healthy") for worker in workers)
    demo.wait_until("the registered workers to be healthy", all_healthy)
    return port, metrics


def drive(port):
    """Requests to both models and to one that does not exist, whole and streamed."""
    for model in ("model-nixl", "model-none", "unknown"):
        for stream in (False, True):
            body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": stream}
            demo.call(port, "POST", "/v1/chat/completions", body)


def lint(promtool, exposition):
    done = subprocess.run([promtool, "check", "metrics"], input=exposition, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=LINT_SECONDS, check=False)
    complaints = {line.strip() for line in done.stdout.splitlines() if line.strip()}
    surprising = sorted(complaints - FIXED_NAMES.keys())
    if surprising:
        raise demo.DemoFailed("promtool complains about\n  " + "\n  ".join(surprising))
    if done.returncode not in (0, 3):
        raise demo.DemoFailed(f"promtool ended with {done.returncode}: {done.stdout}")
    stale = sorted(FIXED_NAMES.keys() - complaints)
    if stale:
        raise demo.DemoFailed("promtool no longer complains about\n  " + "\n  ".join(stale))
    print(f"  promtool: {len(FIXED_NAMES)} complaints, all about names that are fixed elsewhere")


def start_prometheus(processes, prometheus, directory, target):
    (port,) = demo.free_ports(1)
    configuration = pathlib.Path(directory) / "prometheus.yml"
    configuration.write_text(json.dumps({
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "smg", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
    }))
    command = [prometheus, f"--config.file={configuration}", f"--storage.tsdb.path={directory}/data"]
    processes.start("prometheus", [*command, f"--web.listen-address=127.0.0.1:{port}"])

    def ready():
        try:
            return demo.call(port, "GET", "/-/ready")[0] == 200
        except demo.DemoFailed:
            return False
    demo.wait_until("Prometheus to be ready", ready)
    return port


def ask(port, query):
    status, _, text = demo.call(port, "GET", "/api/v1/query?" + urllib.parse.urlencode({"query": query}))
    if status != 200:
        raise demo.DemoFailed(f"Prometheus answered {status} to {query}: {text}")
    return json.loads(text)["data"]["result"]


def check_queries(prometheus_port, smg_port):
    for name, (query, labels) in QUERIES.items():
        def numbers(query=query):
            # A rate needs growth between two scrapes: traffic goes on while it is waited for.
            drive(smg_port)
            result = ask(prometheus_port, query)
            return result if result and all(series["value"][1] not in ("NaN", "+Inf") for series in result) else None
        result = demo.wait_until(f"data for `{query}`", numbers)
        for series in result:
            if not labels <= series["metric"].keys():
                raise demo.DemoFailed(f"{query}: {series['metric']} lacks {labels}")
        print(f"  {name}: {len(result)} series, first {result[0]['metric'] or '{}'} = {result[0]['value'][1]}")


def main():
    try:
        found = tools()
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        binaries = demo.build()
        with tempfile.TemporaryDirectory(prefix="smg-prometheus-") as directory, demo.Processes(directory) as processes:
            port, metrics = start_fleet(processes, binaries)
            drive(port)
            lint(found["promtool"], demo.call(metrics, "GET", "/metrics")[2])
            check_queries(start_prometheus(processes, found["prometheus"], directory, metrics), port)
    except demo.DemoFailed as error:
        print(f"\nprometheus checks failed: {error}", file=sys.stderr)
        return 1
    print("\nprometheus checks passed: the exposition is clean, every documented query returns data")
    return 0


if __name__ == "__main__":
    sys.exit(main())
