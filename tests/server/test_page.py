"""The web page in a browser: Chromium without a window, if it is installed."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lily.server.page import policy
from server.running import Running, running
from server.scripted import ScriptedModel, piece, wait_for
from server.test_streams import until

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
HOSTILE = "<img src=x onerror=\"document.title='broken'\"> `a<b>` <script>1</script>"
REPLY = f"First\n\n```python\nprint('<b>')\n```\n{HOSTILE}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        if os.environ.get("LILY_NEED_CHROMIUM"):
            raise RuntimeError("LILY_NEED_CHROMIUM is set; no chromium is installed")
        pytest.skip("needs chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(color_scheme="light")
    context.set_default_timeout(15_000)
    page = context.new_page()
    page.wrong = []
    page.on("console", lambda m: page.wrong.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("request", lambda r: page.wrong.append(r.url) if "127.0.0.1" not in r.url else None)
    yield page
    context.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(ScriptedModel([piece("ok")])) as server:
        yield server


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def test_the_page_is_one_file_under_a_policy_that_allows_nothing_else(server: Running) -> None:
    response = server.client.get("/")
    rules = response.headers["content-security-policy"]
    assert rules == policy(response.text)
    assert "default-src 'none'" in rules and "unsafe" not in rules
    for word in ("src=", "@import", "http-equiv", "innerHTML", "insertAdjacentHTML", " style="):
        assert word not in response.text, word


def test_a_chat_shows_thought_answer_code_and_counts(page: Any, server: Running) -> None:
    server.state.model.steps = [piece(reasoning="Let me see."), piece(REPLY)]
    page.goto(server.url)
    ask(page, HOSTILE)
    reply = page.locator(".reply")
    reply.get_by_text("tok/s").wait_for()
    assert reply.locator(".block code").text_content() == "print('<b>')"
    assert reply.locator(".block span").text_content() == "python"
    assert reply.locator(".text").inner_text().endswith(HOSTILE.replace("`", ""))
    assert page.locator(".user .text").inner_text() == HOSTILE.replace("`", "")
    assert page.locator("img").count() == 0
    assert page.title() == "demo · lily"
    thought = reply.locator(".thought")
    assert not thought.is_visible()
    reply.locator("summary").click()
    assert thought.text_content() == "Let me see."
    assert "prompt 5, 0 reused" in reply.locator(".counts").inner_text()
    assert not page.wrong


def test_a_second_question_carries_the_conversation_and_it_outlives_a_reload(
    page: Any, server: Running
) -> None:
    model = server.state.model
    model.steps = [piece(reasoning="Hm."), piece("One")]
    page.goto(server.url)
    ask(page, "first")
    page.get_by_text("tok/s").wait_for()
    ask(page, "second")
    page.get_by_text("tok/s").nth(1).wait_for()
    said = [(m["role"], m["content"]) for m in model.calls[-1]["messages"]]
    assert said == [("user", "first"), ("assistant", "One"), ("user", "second")]
    assert model.calls[-1]["messages"][1]["reasoning_content"] == "Hm."
    page.reload()
    page.get_by_role("button", name="first", exact=True).click()
    assert page.locator(".turn").count() == 4
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0
    assert not page.wrong


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_ends_the_answer_and_keeps_what_came(page: Any, server: Running, how: str) -> None:
    server.state.model.steps = [piece("half"), wait_for(threading.Event())]
    page.goto(server.url)
    ask(page, "go")
    page.locator(".reply").get_by_text("half").wait_for()
    if how == "button":
        page.get_by_label("Stop").click()
    else:
        page.keyboard.press("Escape")
    page.get_by_text("Stopped").wait_for()
    assert page.locator(".reply .text").inner_text() == "half"
    until(server.idle)


def test_settings_reach_the_model_and_wrong_ones_are_explained(page: Any, server: Running) -> None:
    model = server.state.model
    model.steps = [piece("fine")]
    page.goto(server.url)
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("Temperature").get_attribute("placeholder") == "0.6"
    page.get_by_label("Temperature").fill("0.25")
    page.get_by_label("System message").fill("Be brief.")
    page.get_by_label("Thinking").select_option("256 tokens")
    page.get_by_label("Appearance").select_option("dark")
    page.get_by_role("button", name="Done").click()
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark == "rgb(23, 23, 25)"
    ask(page, "hi")
    page.get_by_text("tok/s").wait_for()
    call = model.calls[-1]
    assert call["sampling"].temperature == 0.25
    assert call["thinking"] == 256
    assert call["messages"][0] == {"role": "system", "content": "Be brief."}
    ask(page, "x" * 2000)
    page.get_by_role("alert").filter(has_text="expected at most 1000").wait_for()


def test_the_page_asks_for_the_key_until_it_is_right(page: Any) -> None:
    with running(ScriptedModel([piece("ok")]), api_key="secret") as server:
        page.goto(server.url)
        for key in ("wrong", "secret"):
            page.get_by_label("API key").fill(key)
            page.get_by_role("button", name="Continue").click()
            if key == "wrong":
                page.get_by_text("did not accept").wait_for()
        page.get_by_text("1,000 tokens of context").wait_for()
        ask(page, "hi")
        page.get_by_text("tok/s").wait_for()


def test_every_control_has_a_name_and_works_by_keyboard(page: Any, server: Running) -> None:
    page.set_viewport_size({"width": 380, "height": 700})
    page.goto(server.url)
    nameless = page.evaluate(
        "[...document.querySelectorAll('button, input, textarea, select')].filter((e) =>"
        " !(e.textContent.trim() || e.ariaLabel || e.labels?.[0]?.textContent.trim())).length"
    )
    assert nameless == 0
    page.get_by_role("button", name="Chats").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="New chat").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="New chat").wait_for(state="hidden")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_travels_with_the_package() -> None:
    import lily.server

    assert (Path(lily.server.__file__).parent / "page.html").is_file()
