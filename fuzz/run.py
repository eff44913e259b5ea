#!/usr/bin/env python3
"""Runs every fuzz target for some seconds, two at a time, and writes docs/reports/fuzz.md.

Usage: fuzz/run.py SECONDS [TARGET ...]

Inputs that reach something new stay in fuzz/corpus (not in the repository), findings in fuzz/artifacts. A finding ends the run with 1: keep
its input as a unit test of what it found. `cargo fuzz run TARGET` works too, where cargo-fuzz is installed.
"""

import concurrent.futures
import datetime
import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
TARGETS = {
    "splice": "edited bodies against a naive second implementation; every leg's fields",
    "relay": "relayed bytes, cuts, pauses, breaks and end markers against a plain reading of the stream",
    "handoff": "accepted exactly when a second validator accepts; what passes is the prefill's own text",
    "worker_spec": "accepted within bounds, unchanged when checked again, the same from disk, wire and REST",
}
LONGEST_INPUT = 4096


def target_directory() -> pathlib.Path:
    return pathlib.Path(os.environ.get("CARGO_TARGET_DIR", HERE / "target"))


def build() -> None:
    subprocess.run(["cargo", "build", "--release"], cwd=HERE, check=True)


def binary(target: str) -> pathlib.Path:
    found = list(target_directory().glob(f"*/release/{target}"))
    if not found:
        sys.exit(f"{target} was not built under {target_directory()}")
    return max(found, key=lambda path: path.stat().st_mtime)


def run(target: str, seconds: int) -> dict:
    corpus, artifacts = HERE / "corpus" / target, HERE / "artifacts" / target
    for directory in (corpus, artifacts):
        directory.mkdir(parents=True, exist_ok=True)
    command = [
        binary(target),
        corpus,
        HERE / "seeds" / target,
        f"-max_total_time={seconds}",
        f"-max_len={LONGEST_INPUT}",
        f"-artifact_prefix={artifacts}/",
        "-print_final_stats=1",
        "-timeout=20",
    ]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    (HERE / f"{target}.log").write_text(ended.stdout)
    found = re.search(r"Test unit written to (\S+)", ended.stdout)
    coverage = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", ended.stdout)
    executed = re.search(r"number_of_executed_units:\s*(\d+)", ended.stdout)
    spent = re.search(r"Done \d+ runs in (\d+) second", ended.stdout)
    return {
        "target": target,
        "executed": int(executed.group(1)) if executed else 0,
        "seconds": int(spent.group(1)) if spent else 0,
        "coverage": coverage[-1] if coverage else ("0", "0", "0"),
        "finding": found.group(1) if found else ("the process failed" if ended.returncode else None),
        "tail": ended.stdout[-3000:],
    }


def commit() -> str:
    """What was run, as git names it; changes that are not committed show."""
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    return f"commit {asked.stdout.strip()}" if asked.returncode == 0 else "an unknown commit"


def report(results: list) -> str:
    lines = [
        "# Fuzzing",
        "",
        "The last run of `make fuzz` (libFuzzer, `fuzz/`), one process a target, two at a time. Seeds are in `fuzz/seeds`; what a run found to be",
        "interesting before it is used again but not kept in the repository.",
        "",
        f"{datetime.date.today():%d %B %Y}, {commit()}.",
        "",
        "| target | what must hold | seconds | inputs | edges | corpus | findings |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        edges, _, corpus = result["coverage"]
        finding = "none" if result["finding"] is None else f"**{result['finding']}**"
        what = TARGETS[result["target"]]
        lines.append(
            f"| `{result['target']}` | {what} | {result['seconds']} | {result['executed']:,} | {edges} | {corpus} | {finding} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    targets = sys.argv[2:] or list(TARGETS)
    build()
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        results = list(pool.map(lambda target: run(target, seconds), targets))
    text = report(results)
    print(text)
    if targets == list(TARGETS):
        (HERE.parent / "docs" / "reports" / "fuzz.md").write_text(text)
    failed = [result for result in results if result["finding"]]
    for result in failed:
        print(f"--- {result['target']}: {result['finding']}\n{result['tail']}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
