"""KV moves, and only where it can: answers, batched prompts, clients that bring handoffs of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from api import Request, chat, completion, message, prompt, response
from client import call
from engine import reference
from failure import expect
from listeners import listening
from pair import Measured, Pair, expect_handoff, expect_recomputed, measure
from processes import Process
from table import Table

HOSTILE = '{"do_remote_prefill":true}'
"""An incomplete handoff: an unprotected decode server dies of it."""


def check_listeners(pair: Pair) -> str:
    """Every TCP listener of both servers and of the gateway is a loopback one."""
    return expect_loopback([*(engine.process for engine in pair.engines), pair.gateway.process])


def expect_loopback(processes: Iterable[Process]) -> str:
    found = listening(member for process in processes for member in process.members())
    open_ports = sorted(port for port, loopback in found.items() if not loopback)
    expect(found, "no listener found")
    expect(not open_ports, f"not on loopback: ports {open_ports}")
    return f"{len(found)} listeners, all on loopback"


def check_handoff(pair: Pair, request: Request) -> str:
    return expect_handoff(pair, measure(pair, request, pair.mode))


def check_recomputed(pair: Pair, request: Request, mode: str) -> str:
    return expect_recomputed(measure(pair, request, mode))


def check_answers(table: Table, group: str, pair: Pair) -> None:
    """Every generating route, streamed and not."""
    routes: dict[str, Callable[[str, bool], Request]] = {
        "chat": chat, "completions": completion, "messages": message, "responses": response,
    }
    for name, make in routes.items():
        for stream in (False, True):
            request = make(prompt(name), stream)
            table.run(group, f"{name}, streamed" if stream else name, check_handoff, pair, request)
    table.run(group, "control: another prompt, another text", _check_texts_differ, pair)


def _check_texts_differ(pair: Pair) -> str:
    """Equal texts say something only where texts depend on prompts."""
    requests = [completion(prompt("a control")) for _ in range(2)]
    first, second = (request.read(reference(pair.prefill, request.path, request.body)).texts for request in requests)
    expect(first != second, f"two prompts have the same text: {first!r}")
    return "two texts, of two prompts that differ in their number"


def check_batches(table: Table, group: str, pair: Pair) -> None:
    """Several prompts in one completions request: one handoff cannot serve them, so decode computes them."""
    texts = [prompt("first of a batch"), prompt("second of a batch", 1), prompt("third of a batch")]
    shapes = {
        "three prompts": completion(texts),
        "three prompts, streamed": completion([prompt("of a stream") for _ in texts], stream=True),
        "two lists of token ids": completion([list(range(40, 90)), list(range(60, 130))]),
    }
    for name, request in shapes.items():
        table.run(group, name, check_recomputed, pair, request, pair.mode)
    single = completion([prompt("the only one of a batch")])
    table.run(group, "a list of one prompt", check_handoff, pair, single)


def check_hostile_fields(table: Table, group: str, pair: Pair) -> None:
    """`kv_transfer_params` of a client, however written and wherever engines look for them, reach no engine."""
    forms = {
        "a client's kv_transfer_params": (chat(prompt("hostile")), appended),
        "the same, streamed": (completion(prompt("hostile stream"), stream=True), appended),
        "the same, twice": (completion(prompt("hostile twice")), _twice),
        "the same, name escaped": (completion(prompt("hostile escape")), _escaped),
    }
    for name, (request, write) in forms.items():
        table.run(group, name, _check_harmless, pair, request, write)
    batch = completion([prompt("hostile batch"), prompt("hostile batch")])
    table.run(group, "the same, with several prompts", _check_harmless_batch, pair, batch)
    single = completion(prompt("hostile extension"))
    table.run(group, "in vllm_xargs", _check_harmless, pair, single, in_extensions)
    check_hostile_extensions(table, group, pair, pair.mode)


def check_hostile_extensions(table: Table, group: str, pair: Pair, mode: str) -> None:
    """Where requests carry no handoff of the gateway's, what `vllm_xargs` holds would be taken for one."""
    texts = [prompt("hostile extension of a batch") for _ in range(2)]
    table.run(group, "in vllm_xargs, two prompts", _check_harmless_extension, pair, completion(texts), mode)
    twice = completion([prompt("hostile extension, twice") for _ in range(2)])
    twice.body.update(n=2, temperature=1)
    table.run(group, "in vllm_xargs, two prompts and n=2", _check_samples, pair, twice)


def check_unequal_requests(table: Table, group: str, pair: Pair) -> None:
    """Prompts of many KV blocks, and prompts whose start decode has already."""
    long = chat(prompt("long", 16))
    table.run(group, "chat, a long prompt", check_handoff, pair, long)
    table.run(group, "the same prompt again", _check_again, pair, long)


def _check_again(pair: Pair, request: Request) -> str:
    """Decode takes what it has from its own cache and the rest from the prefill server; it computes nothing."""
    measured = measure(pair, request, pair.mode)
    decode, tokens = measured.decode, measured.prompt_tokens
    found = f"decode transferred {decode.transferred}, cached {decode.cached}, computed {decode.computed} of {tokens}"
    expect(decode.computed == 0 and decode.cached > 0 and decode.prompt == tokens, found)
    return f"{found}; text equal"


def _check_harmless(pair: Pair, request: Request, write: Callable[[str], str]) -> str:
    figures = expect_handoff(pair, measure(pair, request, pair.mode, write(json.dumps(request.body))))
    expect(all(engine.healthy() for engine in pair.engines), "a server is not healthy any more")
    return f"{figures}; both servers healthy"


def _check_harmless_batch(pair: Pair, request: Request) -> str:
    figures = expect_recomputed(measure(pair, request, pair.mode, appended(json.dumps(request.body))))
    expect(all(engine.healthy() for engine in pair.engines), "a server is not healthy any more")
    return f"{figures}; both servers healthy"


def _check_harmless_extension(pair: Pair, request: Request, mode: str) -> str:
    measured: Measured = measure(pair, request, mode, in_extensions(json.dumps(request.body)))
    expect(measured.decode.transferred == 0, f"decode transferred {measured.decode.transferred} tokens")
    expect(all(engine.healthy() for engine in pair.engines), "a server is not healthy any more")
    return f"nothing transferred; {len(measured.texts)} texts equal; both servers healthy"


def _check_samples(pair: Pair, request: Request) -> str:
    """Samples are no greedy choices, which vLLM refuses with `n`: their texts cannot be compared."""
    before = pair.decode.counters()
    answer = call(pair.gateway.port, "POST", request.path, in_extensions(json.dumps(request.body)))
    expect(answer.status == 200, f"the gateway answered {answer.status}: {answer.text[:300]}")
    content = request.read(answer.text)
    transferred = pair.decode.growth(before, content.prompt_tokens).transferred
    expect(len(content.texts) == 4 and transferred == 0, f"{len(content.texts)} texts, decode transferred {transferred} tokens")
    expect(all(engine.healthy() for engine in pair.engines), "a server is not healthy any more")
    return "nothing transferred; 4 texts; both servers healthy"


def in_extensions(body: str) -> str:
    return f'{body[:-1]},"vllm_xargs":{{"kv_transfer_params":""}}}}'


def appended(body: str) -> str:
    return f'{body[:-1]},"kv_transfer_params":{HOSTILE}}}'


def _twice(body: str) -> str:
    return f'{{"kv_transfer_params":{HOSTILE},{body[1:-1]},"kv_transfer_params":{HOSTILE}}}'


def _escaped(body: str) -> str:
    return f'{body[:-1]},"kv\\u005ftransfer_param\\u0073":{HOSTILE}}}'
