"""HTML for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

# Opaque colours would be wrong in either a light or a dark notebook: these follow its text.
_STYLE = """<style>
.lily { line-height: 1.5; max-width: 56em; }
.lily-plain { white-space: pre-wrap; overflow-wrap: anywhere; }
.lily details { border-left: 3px solid rgba(128,128,128,.4); padding-left: .8em; }
.lily details > div { opacity: .75; font-size: .95em; }
.lily summary { cursor: pointer; opacity: .75; }
.lily-tail { display: flex; flex-direction: column-reverse; max-height: 16em; overflow-y: auto; }
.lily-call { font-family: monospace; background: rgba(128,128,128,.12); padding: .3em .6em;
  margin: .3em 0; border-radius: 3px; white-space: pre-wrap; overflow-wrap: anywhere; }
.lily-note { opacity: .6; font-size: .85em; margin-top: .4em; }
.lily-error { border-left: 3px solid #c33; padding-left: .8em; }
.lily th, .lily td { text-align: left !important; }
</style>"""


def block(html: str) -> str:
    """HTML in lily's style."""
    return f'{_STYLE}<div class="lily">{html}</div>'


def table_html(rows: Sequence[tuple[str, str]], title: str = "") -> str:
    """Names and values."""
    cells = "".join(f"<tr><th>{escape(n)}</th><td>{escape(v)}</td></tr>" for n, v in rows)
    head = f"<b>{escape(title)}</b>" if title else ""
    return block(f"{head}<table>{cells}</table>")


def markdown_html(text: str) -> str | None:
    """Markdown as HTML in which nothing of the model's can act: its HTML is shown as text, links
    go to the web only, and no picture is fetched. None without markdown-it."""
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        return None
    made = MarkdownIt("commonmark", {"html": False, "breaks": True})
    made.enable(["table", "strikethrough"]).disable("image")
    made.validateLink = _is_web_link  # type: ignore[method-assign]
    return f'<div class="lily-markdown">{made.render(text)}</div>'


def _is_web_link(url: str) -> bool:
    return url.startswith(("https://", "http://", "mailto:"))
