"""The application: routes, errors and guards around one model."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from lily.server.about import about_routes
from lily.server.chat import chat_routes
from lily.server.completions import completion_routes
from lily.server.failures import add_handlers
from lily.server.guard import guarded
from lily.server.page import page_routes
from lily.server.protocol import ErrorBody
from lily.server.settings import Settings
from lily.server.state import State
from lily.server.text import text_routes

if TYPE_CHECKING:
    from lily.model import Model

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in (("4XX", "The request is refused"), ("5XX", "The server cannot answer"))
}
"""What every route may answer instead, for the API's description."""


def create_app(model: Model, settings: Settings) -> FastAPI:
    """An ASGI application that serves `model`.

    Its `state.lily` is the `State`. The model stays the caller's, to be closed after the server.

    Raises:
        ValueError: a default of sampling is unknown or out of range.
    """
    import lily

    state = State(model, settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await state.crew.close()

    app = FastAPI(
        title="lily",
        version=lily.__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        strict_content_type=False,
        redirect_slashes=False,
    )
    app.state.lily = state
    add_handlers(app)
    for routes in (chat_routes, completion_routes, about_routes, text_routes, page_routes):
        app.include_router(routes(state), responses=ERRORS)

    app.add_middleware(guarded, settings=settings)
    return app
