"""What the machine must have, checked before anything is downloaded or started."""

from __future__ import annotations

import ctypes
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile

from failure import Missing

ROOT = pathlib.Path(__file__).resolve().parents[2]

DISK_BYTES = 10 * 1024**3
"""The installed engine takes 6.5 GiB, and the installer keeps 3 GiB of packages beside it until it is done."""

BUILD_BYTES = 5 * 1024**3
"""A debug build of `smg` from nothing, with what it is built of."""

MEMORY_BYTES = 6 * 1024**3
"""Two servers of 3.2 GiB each, which share their libraries' pages."""

TRY_SECONDS = 60


def cache_directory() -> pathlib.Path:
    """Where the engine is installed, once for all runs."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "smg-e2e"


def find_python() -> pathlib.Path | None:
    """A python 3.12 that runs and can make virtual environments."""
    versions = pathlib.Path(os.environ.get("PYENV_ROOT") or pathlib.Path.home() / ".pyenv") / "versions"
    on_path = shutil.which("python3.12")
    candidates = [pathlib.Path(on_path)] if on_path else []
    candidates += sorted(versions.glob("3.12.*/bin/python3.12"), reverse=True)
    for candidate in candidates:
        if _works(candidate):
            return candidate
    return None


def _works(python: pathlib.Path) -> bool:
    test = "import ensurepip, venv, sys; sys.exit(sys.version_info[:2] != (3, 12))"
    try:
        return subprocess.run([python, "-c", test], capture_output=True, check=False, timeout=TRY_SECONDS).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def target_directory() -> pathlib.Path:
    """Where cargo builds `smg`."""
    return pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")


def has_library(name: str) -> bool:
    """Whether the system's loader finds a shared library."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def missing_disk(cache: pathlib.Path, installed: bool) -> list[str]:
    """What the installation and the build lack together on each file system."""
    needs: dict[int, tuple[pathlib.Path, int]] = {}
    built = (target_directory() / "debug" / "smg").exists()
    for directory, size in ((cache, 0 if installed else DISK_BYTES), (target_directory(), 0 if built else BUILD_BYTES)):
        existing = next(parent for parent in (directory.absolute(), *directory.absolute().parents) if os.path.exists(parent))
        device = existing.stat().st_dev
        needs[device] = (existing, size + needs.get(device, (existing, 0))[1])
    free = {existing: (shutil.disk_usage(existing).free, size) for existing, size in needs.values()}
    return [f"{size / 1e9:.1f} GB of free disk at {existing}: there are {have / 1e9:.1f}"
            for existing, (have, size) in free.items() if have < size]


def available_memory() -> int:
    """Bytes that programs can still take without swapping."""
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def check(cache: pathlib.Path, installed: bool) -> pathlib.Path:
    """Refuses a machine that cannot do it, with the whole list of what it lacks. Returns the python to install with."""
    missing = []
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        missing.append(f"Linux on x86_64: the engine's CPU build is pinned for it, this is {platform.platform()}")
        raise Missing("\n".join(missing))
    python = find_python()
    if python is None:
        missing.append("a python3.12 that runs and has the venv module, on PATH or under pyenv's versions: docs/operations tells how "
                       "to get it")
    missing += [f"`{tool}` on PATH" for tool in ("cargo", "git") if shutil.which(tool) is None]
    if not has_library("libnuma.so.1"):
        missing.append("libnuma.so.1, which vLLM's CPU build links to: the Debian package libnuma1")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        missing.append(f"a directory to install into that can be written, XDG_CACHE_HOME names another one: {error}")
    else:
        missing += missing_disk(cache, installed)
    memory = available_memory()
    if memory < MEMORY_BYTES:
        missing.append(f"{MEMORY_BYTES / 1e9:.1f} GB of available memory: there are {memory / 1e9:.1f}")
    if missing or python is None:
        raise Missing("\n".join(missing))
    return python
