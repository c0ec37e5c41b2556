"""Refuses a model whose packed rows do not say what the plain model says."""

from contextlib import nullcontext

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_rl_engines.models.forward_check import difference, probe_documents
from lightning_rl_engines.models.token_model import TokenModel
from lightning_rl_engines.sequence import Experience
from lightning_rl_engines.strategies.engine import Engine


def require_plain_outputs(
    engine: Engine, model: TokenModel, expected: list[Tensor], *, compute_dtype: torch.dtype
) -> None:
    """Run the probe through the built model, as in training, and compare. Collective over the world.

    Args:
        engine: What built the model.
        model: The model; an adapter is switched off.
        expected: What :func:`plain_outputs` returned.
        compute_dtype: Type of weights and activations in passes.

    Raises:
        ValueError: On all ranks: the results differ by more than rounding explains.
    """
    ids = probe_documents(model.config.get_text_config().vocab_size)
    probe = Experience.from_documents(input_ids=ids, response_mask=[torch.arange(len(item)) > 0 for item in ids])
    before = model.training
    model.train()  # noise that a model adds in training is seen as well
    what = f"{type(model.config).__name__} of {model.model_config.source}"
    try:
        with nullcontext() if model.adapter is None else engine.disable_adapter(model):
            columns = engine.infer_batch(model, probe).columns
    except ValueError as error:
        raise ValueError(f"{what} does not run on packed rows: {error}; use another model.") from error
    finally:
        model.train(before)
    name = "values" if model.model_config.head == "value" else "log_probs"
    gap, limit = difference(columns[name][probe.response_mask_host], torch.cat(expected), compute_dtype)
    worst = max(engine.all_gather_objects(gap), key=lambda item: (item != item, item))  # NaN above all
    if not worst <= limit:
        raise ValueError(
            f"{what} gives other {name} in packed rows than by itself: they differ by {worst:.2g}, and rounding "
            f"explains {limit:.2g}. Its architecture does what this engine does not, such as biases for positions, a "
            "head that scales, or noise in training; use another model, or ModelConfig(check_forward=False) if you "
            "know better."
        )
    rank_zero_info(f"Checked {what} against its plain forward pass: {name} differ by {worst:.1g}.")
