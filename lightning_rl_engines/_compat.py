"""The only door to private names of torch, Lightning, transformers and peft.

Each function says which private name it uses and why no public one will do. Versions are bounded in pyproject.toml.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

# A module's `device`, which Lightning sets only where it moves the whole module itself.
from lightning.fabric.utilities.device_dtype_mixin import _update_properties as set_device_of

# What Lightning does at exit with the groups that it starts; one process has a group that we start.
from lightning.fabric.utilities.distributed import _destroy_dist_connection as destroy_group_at_exit

# Lightning's test for notebooks and interactive shells, so that our launcher and its refusal agree.
from lightning.fabric.utilities.imports import _IS_INTERACTIVE as IS_INTERACTIVE

# Lightning offers its launchers only inside its own strategies; ours keep sharded weights in the workers, end together,
# and recover checkpoints.
from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher as MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.multiprocessing import _WorkerOutput as WorkerOutput
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._runtime_utils import _post_backward_final_callback

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
    from transformers import PreTrainedModel

__all__ = [
    "IS_INTERACTIVE",
    "Launcher",
    "MultiProcessingLauncher",
    "SubprocessScriptLauncher",
    "WorkerOutput",
    "checkpoint_folder",
    "compile_in_place",
    "depth_and_options",
    "destroy_group_at_exit",
    "end_aborted_passes",
    "free_cleared_gradients",
    "given_hyperparameters",
    "join_process_group",
    "keys_to_ignore_on_load",
    "keys_to_ignore_on_save",
    "queue_backward_callback",
    "reshard_root",
    "restore_frozen_parameters",
    "return_hidden_states",
    "revert_weight_conversion",
    "set_adapter_disabled",
    "set_device_of",
    "sharding_of",
    "without_checkpoint",
]


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass that is going on ends; autograd offers no public hook for its end."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(callback)


def keys_to_ignore_on_save(model: "PreTrainedModel") -> frozenset[str]:
    """Names of the state that ``save_pretrained`` leaves out; transformers keeps the list in a private attribute."""
    return frozenset(model._keys_to_ignore_on_save or ())


def revert_weight_conversion(conversions: list[Any], config: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run load-time conversions in reverse; transformers takes them from a private attribute of a whole model."""
    from transformers.core_model_loading import revert_weight_conversion as revert

    return revert(cast("PreTrainedModel", SimpleNamespace(_weight_conversions=conversions, config=config)), state)


def given_hyperparameters() -> dict[str, Any] | None:
    """Plain arguments with which LightningCLI builds a module right now; Lightning keeps them in a private variable."""
    from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters

    given: dict[str, Any] | None = _given_hyperparameters.get()
    return given


def reshard_root(model: Any) -> None:
    """Free a root's gathered parameters; FSDP1 leaves them whole after a forward pass and has no public way back."""
    handle = getattr(model, "_handle", None)
    # A unit knows that it is the root from its first forward pass on; before, nothing has been gathered.
    if handle is not None and model._is_root and handle.uses_sharded_strategy and not handle.needs_unshard():
        handle.reshard(free_unsharded_flat_param=True)


def end_aborted_passes(model: Any) -> None:
    """Bring an FSDP1 root back to rest after an exception inside a pass, and drop the gradients of a backward pass.

    FSDP1 has no public way to end a pass. After a backward pass autograd runs no final callback then, and FSDP1 would
    take the next pass for a part of it: parameters stay sharded, gradients are not finished. After a forward pass,
    units stay gathered, which forbids exports; one that is not sharded uses views that torch 2.15 gives no gradient.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    if getattr(model, "_is_root", False) and getattr(model, "_post_backward_callback_queued", False):
        _post_backward_final_callback(model, model)
        for handle in model._all_handles:
            if not handle.uses_sharded_strategy:
                handle.reshard(free_unsharded_flat_param=False)  # see restore_frozen_parameters
        model.zero_grad(set_to_none=True)
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle = unit._handle
        if unit.training_state != TrainingState.IDLE and handle is not None:
            handle.reshard(free_unsharded_flat_param=handle.uses_sharded_strategy)
            handle._training_state = HandleTrainingState.IDLE
        unit.training_state = TrainingState.IDLE


def free_cleared_gradients(root: Any) -> None:
    """Let go of FSDP1's flat gradients once all their views are cleared; it does so itself in the next forward pass.

    Until then, through rollouts and exports, ``zero_grad`` would have freed nothing.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    for unit in FullyShardedDataParallel.fsdp_modules(root):
        if unit._handle is not None:
            unit._handle._reset_flat_param_grad_info_if_needed()


def depth_and_options(callback: "ModelSummary") -> tuple[int, dict[str, Any]]:
    """Depth and further options of a model summary; Lightning's callback has no public way to ask for them."""
    return callback._max_depth, dict(callback._summarize_kwargs)


def compile_in_place(
    module: nn.Module, around: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]], **options: Any
) -> None:
    """Compile a module's call as ``module.compile`` does, and call the result through ``around(module, compiled)``.

    What ``module.compile`` sets is private, and no hook runs outside of it: hooks of the module are compiled with it.
    """
    module.compile(**options)
    module._compiled_call_impl = around(module, module._compiled_call_impl)  # type: ignore[arg-type]


def without_checkpoint(module: nn.Module) -> nn.Module:
    """Return the layer in torch's checkpoint wrapper, which has no public name; a compiler gives up in the wrapper."""
    return module._checkpoint_wrapped_module if isinstance(module, CheckpointWrapper) else module


def checkpoint_folder(callback: "ModelCheckpoint", trainer: "Trainer") -> str:
    """Folder that Lightning will look for `last` in; it offers no public way to ask before it looks."""
    return str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]


def restore_frozen_parameters(root: Any) -> None:
    """Make weights of frozen units parameters again; FSDP1 leaves them plain views after backward without sharding.

    Its own check whether a unit was put back compares addresses, which are always the same where nothing is sharded.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    for unit in FullyShardedDataParallel.fsdp_modules(root):
        handle = unit._handle
        if handle is not None and not handle.uses_sharded_strategy and not handle.flat_param.requires_grad:
            handle.reshard(free_unsharded_flat_param=False)


def set_adapter_disabled(module: Any, disabled: bool) -> None:
    """Switch one of peft's modules; its public way also flips ``requires_grad``, which FSDP1 has read already."""
    module._disable_adapters = disabled


def keys_to_ignore_on_load(hf_config: Any) -> tuple[str, ...]:
    """Patterns of saved names that transformers leaves unread; a private attribute of the language model's class."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    return tuple(model_class._keys_to_ignore_on_load_unexpected or ())


def return_hidden_states(decoder: Any) -> None:
    """Let a torchtitan decoder leave its head to the caller; its own chunked loss sets the same private attribute."""
    decoder._skip_lm_head = True


def sharding_of(module: Any) -> Any:
    """How torchtitan will shard a built module; it keeps what the configuration said in a private attribute."""
    return module._sharding_config


def join_process_group(strategy: Any) -> None:
    """Start the process group of a ``ModelParallelStrategy``; its public set-up would also make a mesh of two axes."""
    strategy._setup_distributed()
