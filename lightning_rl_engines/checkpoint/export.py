"""Turns a training checkpoint into a Hugging Face folder, in one process or several, without a Trainer."""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_rl_engines.checkpoint.adapter import METADATA_KEY, rebuild_model
from lightning_rl_engines.checkpoint.training import read_metadata
from lightning_rl_engines.export.folder import HFFolderSink
from lightning_rl_engines.export.plan import ExportPlan, plan_from_hf_model
from lightning_rl_engines.export.sinks import Communicator, ExportContext, drain
from lightning_rl_engines.models.config import DTypeName, ModelConfig, torch_dtype
from lightning_rl_engines.models.huggingface import load_generation_config, load_hf_model
from lightning_rl_engines.models.lora import load_adapter
from lightning_rl_engines.models.lora_config import adapter_config_dict
from lightning_rl_engines.models.weights import stream_weights

_Stream: TypeAlias = Iterator[tuple[str, Tensor]]


def export_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    *,
    dtype: DTypeName | None = None,
    model: str = "policy",
    max_shard_size: int | str = "5GB",
    weights: Literal["full", "merged", "adapter"] | None = None,
    ranks: Communicator | None = None,
) -> Path:
    """Write a model of a training checkpoint as a Hugging Face folder, on the host.

    Weights are read one stored tensor at a time, so the host needs room for one file and one of these; for the whole
    model where an adapter is merged. Several processes read and write whole files in turn.

    Args:
        checkpoint: A folder that a run saved, such as ``runs/grpo/checkpoints/last.ckpt``.
        output: The folder to write; an existing export in its place is replaced.
        dtype: Type of the exported weights; ``None`` keeps the stored one, fp32 for trained and merged models.
        model: Which of the module's models, by its argument's name.
        max_shard_size: Largest file, in bytes or as ``"5GB"``.
        weights: ``"full"``; of a run with LoRA ``"merged"`` (base plus adapter) or ``"adapter"`` (a PEFT folder);
            ``None`` for ``"full"`` or ``"merged"``, whichever there is. Merging reads the base from where the run did.
        ranks: The processes that share the work, all of which call this; ``None`` for this one alone.

    Returns:
        The folder.

    Raises:
        ValueError: No finished checkpoint, it does not say how ``model`` was built, or it has no such weights.
    """
    path = Path(checkpoint)
    metadata = read_metadata(path)
    config = _model_config(metadata.get("hyper_parameters", {}), model, path)
    adapter = metadata.get(METADATA_KEY, {}).get(model)
    if weights not in (("full", None) if adapter is None else ("merged", "adapter", None)):
        have = "whole weights" if adapter is None else "an adapter"
        raise ValueError(f"weights={weights!r}: checkpoint={str(path)!r} holds {have} of {model!r}; leave it out.")
    target = None if dtype is None else torch_dtype(dtype)
    sink = HFFolderSink(path=str(output), max_shard_size=max_shard_size)
    if adapter is None:
        hf, plan, stream = _full(config, path, model, target, sink.takes)
        adapter_config = None
    else:
        merged = weights != "adapter"
        hf, plan, stream, options = _adapted(config, adapter, path, model, target, merged=merged)
        adapter_config = None if merged else options
    context = ExportContext(
        step=metadata["global_step"],
        config=hf.config,
        generation_config=load_generation_config(config, hf.config),
        tokenizer=_tokenizer(config),
        adapter_config=adapter_config,
    )
    drain(stream, sink, ranks or _ThisProcess(), plan=plan, context=context)
    return Path(output)


class _ThisProcess:
    """A world of one."""

    global_rank = 0

    def all_gather_objects(self, item: Any) -> list[Any]:
        return [item]


def _full(
    config: ModelConfig, path: Path, model: str, dtype: torch.dtype | None, takes: Callable[[int], bool]
) -> tuple[Any, ExportPlan, _Stream]:
    with torch.device("meta"):
        hf = load_hf_model(config, device="meta", attn_implementation="eager", empty=True)  # it never runs
    plan = plan_from_hf_model(hf)
    saved = _Saved(path, f"model.{model}.")
    if any(name.startswith("titan.") for name in saved.names):
        # torchtitan's stacks of experts.
        from lightning_rl_engines.models.titan.saved import saved_sources

        sources = saved_sources(hf.config, plan, saved.names, is_critic=config.head == "value")
        return hf, plan, saved.stream(sources, dtype, takes)
    return hf, plan, saved.by_plan(plan, dtype, takes)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _adapted(
    config: ModelConfig, saved: Mapping[str, Any], path: Path, model: str, dtype: torch.dtype | None, *, merged: bool
) -> tuple[Any, ExportPlan, _Stream, dict[str, Any]]:
    built = rebuild_model(config, saved, path, with_base=merged)
    adapter = built.adapter
    assert adapter is not None
    options = adapter_config_dict(adapter.config)
    tensors = _Saved(path, f"model.{model}.").by_plan(adapter.plan, None if merged else dtype)
    if not merged:
        return built.hf, adapter.plan, tensors, options
    load_adapter(built.hf, adapter.plan, dict(tensors), f"checkpoint={str(path)!r}")
    return built.hf, adapter.base_plan, stream_weights(built, built, "merged", dtype), options


def _model_config(hyper_parameters: Mapping[str, Any], model: str, path: Path) -> ModelConfig:
    arguments = hyper_parameters.get(model)
    if not isinstance(arguments, Mapping):
        named = sorted(name for name, value in hyper_parameters.items() if isinstance(value, Mapping))
        raise ValueError(
            f"checkpoint={str(path)!r} does not say how model={model!r} was built; its hyper-parameters with arguments "
            f"are {named}. Modules save a ModelConfig under the name of the model's attribute."
        )
    return ModelConfig(**arguments.get("init_args", arguments))


def _tokenizer(config: ModelConfig) -> Any:
    from transformers import AutoTokenizer

    # The revision is the model's; a tokenizer that is named comes from elsewhere.
    revision = None if config.tokenizer else config.revision
    try:
        return AutoTokenizer.from_pretrained(
            config.tokenizer_path, trust_remote_code=config.trust_remote_code, revision=revision
        )
    except (OSError, ValueError):
        return None  # a model without a tokenizer, as in tests and in other modalities, is still an export


class _Saved:
    """The tensors of a model in a checkpoint.

    Args:
        path: The checkpoint.
        prefix: What their names begin with there.
    """

    def __init__(self, path: Path, prefix: str) -> None:
        self.path, self.prefix = path, prefix
        stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        self._entries = {
            name.removeprefix(prefix): entry
            for name, entry in stored.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }

    @property
    def names(self) -> Collection[str]:
        return self._entries.keys()

    def read(self, name: str) -> Tensor:
        """Return a tensor, whole.

        Raises:
            ValueError: There is none of this name.
        """
        tensor = torch.empty_like(self.shape_of(name), device="cpu")
        full_name = f"{self.prefix}{name}"
        with warnings.catch_warnings():
            # torch warns that it loads in one process, which is what is asked for.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp.load({full_name: tensor}, checkpoint_id=self.path, no_dist=True)
        return tensor

    def shape_of(self, name: str) -> Tensor:
        """Return a tensor on meta, nothing is read.

        Raises:
            ValueError: There is none of this name.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise ValueError(
                f"checkpoint={str(self.path)!r} holds no tensor '{self.prefix}{name}'; it is of another model."
            )
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")

    def by_plan(
        self, plan: ExportPlan, dtype: torch.dtype | None, takes: Callable[[int], bool] | None = None
    ) -> _Stream:
        """Stream what is stored under Hugging Face names; see :meth:`stream`."""
        return self.stream(((f"hf.{source}", partial(plan.pieces, source)) for source in plan.by_source), dtype, takes)

    def stream(
        self,
        sources: Iterable[tuple[str, Callable[[Tensor], Iterable[tuple[str, Tensor]]]]],
        dtype: torch.dtype | None,
        takes: Callable[[int], bool] | None = None,
    ) -> _Stream:
        """Yield the exported tensors, one stored tensor in memory at a time.

        Args:
            sources: Stored names, each with what takes a stored tensor apart.
            dtype: Type to cast floating-point tensors to.
            takes: Says of the next tensor's size whether its data are needed; others come on meta. ``None`` for all.
        """
        for stored, taken_apart in sources:
            pieces: dict[str, Tensor] = {}
            for name, shape in taken_apart(self.shape_of(stored)):
                shape = _cast(shape, dtype)
                if takes is not None and not takes(shape.nbytes):
                    yield name, shape
                    continue
                if not pieces:
                    pieces = dict(taken_apart(self.read(stored)))
                yield name, _cast(pieces.pop(name), dtype).contiguous()
