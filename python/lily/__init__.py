"""Fast local inference for Qwen3.6-35B-A3B.

    model = lily.Model.load("Qwen/Qwen3.6-35B-A3B")
    for piece in model.generate("Why is the sky blue?", max_tokens=64):
        print(piece.text, end="")

Importing lily loads no network, template or tokenizer module and opens no connection.
"""

from lily.convert import quantize, unpack
from lily.errors import (
    Cancelled,
    CheckpointError,
    ContextError,
    DeviceError,
    Error,
    InternalError,
)
from lily.generation import Generation, Result, Timings, Usage
from lily.grammar import Constraint, Grammar, Regex
from lily.loading import techniques
from lily.memory import MemoryPlan, plan
from lily.model import Model, ModelInfo
from lily.perplexity import Perplexity, perplexity
from lily.sampling import Sampling
from lily.scoring import Ranked, Score
from lily.session import Logits, Session, Snapshot
from lily.stream import Piece, Stream, TokenLogprob

__version__ = "0.1.0"

__all__ = [
    "Cancelled",
    "CheckpointError",
    "Constraint",
    "ContextError",
    "DeviceError",
    "Error",
    "Generation",
    "Grammar",
    "InternalError",
    "Logits",
    "MemoryPlan",
    "Model",
    "ModelInfo",
    "Perplexity",
    "Piece",
    "Ranked",
    "Regex",
    "Result",
    "Sampling",
    "Score",
    "Session",
    "Snapshot",
    "Stream",
    "Timings",
    "TokenLogprob",
    "Usage",
    "__version__",
    "perplexity",
    "plan",
    "quantize",
    "techniques",
    "unpack",
]
