#!/usr/bin/env python3
"""Checks `smg` in front of real vLLM servers, on any x86_64 Linux machine without a GPU: `make e2e-vllm`.

Installs the CPU build of vLLM once into `${XDG_CACHE_HOME:-$HOME/.cache}/smg-e2e`, makes a tiny model without a download,
starts a prefill and a decode server for each KV connector, puts `smg launch` in front, and checks what went over the wire
by the servers' own counters. Everything listens on loopback, and everything that was started is stopped again whatever
happens. A whole run writes `docs/reports/e2e-vllm.md`.

Exit codes: 0 every check passed, 1 a check failed or the run broke, 2 the machine lacks something or the command line is wrong,
130 interrupted. Where only Mooncake cannot run, a whole run tells why and goes on; `--only mooncake` ends with 2 then.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys

import gateway
import mooncake_support
import prerequisites
import report
from failure import Broken, Missing
from installation import Installation, clean_environment
from processes import Interrupted, Processes, install_interruption
from stages import STAGES
from table import FAILED, Table

STAGE_SECONDS = 5400
"""Longest time of a stage that runs in a namespace of its own; its own waits are all shorter."""

STAGE_STOP_SECONDS = 300
"""Time for such a stage to stop its own processes when it is interrupted."""


def whole_run(only: str | None, binary: pathlib.Path | None) -> int:
    installation = Installation(prerequisites.cache_directory())
    python = prerequisites.check(installation.cache, installation.is_complete())
    logs = installation.cache / "logs"
    # First what may be missing, then the build, which takes long.
    installation.install(python)
    obstacle = mooncake_support.obstacle(installation) if only != "nixl" else None
    if only == "mooncake" and obstacle is not None:
        raise Missing(f"what MooncakeConnector needs: {obstacle}")
    commit = report.current_commit()
    binary = binary or gateway.build()
    table = Table()
    if only != "mooncake":
        STAGES["nixl"](table, installation, binary, logs / "nixl")
    if only != "nixl":
        run_mooncake(table, obstacle, binary, logs)
    print(f"\n{table.markdown()}\n\n{table.summary()}")
    if only is None:
        print(f"written to {report.write(table, commit)}")
    return 1 if table.count(FAILED) else 0


def run_mooncake(table: Table, obstacle: str | None, binary: pathlib.Path, logs: pathlib.Path) -> None:
    """Runs the stage in a network namespace, in a process of its own that hands its rows back through a file."""
    namespace = mooncake_support.namespace()
    if obstacle is not None or namespace is None:
        table.not_run("Mooncake", "MooncakeConnector", obstacle or "no network namespace can be made here")
        return
    rows = logs / "mooncake.json"
    rows.unlink(missing_ok=True)
    command = [*namespace, sys.executable, __file__, "--stage", "mooncake", "--binary", str(binary), "--rows", str(rows)]
    with Processes(logs) as processes:
        stage = processes.start("mooncake", command, clean_environment(), STAGE_STOP_SECONDS)
        code = stage.wait(STAGE_SECONDS)
    print(stage.log_text(), end="")
    if not rows.exists():
        raise Broken(f"the Mooncake stage ended with exit code {code}; its log is {stage.log}")
    table.extend(json.loads(rows.read_text()))


def one_stage(name: str, binary: pathlib.Path, rows: pathlib.Path) -> int:
    installation = Installation(prerequisites.cache_directory())
    table = Table()
    STAGES[name](table, installation, binary, rows.parent / name)
    rows.write_text(json.dumps(table.plain()))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(STAGES), help="run one stage and write no page")
    parser.add_argument("--stage", choices=sorted(STAGES), help=argparse.SUPPRESS)
    parser.add_argument("--binary", type=pathlib.Path, help="with --only: check this smg instead of building one")
    parser.add_argument("--rows", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage and not (options.binary and options.rows):
        parser.error("--stage is for this program itself, with --binary and --rows")
    if options.binary and not (options.only or options.stage):
        parser.error("--binary needs --only: the page tells of a commit")
    install_interruption()
    try:
        if options.stage:
            return one_stage(options.stage, options.binary, options.rows)
        return whole_run(options.only, options.binary)
    except Missing as missing:
        print(f"e2e-vllm cannot run here; missing:\n{missing}", file=sys.stderr)
        return 2
    except (Broken, subprocess.SubprocessError, OSError) as error:
        print(f"e2e-vllm broke: {error}", file=sys.stderr)
        return 1
    except Interrupted as interruption:
        print(f"e2e-vllm was interrupted by {interruption}; what it started is stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
