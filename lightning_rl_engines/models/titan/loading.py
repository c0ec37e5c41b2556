"""Loads weights into a torchtitan model that is sharded already; no rank holds more than a tensor of others' parts."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_rl_engines import _compat
from lightning_rl_engines.models.agreement import raise_on_all_ranks
from lightning_rl_engines.models.config import ModelConfig
from lightning_rl_engines.models.titan.names import TIED_HEAD, HFNames, HFPiece
from lightning_rl_engines.models.titan.shards import LocalShard
from lightning_rl_engines.models.titan.sources import (
    BroadcastSource,
    FolderSource,
    RandomModel,
    SavedTensor,
    TensorSource,
    find_folder,
    read_manifest,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def load_weights(
    model: nn.Module | Sequence[nn.Module],
    names: HFNames,
    config: ModelConfig,
    hf_config: "PretrainedConfig",
    *,
    gather: Callable[[Any], list[Any]],
    tied: bool,
    plain_name: Callable[[str], str | None] = str,
) -> None:
    """Fill every parameter and persistent buffer of a sharded model in place; collective over the world.

    From a folder or hub name each rank reads its own shards only. Random weights are built on rank 0, as the other
    engine builds them, and sent one tensor at a time. A value head is restored from a saved critic, and drawn afresh,
    alike in every layout and engine, where the weights are a language model's.

    The caller materialises the model before (``to_empty``) and lets it compute its other buffers, rotary caches among
    them (``init_weights``); these are not touched here.

    Args:
        model: This rank's torchtitan model, or the parts of it under pipeline parallelism.
        names: Where each saved tensor lies.
        config: What the weights are.
        hf_config: Its Hugging Face configuration.
        gather: Returns the host objects of all ranks, in rank order.
        tied: Whether the head shares the embedding's parameter.
        plain_name: Maps a name in the model to one that ``names`` knows; ``None`` for what no save holds, such as an
            adapter, which is left alone.

    Raises:
        ValueError: On all ranks: files cannot be read, or hold too little, too much or other shapes, with names.
    """
    parts = [model] if isinstance(model, nn.Module) else list(model)
    head = config.head == "value"
    names = names.for_value_head() if head else names
    held = ((plain_name(name), tensor) for part in parts for name, tensor in part.state_dict().items())
    state = {name: tensor for name, tensor in held if name is not None}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    manifest, source = _find_source(config, state, gather)
    # Stages of a pipeline hold different layers: what a file must hold is what all of them expect.
    everywhere = {name: shape for item in gather(shapes) for name, shape in item.items()}
    expected = _expected(everywhere, names, tied=tied and not head)
    manifest = _as_expected(manifest, expected, tied=tied and not head)
    fresh = _check(manifest, expected, config, hf_config)
    error: Exception | None = None
    try:
        _fill(state, names, manifest, source)
        _fill_fresh_head(state, fresh, hf_config, config)
        _warn_of_second_head(manifest, source, config, tied=tied and not head)
    except Exception as exception:  # of any type: the other ranks go on
        error = exception
    raise_on_all_ranks(config, error, gather)


def _is_reader() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _find_source(
    config: ModelConfig, state: Mapping[str, Tensor], gather: Callable[[Any], list[Any]]
) -> tuple[dict[str, SavedTensor], TensorSource]:
    """Return the tensors that there are, the same on all ranks, and where to get them."""
    manifest: dict[str, SavedTensor] | None = None
    random, folder, error = None, None, None
    some = next(tensor for tensor in state.values() if tensor.is_floating_point())
    try:
        if _is_reader() and config.path is None:
            random = RandomModel(config, some.dtype)
            manifest = random.manifest()
        elif _is_reader():
            folder = find_folder(config)
            manifest = read_manifest(folder)
    except Exception as exception:
        error = exception
    raise_on_all_ranks(config, error, gather)
    found = gather(manifest)[0]
    if config.path is None:
        # Off-loaded shards lie on the host, where the process group may not communicate.
        device = torch.device(some.device_mesh.device_type) if isinstance(some, DTensor) else some.device
        return found, BroadcastSource(random, device)
    try:
        # After rank 0: what it downloaded is there now.
        folder = folder or find_folder(config)
    except Exception as exception:
        error = exception
    raise_on_all_ranks(config, error, gather)
    assert folder is not None
    return found, FolderSource(folder)


def _expected(shapes: Mapping[str, tuple[int, ...]], names: HFNames, *, tied: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of saved tensors that a whole model needs, by name."""
    expected: dict[str, tuple[int, ...]] = {}
    for fqn, shape in shapes.items():
        pieces = names.pieces(fqn, shape)
        if not pieces and not (tied and fqn == TIED_HEAD):
            raise ValueError(f"The model's {fqn} has no name in a Hugging Face save, so it cannot be loaded.")
        expected |= {piece.name: piece.shape_in(shape) for piece in pieces}
    return expected


def _as_expected(
    manifest: dict[str, SavedTensor], expected: Mapping[str, Any], *, tied: bool
) -> dict[str, SavedTensor]:
    """Rename what transformers also reads: saves of the backbone alone, and a tied embedding saved as the head."""
    if not any(name.startswith("model.") for name in manifest):
        inside = {f"model.{name}": name for name in manifest if f"model.{name}" in expected}
        back = {name: new for new, name in inside.items()}
        manifest = {back.get(name, name): tensor for name, tensor in manifest.items()}
    if tied and EMBEDDING not in manifest and HEAD in manifest:
        manifest = {EMBEDDING if name == HEAD else name: tensor for name, tensor in manifest.items()}
    return manifest


@dataclass(frozen=True)
class _Mismatch:
    """What a source and a model do not have in common."""

    missing: list[str]
    shapes: list[str]
    left: list[str]


def _compare(
    manifest: Mapping[str, SavedTensor], expected: Mapping[str, tuple[int, ...]], hf_config: "PretrainedConfig"
) -> _Mismatch:
    # Heads of language models are left over where a critic starts from one, or where the embedding is the head.
    unread = [*_compat.keys_to_ignore_on_load(hf_config), r"rotary_emb\.inv_freq", rf"^{re.escape(HEAD)}$"]
    return _Mismatch(
        missing=sorted(expected.keys() - manifest.keys()),
        shapes=[
            f"{name} is {list(manifest[name].shape)} and should be {list(shape)}"
            for name, shape in sorted(expected.items())
            if name in manifest and manifest[name].shape != shape
        ],
        left=[
            name
            for name in sorted(manifest.keys() - expected.keys())
            if not any(re.search(pattern, name) for pattern in unread)
        ],
    )


def _check(
    manifest: Mapping[str, SavedTensor],
    expected: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
    hf_config: "PretrainedConfig",
) -> list[str]:
    """Check that a source fits a model; return the parameters of a value head that it has none of."""
    found = _compare(manifest, expected, hf_config)
    fresh = [name for name in found.missing if config.head == "value" and name.startswith("score.")]
    missing = [name for name in found.missing if name not in fresh]
    backbone_left = [name for name in found.left if not fresh or name.startswith("model.")]
    if missing or found.shapes or backbone_left:
        raise ValueError(
            f"The weights of {config.source} do not fit its configuration: missing {_some(missing)}, of another shape "
            f"{_some(found.shapes)}, left over {_some(backbone_left)}; name a complete checkpoint"
            f"{' (a value head has one label)' if config.head == 'value' else ''}."
        )
    if not fresh:
        return []
    heads = [name for name in expected if name.startswith("score.")]
    if found.left or (set(fresh) != set(heads) and fresh != ["score.bias"]):
        raise ValueError(
            f"The weights of {config.source} have no value head under the name that transformers gives it: missing "
            f"{fresh}, left over {_some(found.left)}. A trained head would be lost; rename it to 'score.weight' and "
            "'score.bias', or start from a language model for a fresh one."
        )
    if fresh == ["score.bias"]:
        rank_zero_info(f"The value head of {config.source} has no bias; it starts from 0.")
    else:
        rank_zero_info(f"The value head of {config.source} is freshly initialised: the checkpoint holds none.")
    return fresh


def _some(items: Sequence[str], limit: int = 8) -> str:
    """List items for a message; a model of experts has thousands."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return f"{list(items[:limit])}{more}"


def _fill(
    state: Mapping[str, Tensor], names: HFNames, manifest: Mapping[str, SavedTensor], source: TensorSource
) -> None:
    wanted: dict[str, tuple[LocalShard, HFPiece]] = {}
    for fqn, tensor in state.items():
        shard = LocalShard(tensor)
        wanted |= {piece.name: (shard, piece) for piece in names.pieces(fqn, shard.shape) if shard.holds(piece)}
    # All ranks walk in one order, which the broadcasts need; in a folder it opens each file once.
    for name, saved in manifest.items():
        opened = source.open(name, saved, wanted=name in wanted)
        if name in wanted:
            shard, piece = wanted[name]
            shard.fill(piece, opened)


def _fill_fresh_head(
    state: Mapping[str, Tensor], fresh: Iterable[str], hf_config: "PretrainedConfig", config: ModelConfig
) -> None:
    for name in fresh:
        fqn = name.replace("score.", "lm_head.")
        if fqn not in state:
            continue
        # What transformers draws for the missing head of a token classifier, in the type of the weights.
        value = torch.zeros(state[fqn].shape, dtype=state[fqn].dtype)
        if fqn.endswith("weight"):
            value.normal_(0.0, hf_config.initializer_range, generator=torch.Generator().manual_seed(config.seed))
        LocalShard(state[fqn]).fill(HFPiece(name), value)


def _warn_of_second_head(
    manifest: Mapping[str, SavedTensor], source: TensorSource, config: ModelConfig, *, tied: bool
) -> None:
    """Say it where a checkpoint of a tied model holds another head than the embedding."""
    if not tied or HEAD not in manifest or not _is_reader() or not isinstance(source, FolderSource):
        return
    with torch.no_grad():
        embedding = source.open(EMBEDDING, manifest[EMBEDDING], wanted=True)
        head = source.open(HEAD, manifest[HEAD], wanted=True)
        rows, step = manifest[HEAD].shape[0], 4096
        same = manifest[HEAD].shape == manifest[EMBEDDING].shape and all(
            torch.equal(embedding[start : start + step], head[start : start + step]) for start in range(0, rows, step)
        )
    if not same:
        rank_zero_warn(
            f"{config.source} holds {HEAD} with another value than the tensor that its configuration ties it to; the "
            "configuration is followed. Set tie_word_embeddings=false in config.json if both are meant."
        )
