"""Which addresses a process listens on, read from /proc."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable

_LISTEN = "0A"
_LOOPBACK_V4 = "7F"
"""Addresses in /proc/net/tcp are words in the machine's byte order: on x86 the first byte of 127.x.y.z comes last."""
_LOOPBACK_V6 = "00000000000000000000000001000000"
_MAPPED_V4 = "0000000000000000FFFF0000"


def listening(processes: Iterable[int]) -> dict[int, bool]:
    """Port and whether its address is a loopback one, of every TCP listener of `processes`."""
    owned = {inode for process in processes for inode in _sockets(process)}
    found: dict[int, bool] = {}
    for table in ("tcp", "tcp6"):
        path = pathlib.Path("/proc/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            if fields[3] == _LISTEN and fields[9] in owned:
                found[int(port, 16)] = found.get(int(port, 16), True) and _is_loopback(address)
    return found


def _is_loopback(address: str) -> bool:
    if len(address) == 8 or address.startswith(_MAPPED_V4):
        return address.endswith(_LOOPBACK_V4)
    return address == _LOOPBACK_V6


def _sockets(process: int) -> Iterable[str]:
    directory = f"/proc/{process}/fd"
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        try:
            target = os.readlink(f"{directory}/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[len("socket:["):-1]
