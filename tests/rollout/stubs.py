"""A strategy without processes, and a tokenizer of single characters."""

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'][0] }}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<s>a{% endif %}"
)


class StubStrategy:
    """One rank; ``gathered`` stands for what the sequence peers contribute."""

    root_device = torch.device("cpu")
    global_rank = 0

    def __init__(self, *, data_rank: int = 0, sequence_rank: int = 0, sequence_size: int = 1) -> None:
        self.data_parallel_rank = data_rank
        self.peer_rank = sequence_rank
        self.peer_size = sequence_size
        self.gathered: list[Any] = []
        self.sent: list[Any] = []

    def all_gather_objects(self, obj: Any, group: str = "world") -> list[Any]:
        if group == "world":
            return [obj]
        assert group == "peers"
        self.sent.append(obj)
        return [obj, *self.gathered]


def character_tokenizer() -> PreTrainedTokenizerFast:
    """61 characters after ``<pad>``, ``<s>`` and ``</s>`` (ids 0, 1, 2): vocabulary 64, as the tiny models have."""
    characters = ["<pad>", "<s>", "</s>", *string.ascii_letters, *" .,?!+=\n-"][:64]
    vocabulary = {character: index for index, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="?"
    )
    fast.chat_template = TEMPLATE
    return fast


def save_character_tokenizer(folder: Path) -> str:
    character_tokenizer().save_pretrained(folder)
    return str(folder)
