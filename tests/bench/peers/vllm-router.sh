#!/bin/sh
# vllm-router (pip install vllm-router==0.1.17), for --vllm-peer: it has no SGLang pairs.
# The argument is the virtual environment that it is installed in; the rest comes from smg-bench.
venv=${1:?virtual environment}
for url in $BENCH_PREFILL; do
    workers="$workers --prefill $url"
done
for url in $BENCH_DECODE; do
    workers="$workers --decode $url"
done
exec "$venv/bin/vllm-router" --host 127.0.0.1 --port "$BENCH_PORT" --vllm-pd-disaggregation $workers --policy round_robin \
    --prometheus-host 127.0.0.1 --prometheus-port "$BENCH_METRICS_PORT" --log-level warning --worker-startup-check-interval 1
