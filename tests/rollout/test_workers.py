from typing import Any

import torch
import torch.distributed as dist

from lightning_rl_engines.models.config import ModelConfig
from lightning_rl_engines.rollout import HFRollout, Prompt
from tests.support import run_workers
from tests.support.models import random_documents, tiny_config, tiny_model

LENGTHS = (3, 11, 1, 7, 5)
END = 36  # ends four of the five greedy responses, at different lengths


class _PeerStrategy:
    """Every rank of the world is a sequence peer of the others."""

    root_device = torch.device("cpu")
    data_parallel_rank = 0

    def __init__(self) -> None:
        self.global_rank = self.peer_rank = dist.get_rank()
        self.peer_size = dist.get_world_size()

    def all_gather_objects(self, obj: Any, group: str = "data") -> list[Any]:
        assert group == "peers"
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, obj)
        return gathered


def _generate(greedy: bool) -> list[list[list[int]]]:
    rollout = HFRollout(max_new_tokens=24, num_generations=3, stop=[END])
    rollout.setup(_PeerStrategy(), ModelConfig(from_config=tiny_config("llama").to_dict()), None)
    rollout.update_weights(iter(tiny_model("llama").state_dict().items()))
    prompts = [Prompt(token_ids=ids.tolist(), index=i) for i, ids in enumerate(random_documents(LENGTHS))]
    generations = rollout.generate(prompts, greedy=greedy, num_generations=1 if greedy else None)
    return [[item.token_ids for item in group] for group in generations]


def test_peers_with_ragged_prompts_and_early_ends_agree_with_unbatched_greedy() -> None:
    model = tiny_model("llama", attn_implementation="sdpa")
    expected = []
    for document in random_documents(LENGTHS):
        output = model.generate(
            document[None],
            attention_mask=torch.ones(1, len(document), dtype=torch.int64),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=[2, END],
            pad_token_id=0,
        )
        expected.append([output[0, len(document) :].tolist()])
    assert len({len(group[0]) for group in expected}) > 1
    for size in (2, 4):
        assert run_workers(size, _generate, True) == [expected] * size


def test_peers_return_the_same_samples() -> None:
    first, second = run_workers(2, _generate, False)
    assert first == second
    assert [len(group) for group in first] == [3] * len(LENGTHS)
