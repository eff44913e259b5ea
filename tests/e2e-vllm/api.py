"""The requests of this run and the texts of their answers. Every choice is greedy."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

from engine import MODEL
from failure import expect

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
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
    """A request to either endpoint."""

    path: str
    body: dict[str, object]

    @property
    def streamed(self) -> bool:
        return self.body.get("stream") is True

    def texts(self, answer: str) -> list[str]:
        """The texts of an answer's choices, in order."""
        documents = self._events(answer) if self.streamed else [json.loads(answer)]
        texts: dict[int, str] = {}
        for choice in itertools.chain.from_iterable(document["choices"] for document in documents):
            message = choice.get("delta", choice.get("message", {}))
            piece = choice["text"] if self.path == COMPLETIONS else message.get("content")
            texts[choice["index"]] = texts.get(choice["index"], "") + (piece or "")
        return [texts[index] for index in sorted(texts)]

    def prompt_tokens(self, answer: str) -> int:
        documents = self._events(answer) if self.streamed else [json.loads(answer)]
        usages = [document["usage"] for document in documents if document.get("usage")]
        return int(usages[-1]["prompt_tokens"])

    @staticmethod
    def _events(answer: str) -> list[dict[str, Any]]:
        data = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
        expect(data and data[-1] == "[DONE]", f"the stream does not end with [DONE]: {answer[-300:]!r}")
        return [json.loads(event) for event in data[:-1]]


def chat(text: str, stream: bool = False, **more: object) -> Request:
    return Request(CHAT, _common(stream) | {"messages": [{"role": "user", "content": text}]} | more)


def completion(text: object, stream: bool = False, **more: object) -> Request:
    """`text`: one prompt, or what else the completions API takes for one."""
    return Request(COMPLETIONS, _common(stream) | {"prompt": text} | more)


def endless(text: str, stream: bool) -> Request:
    return chat(text, stream, max_tokens=ENDLESS_TOKENS, ignore_eos=True)


def _common(stream: bool) -> dict[str, object]:
    body: dict[str, object] = {"model": MODEL, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    return body | {"stream": True, "stream_options": {"include_usage": True}} if stream else body
