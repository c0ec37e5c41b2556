"""TorchTitan models built from Hugging Face configurations; importing this package needs torchtitan."""

from lightning_rl_engines.models.titan_library import prepare_torchtitan

prepare_torchtitan()
