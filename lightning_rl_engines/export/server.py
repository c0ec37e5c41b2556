"""New weights or adapters for an inference server, with the calls in the order that servers need."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

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


class LoRAInferenceClient(InferenceClient):
    """How to talk to an inference server that holds the base of a LoRA run and is sent adapters.

    With ``WeightExport(weights="adapter")`` one update is ``pause``, ``load_adapter``, ``reset_prefix_cache``,
    ``resume``. Where the base is missing, ``begin_update``, ``receive`` for each bucket and ``finish_update`` send it
    after the pause, so no request is answered by the base alone. After an error ``resume`` alone is called; a base that
    did not arrive whole is sent again with the next update.
    """

    @abstractmethod
    def holds_base(self) -> bool:
        """Ask the engine whether it holds the base weights; called before each update.

        Let the engine answer and remember nothing here: a restart, or a sleep that discards weights (level 2 of vLLM),
        loses them. A server that was started from the run's own base model holds them from the start.
        """

    @abstractmethod
    def load_adapter(self, tensors: Sequence[tuple[str, Tensor]], config: Mapping[str, Any], version: int) -> None:
        """Load an adapter in the place of the last one; also where the engine identifies both by the same number.

        Args:
            tensors: All its tensors, under the names of a PEFT folder, on the trainer's device.
            config: The content of its ``adapter_config.json``.
            version: Updates that the adapter has seen.
        """


class InferenceServerSink(WeightSink):
    """Sends each export to an inference server.

    Full and merged weights are sent whole, in buckets. Adapters (``WeightExport(weights="adapter")``, with a
    :class:`LoRAInferenceClient`) are sent alone, each in one piece; the base before the first of them, and again
    whenever the engine reports that it has lost it.

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
        self._context = ExportContext()
        # Part of a base arrived and the rest did not: the engine may take what it has for a base.
        self._base_is_broken = False
        self._paused = False
        self._base_for_adapter = False
        self._reset()

    def _reset(self) -> None:
        self._bucket: list[tuple[str, Tensor]] = []
        self._bytes = 0

    @property
    @override
    def takes_adapters(self) -> bool:
        return isinstance(self.client, LoRAInferenceClient)

    @override
    def wants_base(self) -> bool:
        self._base_for_adapter = self._base_is_broken or not self._lora_client.holds_base()
        return self._base_for_adapter

    @property
    def _lora_client(self) -> LoRAInferenceClient:
        if not isinstance(self.client, LoRAInferenceClient):
            raise ValueError(
                f"client={type(self.client).__name__} cannot load adapters; derive it from LoRAInferenceClient, or "
                "export weights='merged'."
            )
        return self.client

    @override
    def open(self, plan: ExportPlan | None, context: ExportContext) -> None:
        self._context = context
        client = self.client if context.adapter_config is None else self._lora_client
        if not self._paused:  # as it is between a base and its adapter
            self._paused = True  # also when pause itself fails half-way
            client.pause()
        if context.adapter_config is None:
            self._base_is_broken = True
            client.begin_update(plan)

    @override
    def write(self, name: str, tensor: Tensor) -> None:
        complete = bool(self._bucket) and _module_of(self._bucket[-1][0]) != _module_of(name)
        if complete and self._bytes >= self.bucket_bytes and self._context.adapter_config is None:
            self._send()
        self._bucket.append((name, tensor))
        self._bytes += tensor.numel() * tensor.element_size()

    def _send(self) -> None:
        self.client.receive(self._bucket)
        self._reset()

    @override
    def close(self) -> None:
        config, version = self._context.adapter_config, self._context.update
        if config is not None:
            self._lora_client.load_adapter(self._bucket, config, version)
            self._reset()
        else:
            if self._bucket:
                self._send()
            self.client.finish_update(version)
            self._base_is_broken = False
            if self._base_for_adapter:
                return
        self.client.reset_prefix_cache()
        self._paused = self._base_for_adapter = False
        self.client.resume()

    @override
    def abort(self, error: BaseException) -> None:
        paused = self._paused
        self._reset()
        self._paused = self._base_for_adapter = False
        if paused:
            self.client.resume()


def _module_of(name: str) -> str:
    """The module whose tensors a server may fuse: ``model.layers.0.mlp`` of ``model.layers.0.mlp.up_proj.weight``."""
    return ".".join(name.split(".")[:-2])
