"""What an answer says, whatever the API it has the shape of: the texts, and how many tokens the prompt had."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from failure import expect

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"


@dataclass(frozen=True)
class Content:
    texts: list[str]
    """One for each choice, in order."""
    prompt_tokens: int


def read(path: str, streamed: bool, answer: str) -> Content:
    """Reads a whole or a streamed answer. Fails the check when it is not one from beginning to end."""
    if not streamed:
        return _WHOLE[path](json.loads(answer))
    data = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
    events = [json.loads(event) for event in data if event != "[DONE]"]
    closed = data[-1:] == ["[DONE]"] if path in (CHAT, COMPLETIONS) else events and events[-1]["type"] in _LAST
    expect(closed, f"the stream has no proper end: {answer[-300:]!r}")
    return _STREAMED[path](events)


_LAST = ("message_stop", "response.completed", "response.incomplete")


def _choices(documents: list[dict[str, Any]]) -> Content:
    """OpenAI's choices: a whole answer is one document, a stream is many."""
    texts: dict[int, str] = {}
    for choice in (choice for document in documents for choice in document["choices"]):
        piece = choice["text"] if "text" in choice else choice.get("delta", choice.get("message", {})).get("content")
        texts[choice["index"]] = texts.get(choice["index"], "") + (piece or "")
    usages = [document["usage"] for document in documents if document.get("usage")]
    return Content([texts[index] for index in sorted(texts)], usages[-1]["prompt_tokens"])


def _message(document: dict[str, Any]) -> Content:
    return Content([_joined(document["content"])], document["usage"]["input_tokens"])


def _message_events(events: list[dict[str, Any]]) -> Content:
    text = _joined(event["delta"] for event in events if event["type"] == "content_block_delta")
    usages = [event.get("message", event).get("usage") for event in events if event["type"].startswith("message_")]
    return Content([text], max(usage.get("input_tokens", 0) for usage in usages if usage))


def _response(document: dict[str, Any]) -> Content:
    text = _joined(part for item in document["output"] for part in item.get("content") or [])
    return Content([text], document["usage"]["input_tokens"])


def _response_events(events: list[dict[str, Any]]) -> Content:
    text = "".join(event["delta"] for event in events if event["type"].endswith("_text.delta"))
    return Content([text], events[-1]["response"]["usage"]["input_tokens"])


def _joined(parts: Iterable[dict[str, Any]]) -> str:
    return "".join(part.get("text") or "" for part in parts)


_WHOLE: dict[str, Callable[[dict[str, Any]], Content]] = {
    CHAT: lambda document: _choices([document]),
    COMPLETIONS: lambda document: _choices([document]),
    MESSAGES: _message,
    RESPONSES: _response,
}

_STREAMED: dict[str, Callable[[list[dict[str, Any]]], Content]] = {
    CHAT: _choices,
    COMPLETIONS: _choices,
    MESSAGES: _message_events,
    RESPONSES: _response_events,
}
