"""How KV caches go from one engine process to another: over a socket, once each, to whoever names the key.

The "KV cache" of a prompt is its tokens. A decode engine answers from what it fetched and from nothing else, so a pair that
was matched wrongly cannot look right.
"""

import asyncio
import json

PATIENCE = 30.0
"""Seconds that either side waits for the other."""


class Ledger:
    """What a prefill engine has computed, by key, until it is fetched."""

    def __init__(self):
        self._offers = {}
        self._arrivals = {}
        self.taken = 0

    def offer(self, key, tokens):
        """Puts a prompt's KV up; returns an event that is set when it has been fetched."""
        if key in self._offers:
            raise KeyError(f"the key {key} is in use")
        fetched = asyncio.Event()
        self._offers[key] = (tokens, fetched)
        self._arrival(key).set()
        return fetched

    def withdraw(self, key):
        self._offers.pop(key, None)
        self._arrivals.pop(key, None)

    @property
    def held(self):
        return len(self._offers)

    def _arrival(self, key):
        return self._arrivals.setdefault(key, asyncio.Event())

    async def _take(self, key):
        await asyncio.wait_for(self._arrival(key).wait(), PATIENCE)
        tokens, fetched = self._offers[key]
        self.withdraw(key)
        self.taken += 1
        fetched.set()
        return tokens

    async def serve(self, port, state):
        """Serves fetches on a port of loopback for ever, and `state()` to whoever names no key."""
        async def serve_one(reader, writer):
            try:
                key = json.loads(await reader.readline())["key"]
                answer = state() if key is None else {"tokens": await self._take(key)}
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
            except (TimeoutError, asyncio.TimeoutError, KeyError, ValueError, OSError):
                pass
            finally:
                writer.close()
        server = await asyncio.start_server(serve_one, "127.0.0.1", port, limit=1 << 24)
        await server.serve_forever()


async def fetch(host, port, key):
    """The tokens under `key` of the engine that serves there."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
    try:
        writer.write(json.dumps({"key": key}).encode() + b"\n")
        await writer.drain()
        line = await asyncio.wait_for(reader.readline(), PATIENCE)
        if not line:
            raise ConnectionError("there is no KV under that key")
        return json.loads(line)["tokens"]
    finally:
        writer.close()
