#!/usr/bin/env python3
"""Writes the files of the mock engines' tokenizer into tokenizer/, beside this script.

A byte-level BPE as published models have it: every byte is a token, so that every text has one, and some words are one
token, so that texts are short. Nothing in it was learned from anything.
"""

import json
from pathlib import Path

WORDS = """
amber basin cedar delta ember fjord grain harbor inlet jade kelp lagoon meadow north orchard pebble quartz river summit
tundra umber valley willow xenon yarrow zephyr arch birch cliff dune eddy fern glade heath isle juniper knoll ledge marsh
nectar oasis pine quill ridge spruce thicket upland vista wharf yonder zinnia aurora brook canyon drift estuary
the and user assistant system tool name arguments function answer think hello world you are is in of to
""".split()
PIECES = ['{"', '":', '":"', '",', '"}', '}}', '\n\n', ': ', '. ', ', ', '</', '>\n']
SPECIAL = ["<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CONTEXT = 131072

TEMPLATE = """{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'You may call these tools:\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- 'Call one with <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>.<|im_end|>\\n' }}
{%- elif messages and messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


def byte_characters():
    """The printable character that stands for each byte in such vocabularies."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters, moved = {}, 0
    for byte in range(256):
        if byte in plain:
            characters[byte] = chr(byte)
        else:
            characters[byte] = chr(0x100 + moved)
            moved += 1
    return characters


def main():
    characters = byte_characters()
    vocabulary = {characters[byte]: byte for byte in range(256)}
    merges = []
    for text in [" " + word for word in WORDS] + WORDS + PIECES:
        spelled = [characters[byte] for byte in text.encode()]
        whole = spelled[0]
        for following in spelled[1:]:
            if whole + following not in vocabulary:
                merges.append([whole, following])
                vocabulary[whole + following] = len(vocabulary)
            whole += following
    added = [
        {
            "id": len(vocabulary) + position,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": content in SPECIAL,
        }
        for position, content in enumerate(SPECIAL + PLAIN)
    ]
    ids = {token["content"]: token["id"] for token in added}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    size = len(vocabulary) + len(added)
    files = {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocabulary,
                "merges": merges,
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|pad|>",
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE.strip(),
        },
        "special_tokens_map.json": {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"},
        "generation_config.json": {
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "pad_token_id": ids["<|pad|>"],
        },
        "config.json": {
            "model_type": "mock",
            "architectures": ["MockForCausalLM"],
            "vocab_size": size,
            "max_position_embeddings": CONTEXT,
            "eos_token_id": ids["<|im_end|>"],
        },
    }
    folder = Path(__file__).parent / "tokenizer"
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
