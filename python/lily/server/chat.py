"""`/v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from typing import Any

from fastapi import APIRouter, Request, Response

from lily.sampling import Sampling
from lily.server.bodies import StrictRoute
from lily.server.events import WHOLE_OR_STREAM, answer
from lily.server.logprobs import chat_logprob
from lily.server.options import chat_arguments, check_model
from lily.server.protocol import ChatRequest
from lily.server.state import State
from lily.server.usage import extras, usage
from lily.server.work import Finished


def chat_routes(state: State) -> APIRouter:
    """The route, for one model."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/chat/completions", response_model=None, responses=WHOLE_OR_STREAM)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        check_model(body.model, state.settings.name)
        arguments = chat_arguments(body, state.sampling, state.model.n_tokens)

        def draw(progress: Any) -> Any:
            return state.model.chat(**arguments, progress=progress)

        work = state.crew.begin(request, draw)
        writer = ChatWriter(state.settings.name, body, arguments["sampling"])
        return await answer(work, writer, bool(body.stream), state.settings.keep_alive_s)

    return router


class ChatWriter:
    """A `lily.Reply` as OpenAI's chat completion, whole or in chunks."""

    def __init__(self, model: str, request: ChatRequest, sampling: Sampling) -> None:
        options = request.stream_options
        self._usage = bool(options and options.include_usage)
        self._progress = bool(options and options.include_progress)
        self._sampling = sampling
        self._logprobs = bool(request.logprobs)
        self._calls: set[int] = set()
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def opening(self) -> list[dict[str, Any]]:
        return [self._choice({"role": "assistant", "content": ""})]

    def computed(self, done: int, total: int) -> list[dict[str, Any]]:
        if not self._progress:
            return []
        return [self._chunk(choices=[], progress={"done": done, "total": total})]

    def drawn(self, piece: Any) -> list[dict[str, Any]]:
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.content:
            delta["content"] = piece.content
        if piece.call is not None:
            delta["tool_calls"] = [self._call(piece.call)]
        logprob = piece.logprob if self._logprobs else None
        return [self._choice(delta, logprob=logprob)] if delta or logprob else []

    def closing(self, done: Finished) -> list[dict[str, Any]]:
        chunks = [self._choice({}, reason=done.result.finish_reason) | extras(done, self._sampling)]
        if self._usage:
            chunks.append(self._chunk(choices=[], usage=usage(done.result)))
        return chunks

    def whole(self, done: Finished) -> dict[str, Any]:
        result = done.result
        message: dict[str, Any] = {"role": "assistant", "content": result.content}
        message["reasoning_content"] = result.reasoning or None
        if result.tool_calls:
            message["content"] = result.content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments_json},
                }
                for call in result.tool_calls
            ]
        logprobs = None
        if self._logprobs:
            logprobs = {"content": [chat_logprob(entry) for entry in result.logprobs or ()]}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": result.finish_reason,
        }
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage(result),
            **extras(done, self._sampling),
        }

    def _chunk(self, **fields: Any) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", **fields}

    def _call(self, call: Any) -> dict[str, Any]:
        """A piece of a tool call; id and name come with its first."""
        if call.index in self._calls:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        self._calls.add(call.index)
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": call.id, "type": "function", "function": function}

    def _choice(
        self, delta: dict[str, Any], *, reason: str | None = None, logprob: Any = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": reason}
        if logprob is not None:
            choice["logprobs"] = {"content": [chat_logprob(logprob)]}
        return self._chunk(choices=[choice])
