"""All data is looked at before the first step."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_rl_engines import (
    DPOModule,
    ExperienceDataModule,
    FSDPUlyssesStrategy,
    HFRollout,
    ModelConfig,
    PolicyModule,
    PreferenceDataModule,
    PromptDataModule,
    RewardModelModule,
    RLOOAdvantage,
    SFTModule,
)
from lightning_rl_engines.models import TokenModel
from lightning_rl_engines.modules.training_data import check_documents
from tests.modules.cases import even_tokens, sgd
from tests.support import run_workers
from tests.support.lightning_env import make_trainer

POLICY = ModelConfig(from_config="examples/quickstart")  # 64 positions
GOOD = [3, 4]


class Steps(Callback):
    """Counts training batches."""

    def __init__(self) -> None:
        self.count = 0

    @override
    def on_train_batch_start(self, *arguments: Any) -> None:
        self.count += 1


def parts(kind: str, file: str, **option: Any) -> tuple[Any, Any]:
    """A module and data of its kind, for training or (``split``) only for validation."""
    good, split = f"{Path(file).parent}/good.jsonl", option.pop("split", "train")
    files = {"train": file} if split == "train" else {"train": good, "val": file}
    if kind == "prompt":
        rollout = HFRollout(num_generations=2, max_new_tokens=4)
        policy = PolicyModule(policy=POLICY, rollout=rollout, reward=even_tokens, optimizer=sgd, **option)
        return policy, PromptDataModule(**files, batch_size=2)
    if kind == "experience":
        recorded = ExperienceDataModule(**files, documents_per_batch=2)
        return PolicyModule(policy=POLICY, optimizer=sgd, **option), recorded
    if kind == "sft":
        tuned = SFTModule(policy=POLICY, optimizer=sgd, completion_column="response", **option)
        return tuned, PromptDataModule(**files, batch_size=2, shuffle=False)
    pairs = PreferenceDataModule(**files, batch_size=2, shuffle=False)
    if kind == "dpo":
        return DPOModule(policy=POLICY, optimizer=sgd, **option), pairs
    return RewardModelModule(reward_model=ModelConfig(from_config=POLICY.from_config, head="value"), **option), pairs


def fit(kind: str, file: str, message: str, option: dict[str, Any]) -> int:
    module, data = parts(kind, file, **option)
    steps = Steps()
    trainer = make_trainer(FSDPUlyssesStrategy(), max_steps=2, callbacks=[steps], num_sanity_val_steps=0)
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, data)
    return steps.count


def row(**changes: Any) -> str:
    base = {"prompt": GOOD, "response": GOOD, "chosen": GOOD, "rejected": GOOD, "advantages": 1.0}
    return json.dumps({**base, **changes})


LONG = [3] * 63
VOCABULARY = r"token id 999, but the vocabulary ends at \d+; encode it with the model's own tokenizer"
CASES = {
    "prompt-validation": ("prompt", {"prompt": [3] * 64}, "prompt 5 has 64 tokens", {"split": "val"}),
    "prompt-room": (
        "prompt",
        {"prompt": [3] * 30},
        "prompt 5 has 30 tokens and may get max_new_tokens=4 more, .*=32 allows 32 in a row; raise it to at least 34",
        {"max_tokens_per_micro_batch": 32},
    ),
    "prompt-long": (
        "prompt",
        {"prompt": [3] * 64},
        r"prompt 5 has 64 tokens; .*the model's 64 positions. Set max_prompt_length=60",
        {},
    ),
    "experience-vocabulary": ("experience", {"response": [3, 999]}, rf"bad.jsonl, line 6: {VOCABULARY}", {}),
    "experience-validation": (
        "experience",
        {"response": [999]},
        rf"bad.jsonl, line 6: {VOCABULARY}",
        {"split": "val"},
    ),
    "experience-budget": (
        "experience",
        {"response": [3] * 20},
        "line 6: 22 tokens in a row, more than the 16 that max_tokens_per_micro_batch allows; raise it to at least 22",
        {"max_tokens_per_micro_batch": 16},
    ),
    "sft-vocabulary": ("sft", {"prompt": [999]}, f"Prompt 5 for train: {VOCABULARY}", {}),
    "dpo-vocabulary": ("dpo", {"rejected": [999]}, f"line 6: {VOCABULARY}", {}),
    "reward-budget": (
        "reward",
        {"chosen": LONG},
        "line 6: 69 tokens in a row, more than the 64 that max_tokens_per_micro_batch allows",
        {"max_tokens_per_micro_batch": 64},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_row_that_no_pass_takes_is_refused_before_training(tmp_path: Path, case: str) -> None:
    kind, changes, message, option = CASES[case]
    (tmp_path / "good.jsonl").write_text("\n".join([row()] * 5))
    (tmp_path / "bad.jsonl").write_text("\n".join([*[row()] * 5, row(**changes)]))
    assert run_workers(1, fit, kind, str(tmp_path / "bad.jsonl"), message, option) == [0]


def test_a_model_with_a_table_of_positions_ends_with_it() -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=8))
    model = cast(TokenModel, SimpleNamespace(config=config, longest_document=4))
    check_documents([("row 1", [[7] * 4]), ("row 2", [])], model, None)
    with pytest.raises(ValueError, match="row 2: 5 tokens, and the model has max_position_embeddings=4"):
        check_documents([("row 1", [[7] * 4]), ("row 2", [[7], [7] * 5])], model, None)


def test_what_a_script_gets_wrong_is_named() -> None:
    with pytest.raises(TypeError, match=r"policy='tiny' is no ModelConfig; use ModelConfig\(path='tiny'\)"):
        PolicyModule(policy=cast(ModelConfig, "tiny"), optimizer=sgd)
    with pytest.raises(ValueError, match="num_generations=1 with RLOOAdvantage gives every response an advantage of 0"):
        PolicyModule(policy=POLICY, rollout=HFRollout(num_generations=1), reward=even_tokens, advantage=RLOOAdvantage())
    with pytest.raises(ValueError, match=r"the model folder './missing' does not exist"):
        ModelConfig(path="./missing").load_hf_config()


def fit_strangely(kind: str) -> str:
    made = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    rollout = HFRollout(num_generations=2, max_new_tokens=4)
    module = PolicyModule(
        policy=POLICY, rollout=rollout, reward=even_tokens, optimizer=cast(Any, made) if kind == "optimizer" else sgd
    )
    with pytest.raises((TypeError, RuntimeError)) as error:
        make_trainer(FSDPUlyssesStrategy(), max_steps=2).fit(module, DataLoader(["a", "b"], batch_size=2))
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("optimizer", "the optimizer SGD is built already, .*optimizer=lambda parameters: AdamW"),
        ("batch", r"a batch holds str instead of Prompt; use PromptDataModule, or a loader of Prompt\(token_ids"),
    ],
)
def test_what_training_cannot_use_is_named(kind: str, words: str) -> None:
    (message,) = run_workers(1, fit_strangely, kind)
    assert re.search(words, message)
