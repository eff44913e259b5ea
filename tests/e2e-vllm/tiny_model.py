"""Makes a language model that is small enough for any machine, without any download: `tiny_model.py DIRECTORY`.

Run with the engine's python. The model is a Qwen3 of two layers with random weights of a fixed seed, so that the same
versions make the same file and two servers agree on every greedy answer. Its tokens are single bytes: a prompt has about
as many tokens as letters and so fills several KV blocks. Only printable ASCII can win a greedy choice, hence texts are
readable, though without sense.
"""

from __future__ import annotations

import pathlib
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SEED = 20
CONTEXT = 4096
END, TURN = "<|end|>", "<|turn|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([END, TURN, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, additional_special_tokens=[TURN],
        model_max_length=CONTEXT, clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE,
    )


def random_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        # Weights this large make answers depend on the whole prompt; with the usual 0.02 all of them look alike.
        initializer_range=0.3, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    ))
    with torch.no_grad():
        for token in range(len(tokenizer)):
            text = tokenizer.decode([token])
            if token in tokenizer.all_special_ids or not (text.isascii() and text.isprintable()):
                model.lm_head.weight[token].zero_()
    return model


def main(directory: pathlib.Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(directory)
    random_model(tokenizer).save_pretrained(directory)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
