"""What MooncakeConnector needs on a machine without a GPU and without RDMA.

* Shared libraries that its wheel links to and does not bring: taken from the machine, else unpacked from Debian packages
  into the cache directory, without installing them.
* One patched call (`mooncake_plugin/`): the connector asks for the number of the current GPU, which raises without one.
* A network namespace with nothing but loopback: its bootstrap server and its transfer ports listen on every address.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess

from client import call
from engine import Engine
from installation import HERE, Installation, clean_environment

PACKAGES = ("libibverbs1", "librdmacm1", "libnl-3-200", "libnl-route-3-200", "libnuma1")
PLUGIN = HERE / "mooncake_plugin"
OPTIONS: dict[str, object] = {"kv_connector_extra_config": {"mooncake_protocol": "tcp"}}
FETCH_SECONDS = 300
_LOOPBACK_ONLY = ("--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
_NAMESPACES = (("unshare", "--net", *_LOOPBACK_ONLY), ("unshare", "--net", "--map-root-user", *_LOOPBACK_ONLY))
"""Commands that run what follows in a network namespace of its own where only loopback is up: for root, and for others."""


def engine_id(prefill: Engine) -> str:
    """The id that decode servers must name to be served, as the prefill's bootstrap server tells it.

    It is another one after each start. A fixed one (`engine_id` in `--kv-transfer-config`) would be worse: decode servers
    keep the addresses they once learned for an id, and wait 9 minutes for a server that is gone.
    """
    return str(call(prefill.side_port, "GET", "/query").json()["0"]["engine_id"])


def environment(installation: Installation) -> dict[str, str]:
    """What the servers' environment has in addition."""
    return {"PYTHONPATH": str(PLUGIN), "LD_LIBRARY_PATH": ":".join(map(str, _library_directories(installation)))}


def namespace() -> tuple[str, ...] | None:
    """The start of a command that runs the rest of it in a network namespace, or nothing where none can be made."""
    for candidate in _NAMESPACES:
        if subprocess.run([*candidate, "true"], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def obstacle(installation: Installation) -> str | None:
    """What keeps Mooncake from running here, or nothing. Fetches missing libraries."""
    absent = [tool for tool in ("unshare", "ip") if shutil.which(tool) is None]
    if absent:
        return f"no {' and no '.join(absent)} on PATH to make a network namespace with"
    if namespace() is None:
        return "the system lets this user make no network namespace"
    failure = _import_failure(installation)
    if failure is not None:
        fetched = _fetch_libraries(installation)
        failure = _import_failure(installation)
        if failure is not None:
            return f"its library does not load: {failure}" + (f"; {fetched}" if fetched else "")
    return None


def _library_root(installation: Installation) -> pathlib.Path:
    return installation.cache / "libraries"


def _library_directories(installation: Installation) -> list[pathlib.Path]:
    return [_library_root(installation) / directory for directory in ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu")]


def _import_failure(installation: Installation) -> str | None:
    command = [str(installation.python), "-c", "import mooncake.engine"]
    settings = clean_environment() | environment(installation)
    done = subprocess.run(command, cwd=installation.cache, env=settings, capture_output=True, text=True, check=False,
                          timeout=FETCH_SECONDS)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]


def _fetch_libraries(installation: Installation) -> str | None:
    """Unpacks the libraries from the machine's own package sources; returns what went wrong."""
    root = _library_root(installation)
    root.mkdir(parents=True, exist_ok=True)
    unpack = [["sh", "-c", 'dpkg-deb -x "$1"_*.deb .', "sh", name] for name in PACKAGES]
    for step in (["apt-get", "download", *PACKAGES], *unpack):
        try:
            subprocess.run(step, cwd=root, check=True, capture_output=True, text=True, timeout=FETCH_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            return f"the Debian packages {', '.join(PACKAGES)} cannot be fetched either: {reason.strip()}"
    return None
