"""What our data modules share: one loader per data rank, its state, and Lightning's counters after a resume."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from lightning.pytorch import LightningDataModule
from typing_extensions import override

from lightning_rl_engines.data.loader import ShardedLoader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightning_rl_engines.data.experience import RecordedDocument

Raw = TypeVar("Raw")
Item = TypeVar("Item")
Batch = TypeVar("Batch")
Split = Literal["train", "val", "test", "predict"]

_SPLITS: dict[str, tuple[Split, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}


class ShardedDataModule(LightningDataModule, Generic[Raw, Item, Batch]):
    """Base of our data modules: data sets that fit in memory, read by every rank, divided by data rank.

    Data is read in ``setup``, so that faults show before a model is built, and encoded when a loader is asked for:
    by then the training module has its tokenizer.

    Args:
        batch_size: Items per data rank and training batch.
        eval_batch_size: Items per data rank and batch elsewhere; ``None`` means ``batch_size``.
        shuffle: Train in another order in each epoch.
        seed: Seed of the order.
        tokenizer: Folder or hub name; ``None`` means the tokenizer of the module that is trained.
    """

    def __init__(
        self, *, batch_size: int, eval_batch_size: int | None, shuffle: bool, seed: int, tokenizer: str | None
    ) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("eval_batch_size", eval_batch_size)):
            if value is not None and value < 1:
                raise ValueError(f"{type(self).__name__}({name}={value}) is out of range; use 1 or more.")
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.tokenizer = tokenizer
        self._raw: dict[Split, list[list[Raw]]] = {}
        self._items: dict[Split, list[list[Item]]] = {}
        self._loaded_tokenizer: PreTrainedTokenizerBase | None = None
        self._train_loader: ShardedLoader[Batch] | None = None
        self._resume: dict[str, Any] | None = None

    @abstractmethod
    def read(self, split: Split) -> list[list[Raw]]:
        """Read the data sets of a split; an empty list when there is none, one data set for training."""

    @abstractmethod
    def encode(self, raw: Sequence[Raw], split: Split) -> list[Item]:
        """Turn one data set into items."""

    @abstractmethod
    def collate(self, items: list[Item]) -> Batch:
        """Make a batch; ``items`` may be empty outside training."""

    @override
    def setup(self, stage: str) -> None:
        self._resume = None
        for split in _SPLITS[stage]:
            # The next module may have another tokenizer.
            self._items.pop(split, None)
            if split not in self._raw:
                self._raw[split] = self.read(split)
        if stage == "fit" and not self._raw["val"]:
            # Lightning asks whoever overrides the hook, and warns of an empty answer; `from_datasets` does the same.
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]

    @override
    def teardown(self, stage: str) -> None:
        self.__dict__.pop("val_dataloader", None)

    @override
    def train_dataloader(self) -> ShardedLoader[Batch]:
        data_sets = self._encoded("train")
        if not data_sets:
            raise ValueError(f"{type(self).__name__}(train=None) has nothing to train on; name a file.")
        loader = self._loader(data_sets[0], self.batch_size, training=True)
        if len(loader) == 0:
            ranks = self._ranks()["num_replicas"]
            raise ValueError(
                f"{type(self).__name__}(batch_size={self.batch_size}) on {ranks} data rank(s) needs "
                f"{self.batch_size * ranks} items for a batch, and there are {len(data_sets[0])}; use at most "
                f"batch_size={len(data_sets[0]) // ranks}."
            )
        self._train_loader = loader
        if self._resume is not None:
            loader.load_state_dict(self._resume)
            self._align_progress(loader.resumed_batches() - int(self._resume["batches"]))
            self._resume = None
        return loader

    @override
    def val_dataloader(self) -> list[ShardedLoader[Batch]]:
        return self._eval_loaders("val", required=False)

    @override
    def test_dataloader(self) -> list[ShardedLoader[Batch]]:
        return self._eval_loaders("test", required=True)

    @override
    def predict_dataloader(self) -> list[ShardedLoader[Batch]]:
        return self._eval_loaders("predict", required=True)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training data; it holds for any number of ranks."""
        return {} if self._train_loader is None else self._train_loader.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue training after the position of :meth:`state_dict`."""
        self._resume = dict(state_dict)

    def resolve_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the tokenizer that was named, or that of the module that is trained.

        Raises:
            ValueError: There is neither.
        """
        if self._loaded_tokenizer is None and self.tokenizer is not None:
            from transformers import AutoTokenizer

            self._loaded_tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        if self._loaded_tokenizer is not None:
            return self._loaded_tokenizer
        module = None if self.trainer is None else self.trainer.lightning_module
        if not hasattr(module, "tokenizer"):
            raise ValueError(
                f"{type(self).__name__}(tokenizer=None) and the module in training ({type(module).__name__}) has no "
                "tokenizer; name the model's folder, as in tokenizer='Qwen/Qwen3-0.6B'."
            )
        tokenizer: PreTrainedTokenizerBase = module.tokenizer  # type: ignore[union-attr,assignment]
        return tokenizer

    def _eval_loaders(self, split: Split, *, required: bool) -> list[ShardedLoader[Batch]]:
        data_sets = self._encoded(split)
        if required and not data_sets:
            raise ValueError(f"{type(self).__name__}({split}=None) has no data to {split} on; name a file.")
        size = self.eval_batch_size or self.batch_size
        return [self._loader(items, size, training=False) for items in data_sets]

    def items(self, split: Split) -> list[list[Item]]:
        """Return the encoded data sets of a split, each whole; after ``setup``."""
        return self._encoded(split)

    def documents(self, split: Split) -> "Iterator[tuple[RecordedDocument, ...]]":
        """Return the documents of a split, each whole and with those that share its row; prompts alone are none."""
        return iter(())

    def _encoded(self, split: Split) -> list[list[Item]]:
        if split not in self._items:
            self._items[split] = [self.encode(raw, split) for raw in self._raw.get(split, [])]
        return self._items[split]

    def _loader(self, items: list[Item], batch_size: int, *, training: bool) -> ShardedLoader[Batch]:
        trainer: Any = self.trainer
        overfit = trainer is not None and trainer.overfit_batches > 0
        return ShardedLoader(
            size=len(items),
            collate=lambda indices: self.collate([items[index] for index in indices]),
            batch_size=batch_size,
            shuffle=training and self.shuffle and not overfit,
            drop_last=training,
            seed=self.seed,
            in_flight=self._batches_in_flight if training else lambda: 0,
            **self._ranks(),
        )

    def _ranks(self) -> dict[str, int]:
        sampler = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        if sampler is None:
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": sampler["num_replicas"], "rank": sampler["rank"]}

    def _batches_in_flight(self) -> int:
        # A checkpoint that an exception causes is saved inside a training step: its batch is not done with.
        if self.trainer is None:
            return 0
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return int(progress.ready - progress.processed)

    def _align_progress(self, batches: int) -> None:
        """Move Lightning's count of batches in this epoch, which is in batches of the layout that saved it."""
        if self.trainer is None or batches == 0:
            return
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        progress.ready += batches
        progress.started += batches
        progress.processed += batches
        progress.completed += batches
