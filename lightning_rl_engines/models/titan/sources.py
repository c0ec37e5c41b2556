"""Where weights come from: a folder that every rank reads its part of, or a model that rank 0 alone builds."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from lightning_rl_engines.export.plan import plan_from_hf_model
from lightning_rl_engines.models.config import ModelConfig
from lightning_rl_engines.models.huggingface import load_hf_model

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class SavedTensor:
    """One tensor of a source.

    Attributes:
        shape: Its shape.
        dtype: Its type; ``None`` where the file says.
        stored: Its name in the file.
        file: The file, relative to the folder.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    stored: str = ""
    file: str = ""


class TensorSource(Protocol):
    """Tensors under the names of a Hugging Face save, opened one at a time in a common order on all ranks."""

    def open(self, name: str, tensor: SavedTensor, *, wanted: bool) -> Any:
        """Return something that gives a tensor for a tuple of slices; nothing in particular unless ``wanted``."""


def find_folder(config: ModelConfig) -> Path:
    """Return the folder of ``config.path``, downloaded where it is a hub name; local.

    Raises:
        ValueError: It holds no safetensors.
    """
    assert config.path is not None
    folder = Path(config.path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        patterns = [INDEX, "*.safetensors"]
        folder = Path(snapshot_download(config.path, revision=config.revision, allow_patterns=patterns))
    if not (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        raise ValueError(
            f"path={config.path!r} has neither {SINGLE} nor {INDEX}; save it again with "
            "transformers' model.save_pretrained(...)."
        )
    return folder


def read_manifest(folder: Path) -> dict[str, SavedTensor]:
    """Return the tensors of a folder by name, from the headers of its files; no data is read."""
    files = [SINGLE]
    if (folder / INDEX).is_file():
        files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    manifest = {}
    for file in files:
        with safe_open(folder / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                shape = tuple(opened.get_slice(name).get_shape())
                manifest[name] = SavedTensor(shape, stored=name, file=file)
    return manifest


class FolderSource:
    """Reads parts of tensors from the files of a folder, on each rank for itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: str | None = None
        self._opened: Any = None

    def open(self, name: str, tensor: SavedTensor, *, wanted: bool) -> Any:
        """Return the tensor's slice object, which reads what is asked of it; ``None`` unless ``wanted``."""
        if not wanted:
            return None
        if self._file != tensor.file:
            self._file, self._opened = tensor.file, safe_open(self._folder / tensor.file, framework="pt")
        return self._opened.get_slice(tensor.stored)


class RandomModel:
    """The random weights of ``ModelConfig(from_config=...)`` on rank 0, the same that the other engine starts from.

    Args:
        config: What to build.
        dtype: Storage type of the weights.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        model = load_hf_model(config, dtype=dtype, device="cpu", attn_implementation="eager")
        self._plan = plan_from_hf_model(model)
        self._state = model.state_dict()

    def manifest(self) -> dict[str, SavedTensor]:
        """Return the tensors by name, in the order of :meth:`tensors`."""
        shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in self._state.items()}
        return {name: SavedTensor(tuple(item.shape), item.dtype) for name, item in self._walk(shapes)}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors as a save would hold them."""
        return self._walk(self._state)

    def _walk(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for source in self._plan.by_source:
            yield from self._plan.pieces(source, state[source])


class BroadcastSource:
    """Sends the tensors of rank 0's model to all ranks, one at a time; collective over the world.

    Args:
        model: The model on rank 0, ``None`` elsewhere.
        device: Where tensors are received; the process group must communicate there.
    """

    def __init__(self, model: RandomModel | None, device: torch.device) -> None:
        self._tensors = None if model is None else model.tensors()
        self._device = device

    def open(self, name: str, tensor: SavedTensor, *, wanted: bool) -> Tensor:
        """Return the whole tensor on every rank; call it on all of them, in the order of the manifest."""
        if self._tensors is None:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        else:
            found, whole = next(self._tensors)
            assert found == name, f"{found} comes where the manifest has {name}"
            whole = whole.to(self._device).contiguous()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(whole, src=0)
        return whole
