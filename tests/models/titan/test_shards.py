"""Local parts of tensors under every kind of placement, filled from whole tensors and from parts of files."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")

from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_rl_engines.models.titan.names import HFPiece
from lightning_rl_engines.models.titan.shards import LocalShard
from tests.support import run_workers

SHAPE = (5, 7, 6)
PLACEMENTS = [
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Shard(0), Shard(0)),
    (Shard(1), Shard(0)),
    (Shard(2), Shard(1)),
    (Shard(1), Shard(1)),
    # Interleaved: rank (0, 0) of two by two holds rows 0 and 2 of 0 .. 4 in this order of the axes.
    (Shard(0), _StridedShard(0, split_factor=2)),
    (_StridedShard(1, split_factor=2), Shard(1)),
    (_StridedShard(2, split_factor=2), Shard(2)),
]


def fill_everywhere(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    whole = torch.arange(5 * 7 * 6, dtype=torch.float32).view(SHAPE)
    with safe_open(f"{folder}/parts.safetensors", framework="pt") as opened:
        for placements in PLACEMENTS:
            expected = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            check(expected, [(HFPiece("whole"), whole), (HFPiece("whole"), opened.get_slice("whole"))])
            flipped = HFPiece("flipped", transposed=True)
            check(expected, [(flipped, whole.mT), (flipped, opened.get_slice("flipped"))])
            for transposed, name in ((False, "expert"), (True, "flipped_expert")):
                pieces = [HFPiece(f"{name}.{index}", index, transposed) for index in range(SHAPE[0])]
                fill_stack(expected, [(piece, opened.get_slice(piece.name)) for piece in pieces])


def check(expected: DTensor, sources: list[tuple[HFPiece, Any]]) -> None:
    for piece, source in sources:
        found = torch.full_like(expected, -1)
        shard = LocalShard(found)
        assert shard.shape == SHAPE
        assert shard.holds(piece) == (expected.to_local().numel() > 0)
        shard.fill(piece, source)
        assert torch.equal(found.to_local(), expected.to_local())


def fill_stack(expected: DTensor, sources: list[tuple[HFPiece, Any]]) -> None:
    found = torch.full_like(expected, -1)
    shard = LocalShard(found)
    for piece, source in sources:
        shard.fill(piece, source)
    assert torch.equal(found.to_local(), expected.to_local())


def test_every_placement_gets_its_part(tmp_path: Path) -> None:
    whole = torch.arange(5 * 7 * 6, dtype=torch.float32).view(SHAPE)
    parts = {"whole": whole, "flipped": whole.mT.contiguous()}
    for index, expert in enumerate(whole):
        parts |= {f"expert.{index}": expert.clone(), f"flipped_expert.{index}": expert.mT.contiguous()}
    save_file(parts, tmp_path / "parts.safetensors")
    run_workers(4, fill_everywhere, str(tmp_path))


def fill_sharded_layers() -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    rows = []
    for size in (97, 5, 3):
        layer = nn.Linear(8, size, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(torch.zeros(size, 8), mesh["tensor"], [Shard(0)]))
        fully_shard(layer, mesh=mesh["data"])
        whole = torch.arange(size * 8.0).view(size, 8)
        shard = LocalShard(layer.weight)
        shard.fill(HFPiece("x"), whole)
        assert torch.equal(layer.weight.full_tensor(), whole)
        rows.append(len(shard.local))
    return rows


def test_rows_that_two_axes_share_unevenly() -> None:
    rows = run_workers(4, fill_sharded_layers)
    assert [sum(counts) for counts in zip(*rows, strict=True)] == [97, 5, 3]
    assert 0 in [counts[2] for counts in rows]


def test_a_plain_tensor_is_cast_to_its_own_type() -> None:
    target = torch.zeros(3, 2, dtype=torch.bfloat16)
    source = torch.rand(3, 2)
    LocalShard(target).fill(HFPiece("x"), source)
    assert torch.equal(target, source.bfloat16())
