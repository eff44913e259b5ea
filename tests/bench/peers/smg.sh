#!/bin/sh
# SMG (pip install smg==1.13.0) or its predecessor (sglang-router==0.3.2): both bring a command `smg`.
# The argument is the virtual environment that it is installed in; the rest comes from smg-bench.
venv=${1:?virtual environment}
set -- $BENCH_BOOTSTRAP
for url in $BENCH_PREFILL; do
    workers="$workers --prefill $url $1"
    shift
done
for url in $BENCH_DECODE; do
    workers="$workers --decode $url"
done
exec "$venv/bin/smg" launch --host 127.0.0.1 --port "$BENCH_PORT" --pd-disaggregation $workers --policy round_robin \
    --prometheus-host 127.0.0.1 --prometheus-port "$BENCH_METRICS_PORT" --log-level warn
