"""Bounded waiting: nothing in this run waits without a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from failure import Broken

Value = TypeVar("Value")


def wait_until(what: str, seconds: float, probe: Callable[[], Value | None], pause: float = 0.1) -> Value:
    """The first truthy value of `probe`, asked every `pause` seconds until `seconds` are over."""
    deadline = time.monotonic() + seconds
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise Broken(f"waited {seconds:.0f} s for {what}")
        time.sleep(pause)
