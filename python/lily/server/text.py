"""Routes between text, chats and token ids; they need no place among the replies."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from lily.server.bodies import StrictRoute
from lily.server.options import check_model, messages, template_variables
from lily.server.protocol import DetokenizeRequest, TemplateRequest, TokenizeRequest
from lily.server.state import State
from lily.tools import parse_tools


def text_routes(state: State) -> APIRouter:
    """The routes, for one model. Plain functions, which FastAPI calls beside the event loop."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/tokenize")
    def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        check_model(body.model, state.settings.name)
        return {"tokens": state.model.encode(body.content, special=bool(body.special))}

    @router.post("/detokenize")
    def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        check_model(body.model, state.settings.name)
        return {"content": state.model.decode(body.tokens)}

    @router.post("/apply-template")
    def apply_template(body: TemplateRequest) -> dict[str, Any]:
        check_model(body.model, state.settings.name)
        given = messages(body.messages)
        kwargs = template_variables(body.chat_template_kwargs)
        kwargs["thinking"] = kwargs.pop("enable_thinking", None)
        kwargs["tools"] = [tool.spec() for tool in parse_tools(body.tools)] or None
        prompt = state.model.render_chat(given, **kwargs)
        tokens = state.model.encode_chat(given, **kwargs)
        return {"prompt": prompt, "tokens": tokens}

    return router
