#!/bin/sh
# SMG (pip install smg==1.13.0) in front of vLLM pairs, for --vllm-registered-peer: it learns their KV connector only from POST /workers.
# The argument is the virtual environment that it is installed in; the rest comes from smg-bench.
venv=${1:?virtual environment}
exec "$venv/bin/smg" launch --host 127.0.0.1 --port "$BENCH_PORT" --pd-disaggregation --policy round_robin \
    --prometheus-host 127.0.0.1 --prometheus-port "$BENCH_METRICS_PORT" --log-level warn
