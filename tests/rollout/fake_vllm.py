"""An HTTP server with the routes of vLLM that training needs, around a Hugging Face model."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from lightning_rl_engines.rollout.decoding import decode_batch
from lightning_rl_engines.rollout.sampling import StopRule, sample_tokens

FORGOTTEN = "default"
"""Version of weights that nobody named, as after a start."""

_LOADING = threading.Lock()
"""transformers replaces methods of its classes while it loads: two threads would leave them replaced."""


class FakeVLLM(ThreadingHTTPServer):
    """Samples as vLLM does, with the weights of the last folder that it was told to read.

    Attributes:
        calls: Method and path of every request so far.
        requests: Bodies of the requests for completions.
        facts: What ``/server_info`` answers.
        dev_mode: Whether the routes for new weights exist.
        broken: Paths that answer with an error.
        key: What requests must bring along, where there is one.
        folder: The folder that was read last.
        names: Names of the tensors in it.
    """

    daemon_threads = True

    def __init__(self, *, positions: int = 256, tokenizer: Any = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.positions = positions
        self.tokenizer = tokenizer
        self.calls: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {
            "model_config": {"logprobs_mode": "processed_logprobs", "hf_overrides": {}},
            "load_config": {"load_format": "auto"},
            "device_config": {"device": "cuda"},
        }
        self.dev_mode = True
        self.broken: set[str] = set()
        self.key: str | None = None
        self.folder = ""
        self.names: set[str] = set()
        self.lock = threading.Lock()
        self.model: Any = None
        self.version, self.paused, self.stale, self.asleep = FORGOTTEN, False, True, False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def forget(self) -> None:
        """What a new start of the server does."""
        self.version = FORGOTTEN

    def answer(self, path: str, query: dict[str, str], body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "served", "max_model_len": self.positions}]}
        if path == "/v1/completions":
            return self.complete(body)
        if path == "/server_info":
            assert query == {"config_format": "json"}
            return {"vllm_config": self.facts}
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return {}
        if path == "/sleep":
            assert query == {"level": "1", "mode": "wait"}
            self.asleep = True
            return {}
        if path == "/wake_up":
            self.asleep = False
            return {}
        if path == "/is_sleeping":
            return {"is_sleeping": self.asleep}
        if path == "/pause":
            assert query == {"mode": "wait"}
            self.paused = True
            return {}
        if path == "/resume":
            self.paused = False
            return {}
        if path == "/reset_prefix_cache":
            self.stale = False
            return {"success": True}
        assert path == "/collective_rpc", path
        return self.rpc(body)

    def rpc(self, body: dict[str, Any]) -> Any:
        if body["method"] == "update_config":
            self.facts["load_config"] |= body["args"][0]["load_config"]
        else:
            assert body["method"] == "reload_weights"
            assert self.paused, "weights change under running requests"
            assert not self.asleep
            assert self.facts["load_config"]["load_format"] != "dummy"
            self.folder = body["kwargs"]["weights_path"]
            with safe_open(f"{self.folder}/model.safetensors", "pt") as file:
                self.names = set(file.keys())
            with _LOADING:
                self.model, loading = AutoModelForCausalLM.from_pretrained(self.folder, output_loading_info=True)
            assert not loading["missing_keys"]
            self.stale = True
        return {"results": [None]}

    def complete(self, body: dict[str, Any]) -> Any:
        assert not self.paused and not self.stale, "a response from old keys and values"
        assert not self.asleep
        assert body["model"] == "served"
        greedy = body["temperature"] == 0
        choices = []
        with self.lock:
            self.requests.append(body)
            for index in range(body["n"]):
                choose = partial(
                    sample_tokens,
                    temperature=1.0 if greedy else body["temperature"],
                    top_k=body["top_k"],
                    top_p=body["top_p"],
                    greedy=greedy,
                    generator=torch.Generator().manual_seed(body["seed"] + index),
                )
                stop = StopRule(token_ids=body["stop_token_ids"], strings=body["stop"], tokenizer=self.tokenizer)
                (found,) = decode_batch(
                    self.model, [body["prompt"]], max_new_tokens=body["max_tokens"], choose=choose, is_complete=stop
                )
                choices.append(
                    {
                        "index": index,
                        "token_ids": found.token_ids,
                        "logprobs": {"token_logprobs": found.log_probs},
                        "finish_reason": found.finish_reason,
                    }
                )
        return {"choices": choices[::-1]}


class _Handler(BaseHTTPRequestHandler):
    server: FakeVLLM
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.respond({})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.respond(json.loads(content) if content else {})

    def respond(self, body: dict[str, Any]) -> None:
        parts = urlsplit(self.path)
        self.server.calls.append(f"{self.command} {parts.path}")
        if self.server.key is not None and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self.send(401, {"error": "Unauthorized"})
        elif not self.server.dev_mode and not parts.path.startswith("/v1/"):
            self.send(404, {"detail": "Not Found"})
        elif parts.path in self.server.broken:
            self.send(500, {"detail": "out of order"})
        else:
            self.send(200, self.server.answer(parts.path, dict(parse_qsl(parts.query)), body))

    def send(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serve(**options: Any) -> Iterator[FakeVLLM]:
    with FakeVLLM(**options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
