"""What the official clients must see of tools and reasoning that the gateway itself reads out of an engine's tokens.

Run by sdk.py: `checks_tools.py URL MODEL`, in front of engines that always think and then call `weather`.
"""

import json
import sys

from harness import ANTHROPIC, MODEL, OPENAI, check, expect, run

MESSAGES = [{"role": "user", "content": "How is the weather in Ulm?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
ARGUMENTS = {"city": "Ulm"}
REASONING, TEXT = "Which city?", "Let me look."


def is_the_call(call):
    expect(call.function.name == "weather" and json.loads(call.function.arguments) == ARGUMENTS, call)
    expect(call.id and call.type == "function", call)


@check
def openai_chat_calls_a_tool():
    choice = OPENAI.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS).choices[0]
    expect(choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1, choice)
    is_the_call(choice.message.tool_calls[0])
    expect(choice.message.content.strip() == TEXT and choice.message.reasoning_content.strip() == REASONING, choice)


@check
def openai_chat_stream_helper_accumulates_the_call():
    with OPENAI.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        choice = stream.get_final_completion().choices[0]
    expect("tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds, kinds)
    expect(choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1, choice)
    is_the_call(choice.message.tool_calls[0])
    expect(choice.message.content.strip() == TEXT, choice)


@check
def openai_chat_goes_on_with_the_result_of_a_call():
    choice = OPENAI.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS).choices[0]
    call = choice.message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    called = {"role": "assistant", "content": None, "tool_calls": [call.to_dict()]}
    again = OPENAI.chat.completions.create(model=MODEL, messages=[*MESSAGES, called, result], tools=TOOLS)
    expect(again.usage.prompt_tokens > 0 and again.choices[0].finish_reason == "tool_calls", again)


@check
def openai_responses_call_a_tool_whole_and_streamed():
    tools = [{"type": "function", "name": "weather", "parameters": PARAMETERS}]
    whole = OPENAI.responses.create(model=MODEL, input="How is the weather in Ulm?", tools=tools)
    calls = [item for item in whole.output if item.type == "function_call"]
    expect(len(calls) == 1 and calls[0].name == "weather" and json.loads(calls[0].arguments) == ARGUMENTS, whole)
    expect(whole.output_text.strip() == TEXT, whole)
    events = list(OPENAI.responses.create(model=MODEL, input="How is the weather in Ulm?", tools=tools, stream=True))
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    expect(len(done) == 1 and json.loads(done[0].arguments) == ARGUMENTS, [event.type for event in events])
    last = events[-1]
    expect(last.type == "response.completed" and last.response.output_text.strip() == TEXT, last)


@check
def openai_responses_are_kept_and_gone_on_from():
    first = OPENAI.responses.create(model=MODEL, input="hi")
    expect(OPENAI.responses.retrieve(first.id).id == first.id, first)
    following = OPENAI.responses.create(model=MODEL, input="and?", previous_response_id=first.id)
    expect(following.previous_response_id == first.id, following)
    OPENAI.responses.delete(first.id)


@check
def anthropic_messages_use_a_tool_whole_and_streamed():
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    fields = {"model": MODEL, "max_tokens": 500, "messages": MESSAGES, "tools": tools}
    whole = ANTHROPIC.messages.create(**fields)
    with ANTHROPIC.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        uses = [block for block in message.content if block.type == "tool_use"]
        texts = "".join(block.text for block in message.content if block.type == "text")
        expect(message.stop_reason == "tool_use" and len(uses) == 1, message)
        expect(uses[0].name == "weather" and uses[0].input == ARGUMENTS and uses[0].id, message)
        expect(texts.strip() == TEXT, message)


@check
def anthropic_counts_the_tokens_of_tools():
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    bare = ANTHROPIC.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
    offered = ANTHROPIC.messages.count_tokens(model=MODEL, messages=MESSAGES, tools=tools).input_tokens
    expect(offered > bare > 0, (bare, offered))


if __name__ == "__main__":
    sys.exit(run())
