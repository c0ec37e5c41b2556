"""Fills the local part of a sharded tensor from the parts of a Hugging Face save that belong there."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lightning_rl_engines.models.titan.names import HFPiece


class LocalShard:
    """What this rank holds of a tensor, and which indices of the whole tensor that is.

    Any placement will do: even or uneven shards, several mesh axes on one dimension in any order, shards of any
    dimension, none.

    Args:
        tensor: A plain tensor, or a DTensor of a mesh that this rank is part of; it is filled in place.

    Raises:
        ValueError: FSDP2 has cut a part that tensor or expert parallelism cut unevenly otherwise than torch describes
            it, so that checkpoints would be wrong. The other ranks' parts may be as described.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        self.indices = [_indices(tensor, dim) for dim in range(tensor.ndim)]
        for size, index, length in zip(self.shape, self.indices, self.local.shape, strict=True):
            if len(index) != length:
                raise ValueError(
                    f"a dimension of {size}, such as the vocabulary, is cut into uneven parts, and by FSDP2 again: "
                    f"torch places {len(index)} of it on a rank that holds {length}. Use a tensor_parallel_degree that "
                    f"divides {size}, or another number of ranks."
                )

    def holds(self, piece: HFPiece) -> bool:
        """Whether any element of a piece is on this rank."""
        if self.local.numel() == 0:
            return False
        return piece.expert is None or bool((self.indices[0] == piece.expert).any())

    @torch.no_grad()
    def fill(self, piece: HFPiece, whole: Any) -> None:
        """Copy this rank's part of a piece, cast to the type of the tensor; nothing where it has none.

        Args:
            piece: The piece.
            whole: The piece as a tensor, or as anything that gives one for a tuple of slices, such as a slice of a
                safetensors file: only the part in question is read.
        """
        if self.holds(piece):
            target, indices = self._part(piece)
            target.copy_(_read(whole, indices))

    @torch.no_grad()
    def sample(self, piece: HFPiece, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of some elements of a piece are on this rank, and their values.

        Args:
            piece: The piece.
            wanted: int64 indices into the flattened piece.

        Returns:
            A bool mask like ``wanted``, on the host, and a value for each ``True`` in it.
        """
        if not self.holds(piece):
            return torch.zeros_like(wanted, dtype=torch.bool), self.local.new_empty(0)
        target, indices = self._part(piece)
        held, places = torch.ones_like(wanted, dtype=torch.bool), []
        for coordinate, index, size in zip(
            torch.unravel_index(wanted, piece.shape_in(self.shape)), indices, piece.shape_in(self.shape), strict=True
        ):
            place = torch.full((size,), -1)
            place[index] = torch.arange(len(index))
            places.append(place[coordinate])
            held &= places[-1] >= 0
        return held, target[tuple(place[held].to(target.device) for place in places)]

    def _part(self, piece: HFPiece) -> tuple[Tensor, list[Tensor]]:
        """This rank's part of a piece, a view, and which indices of the piece that is."""
        target, indices = self.local, self.indices
        if piece.expert is not None:
            target = target[int((indices[0] == piece.expert).nonzero())]
            indices = indices[1:]
        if piece.transposed:
            target = target.mT
            indices = [*indices[:-2], indices[-1], indices[-2]]
        return target, indices


def _indices(tensor: Tensor, dim: int) -> Tensor:
    """Indices of the whole tensor along ``dim`` that this rank holds, ascending or not."""
    size = tensor.shape[dim]
    line = torch.arange(size)
    if not isinstance(tensor, DTensor):
        return line
    # The placements of this dimension alone, so that the line along it is cut as the tensor is; a DTensor tells only
    # the first index, which is not enough where shards of several axes interleave.
    placements = [item if getattr(item, "dim", None) == dim else Replicate() for item in tensor.placements]
    line = line.view([size if index == dim else 1 for index in range(tensor.ndim)])
    cut = distribute_tensor(line, tensor.device_mesh, placements, src_data_rank=None)
    return cut.to_local().flatten().cpu()


def _read(whole: Any, indices: Sequence[Tensor]) -> Tensor:
    ranges = [slice(int(index.min()), int(index.max()) + 1) for index in indices]
    part: Tensor = whole[tuple(ranges)]
    for dim, (index, taken) in enumerate(zip(indices, ranges, strict=True)):
        inside = index - taken.start
        if not torch.equal(inside, torch.arange(part.shape[dim])):
            part = part.index_select(dim, inside.to(part.device))
    return part
