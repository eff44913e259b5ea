"""One engine of a pair as a process, on the message types and helpers that the engines' own servicers are made of.

It answers a prompt with the prompt's own tokens and then ends: whoever gets the answer can tell whether it is right, and a
decode engine can only give it after it has fetched the prompt from a prefill engine (transfer.py).
"""

import argparse
import asyncio
import signal
import uuid

import grpc
from smg_grpc_servicer.engine_status import grpc_code_for_http_status
from smg_grpc_servicer.tokenizer_bundle import tokenizer_bundle, tokenizer_chunks

from transfer import Ledger, fetch

WINDOW = 4096
REFUSED_TOKEN = 7


class Refused(Exception):
    """The engine's own refusal of a request, as the HTTP status that it would have."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class Core:
    """What all engines share: settings, KV ledger, and the requests inside."""

    def __init__(self, arguments):
        self.role = arguments.role
        self.model = arguments.model
        self.tokenizer = arguments.tokenizer
        self.connector = arguments.connector
        self.kv_port = arguments.kv_port
        self.token_delay = arguments.token_delay_ms / 1000
        self.max_running = arguments.max_running
        self.engine_id = str(uuid.uuid4())
        self.ledger = Ledger()
        self.inside = {}
        self.aborted = 0

    def enter(self, request_id, tokens):
        """Takes a request in; returns the event that aborts it."""
        if request_id in self.inside:
            raise Refused(400, f"the request id {request_id} is in use")
        if not tokens:
            raise Refused(400, "the prompt is empty")
        if REFUSED_TOKEN in tokens:
            raise Refused(400, f"token {REFUSED_TOKEN} is refused here")
        if len(tokens) > WINDOW:
            raise Refused(400, f"the prompt has {len(tokens)} tokens, more than {WINDOW}")
        stop = self.inside[request_id] = asyncio.Event()
        return stop

    def abort(self, request_id):
        """Whether the request was inside."""
        stop = self.inside.get(request_id)
        if stop is not None:
            self.aborted += 1
            stop.set()
        return stop is not None

    async def unless_aborted(self, stop, work):
        """What `work` yields; None when the request was aborted first."""
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else None
        finally:
            for task in tasks:
                task.cancel()

    async def meet(self, host, port, room, tokens, stop):
        """Both legs at once: a prefill waits until its KV has been fetched, a decode fetches it. None = aborted."""
        if self.role == "decode":
            return await self.unless_aborted(stop, fetch(host, port, room))
        fetched = self.ledger.offer(room, tokens)
        try:
            return tokens if await self.unless_aborted(stop, fetched.wait()) else None
        finally:
            self.ledger.withdraw(room)

    def state(self):
        """What is inside, for whoever wants to know whether anything was left behind."""
        return {"inside": len(self.inside), "held": self.ledger.held, "taken": self.ledger.taken,
                "aborted": self.aborted}

    async def generate(self, context, request_id, tokens, get_kv, write, stream, limit):
        """Runs one request: gets the KV, then says the prompt again, in the engine's own messages.

        `get_kv(stop)` returns the tokens to answer from, or None when the request was aborted. `write` is (chunk, complete).
        """
        chunk, complete = write
        try:
            stop = self.enter(request_id, tokens)
        except Refused as refused:
            await context.abort(grpc_code_for_http_status(refused.status), str(refused))
        try:
            try:
                known = await get_kv(stop)
            except (OSError, KeyError, ValueError, TimeoutError, asyncio.TimeoutError) as error:
                await context.abort(grpc.StatusCode.INTERNAL, f"KV transfer failed: {error!r}")
            if known is None:
                yield complete([], 0, "abort")
                return
            said = known[:limit]
            for position, token in enumerate(said):
                if self.token_delay:
                    await self.unless_aborted(stop, asyncio.sleep(self.token_delay))
                if stop.is_set():
                    yield complete([], position, "abort")
                    return
                if stream:
                    yield chunk([token], position + 1)
            reason = "length" if len(said) == limit else "stop"
            yield complete(said[-1:] if stream else said, len(said), reason)
        finally:
            self.inside.pop(request_id, None)

    async def tokenizer_pieces(self):
        archive, digest = await tokenizer_bundle(self.tokenizer)
        for piece in tokenizer_chunks(archive, digest):
            yield piece


def servicer_of(engine):
    """The module of an engine: `register(server, core)` adds its service."""
    if engine == "sglang":
        import as_sglang as module
    elif engine == "vllm":
        import as_vllm as module
    else:
        import as_tokenspeed as module
    return module


async def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["sglang", "vllm", "tokenspeed"], required=True)
    parser.add_argument("--role", choices=["prefill", "decode"], required=True)
    parser.add_argument("--connector", default="")
    parser.add_argument("--model", default="m")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kv-port", type=int, required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--token-delay-ms", type=float, default=0)
    parser.add_argument("--max-running", type=int, default=64)
    arguments = parser.parse_args()
    core = Core(arguments)
    server = grpc.aio.server()
    servicer_of(arguments.engine).register(server, core)
    server.add_insecure_port(f"127.0.0.1:{arguments.port}")
    await server.start()
    serving = asyncio.ensure_future(core.ledger.serve(arguments.kv_port, core.state))
    print(f"ready grpc://127.0.0.1:{arguments.port}", flush=True)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()
    serving.cancel()
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main())
