"""Writes examples/quickstart: the prompts, the tokenizer and the model configuration of the quickstart.

The task is to copy: the prompt is `copy cab` and a line break, the right response `cab` and a line break. The model
starts from random weights, so it has to find out that responses are letters, which ones, in which order, and when to
stop.
"""

import json
import random
from itertools import permutations
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

FOLDER = Path(__file__).parent / "quickstart"
LETTERS = "abcdefghij"
WORD_LENGTH = 3
TRAIN, VALIDATION = 512, 64


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character, one for `copy `; the line break ends a response."""
    tokens = ["\n", "<pad>", "copy ", *"abcdefghijklmnopqrstuvwxyz", " ", ".", "?"]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"copy |\n|."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="\n", pad_token="<pad>", unk_token="?")


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """A Qwen3 of 2 layers and 80 thousand parameters; 2 KV heads, so that Ulysses can split it over two ranks."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["Qwen3ForCausalLM"],
    )


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(FOLDER)
    make_config(tokenizer).save_pretrained(FOLDER)
    words = ["".join(letters) for letters in permutations(LETTERS, WORD_LENGTH)]
    random.Random(0).shuffle(words)
    # No word is in both files: a right answer in validation is not remembered.
    for name, part in (("train", words[:TRAIN]), ("val", words[TRAIN : TRAIN + VALIDATION])):
        lines = [json.dumps({"prompt": f"copy {word}\n", "answer": word}) for word in part]
        (FOLDER / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
