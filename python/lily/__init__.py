"""Fast local inference for Qwen3.6-35B-A3B.

    model = lily.Model.load("Qwen/Qwen3.6-35B-A3B")
    for piece in model.generate("Why is the sky blue?", max_tokens=64):
        print(piece.text, end="")

Importing lily loads no network, template or tokenizer module and opens no connection.
"""

from lily.chat_reply import Reply, ReplyPiece, ReplyResult
from lily.convert import quantize, unpack
from lily.errors import (
    Cancelled,
    CheckpointError,
    ContextError,
    DeviceError,
    Error,
    InternalError,
    SessionFileError,
)
from lily.generation import Generation, Result, Timings, Usage
from lily.grammar import Constraint, Grammar, Regex
from lily.loading import techniques
from lily.memory import MemoryPlan, plan
from lily.model import Model
from lily.model_info import ModelInfo
from lily.perplexity import Perplexity, perplexity
from lily.reply import ToolCall, ToolCallPiece
from lily.sampling import Sampling
from lily.scoring import Ranked, Score
from lily.session import Logits, Session, Snapshot
from lily.store import ReuseStats
from lily.stream import Piece, Stream, TokenLogprob
from lily.tool_loop import ToolRun
from lily.tools import Tool

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
    "Reply",
    "ReplyPiece",
    "ReplyResult",
    "Result",
    "ReuseStats",
    "Sampling",
    "Score",
    "Session",
    "SessionFileError",
    "Snapshot",
    "Stream",
    "Timings",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolCallPiece",
    "ToolRun",
    "Usage",
    "__version__",
    "perplexity",
    "plan",
    "quantize",
    "techniques",
    "unpack",
]
