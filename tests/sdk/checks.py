"""What the official clients must see of a gateway. Run by sdk.py: `checks.py URL MODEL`, with the clients installed."""

import sys

import anthropic
import openai

from harness import ANTHROPIC, MODEL, OPENAI, check, expect, raises, run

PROMPT = "Why do prefill and decode run on different machines?"
TOKENS = 12
MESSAGES = [{"role": "user", "content": PROMPT}]


# --- the OpenAI client

@check
def openai_lists_the_model():
    models = [model.id for model in OPENAI.models.list()]
    expect(models == [MODEL], models)
    expect(OPENAI.models.retrieve(MODEL).id == MODEL, MODEL)


@check
def openai_chat_is_the_same_whole_and_streamed():
    whole = OPENAI.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=TOKENS)
    text = whole.choices[0].message.content
    expect(text and whole.choices[0].finish_reason == "length", whole)
    expect(whole.usage.completion_tokens == TOKENS, whole.usage)
    stream = OPENAI.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=TOKENS, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    expect(streamed == text, streamed)
    expect(chunks[-1].usage.completion_tokens == TOKENS, chunks[-1])


@check
def openai_chat_stream_helper_accumulates_the_answer():
    with OPENAI.chat.completions.stream(model=MODEL, messages=MESSAGES, max_completion_tokens=TOKENS) as stream:
        events = [event.type for event in stream]
    expect("content.delta" in events and "chunk" in events, set(events))


@check
def openai_completions_are_the_same_whole_and_streamed():
    whole = OPENAI.completions.create(model=MODEL, prompt=PROMPT, max_tokens=TOKENS)
    text = whole.choices[0].text
    stream = OPENAI.completions.create(model=MODEL, prompt=PROMPT, max_tokens=TOKENS, stream=True)
    streamed = "".join(choice.text for chunk in stream for choice in chunk.choices)
    expect(text and streamed == text, (text, streamed))


@check
def openai_responses_are_the_same_whole_and_streamed():
    whole = OPENAI.responses.create(model=MODEL, input=PROMPT, max_output_tokens=TOKENS)
    # Where the gateway itself writes the response it says that the limit cut it; the mock engines over HTTP do not.
    expect(whole.status in ("completed", "incomplete") and whole.output_text, whole)
    stream = OPENAI.responses.create(model=MODEL, input=PROMPT, max_output_tokens=TOKENS, stream=True)
    events = list(stream)
    streamed = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    expect(streamed == whole.output_text, streamed)
    expect(events[-1].type == f"response.{whole.status}" and events[-1].response.output_text == streamed, events[-1])
    expect([event.sequence_number for event in events] == list(range(len(events))), events)


@check
def openai_raw_responses_carry_the_request_id_and_the_worker():
    raw = OPENAI.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=1, extra_headers={"X-Request-Id": "sdk-raw-1"})
    expect(raw.headers["x-request-id"] == "sdk-raw-1", raw.headers)
    expect(raw.headers["x-smg-routed-worker-id"].startswith(("http://", "grpc://")), raw.headers)
    expect(raw.parse().choices[0].message.content, raw)


@check
def openai_errors_are_the_classes_that_users_catch():
    chat = OPENAI.chat.completions.create
    error = raises(openai.NotFoundError, lambda: chat(model="none", messages=MESSAGES), status_code=404)
    expect(error.code == "model_not_found" and error.type == "invalid_request_error" and error.request_id, error)
    streamed = lambda: chat(model="none", messages=MESSAGES, stream=True)  # noqa: E731
    raises(openai.NotFoundError, streamed, status_code=404, code="model_not_found")
    wrong = lambda: chat(model=MODEL, messages=MESSAGES, extra_body={"stream": "yes"})  # noqa: E731
    raises(openai.BadRequestError, wrong, status_code=400, code="invalid_type")
    # The engine's own refusal.
    raises(openai.BadRequestError, lambda: chat(model=MODEL, messages=[]), status_code=400)
    raises(openai.NotFoundError, lambda: OPENAI.models.retrieve("none"), status_code=404, code="model_not_found")
    embeddings = lambda: OPENAI.embeddings.create(model=MODEL, input="x")  # noqa: E731
    raises(openai.InternalServerError, embeddings, status_code=501, code="pd_route_unsupported")


# --- the Anthropic client

@check
def anthropic_lists_the_model():
    models = [model.id for model in ANTHROPIC.models.list()]
    expect(models == [MODEL], models)


@check
def anthropic_messages_are_the_same_whole_and_streamed():
    whole = ANTHROPIC.messages.create(model=MODEL, max_tokens=TOKENS, messages=MESSAGES)
    text = whole.content[0].text
    expect(text and whole.stop_reason == "max_tokens" and whole.usage.output_tokens == TOKENS, whole)
    events = list(ANTHROPIC.messages.create(model=MODEL, max_tokens=TOKENS, messages=MESSAGES, stream=True))
    kinds = [event.type for event in events]
    deltas = kinds.count("content_block_delta")
    # A token may be part of a character only: then there is an event less.
    expect(TOKENS // 2 <= deltas <= TOKENS, kinds)
    inside = ["content_block_delta"] * deltas
    expected = ["message_start", "content_block_start", *inside, "content_block_stop", "message_delta", "message_stop"]
    expect(kinds == expected, kinds)
    expect("".join(event.delta.text for event in events if event.type == "content_block_delta") == text, events)


@check
def anthropic_stream_helper_accumulates_the_message():
    with ANTHROPIC.messages.stream(model=MODEL, max_tokens=TOKENS, messages=MESSAGES) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    expect(text and message.content[0].text == text and message.usage.output_tokens == TOKENS, message)


@check
def anthropic_counts_tokens():
    count = ANTHROPIC.messages.count_tokens(model=MODEL, messages=MESSAGES)
    whole = ANTHROPIC.messages.create(model=MODEL, max_tokens=1, messages=MESSAGES)
    expect(count.input_tokens == whole.usage.input_tokens, count)


@check
def anthropic_errors_are_the_classes_that_users_catch():
    create = lambda **fields: ANTHROPIC.messages.create(  # noqa: E731
        **({"model": MODEL, "max_tokens": 1, "messages": MESSAGES} | fields))
    error = raises(anthropic.NotFoundError, lambda: create(model="none"), status_code=404)
    expect(error.body["error"]["type"] == "not_found_error" and error.body["request_id"], error.body)
    raises(anthropic.NotFoundError, lambda: create(model="none", stream=True), status_code=404)
    error = raises(anthropic.BadRequestError, lambda: create(extra_body={"stream": "yes"}), status_code=400)
    expect(error.body["error"]["type"] == "invalid_request_error", error.body)
    error = raises(anthropic.BadRequestError, lambda: create(messages=[]), status_code=400)
    expect(error.body["type"] == "error", error.body)


if __name__ == "__main__":
    sys.exit(run())
