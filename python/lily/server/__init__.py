"""A server that speaks OpenAI's HTTP API, with a web page. Needs the extra `lily[server]`."""

from lily.server.app import create_app
from lily.server.run import serve
from lily.server.settings import Settings

__all__ = ["Settings", "create_app", "serve"]
