"""Finds torchtitan, checks its version, and tells it the device before any other part of it is imported."""

import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

SUPPORTED = "0.3"
"""Release series of torchtitan whose interfaces, private ones among them, this package knows."""

RANGE = ">=0.3,<0.4"


def require_torchtitan() -> None:
    """Check that a supported torchtitan is installed, without importing it.

    Raises:
        ImportError: It is missing, or of another series than :data:`SUPPORTED`.
    """
    wanted = f'strategy="torchtitan" needs torchtitan{RANGE}: pip install "lightning-rl-engines[torchtitan]"'
    if find_spec("torchtitan") is None:
        raise ImportError(f"{wanted}; torchtitan is not installed.")
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        found = "an unknown version"
    if not (found == SUPPORTED or found.startswith(f"{SUPPORTED}.")):
        raise ImportError(f"{wanted}; found {found}.")


def prepare_torchtitan(device_type: str | None = None) -> None:
    """Let torchtitan work on a device; it reads the type once, when its modules are imported.

    Args:
        device_type: ``"cpu"`` or an accelerator's type; by default the accelerator of this machine, or the CPU.

    Raises:
        ImportError: No supported torchtitan is installed.
        RuntimeError: Its modules are imported already, for another device.
    """
    require_torchtitan()
    if device_type is None:
        if "torchtitan.distributed.utils" in sys.modules:
            return
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device_type = "cpu" if accelerator is None else accelerator.type
    import torchtitan.tools.utils as titan_utils

    if titan_utils.device_type != device_type and "torchtitan.distributed.utils" in sys.modules:
        raise RuntimeError(
            f"torchtitan was imported for {titan_utils.device_type!r} and cannot work on {device_type!r} in the same "
            "process; start a new one."
        )
    titan_utils.device_type = device_type
    titan_utils.device_module = torch.get_device_module(device_type)
