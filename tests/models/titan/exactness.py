"""Logits and gradients of a torchtitan model beside those of the Hugging Face model with the same weights."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from lightning_rl_engines.export import ExportPlan, plan_from_hf_model
from lightning_rl_engines.models.titan.attention import row_mask
from lightning_rl_engines.models.titan.names import HFNames
from lightning_rl_engines.sequence.experience import Experience
from lightning_rl_engines.sequence.packing import MicroBatch, pack_row

LENGTHS = (70, 1, 105)
"""Documents of the packed row; two exceed the 64 positions at which a wrong rotary cache starts to show."""


def hugging_face_model(config: PretrainedConfig, spread: float = 0.15) -> Any:
    """A model whose every parameter and persistent buffer is random, so that leaving one out shows.

    With twice the spread fp32 itself is off by 1e-5, in either implementation.
    """
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).train()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.2 * noise if "norm" in name else spread * noise)
    return model


def saved(plan: ExportPlan, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """A model's tensors under the names and in the layout of ``save_pretrained``, ties once."""
    return {
        name: piece
        for source, tensor in tensors
        if source in plan.by_source
        for name, piece in plan.pieces(source, tensor)
    }


def in_saved_names(names: HFNames, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """A torchtitan model's tensors under their Hugging Face names; they are views."""
    found = {}
    for fqn, tensor in tensors:
        for piece in names.pieces(fqn, tuple(tensor.shape)):
            part = tensor if piece.expert is None else tensor[piece.expert]
            found[piece.name] = part.mT if piece.transposed else part
    return found


def build(spec: Any) -> Any:
    """Build as an engine does: on the meta device, then materialised and initialised."""
    with torch.device("meta"):
        model = spec.model.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train()


def load(model: Any, names: HFNames, state: dict[str, Tensor]) -> None:
    """Copy a saved state into a torchtitan model; every saved tensor must find its place."""
    places = in_saved_names(names, model.state_dict().items())
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert {name: tuple(tensor.shape) for name, tensor in places.items()} == shapes
    with torch.no_grad():
        for name, tensor in places.items():
            tensor.copy_(state[name])


def masks_of(spec: Any, micro_batch: MicroBatch) -> Any:
    """What the layers of a specification need: one mask, or one for each kind of layer where windows differ."""
    windows = {getattr(layer.attention, "sliding_window_size", None) for layer in spec.model.layers}
    masks = {w: row_mask(micro_batch, kernel="packed_sdpa", context_parallel=False, window=w) for w in {None, *windows}}
    if windows == {None}:
        return masks[None]
    (window,) = windows - {None}
    return {"basic_mask": masks[None], "sliding_window_mask": masks[window]}


def error(ours: Tensor, theirs: Tensor) -> float:
    """The largest error, relative to the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def assert_exact(reference: Any, spec: Any, tolerance: float = 1e-5) -> None:
    """Compare the logits of a packed row and the gradient of every parameter."""
    plan = plan_from_hf_model(reference)
    model = build(spec)
    load(model, spec.names, saved(plan, reference.state_dict().items()))
    generator = torch.Generator().manual_seed(3)
    vocabulary = reference.config.vocab_size
    documents = [torch.randint(vocabulary, (length,), generator=generator) for length in LENGTHS]
    cotangent = torch.randn(sum(LENGTHS), vocabulary, generator=generator)
    theirs = torch.cat([reference(document[None], use_cache=False).logits[0] for document in documents])
    experience = Experience.from_documents(
        input_ids=documents, response_mask=[torch.ones_like(document) for document in documents]
    )
    row = pack_row(experience, range(len(documents)))
    ours = model(row.input_ids[None], positions=row.position_ids[None], attention_masks=masks_of(spec, row))[0]
    logits_error = error(ours.detach(), theirs.detach())
    assert logits_error < tolerance, logits_error

    (theirs * cotangent).sum().backward()
    (ours * cotangent).sum().backward()
    expected = saved(plan, ((name, parameter.grad) for name, parameter in reference.named_parameters()))
    found = in_saved_names(spec.names, ((name, parameter.grad) for name, parameter in model.named_parameters()))
    assert found.keys() == expected.keys()
    assert all(float(gradient.abs().max()) > 0 for gradient in expected.values())
    errors = {name: error(found[name], expected[name]) for name in expected}
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < tolerance, (worst, errors[worst])
