"""`/v1/completions`: text after a prompt, without a chat template."""

from __future__ import annotations

import secrets
import time
from typing import Any

from fastapi import APIRouter, Request, Response

from lily.sampling import Sampling
from lily.server.bodies import StrictRoute
from lily.server.events import WHOLE_OR_STREAM, answer
from lily.server.failures import refused
from lily.server.logprobs import completion_logprobs
from lily.server.options import check_model, common
from lily.server.protocol import CompletionRequest, Prompt
from lily.server.state import State
from lily.server.usage import extras, usage
from lily.server.work import Finished
from lily.stream import check_logprobs


def completion_routes(state: State) -> APIRouter:
    """The route, for one model."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/completions", response_model=None, responses=WHOLE_OR_STREAM)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        check_model(body.model, state.settings.name)
        arguments = _arguments(body, state)

        def draw(progress: Any) -> Any:
            return state.model.generate(**arguments, progress=progress)

        work = state.crew.begin(request, draw)
        writer = CompletionWriter(state.settings.name, body, arguments["sampling"])
        return await answer(work, writer, bool(body.stream), state.settings.keep_alive_s)

    return router


def _arguments(body: CompletionRequest, state: State) -> dict[str, Any]:
    """The arguments of `Model.generate`."""
    arguments = common(body, state.sampling, state.model.n_tokens)
    for name, value, wanted in (
        ("echo", body.echo, False), ("best_of", body.best_of, 1), ("suffix", body.suffix, ""),
    ):  # fmt: skip
        if value is not None and value != wanted:
            raise refused(f"{name}: {value!r:.40}, expected {wanted!r}: it is not supported")
    check_logprobs(body.logprobs)
    arguments |= {"logprobs": body.logprobs, "special": bool(body.special)}
    arguments["prompt"] = _prompt(body.prompt, state.model.n_tokens)
    return arguments


def _prompt(given: Prompt, n_tokens: int) -> str | list[int]:
    """The one prompt of a request, whose ids are in [0, n_tokens)."""
    prompt: Any = given
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise refused(f"prompt: {len(prompt)} prompts, expected one")
        prompt = prompt[0]
    if not prompt:
        raise refused("prompt: empty, expected text or token ids")
    if isinstance(prompt, list):
        for i, token in enumerate(prompt):
            if not 0 <= token < n_tokens:
                raise refused(f"prompt[{i}]: {token}, expected an id in [0, {n_tokens})")
    return prompt  # type: ignore[no-any-return]


class CompletionWriter:
    """A `lily.Generation` as OpenAI's text completion, whole or in chunks."""

    def __init__(self, model: str, request: CompletionRequest, sampling: Sampling) -> None:
        options = request.stream_options
        self._usage = bool(options and options.include_usage)
        self._progress = bool(options and options.include_progress)
        self._sampling = sampling
        self._logprobs = request.logprobs is not None
        self._offset = 0
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def opening(self) -> list[dict[str, Any]]:
        return []

    def computed(self, done: int, total: int) -> list[dict[str, Any]]:
        if not self._progress:
            return []
        return [self._head | {"choices": [], "progress": {"done": done, "total": total}}]

    def drawn(self, piece: Any) -> list[dict[str, Any]]:
        logprob = piece.logprob if self._logprobs else None
        if not piece.text and logprob is None:
            return []
        found = None
        if logprob is not None:
            found = completion_logprobs([logprob], self._offset)
            self._offset += len(logprob.text)
        return [self._choice(piece.text, logprobs=found)]

    def closing(self, done: Finished) -> list[dict[str, Any]]:
        chunks = [self._choice("", done.result.finish_reason) | extras(done, self._sampling)]
        if self._usage:
            chunks.append(self._head | {"choices": [], "usage": usage(done.result)})
        return chunks

    def whole(self, done: Finished) -> dict[str, Any]:
        result = done.result
        found = completion_logprobs(result.logprobs or (), 0) if self._logprobs else None
        choice = self._choice(result.text, result.finish_reason, found)
        return choice | {"usage": usage(result)} | extras(done, self._sampling)

    def _choice(
        self, text: str, reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return self._head | {"choices": [choice]}
