"""What can go wrong, by who has to act on it."""

from __future__ import annotations


class Missing(Exception):
    """The machine lacks something that the run needs; the message lists it. Nothing was started."""


class Broken(Exception):
    """A part of the run itself does not work: a build, an installation, a server that does not start."""


class CheckFailed(Exception):
    """A check found something else than it expects; the message says what."""


def expect(condition: object, message: str) -> None:
    """Fails the running check with `message` unless `condition` holds."""
    if not condition:
        raise CheckFailed(message)
