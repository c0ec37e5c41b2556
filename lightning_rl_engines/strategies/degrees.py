"""Degrees of parallelism of the torchtitan engine: checked, multiplied, and laid out as ranks."""

from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from lightning_rl_engines.strategies.validation import require_size

Schedule: TypeAlias = Literal["1F1B", "GPipe", "Interleaved1F1B"]

SCHEDULES: Final[tuple[str, ...]] = ("1F1B", "GPipe", "Interleaved1F1B")

LoadBalancer: TypeAlias = Literal["headtail", "ptrr"]


@dataclass(frozen=True, kw_only=True)
class ParallelDegrees:
    """Sizes of the axes; torchtitan's names without ``_parallel_degree``.

    Ranks lie as pipeline x replicate x shard x context x tensor, the last one fastest. Experts are spread over
    neighbouring shard, context and tensor ranks of a pipeline stage.

    Attributes:
        shard: Data ranks that parameters are sharded over; -1 for what the world leaves.
        replicate: Groups of data ranks that hold replicas of the shards.
        context: Ranks that a row is split over.
        tensor: Ranks that every matrix, and the vocabulary, is split over.
        expert: Ranks that the experts of a layer are spread over.
        pipeline: Ranks that the layers are split over.

    Raises:
        ValueError: A degree that is no positive integer.
    """

    shard: int = -1
    replicate: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        if self.shard != -1:
            require_size("data_parallel_shard_degree", self.shard)
        require_size("data_parallel_replicate_degree", self.replicate)
        require_size("context_parallel_degree", self.context)
        require_size("tensor_parallel_degree", self.tensor)
        require_size("expert_parallel_degree", self.expert)
        require_size("pipeline_parallel_degree", self.pipeline)

    def resolve(self, world: int) -> "ParallelDegrees":
        """Return the degrees with ``shard`` known, for a run of ``world`` processes.

        Raises:
            ValueError: The product is not the world, or the experts cannot be spread; with the arithmetic.
        """
        others = self.replicate * self.context * self.tensor * self.pipeline
        sum_ = (
            f"data_parallel_replicate_degree={self.replicate} * context_parallel_degree={self.context} * "
            f"tensor_parallel_degree={self.tensor} * pipeline_parallel_degree={self.pipeline} = {others}"
        )
        if world % others:
            raise ValueError(
                f"{sum_} does not divide the {world} processes of this run; start a multiple of {others} processes, "
                "or lower one of the degrees."
            )
        shard = world // others if self.shard == -1 else self.shard
        if shard * others != world:
            raise ValueError(
                f"data_parallel_shard_degree={shard} * {sum_} needs {shard * others} processes, and this run has "
                f"{world}; use data_parallel_shard_degree={world // others}, or -1."
            )
        ranks = shard * self.context * self.tensor
        if ranks % self.expert:
            legal = [size for size in range(1, ranks + 1) if ranks % size == 0]
            raise ValueError(
                f"expert_parallel_degree={self.expert} does not divide data_parallel_shard_degree={shard} * "
                f"context_parallel_degree={self.context} * tensor_parallel_degree={self.tensor} = {ranks}; use one of "
                f"{legal}."
            )
        return replace(self, shard=shard)

    def peers(self) -> list[list[int]]:
        """The ranks that share each data rank; degrees are resolved."""
        row = self.context * self.tensor  # neighbours
        starts = [[stage * self.data * row + data * row for stage in range(self.pipeline)] for data in range(self.data)]
        return [[start + place for start in stages for place in range(row)] for stages in starts]

    def describe(self) -> str:
        """Name the axes that have more than one rank, such as ``"2 shard x 2 tensor ranks, experts over 2"``."""
        names = ("pipeline", "replicate", "shard", "context", "tensor")
        sizes = [f"{getattr(self, name)} {name}" for name in names if getattr(self, name) > 1]
        experts = f", experts over {self.expert}" if self.expert > 1 else ""
        return f"{' x '.join(sizes)} ranks{experts}" if sizes else "1 rank"

    @property
    def data(self) -> int:
        """Ranks that hold different documents."""
        return self.replicate * self.shard
