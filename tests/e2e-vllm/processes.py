"""Processes that do not outlive the run.

Every process gets a session, hence a process group, of its own: vLLM starts workers, and stopping a server means
stopping them too. Only groups that were started here are ever signalled.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from failure import Broken

STOP_SECONDS = 60.0
SHOWN_LINES = 25


class Process:
    """A started command with its log file."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: pathlib.Path,
                 stop_seconds: float) -> None:
        self.name = name
        self.log = log
        self._stop_seconds = stop_seconds
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.group = self._process.pid
        self._death_expected_from: int | None = None

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def require_alive(self) -> None:
        if self.has_ended():
            raise Broken(f"{self.name} ended with exit code {self._process.returncode}; its log is {self.log}")

    def wait(self, seconds: float) -> int:
        """Waits until it ends by itself and returns its exit code."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise Broken(f"{self.name} did not end within {seconds:.0f} s; its log is {self.log}") from error

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def expect_death(self) -> None:
        """From here on, its log may tell of its end."""
        self._death_expected_from = len(self.log_text())

    def log_while_it_should_live(self) -> str:
        return self.log_text()[:self._death_expected_from]

    def members(self) -> list[int]:
        """Ids of the living processes of its session."""
        members = []
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                state, session = fields[0], int(fields[3])
                if session == self.group and state not in "ZX":
                    members.append(int(entry.name))
        return members

    def member_named(self, part: str) -> int:
        """Id of the one living process of its session whose command line contains `part`."""
        found = []
        for member in self.members():
            try:
                command = pathlib.Path(f"/proc/{member}/cmdline").read_text(errors="replace")
            except OSError:
                continue
            if part in command:
                found.append(member)
        if len(found) != 1:
            raise Broken(f"{self.name} has {len(found)} processes with {part!r} in their command line")
        return found[0]

    def kill(self) -> None:
        """Ends the whole group at once, as a crash does."""
        self._signal(signal.SIGKILL)
        self._process.wait(STOP_SECONDS)

    def ask_to_stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def stop(self) -> None:
        """Asks the leader to stop; what is left of its group after a while is killed."""
        self.ask_to_stop()
        deadline = time.monotonic() + self._stop_seconds
        while self._process.poll() is None or self.members():
            if time.monotonic() > deadline:
                print(f"{self.name} did not stop within {self._stop_seconds:.0f} s and is killed", file=sys.stderr)
                self.kill()
                return
            time.sleep(0.1)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, number)


class Processes:
    """The processes of one stage; leaving the `with` block stops all."""

    def __init__(self, logs: pathlib.Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = logs
        self._started: list[Process] = []

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str],
              stop_seconds: float = STOP_SECONDS) -> Process:
        """Starts `command`; it gets `stop_seconds` to end when it is asked to."""
        with interruption_later():
            process = Process(name, command, environment, self.logs / f"{name}.log", stop_seconds)
            self._started.append(process)
        return process

    @property
    def started(self) -> list[Process]:
        return list(self._started)

    def show_logs(self) -> None:
        """Prints the end of every log."""
        for process in self._started:
            print(f"--- last lines of {process.log}", file=sys.stderr)
            print(*process.log_text().splitlines()[-SHOWN_LINES:], sep="\n", file=sys.stderr)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: object) -> None:
        if kind is not None and issubclass(kind, Broken):
            self.show_logs()
        # An interruption while stopping must not leave the rest running.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        try:
            for process in self._started:
                process.ask_to_stop()
            for process in self._started:
                process.stop()
        finally:
            install_interruption()


class Interrupted(BaseException):
    """A signal asked the run to end."""


class _Later:
    """Whether an interruption has to wait, and the one that does."""

    waits = False
    signal: signal.Signals | None = None


def install_interruption() -> None:
    """Turns signals into an exception, so that every `with` block on the way out stops what it started."""
    def interrupt(number: int, _frame: object) -> None:
        if _Later.waits:
            _Later.signal = signal.Signals(number)
        else:
            raise Interrupted(signal.Signals(number).name)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


@contextlib.contextmanager
def interruption_later() -> Iterator[None]:
    """Inside, a signal is only noted; the exception comes at the end.

    For the start of a process: an exception between its start and the note of it would leave it running. Blocking signals would be
    inherited by the process.
    """
    _Later.waits = True
    try:
        yield
    finally:
        _Later.waits = False
        noted, _Later.signal = _Later.signal, None
        if noted is not None:
            raise Interrupted(noted.name)


def run_step(command: Sequence[str | pathlib.Path], seconds: float, *, environment: Mapping[str, str] | None = None,
             folder: pathlib.Path | None = None, output: int | None = None, errors: int | None = None) -> tuple[str, str]:
    """Runs a step to its end and returns what it wrote to `output` and `errors`, where these are pipes.

    Leaving early, also by an interruption, ends the step too. Raises as `subprocess.run` does with `check`.
    """
    step: subprocess.Popen[str] | None = None
    try:
        with interruption_later():
            step = subprocess.Popen(command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
                                    text=True)
        written, told = step.communicate(timeout=seconds)
        if step.returncode:
            raise subprocess.CalledProcessError(step.returncode, command, written, told)
        return written or "", told or ""
    finally:
        if step is not None and step.poll() is None:
            step.kill()
            step.wait()


_PORTS = range(20000, 32000)
"""Below what Linux hands to outgoing connections, so that a port stays free during the minutes an engine needs to start."""

_handed_out: set[int] = set()


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on and that was not handed out before."""
    for port in random.sample(_PORTS, 200):
        if port in _handed_out:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _handed_out.add(port)
        return port
    raise Broken("no free port on 127.0.0.1")
