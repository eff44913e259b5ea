"""The requests of this run. Every choice is greedy."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from answers import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Content, read
from engine import MODEL

ANSWER_TOKENS = 24
ENDLESS_TOKENS = 3000
"""More than any check waits for: whoever sends it leaves, or is left."""

FILLER = "Whoever reads a prompt must not read it twice; what was computed once is handed over and taken on from there."

_numbers = itertools.count(1)


def prompt(about: str, repeat: int = 2) -> str:
    """A prompt that no server has seen before: it differs in its first KV block."""
    return f"{next(_numbers)} {about}. " + " ".join([FILLER] * repeat)


@dataclass(frozen=True)
class Request:
    """A request to one of the generating endpoints."""

    path: str
    body: dict[str, object]

    def read(self, answer: str) -> Content:
        return read(self.path, self.body.get("stream") is True, answer)


def chat(text: str, stream: bool = False, **more: object) -> Request:
    body = {"max_tokens": ANSWER_TOKENS, "messages": _user(text), **_with_usage(stream)}
    return Request(CHAT, _common(stream) | body | more)


def completion(text: object, stream: bool = False) -> Request:
    """`text`: one prompt, or what else the completions API takes for one."""
    body = {"max_tokens": ANSWER_TOKENS, "prompt": text, **_with_usage(stream)}
    return Request(COMPLETIONS, _common(stream) | body)


def message(text: str, stream: bool = False) -> Request:
    return Request(MESSAGES, _common(stream) | {"max_tokens": ANSWER_TOKENS, "messages": _user(text)})


def response(text: str, stream: bool = False) -> Request:
    return Request(RESPONSES, _common(stream) | {"max_output_tokens": ANSWER_TOKENS, "input": text})


def endless(text: str, stream: bool) -> Request:
    return chat(text, stream, max_tokens=ENDLESS_TOKENS, ignore_eos=True)


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _common(stream: bool) -> dict[str, object]:
    return {"model": MODEL, "temperature": 0, "stream": stream}


def _with_usage(stream: bool) -> dict[str, object]:
    return {"stream_options": {"include_usage": True}} if stream else {}
