"""A Hugging Face folder, written shard by shard and replaced as a whole."""

import copy
import json
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import Tensor
from typing_extensions import override

from lightning_rl_engines.export.plan import ExportPlan
from lightning_rl_engines.export.sinks import ExportContext, WeightSink

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_METADATA = {"format": "pt"}


class HFFolderSink(WeightSink):
    """Writes a folder that ``from_pretrained`` and inference servers load.

    ``model.safetensors``, or numbered shards with their index; ``config.json`` with the exported type, the generation
    configuration and the tokenizer where the context has them. Memory: at most one shard and one tensor. An adapter
    becomes a PEFT folder: one file, with ``adapter_config.json`` in the place of the model's configurations.

    The folder is written beside its destination and renamed when complete. An earlier export there is replaced then;
    if the process dies before, it is left as it was.

    Args:
        path: Destination. ``{step}`` and ``{update}`` stand for the optimizer steps and updates so far, as in
            ``runs/export-{update}``; without them each export replaces the last.
        max_shard_size: Largest file: bytes, or a number with ``KB``, ``MB``, ``GB`` or ``TB`` (powers of ten). A
            larger tensor gets a file of its own.

    Raises:
        ValueError: ``path`` has another placeholder, or ``max_shard_size`` is no size.
    """

    def __init__(self, *, path: str, max_shard_size: int | str = "5GB") -> None:
        self.path = str(path)
        self.max_shard_size = max_shard_size
        _parse_size(max_shard_size)
        _expand(self.path, ExportContext())
        self._location: str | None = None
        self._target = self._partial = Path()
        self._plan: ExportPlan | None = None
        self._context = ExportContext()
        self._reset()

    def _reset(self) -> None:
        self._shard: dict[str, Tensor] = {}
        self._shard_bytes = 0
        self._files: list[list[str]] = []
        self._bytes_by_dtype: Counter[str] = Counter()
        self._total_bytes = self._total_elements = 0

    @property
    @override
    def location(self) -> str | None:
        return self._location

    @override
    def open(self, plan: ExportPlan | None, context: ExportContext) -> None:
        self._plan, self._context = plan, context
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
        # peft reads one file.
        self._limit = sys.maxsize if context.adapter_config is not None else _parse_size(self.max_shard_size)
        self._reset()

    @override
    def write(self, name: str, tensor: Tensor) -> None:
        tensor = tensor.detach().cpu().contiguous()
        size = tensor.nbytes
        self._total_bytes += size
        self._total_elements += tensor.numel()
        if tensor.dtype.is_floating_point:
            self._bytes_by_dtype[str(tensor.dtype).removeprefix("torch.")] += size
        # The rule of Hugging Face: too large a tensor goes alone, and the shard that is being filled stays open.
        if size > self._limit:
            self._save({name: tensor})
            return
        if self._shard_bytes + size > self._limit:
            self._flush()
        self._shard[name] = tensor
        self._shard_bytes += size

    @override
    def close(self) -> None:
        self._flush()
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
        if self._partial.name:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _flush(self) -> None:
        if self._shard:
            self._save(self._shard)
            self._shard, self._shard_bytes = {}, 0

    def _save(self, tensors: dict[str, Tensor]) -> None:
        from safetensors.torch import save_file

        # How many files there will be is known at the end only; they get their final names then.
        self._files.append(list(tensors))
        save_file(tensors, self._partial / f"{len(self._files)}.part", metadata=_METADATA)

    def _finish_model(self) -> None:
        if not self._files:
            raise RuntimeError(f"The export to {self._target} holds no tensor.")
        count = len(self._files)
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
                "weight_map": {key: name for name, keys in zip(names, self._files, strict=True) for key in keys},
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
