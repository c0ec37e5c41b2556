"""Where a rank stands: a mesh of data ranks times sequence ranks."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_rl_engines.strategies.engine import GroupName
from lightning_rl_engines.strategies.rows import RowPasses


class MeshRanks(RowPasses):
    """The part of an engine that a mesh with the axes ``dp`` and ``sp`` answers; set ``_mesh`` at set-up."""

    _mesh: DeviceMesh | None = None

    @property
    def mesh(self) -> DeviceMesh:
        """Data ranks times sequence ranks, axes ``dp`` and ``sp``.

        Raises:
            RuntimeError: The processes are not set up yet.
        """
        if self._mesh is None:
            raise RuntimeError("The strategy has no ranks yet: they exist once the Trainer runs.")
        return self._mesh

    def _axis_size(self, axis: str) -> int:
        # By index: a mesh of one axis, as indexing by its name makes, is built anew each time.
        names = self.mesh.mesh_dim_names
        assert names is not None
        return self.mesh.size(names.index(axis))

    @property
    @override
    def data_parallel_size(self) -> int:
        return self._axis_size("dp")

    @property
    @override
    def data_parallel_rank(self) -> int:
        return self.mesh.get_local_rank("dp")

    @property
    @override
    def data_parallel_group(self) -> ProcessGroup | None:
        return self.mesh.get_group("dp") if self.data_parallel_size > 1 else None

    @property
    @override
    def sequence_parallel_size(self) -> int:
        return self._axis_size("sp")

    @property
    @override
    def sequence_parallel_rank(self) -> int:
        return self.mesh.get_local_rank("sp")

    @property
    @override
    def sequence_parallel_group(self) -> ProcessGroup | None:
        return self.mesh.get_group("sp") if self.sequence_parallel_size > 1 else None

    @property
    def _peer_group(self) -> ProcessGroup | None:
        """Ranks that share this data rank; ``None`` for one."""
        return self.sequence_parallel_group

    def _group(self, name: GroupName) -> ProcessGroup | None:
        """The ranks of a name; ``None`` where this one is alone."""
        match name:
            case "world":
                return dist.group.WORLD if self.mesh.size() > 1 else None
            case "data":
                return self.data_parallel_group
            case "sequence":
                return self.sequence_parallel_group
            case "peers":
                return self._peer_group

    @override
    def all_gather_objects(self, item: Any, group: GroupName = "world") -> list[Any]:
        chosen = self._group(group)
        if chosen is None:
            return [item]
        results: list[Any] = [None] * dist.get_world_size(chosen)
        dist.all_gather_object(results, item, group=chosen)
        return results

    @override
    def _sum_over_sequence(self, tensor: Tensor) -> None:
        group = self.sequence_parallel_group
        if group is not None:
            dist.all_reduce(tensor, group=group)
