#!/usr/bin/env bash
# Asks an HTTP server of this container whether it is alive: smg-probe PORT PATH.
# Succeeds on status 200. Needs nothing that the base image does not have.
set -euo pipefail
exec 3<>"/dev/tcp/127.0.0.1/$1"
printf 'GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n' "$2" >&3
read -r -t 5 status <&3
[[ $status == "HTTP/1."?" 200"* ]]
