"""Session-wide set-up: thread counts, the folder of tiny models, the end of the worker pool, markers."""

import os
import shutil
import tempfile
from pathlib import Path

# Before torch is imported: the suite shares few cores between many processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from tests.support import shutdown_workers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="also run the full product of each grid")


def pytest_configure(config: pytest.Config) -> None:
    # Through the environment, since workers are processes of their own.
    os.environ["LRE_TEST_MODELS"] = tempfile.mkdtemp(prefix="lre_models_")
    torch.set_num_threads(1)


def pytest_unconfigure(config: pytest.Config) -> None:
    shutdown_workers()
    shutil.rmtree(Path(os.environ.pop("LRE_TEST_MODELS")), ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    exhaustive = config.getoption("--exhaustive") or "exhaustive" in config.getoption("-m")
    left_out = [] if exhaustive else [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("vllm") and "LIGHTNING_RL_TEST_VLLM" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="needs LIGHTNING_RL_TEST_VLLM, a Python interpreter with vLLM"))
