"""One vLLM server, as an HTTP client sees it."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import httpx

_ATTEMPTS = 3
"""How often a request is sent whose connection breaks; every request here may be repeated."""

COMMAND = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --logprobs-mode processed_logprobs"


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What a server says of itself.

    Attributes:
        model: Name that requests give.
        max_model_len: The most tokens of prompt and response.
        logprobs_mode: ``"raw_logprobs"`` or ``"processed_logprobs"``: before or after temperature and truncation.
        load_format: How it read its weights; ``"dummy"`` for none.
        device: ``"cuda"``, ``"cpu"``, ...
        can_sleep: Whether it can give the memory of its accelerator back.
        head_untied: Whether it was told to keep a head of its own where the model shares it with the embeddings.
    """

    model: str
    max_model_len: int
    logprobs_mode: str
    load_format: str
    device: str
    can_sleep: bool
    head_untied: bool


class VLLMServer:
    """Talks to one server, as a context manager that ends its connections; safe to use from several threads.

    Args:
        url: Address, such as ``"http://127.0.0.1:8000"``.
        timeout_seconds: How long one request may take.
        max_connections: Requests that run at once.

    Raises:
        RuntimeError: From every method: the server cannot be reached, or answers with an error.
    """

    def __init__(self, url: str, *, timeout_seconds: float, max_connections: int) -> None:
        self.url = url
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if (key := os.environ.get("VLLM_API_KEY")) else None,
            timeout=httpx.Timeout(timeout_seconds, connect=min(timeout_seconds, 30.0)),
            limits=httpx.Limits(max_connections=max_connections),
            trust_env=False,  # a proxy for the world outside is none for a server next door
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def facts(self) -> ServerFacts:
        """Ask what the server holds; also shows that it has the routes that training needs.

        Raises:
            RuntimeError: It runs without them.
        """
        (model, *_) = self._call("GET", "/v1/models")["data"]
        try:
            config = self._call("GET", "/server_info", params={"config_format": "json"})["vllm_config"]
        except _StatusError as error:
            if error.status != httpx.codes.NOT_FOUND:
                raise
            raise RuntimeError(
                f"the vLLM server at {self.url} has no route for new weights; start it as in: {COMMAND}"
            ) from error
        overrides = config["model_config"].get("hf_overrides") or {}
        untied = config["model_config"].get("word_embeddings_untied_by_checkpoint", False)
        return ServerFacts(
            model=model["id"],
            max_model_len=int(model["max_model_len"]),
            logprobs_mode=config["model_config"]["logprobs_mode"],
            load_format=str(config["load_config"]["load_format"]),
            device=str(config["device_config"]["device"]),
            can_sleep=bool(config["model_config"].get("enable_sleep_mode", False)),
            head_untied=untied or overrides.get("tie_word_embeddings") is False,
        )

    def complete(self, prompt: list[int], options: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Sample continuations.

        Args:
            prompt: Token ids.
            options: Fields of a request to ``/v1/completions``.

        Returns:
            One choice per sample, in order.
        """
        answer = self._call("POST", "/v1/completions", json={**options, "prompt": prompt})
        return sorted(answer["choices"], key=lambda choice: int(choice["index"]))

    def weight_version(self) -> str:
        """Return what :meth:`load_weights` was last given; a server that was started again has forgotten it."""
        return str(self._call("GET", "/weight_info")["weight_version"])

    def load_weights(self, folder: str, version: str, *, load_format: str) -> None:
        """Replace the weights, forget what old ones computed, and go on.

        Args:
            folder: Hugging Face folder, as the server sees it.
            version: Name of these weights.
            load_format: What :meth:`facts` said.
        """
        self._call("POST", "/pause", params={"mode": "wait"})
        try:
            if load_format == "dummy":  # that loader reads no files
                self._rpc("update_config", [{"load_config": {"load_format": "auto"}}])
            self._rpc("reload_weights", kwargs={"weights_path": folder})
            if not self._call("POST", "/reset_prefix_cache")["success"]:
                raise RuntimeError(f"the vLLM server at {self.url} still holds keys and values of old weights")
            self._call("POST", "/update_weight_version", json={"new_version": version})
        finally:
            self._call("POST", "/resume")

    def sleep(self) -> None:
        """Move the weights to host memory and drop keys and values; nothing happens to a server that sleeps."""
        self._call("POST", "/sleep", params={"level": 1, "mode": "wait"})

    def wake(self) -> None:
        """Bring the weights back; nothing happens to a server that is awake."""
        if self._call("GET", "/is_sleeping")["is_sleeping"]:
            self._call("POST", "/wake_up")

    def _rpc(self, method: str, args: list[Any] | None = None, kwargs: dict[str, Any] | None = None) -> None:
        self._call("POST", "/collective_rpc", json={"method": method, "args": args or [], "kwargs": kwargs or {}})

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                response = self._client.request(method, path, **arguments)
                break
            except httpx.TimeoutException as error:
                raise RuntimeError(
                    f"the vLLM server at {self.url} did not answer {path} in time; set a longer timeout_seconds, or "
                    "look into its log."
                ) from error
            except httpx.TransportError as error:
                if attempt == _ATTEMPTS:
                    raise RuntimeError(self._lost(path, error)) from error
                time.sleep(attempt)
        if response.is_error:
            raise _StatusError(self.url, path, response.status_code, response.text)
        return response.json()

    def _lost(self, path: str, error: httpx.TransportError) -> str:
        if isinstance(error, httpx.ConnectError):
            return f"there is no vLLM server at {self.url} ({error}); start one as in: {COMMAND}"
        return f"the vLLM server at {self.url} ended the connection in the midst of {path} ({error}); look into its log"


class _StatusError(RuntimeError):
    """The server answered, with an error."""

    def __init__(self, url: str, path: str, status: int, text: str) -> None:
        super().__init__(f"the vLLM server at {url} answered {path} with {status}: {text[:500]}")
        self.status = status
