"""Off-load: training is bit for bit the same, nothing multiplies, and what is off-loaded is off the device."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_rl_engines import ModelConfig, PolicyLoss
from lightning_rl_engines.strategies.offload import HostBuffers, local_part
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import assert_same, value_loss
from tests.support import run_workers
from tests.support.engine import EngineModule, share, with_engine
from tests.support.live import LiveTensors
from tests.support.models import tiny_model_folder


def bytes_on_device(tensors: Any) -> int:
    found = [local_part(tensor.detach()).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def state_tensors(optimizer: Any) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def train(folder: str, documents: Documents, cycles: int, **strategy: Any) -> Any:
    """AdamW over some cycles of inference, training and export; weights, and what was on the device in between."""
    notes: dict[str, Any] = {"storages": [], "bytes": [], "parameter_bytes": [], "state_bytes": [], "scalars": []}

    def body(module: EngineModule) -> Any:
        engine: Any = module.engine
        trained = {"policy": (module.policy, PolicyLoss()), "critic": (module.critic, value_loss)}
        reference = engine.build_model(ModelConfig(path=folder), trainable=False)
        models = [module.policy, module.critic, reference]
        optimizers = {name: torch.optim.AdamW(model.parameters(), 1e-2) for name, (model, _) in trained.items()}
        mine = share(range(documents.size), engine.data_parallel_rank, engine.data_parallel_size)
        experience = documents.experience(mine)

        def note_parameters() -> None:
            notes["parameter_bytes"].append([bytes_on_device(model.parameters()) for model in models])

        with LiveTensors() as live:
            for _ in range(cycles):
                for model in models:
                    with engine.eval_mode(model):
                        engine.infer_batch(model, experience)
                for name, (model, loss) in trained.items():
                    with engine.train_mode(model, optimizers[name]):
                        engine.train_batch(model, optimizers[name], experience, loss, max_grad_norm=0.1)
                weights = {name: dict(engine.get_per_tensor_param(model)) for name, (model, _) in trained.items()}
                note_parameters()
                state = [state_tensors(optimizer) for optimizer in optimizers.values()]
                notes["state_bytes"].append([bytes_on_device([t for t in found if t.dim()]) for found in state])
                notes["scalars"].append([float(t) for t in state[0] if not t.dim()][:1])
                notes["storages"].append(len(live.storages()))
                notes["bytes"].append(live.bytes())
        # Outside the contexts, too, a call finds its parameters.
        columns = [engine.infer_batch(model, experience).columns for model in models]
        note_parameters()
        return weights, columns, notes

    critic = ModelConfig(path=folder, head="value", seed=3)
    return with_engine(body, {"policy": ModelConfig(path=folder), "critic": critic}, **strategy)


def require_flat(counts: list[int]) -> None:
    """A collective that has just ended may hold a storage for a while; what each cycle leaves raises the least, too."""
    assert min(counts[-2:]) == min(counts[:2]), counts


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, {}),
        pytest.param(2, {}, marks=pytest.mark.exhaustive),
        (2, {"fsdp_size": 1}),
        (4, {"ulysses_sp_size": 2}),
        pytest.param(1, {"engine": "torchtitan"}, marks=pytest.mark.exhaustive),
        (4, {"engine": "torchtitan", "tensor_parallel_degree": 2}),
    ],
)
def test_training_with_offload_is_bit_equal_and_frees_the_device(world: int, layout: dict[str, Any]) -> None:
    folder = str(tiny_model_folder("llama_tied"))
    documents = make_documents(folder, vocabulary=64)
    plain = run_workers(world, train, folder, documents, 6, **layout)
    moved = run_workers(world, train, folder, documents, 6, offload_param=True, offload_optimizer=True, **layout)
    for (weights, columns, before), (other_weights, other_columns, after) in zip(plain, moved, strict=True):
        for name, tensors in weights.items():
            assert_same(other_weights[name], tensors)
        for found, expected in zip(other_columns, columns, strict=True):
            assert_same(found, expected)
        assert all(all(counts) for counts in (*before["parameter_bytes"], *before["state_bytes"]))
        assert after["parameter_bytes"] == [[0, 0, 0]] * 7  # of the policy, the critic and the frozen reference
        assert after["state_bytes"] == [[0, 0]] * 6
        assert after["scalars"] == [[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]]
        require_flat(after["storages"][1:])
        require_flat(after["bytes"][1:])


def outside_of_modes(folder: str, documents: Documents, **strategy: Any) -> Any:
    """Calls between the modes, with everything on the host that can be there; results of each."""

    def body(module: EngineModule) -> Any:
        engine, model = module.engine, module.policy
        host = strategy.get("offload_param", False)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        mine = share(range(documents.size), engine.data_parallel_rank, engine.data_parallel_size)
        experience = documents.experience(mine)
        with engine.train_mode(model, optimizer):
            engine.train_batch(model, optimizer, experience, PolicyLoss())
        norms = [engine.train_batch(model, optimizer, experience, PolicyLoss()).metrics["grad_norm"]]
        assert bytes_on_device([t for t in state_tensors(optimizer) if t.dim()]) == 0 or not host
        gradients = []
        for _ in range(2):  # the second adds to gradients that are on the host
            engine.forward_backward_batch(model, experience, PolicyLoss())
            if host:
                engine.to("cpu", grad=model)
            gradients.append(dict(engine.get_per_tensor_grad(model)))
            norms.append(float(engine.clip_grad_norm(model, 0.01)))
        given = [item.grad for item in model.parameters() if item.grad is not None]
        on_device = bytes_on_device(model.parameters()), bytes_on_device(given)
        return dict(engine.get_per_tensor_param(model)), gradients, norms, on_device

    return with_engine(body, ModelConfig(path=folder), **strategy)


@pytest.mark.parametrize(("world", "layout"), [(1, {}), (2, {"ulysses_sp_size": 2}), (2, {"engine": "torchtitan"})])
def test_calls_outside_of_the_modes_find_what_is_on_the_host(world: int, layout: dict[str, Any]) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    plain = run_workers(world, outside_of_modes, folder, documents, **layout)
    moved = run_workers(
        world, outside_of_modes, folder, documents, offload_param=True, offload_optimizer=True, **layout
    )
    for (weights, gradients, norms, before), (moved_weights, moved_gradients, moved_norms, after) in zip(
        plain, moved, strict=True
    ):
        assert_same(moved_weights, weights)
        for found, expected in zip(moved_gradients, gradients, strict=True):
            assert_same(found, expected)
        assert moved_norms == norms
        assert all(before) and after == (0, 0)


def move_by_hand(folder: str, documents: Documents) -> None:
    def body(module: EngineModule) -> None:
        engine: Any = module.engine
        experience = documents.experience(list(range(documents.size)))
        model = module.policy
        with engine.train_mode(model):
            engine.forward_backward_batch(model, experience, PolicyLoss())
            before = {name: item.clone() for name, item in engine.get_per_tensor_grad(model)}
            weights = {name: item.clone() for name, item in engine.get_per_tensor_param(model)}
            for _ in range(2):
                engine.to("cpu", model=model, grad=model)
            assert bytes_on_device(model.parameters()) == 0
            assert bytes_on_device([p.grad for p in model.parameters() if p.grad is not None]) == 0
            for _ in range(2):
                engine.to("device", model=model, grad=model)
            after = dict(engine.get_per_tensor_grad(model))
            assert all(torch.equal(before[name], after[name]) for name in before)
            restored = dict(engine.get_per_tensor_param(model))
            assert all(torch.equal(weights[name], restored[name]) for name in weights)
            # An export from the host leaves the parameters there, also one that stops half-way.
            engine.to("cpu", model=model)
            stream = engine.get_per_tensor_param(model)
            next(stream)
            stream.close()
            assert bytes_on_device(model.parameters()) == 0
        with pytest.raises(ValueError, match="device='tpu'"):
            engine.to("tpu", model=model)

    with_engine(body, ModelConfig(path=folder))


def test_moving_by_hand_is_idempotent_and_keeps_gradients() -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    run_workers(1, move_by_hand, folder, documents)
    run_workers(2, move_by_hand, folder, documents)


def test_views_share_a_buffer_and_buffers_are_reused() -> None:
    base = torch.arange(12.0)
    views = [base[:5], base[5:], base.view(3, 4)]
    buffers = HostBuffers()
    buffers.offload(views)
    assert base.untyped_storage().nbytes() == 0
    assert buffers.offloaded
    buffers.load()
    assert torch.equal(base, torch.arange(12.0))
    kept = [item.data_ptr() for item in buffers._free[48]]
    buffers.offload([base])
    buffers.offload([base])
    buffers.load()
    buffers.load()
    assert torch.equal(views[2], torch.arange(12.0).view(3, 4))
    assert [item.data_ptr() for item in buffers._free[48]] == kept


@pytest.mark.parametrize(("device", "pinned"), [("cpu", False), ("meta", True)])
def test_buffers_are_pinned_for_what_is_not_on_the_host(device: str, pinned: bool) -> None:
    weight = torch.ones(3, device=device)
    # Pinned memory needs an accelerator; to see what is asked for needs none.
    with mock.patch("torch.empty") as allocate, mock.patch("torch.accelerator.synchronize") as wait:
        HostBuffers().offload([weight])
    assert allocate.call_args_list[0] == mock.call(12, dtype=torch.uint8, pin_memory=pinned)
    assert wait.called == pinned
    assert weight.untyped_storage().nbytes() == 0


@pytest.mark.cuda
def test_offload_frees_cuda_memory() -> None:
    weight = torch.ones(64 * 2**20, device="cuda")
    before = torch.cuda.memory_allocated()
    buffers = HostBuffers()
    buffers.offload([weight])
    assert torch.cuda.memory_allocated() <= before - 250 * 2**20
    buffers.load()
    assert float(weight.sum()) == weight.numel()
