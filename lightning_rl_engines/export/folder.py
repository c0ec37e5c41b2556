"""A Hugging Face folder, written shard by shard and replaced as a whole."""

import copy
import json
import os
import re
import shutil
import sys
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

from torch import Tensor
from typing_extensions import override

from lightning_rl_engines.export.plan import ExportPlan
from lightning_rl_engines.export.sinks import ExportContext, WeightSink

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Writers = Literal["all", "rank0"]
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_METADATA = {"format": "pt"}


@dataclass(eq=False)
class _Shard:
    """One file: what is in it, and its tensors on the rank that writes it."""

    writer: int
    names: list[str] = field(default_factory=list)
    size: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    number: int = 0


class HFFolderSink(WeightSink):
    """Writes a folder that ``from_pretrained`` and inference servers load.

    ``model.safetensors``, or numbered shards with their index; ``config.json`` with the exported type, the generation
    configuration and the tokenizer where the context has them. An adapter becomes a PEFT folder: one file, with
    ``adapter_config.json`` in the place of the model's configurations.

    Shards are whole files, given to the ranks in turn. Which tensor is in which file follows from the stream, which is
    the same on all ranks, so the folder does not depend on their number. A rank copies only the tensors of its own
    files to the host. Ranks write at the same time, when each of them has a file. Memory on the host of each rank: at
    most one file, and one tensor that is larger than a file may be.

    The folder is written beside its destination and renamed when complete. An earlier export there is replaced then;
    if the process dies before, it is left as it was.

    Args:
        path: Destination. ``{step}`` and ``{update}`` stand for the optimizer steps and updates so far, as in
            ``runs/export-{update}``; without them each export replaces the last.
        max_shard_size: Largest file: bytes, or a number with ``KB``, ``MB``, ``GB`` or ``TB`` (powers of ten). A
            larger tensor gets a file of its own.
        writers: ``"all"``: every rank that sees the folder which rank 0 makes; these are all ranks where they share a
            file system, and else those of rank 0's machine. ``"rank0"``: rank 0 alone.

    Raises:
        ValueError: ``path`` has another placeholder, ``max_shard_size`` is no size, or ``writers`` is unknown.
    """

    def __init__(self, *, path: str, max_shard_size: int | str = "5GB", writers: Writers = "all") -> None:
        self.path = str(path)
        self.max_shard_size = max_shard_size
        self.writers: Writers = writers
        _parse_size(max_shard_size)
        _expand(self.path, ExportContext())
        if writers not in get_args(Writers):
            raise ValueError(f"writers={writers!r} is unknown; use one of {list(get_args(Writers))}.")
        self._location: str | None = None
        self._target = self._partial = Path()
        self._plan: ExportPlan | None = None
        self._context = ExportContext()
        self._limit = 0
        self._index: int | None = 0  # None where this rank writes nothing, and removes nothing
        self._count = 1
        self._reset()

    def _reset(self) -> None:
        self._filling: _Shard | None = None
        self._complete: list[_Shard] = []
        self._waiting: list[_Shard] = []
        self._begun = 0
        self._bytes_by_dtype: Counter[str] = Counter()
        self._total_bytes = self._total_elements = 0

    @property
    @override
    def location(self) -> str | None:
        return self._location

    @override
    def open(self, plan: ExportPlan | None, context: ExportContext) -> None:
        self._plan = plan
        self._target = Path(os.path.abspath(_expand(self.path, context)))
        self._partial = self._target.with_name(f".{self._target.name}.partial")
        self._target.parent.mkdir(parents=True, exist_ok=True)
        previous = _previous(self._target)
        if previous.exists() and not self._target.exists():
            # A process died between the two renames of close(): the old export is complete, the new one was not named.
            previous.rename(self._target)
        _refuse_foreign(self._target)
        for leftover in (self._partial, previous):
            shutil.rmtree(leftover, ignore_errors=True)
        self._partial.mkdir()
        self._begin_export(context)
        self.share(0, 1)

    def _begin_export(self, context: ExportContext) -> None:
        self._context = context
        # peft reads one file.
        self._limit = sys.maxsize if context.adapter_config is not None else _parse_size(self.max_shard_size)
        self._reset()

    @override
    def invite(self) -> tuple[str, str] | None:
        if self.writers == "rank0":
            return None
        # A name that no other export and no other machine has, so that a rank that finds it sees this very folder.
        token = self._partial / f"{uuid.uuid4().hex}.token"
        token.touch()
        return str(self._partial), token.name

    @override
    def join(self, invitation: tuple[str, str], context: ExportContext) -> bool:
        partial, token = invitation
        self._partial = Path(partial)
        self._begin_export(context)
        self._index = None
        return (self._partial / token).exists()

    @override
    def share(self, index: int, count: int) -> None:
        self._index, self._count = index, count

    @override
    def write(self, name: str, tensor: Tensor) -> None:
        size = tensor.nbytes
        self._total_bytes += size
        self._total_elements += tensor.numel()
        if tensor.dtype.is_floating_point:
            self._bytes_by_dtype[str(tensor.dtype).removeprefix("torch.")] += size
        # The rule of Hugging Face: too large a tensor goes alone, and the shard that is being filled stays open.
        if size > self._limit:
            alone = self._begin_shard()
            self._put(alone, name, tensor)
            self._end_shard(alone)
            return
        if self._filling is not None and self._filling.size + size > self._limit:
            self._end_shard(self._filling)
            self._filling = None
        if self._filling is None:
            self._filling = self._begin_shard()
        self._put(self._filling, name, tensor)

    def takes(self, num_bytes: int) -> bool:
        """Whether this rank writes the next tensor of the stream; of others it needs no data, only type and shape.

        Args:
            num_bytes: Size of that tensor.
        """
        filling = self._filling
        starts_file = filling is None or num_bytes > self._limit or filling.size + num_bytes > self._limit
        writer = self._begun % self._count if filling is None or starts_file else filling.writer
        return writer == self._index

    @override
    def finish(self) -> None:
        if self._filling is not None:
            self._end_shard(self._filling)
            self._filling = None
        self._save_waiting()

    @override
    def close(self) -> None:
        self.finish()
        for token in self._partial.glob("*.token"):
            token.unlink()
        self._finish_model()
        if self._context.tokenizer is not None:
            self._context.tokenizer.save_pretrained(str(self._partial))
        for file in self._partial.rglob("*"):
            _sync(file)
        self._replace()
        self._location = str(self._target)
        self._reset()

    @override
    def abort(self, error: BaseException) -> None:
        self._reset()
        if self._partial.name and self._index == 0:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _begin_shard(self) -> _Shard:
        # All ranks come here at the same tensor, so those that have a complete file write at the same time. Saving a
        # file as soon as it is complete would have the others wait for it in the next gather.
        if self._begun % self._count == 0:
            self._save_waiting()
        self._begun += 1
        return _Shard(writer=(self._begun - 1) % self._count)

    def _put(self, shard: _Shard, name: str, tensor: Tensor) -> None:
        shard.names.append(name)
        shard.size += tensor.nbytes
        if shard.writer == self._index:
            shard.tensors[name] = tensor.detach().cpu().contiguous()

    def _end_shard(self, shard: _Shard) -> None:
        self._complete.append(shard)
        shard.number = len(self._complete)
        if shard.writer == self._index:
            self._waiting.append(shard)

    def _save_waiting(self) -> None:
        from safetensors.torch import save_file

        while self._waiting:
            shard = self._waiting.pop(0)
            # How many files there will be is known at the end only; they get their final names then.
            path = self._partial / f"{shard.number}.part"
            save_file(shard.tensors, path, metadata=_METADATA)
            shard.tensors = {}
            _sync(path)  # on this machine: another one's sync does not flush what this one holds

    def _finish_model(self) -> None:
        if not self._complete:
            raise RuntimeError(f"The export to {self._target} holds no tensor.")
        count = len(self._complete)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        names = ["model.safetensors"] if count == 1 else names
        if self._context.adapter_config is not None:
            names = ["adapter_model.safetensors"]
        for number, name in enumerate(names, start=1):
            (self._partial / f"{number}.part").rename(self._partial / name)
        if count > 1:
            known = self._plan.num_parameters if self._plan is not None else None
            index = {
                "metadata": {
                    "total_parameters": self._total_elements if known is None else known,
                    "total_size": self._total_bytes,
                },
                "weight_map": {
                    key: name for name, shard in zip(names, self._complete, strict=True) for key in shard.names
                },
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self._partial / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        if self._context.adapter_config is not None:
            text = json.dumps(self._context.adapter_config, indent=2, sort_keys=True) + "\n"
            (self._partial / "adapter_config.json").write_text(text, encoding="utf-8")
            return
        if self._context.config is not None:
            self._save_config(self._context.config)
        if self._context.generation_config is not None:
            self._context.generation_config.save_pretrained(str(self._partial))

    def _save_config(self, config: "PretrainedConfig") -> None:
        config = copy.deepcopy(config)
        if self._bytes_by_dtype:
            # Of mixed types, the one that most of the model has.
            config.dtype = self._bytes_by_dtype.most_common(1)[0][0]
        if self._plan is not None and self._plan.architecture is not None:
            config.architectures = [self._plan.architecture]
        config.save_pretrained(str(self._partial))

    def _replace(self) -> None:
        previous = _previous(self._target)
        if self._target.exists():
            self._target.rename(previous)
        self._partial.rename(self._target)
        _sync(self._target.parent)
        shutil.rmtree(previous, ignore_errors=True)


def _expand(path: str, context: ExportContext) -> str:
    try:
        return path.format(step=context.step, update=context.update)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"path={path!r}: only {{step}} and {{update}} can be filled in, as in 'export-{{update}}'."
        ) from error


def _parse_size(size: int | str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]B)?\s*", str(size).upper())
    number = int(float(match[1]) * _UNITS.get(cast(str, match[2]), 1)) if match else 0
    if number < 1:
        raise ValueError(f"max_shard_size={size!r} is no size; use bytes, or a string such as '5GB'.")
    return number


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def _refuse_foreign(target: Path) -> None:
    """Refuse to replace a folder that is no export: its content would be lost."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"path={str(target)!r} is a file; name a folder.")
    content = list(target.iterdir())
    exported = any(re.fullmatch(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors", file.name) for file in content)
    folders = [file.name for file in content if file.is_dir() and file.name != "additional_chat_templates"]
    if content and (not exported or folders):
        raise ValueError(
            f"path={str(target)!r} holds something else than exported weights and would be replaced; name a new folder "
            f"such as {str(target / 'export')!r}."
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
