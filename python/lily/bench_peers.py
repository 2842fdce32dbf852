"""The process of a peer in `lily bench` and `lily fidelity`: load another engine, then do as asked.

It imports nothing of lily, because it may run in a Python that has no lily. Requests come on
standard input and answers go to standard output, a line of JSON each. The first request names the
engine and its work:

* "turns" (bench): each request is a turn, timed here.
* "scores" (fidelity), in float32 on the CPU: `{"score": TOKENS}` begins a window;
  `{"rows": [start, stop], "into": FILE}`, in order and without gaps, writes the logits after those
  tokens, float32 [stop - start, V].
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol


class Loaded(Protocol):
    """What a peer's process holds. Its token ids stay in its own arrays between steps."""

    version: str
    detail: str
    n_tokens: int

    def prefill(self, tokens: Sequence[int]) -> int:
        """From nothing; returns the best next token, which is known on the host."""

    def decode(self, token: int, steps: int) -> list[int]:
        """Append the token; draw `steps` greedy ones."""


class Transformers:
    def __init__(self, model: str, threads: int | None, cpu: bool, context: int) -> None:
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        if threads:
            torch.set_num_threads(threads)
        device = "cpu"
        if not cpu and torch.backends.mps.is_available():
            device = "mps"
        elif not cpu and torch.cuda.is_available():
            device = "cuda"
        self.torch, self.device = torch, device
        loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
        self.model = loaded.to(device).eval()
        self.version = f"{transformers.__version__}, torch {torch.__version__}"
        dtype = str(self.model.dtype).removeprefix("torch.")
        self.detail = f"{device}, {dtype}, {torch.get_num_threads()} threads"
        self.n_tokens = int(self.model.config.get_text_config().vocab_size)
        self.cache: Any = None

    def _step(self, tokens: Sequence[int]) -> int:
        with self.torch.inference_mode():
            ids = self.torch.tensor([list(tokens)], device=self.device)
            out = self.model(
                input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1
            )
            self.cache = out.past_key_values
            return int(out.logits[0, -1].argmax())

    def prefill(self, tokens: Sequence[int]) -> int:
        self.cache = None
        return self._step(tokens)

    def decode(self, token: int, steps: int) -> list[int]:
        drawn = []
        for _ in range(steps):
            token = self._step([token])
            drawn.append(token)
        return drawn


class MlxLm:
    CHUNK = 2048  # mlx-lm's own prefill step

    def __init__(self, model: str, threads: int | None, cpu: bool, context: int) -> None:
        self.mx: Any = importlib.import_module("mlx.core")
        mlx_lm: Any = importlib.import_module("mlx_lm")
        self.caches: Any = importlib.import_module("mlx_lm.models.cache")
        if cpu:
            self.mx.set_default_device(self.mx.cpu)
        self.model, tokenizer = mlx_lm.load(model)
        versions = [importlib.metadata.version(name) for name in ("mlx-lm", "mlx")]
        self.version = f"{versions[0]}, mlx {versions[1]}"
        self.detail = str(self.mx.default_device())
        self.n_tokens = int(tokenizer.vocab_size)
        self.cache: Any = None

    def prefill(self, tokens: Sequence[int]) -> int:
        self.cache = self.caches.make_prompt_cache(self.model)
        ids = self.mx.array(list(tokens))[None]
        start = 0
        while len(tokens) - start > self.CHUNK:
            self.model(ids[:, start : start + self.CHUNK], cache=self.cache)
            self.mx.eval([c.state for c in self.cache])
            start += self.CHUNK
        logits = self.model(ids[:, start:], cache=self.cache)
        return int(self.mx.argmax(logits[0, -1]).item())

    def decode(self, token: int, steps: int) -> list[int]:
        # As mlx-lm's own loop: the next step is queued before this one's token is read.
        def step(previous: Any) -> Any:
            return self.mx.argmax(self.model(previous, cache=self.cache)[:, -1:], axis=-1)

        drawn = []
        ahead = step(self.mx.array([[token]]))
        self.mx.async_eval(ahead)
        for i in range(steps):
            current = ahead
            if i + 1 < steps:
                ahead = step(current)
                self.mx.async_eval(ahead)
            drawn.append(int(current.item()))
        return drawn


class LlamaCpp:
    """Through the C interface: no sampler and no Python work but the argmax."""

    def __init__(self, model: str, threads: int | None, cpu: bool, context: int) -> None:
        import ctypes

        import numpy as np

        self.np = np
        self.c: Any = importlib.import_module("llama_cpp")
        self._log = self.c.llama_log_callback(lambda *_: None)  # llama.cpp keeps the pointer
        self.c.llama_log_set(self._log, ctypes.c_void_p(0))
        self.c.llama_backend_init()
        model_params = self.c.llama_model_default_params()
        if cpu:
            model_params.n_gpu_layers = 0
        loaded = self.c.llama_model_load_from_file(os.fsencode(model), model_params)
        if not loaded:
            raise RuntimeError(f"{model}: llama.cpp cannot load it")
        params = self.c.llama_context_default_params()
        params.n_ctx = params.n_batch = -(-context // 256) * 256
        if threads:
            params.n_threads = params.n_threads_batch = threads
        self.context = self.c.llama_init_from_model(loaded, params)
        if not self.context:
            raise RuntimeError(f"{model}: llama.cpp cannot make a context of {context} tokens")
        self.n_tokens = int(self.c.llama_vocab_n_tokens(self.c.llama_model_get_vocab(loaded)))
        self.version = str(self.c.__version__)
        self.detail = f"{params.n_threads} threads, {Path(model).name}"

    def _step(self, tokens: Sequence[int]) -> int:
        ids = (self.c.llama_token * len(tokens))(*tokens)
        if status := self.c.llama_decode(self.context, self.c.llama_batch_get_one(ids, len(ids))):
            raise RuntimeError(f"llama_decode failed: {status}")
        logits = self.c.llama_get_logits_ith(self.context, -1)
        return int(self.np.ctypeslib.as_array(logits, shape=(self.n_tokens,)).argmax())

    def prefill(self, tokens: Sequence[int]) -> int:
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)
        return self._step(tokens)

    def decode(self, token: int, steps: int) -> list[int]:
        drawn = []
        for _ in range(steps):
            token = self._step([token])
            drawn.append(token)
        return drawn


class Scorer(Protocol):
    """An engine in float32 on the CPU that gives the logits after each token of a window."""

    version: str
    detail: str
    n_tokens: int

    def begin(self, tokens: Sequence[int]) -> None:
        """Forget everything; the window is `tokens`."""

    def logits(self, start: int, stop: int) -> Any:
        """A float32 NumPy array [stop - start, V]. Calls come in order."""


class TransformersScorer:
    """A window goes through the layers in one pass; the head follows in pieces."""

    def __init__(self, model: str, threads: int | None, context: int) -> None:
        self.torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        if threads:
            self.torch.set_num_threads(threads)
        auto = transformers.AutoModelForCausalLM
        self.model: Any = auto.from_pretrained(model, dtype=self.torch.float32).eval()
        self.version = f"{transformers.__version__}, torch {self.torch.__version__}"
        self.detail = f"cpu, float32, {self.torch.get_num_threads()} threads"
        self.n_tokens = int(self.model.config.get_text_config().vocab_size)
        self.hidden: Any = None

    def begin(self, tokens: Sequence[int]) -> None:
        with self.torch.inference_mode():
            ids = self.torch.tensor([list(tokens)])
            out = self.model.base_model(input_ids=ids, use_cache=False)
            self.hidden = out.last_hidden_state[0]

    def logits(self, start: int, stop: int) -> Any:
        with self.torch.inference_mode():
            return self.model.get_output_embeddings()(self.hidden[start:stop]).float().numpy()


class MlxLmScorer:
    """The packed codes as they are; scales, biases, norms and activations in float32.

    A window goes through the model in the pieces that are asked for, by way of its cache.
    """

    def __init__(self, model: str, threads: int | None, context: int) -> None:
        self.mx: Any = importlib.import_module("mlx.core")
        self.mx.set_default_device(self.mx.cpu)
        mlx_lm: Any = importlib.import_module("mlx_lm")
        self.caches: Any = importlib.import_module("mlx_lm.models.cache")
        self.np: Any = importlib.import_module("numpy")
        self.model, tokenizer = mlx_lm.load(model)[:2]
        self.model.set_dtype(self.mx.float32)
        versions = [importlib.metadata.version(name) for name in ("mlx-lm", "mlx")]
        self.version = f"{versions[0]}, mlx {versions[1]}"
        self.detail = "cpu, float32"
        self.n_tokens = int(tokenizer.vocab_size)
        self.cache: Any = None
        self.ids: Any = None

    def begin(self, tokens: Sequence[int]) -> None:
        self.cache = self.caches.make_prompt_cache(self.model)
        self.ids = self.mx.array(list(tokens))[None]

    def logits(self, start: int, stop: int) -> Any:
        out = self.model(self.ids[:, start:stop], cache=self.cache)
        self.mx.eval(out, [c.state for c in self.cache])
        return self.np.array(out[0], dtype=self.np.float32)


LOADERS: dict[str, Callable[[str, int | None, bool, int], Loaded]] = {
    "transformers": Transformers,
    "mlx-lm": MlxLm,
    "llama-cpp-python": LlamaCpp,
}
SCORERS: dict[str, Callable[[str, int | None, int], Scorer]] = {
    "transformers": TransformersScorer,
    "mlx-lm": MlxLmScorer,
}


def take_turn(engine: Loaded, request: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    token = engine.prefill(request["tokens"])
    prefilled = time.perf_counter()
    drawn = engine.decode(token, request["steps"]) if request["steps"] else []
    decode_s = time.perf_counter() - prefilled
    turn = {"prefill_s": prefilled - start, "decode_s": decode_s}
    return turn | {"drawn": len({token, *drawn})}


def score(engine: Scorer, request: dict[str, Any]) -> dict[str, Any]:
    if "score" in request:
        engine.begin(request["score"])
        return {}
    logits = engine.logits(*request["rows"])
    logits.tofile(request["into"])
    return {"shape": list(logits.shape)}


def serve() -> None:
    """A peer's process: load, then do what its standard input asks."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # engines may print

    def answer(reply: dict[str, Any]) -> None:
        answers.write(json.dumps(reply | {"peak_bytes": peak_bytes()}) + "\n")
        answers.flush()

    try:
        setup = json.loads(sys.stdin.readline())
        name, model, threads = setup["name"], setup["model"], setup["threads"]
        start = time.perf_counter()
        engine: Any
        work: Callable[[Any, dict[str, Any]], dict[str, Any]]
        if setup["work"] == "scores":
            engine, work = SCORERS[name](model, threads, setup["context"]), score
        else:
            engine, work = LOADERS[name](model, threads, setup["cpu"], setup["context"]), take_turn
        about = {
            "name": name,
            "version": engine.version,
            "model": model,
            "detail": engine.detail,
            "n_tokens": engine.n_tokens,
            "load_s": time.perf_counter() - start,
        }
        answer(about)
        for line in sys.stdin:
            answer(work(engine, json.loads(line)))
    except KeyboardInterrupt:
        return
    except BaseException as error:  # whatever it is, the others go on without this peer
        first = (str(error).strip().splitlines() or [""])[0]
        answer({"error": f"{type(error).__name__}: {first}"[:300]})


def peak_bytes() -> int:
    """Most memory that this process has held."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    serve()
