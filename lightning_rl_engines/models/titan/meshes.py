"""torchtitan's meshes and its description of a layout."""

from typing import TYPE_CHECKING, Any, cast

from torchtitan.config.configs import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend

if TYPE_CHECKING:
    from lightning_rl_engines.strategies.degrees import ParallelDegrees

BACKEND = "partial_dtensor"
"""DTensors on model-parallel axes only: exact for dense models, vocabularies of any size, and experts under EP."""


def parallelism_config(
    degrees: "ParallelDegrees", *, schedule: str, load_balancer: str | None, reshard_after_forward: str
) -> ParallelismConfig:
    """Put degrees into torchtitan's words.

    Args:
        degrees: Resolved degrees.
        schedule: Of the pipeline.
        load_balancer: Of context parallelism.
        reshard_after_forward: FSDP2's policy.
    """
    return ParallelismConfig(
        data_parallel_replicate_degree=degrees.replicate,
        data_parallel_shard_degree=degrees.shard,
        tensor_parallel_degree=degrees.tensor,
        context_parallel_degree=degrees.context,
        context_parallel_load_balancer=load_balancer,
        expert_parallel_degree=degrees.expert,
        pipeline_parallel_degree=degrees.pipeline,
        pipeline_parallel_schedule=schedule,
        fsdp_reshard_after_forward=cast(Any, reshard_after_forward),
        spmd_backend=BACKEND,
    )


def build_meshes(parallelism: ParallelismConfig, world_size: int) -> ParallelDims:
    """Make the meshes and their process groups; collective over the world.

    Args:
        parallelism: The layout.
        world_size: Number of ranks.
    """
    dims = ParallelDims.from_config(parallelism, world_size)
    dims.build_mesh()
    # torchtitan's modules ask for it while they run; it is the same for every layout here.
    set_spmd_backend(BACKEND)
    return dims
