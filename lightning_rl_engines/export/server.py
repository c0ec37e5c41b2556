"""New weights for an inference server: in buckets, and with the calls in the order that servers need."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from lightning_rl_engines.export.plan import ExportPlan
from lightning_rl_engines.export.sinks import ExportContext, WeightSink

_MEBIBYTE = 2**20


class InferenceClient(ABC):
    """How to talk to an inference server; implement it for yours. Every method runs on rank 0 only and blocks.

    One update is ``pause``, ``begin_update``, ``receive`` for each bucket, ``finish_update``, ``reset_prefix_cache``,
    ``resume``. After an error in any of them, or in the stream of weights, ``resume`` alone is called; the next update
    sends all weights again.
    """

    @abstractmethod
    def pause(self) -> None:
        """Take no new requests and wait until no running request reads weights."""

    @abstractmethod
    def begin_update(self, plan: ExportPlan | None) -> None:
        """Prepare for new weights.

        Args:
            plan: Names, shapes and types of what will come, in any order; ``None`` where only the stream knows.
        """

    @abstractmethod
    def receive(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Load some weights.

        Args:
            tensors: Hugging Face names and full tensors on the trainer's device. The tensors of one module come
                together, for servers fuse the projections of attention and of the feed-forward layer.
        """

    @abstractmethod
    def finish_update(self, version: int) -> None:
        """End the update.

        Args:
            version: Updates that the weights have seen.
        """

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forget keys and values that old weights computed."""

    @abstractmethod
    def resume(self) -> None:
        """Take requests again."""


class InferenceServerSink(WeightSink):
    """Sends each export to an inference server.

    Args:
        client: How to talk to it.
        bucket_megabytes: Send what has come when it reaches this many MiB and the tensors of a module are complete. A
            bucket is larger than that only by the rest of its last module.

    Raises:
        ValueError: ``bucket_megabytes`` is not positive.
    """

    def __init__(self, *, client: InferenceClient, bucket_megabytes: float = 512.0) -> None:
        if not bucket_megabytes > 0:
            raise ValueError(f"bucket_megabytes={bucket_megabytes} must be positive, for instance 512.")
        self.client = client
        self.bucket_bytes = int(bucket_megabytes * _MEBIBYTE)
        self._version = 0
        self._reset()

    def _reset(self) -> None:
        self._bucket: list[tuple[str, Tensor]] = []
        self._bytes = 0
        self._paused = False

    @override
    def open(self, plan: ExportPlan | None, context: ExportContext) -> None:
        self._version = context.update
        self._paused = True  # also when pause itself fails half-way
        self.client.pause()
        self.client.begin_update(plan)

    @override
    def write(self, name: str, tensor: Tensor) -> None:
        complete = bool(self._bucket) and _module_of(self._bucket[-1][0]) != _module_of(name)
        if complete and self._bytes >= self.bucket_bytes:
            self._send()
        self._bucket.append((name, tensor))
        self._bytes += tensor.numel() * tensor.element_size()

    def _send(self) -> None:
        self.client.receive(self._bucket)
        self._bucket, self._bytes = [], 0

    @override
    def close(self) -> None:
        if self._bucket:
            self._send()
        self.client.finish_update(self._version)
        self.client.reset_prefix_cache()
        self._paused = False
        self.client.resume()

    @override
    def abort(self, error: BaseException) -> None:
        paused = self._paused
        self._reset()
        if paused:
            self.client.resume()


def _module_of(name: str) -> str:
    """The module whose tensors a server may fuse: ``model.layers.0.mlp`` of ``model.layers.0.mlp.up_proj.weight``."""
    return ".".join(name.split(".")[:-2])
