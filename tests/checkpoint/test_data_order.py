"""Which samples come next does not depend on the ranks that a stopped run continues on."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from lightning_rl_engines import ModelConfig, PromptDataModule
from tests.checkpoint.cases import ENGINES, Everything, SaveAfter
from tests.strategies.reference import Documents, make_documents
from tests.support import run_workers
from tests.support.lightning_env import make_trainer
from tests.support.models import tiny_model_folder

SIZE, SAVED, STEPS = 20, 3, 9


class Reader(Everything):
    """Notes the samples of each step, in the order of the data ranks."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        engine: Any = self.trainer.strategy
        shares = engine.all_gather_objects([prompt.index for prompt in batch], "data")
        self.steps[-1]["place"] = (self.current_epoch, batch_idx)
        self.steps[-1]["samples"] = list(chain(*shares))


def read(
    folder: str,
    documents: Documents,
    path: str,
    *,
    steps: int,
    resume: bool,
    engine: str,
    batch_size: int = 2,
    **strategy: Any,
) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """On a rank: epoch and batch of each step, and its samples."""
    module = Reader(ModelConfig(path=folder), documents)
    save = [] if resume else [SaveAfter(SAVED, f"{path}/run.ckpt")]
    trainer = make_trainer(ENGINES[engine](**strategy), max_steps=steps, callbacks=save)
    data = PromptDataModule(train=f"{path}/train.jsonl", batch_size=batch_size)
    trainer.fit(module, datamodule=data, ckpt_path=f"{path}/run.ckpt" if resume else None)
    return [step["place"] for step in module.steps], [step["samples"] for step in module.steps]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_that_stops_within_an_epoch_goes_on_with_the_next_samples_on_other_ranks(
    tmp_path: Path, engine: str
) -> None:
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({"prompt": [1, n]}) for n in range(SIZE)))
    folder = str(tiny_model_folder("llama"))
    case = (folder, make_documents(folder, vocabulary=64), str(tmp_path))
    (_, whole), (_, peer) = run_workers(2, read, *case, steps=STEPS, resume=False, engine=engine)
    assert whole == peer
    first, second = [list(chain(*steps)) for steps in (whole[:5], whole[5:])]
    assert sorted(first) == list(range(SIZE)) != first  # an epoch of five steps, shuffled
    assert first[:16] != second
    # Four samples in a step as before, or two, or eight.
    for world, batch_size in ((1, 4), (1, 2), (4, 1), (4, 2)):
        samples = world * batch_size
        left, later, epoch = 8 // samples, 16 // samples, SIZE // samples
        options = {"steps": SAVED + left + later, "resume": True, "engine": engine, "batch_size": batch_size}
        for places, rest in run_workers(world, read, *case, **options):
            assert places == [*((0, epoch - left + n) for n in range(left)), *((1, n) for n in range(later))]
            assert list(chain(*rest)) == list(chain(*whole[SAVED:]))
