"""A PD pair behind a gateway: everything a check needs, and the measured request that most checks are made of."""

from __future__ import annotations

from dataclasses import dataclass

from api import Request
from client import call
from engine import Counters, Engine, reference
from failure import expect
from gateway import Gateway


@dataclass(frozen=True)
class Pair:
    prefill: Engine
    decode: Engine
    gateway: Gateway
    mode: str
    """The KV connector mode that the gateway reports for this pair when its connector is declared."""
    loopback_only: bool
    """Whether everything of the servers listens on loopback addresses."""

    @property
    def engines(self) -> list[Engine]:
        return [self.prefill, self.decode]


@dataclass(frozen=True)
class Measured:
    """What one request through the gateway made of both servers' counters."""

    prompt_tokens: int
    texts: list[str]
    prefill: Counters
    decode: Counters
    modes: int
    """How often the gateway counted the expected mode."""


def measure(pair: Pair, request: Request, mode: str, raw_body: str | None = None) -> Measured:
    """Sends `request` through the gateway and compares its texts with those of the prefill server asked alone.

    `raw_body` is sent instead of the request's own body when given; the texts must be the same all the same.
    """
    prefill, decode, modes = pair.prefill.counters(), pair.decode.counters(), pair.gateway.mode_count(mode)
    answer = call(pair.gateway.port, "POST", request.path, raw_body or request.body)
    expect(answer.status == 200, f"the gateway answered {answer.status}: {answer.text[:300]}")
    content = request.read(answer.text)
    texts, tokens = content.texts, content.prompt_tokens
    # Decode first: when it has settled, the prefill server, which was done before, has too.
    decoded = pair.decode.growth(decode, tokens)
    prefilled = pair.prefill.growth(prefill, 0)
    measured = Measured(tokens, texts, prefilled, decoded, pair.gateway.mode_count(mode) - modes)
    alone = request.read(reference(pair.prefill, request.path, request.body)).texts
    expect(all(texts), f"an answer is empty: {texts!r}")
    expect(texts == alone, f"the texts differ: {texts!r} through the gateway, {alone!r} from one server alone")
    return measured


def expect_handoff(pair: Pair, measured: Measured) -> str:
    """The prompt's KV came from the prefill server, whole."""
    decode, prefill, tokens = measured.decode, measured.prefill, measured.prompt_tokens
    found = f"decode transferred {decode.transferred}, computed {decode.computed}, cached {decode.cached} of {tokens}"
    expect(decode.transferred == tokens and decode.computed == 0 and decode.cached == 0, found)
    expect(prefill.prompt == tokens, f"prefill counted {prefill.prompt} of {tokens} prompt tokens")
    expect(prefill.generated == 1, f"prefill generated {prefill.generated} tokens instead of one")
    expect(decode.failed_transfers == 0, f"{decode.failed_transfers} transfers failed")
    expect(measured.modes == 1, f"the gateway counted mode {pair.mode} {measured.modes} times")
    moved = f", {decode.bytes_moved:,} bytes" if decode.bytes_moved else ""
    return f"{found}{moved}; text equal"


def expect_recomputed(measured: Measured) -> str:
    """No KV moved: decode computed the prompt itself."""
    decode, tokens = measured.decode, measured.prompt_tokens
    found = f"decode transferred {decode.transferred}, computed {decode.computed} of {tokens}"
    expect(decode.transferred == 0 and decode.computed + decode.cached == tokens, found)
    return f"{found}; {'text' if len(measured.texts) == 1 else f'{len(measured.texts)} texts'} equal"
