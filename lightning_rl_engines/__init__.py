"""RL post-training engines for PyTorch Lightning.

``import lightning_rl_engines`` registers the strategy ``fsdp_ulysses``, so that ``Trainer(strategy="fsdp_ulysses")``
finds it.

Vocabulary: a *document* is one prompt and its response; a *row* is documents packed one after another; a *micro-batch*
is the row that goes through the model at once; an *experience* is all documents of one update; ranks with different
*data ranks* hold different documents, ranks that share one work on the same row; the *budget* is the most tokens in a
row. A per-token column at index *t* describes token *t*.
"""

from lightning_rl_engines.__about__ import __version__
from lightning_rl_engines.algorithms import *  # noqa: F403
from lightning_rl_engines.models import ModelConfig, TokenModel
from lightning_rl_engines.sequence import Experience, MicroBatch
from lightning_rl_engines.strategies import BatchOutput, Engine, FSDPUlyssesStrategy
