"""Replies: thinking, answers, tools and formats on the demo model."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

import lily

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "demo_model" / "checkpoint"
CHAT = [{"role": "user", "content": "Tell me of the river."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
DEEP: dict[str, object] = {}
for _ in range(2000):
    DEEP = {"items": DEEP}


@pytest.fixture(scope="module")
def demo() -> Iterator[lily.Model]:
    with lily.Model.load(FOLDER, precision="float32") as model:
        yield model


def weather(city: str, days: int = 1) -> str:
    """The weather forecast.

    Args:
        city: name of the city.
    """
    if days > 3:
        raise ValueError("too far ahead")
    return f"{city}: sunny"


def lamp(on: bool, colour: Literal["red", "green"] = "red") -> None:
    """Switch the lamp."""


def joined(reply: lily.Reply) -> tuple[str, str, dict[int, str]]:
    reasoning = content = ""
    calls: dict[int, str] = {}
    for piece in reply:
        reasoning += piece.reasoning
        content += piece.content
        if piece.call is not None:
            calls[piece.call.index] = calls.get(piece.call.index, "") + piece.call.arguments
    return reasoning, content, calls


@pytest.mark.parametrize("seed", range(4))
def test_pieces_join_to_the_result(demo: lily.Model, seed: int) -> None:
    reply = demo.chat(CHAT, max_tokens=120, seed=seed)
    reasoning, content, _ = joined(reply)
    result = reply.result()
    assert (reasoning, content) == (result.reasoning, result.content)
    assert result.reasoning
    for tag in ("<think>", "</think>", "<|im_end|>"):
        assert tag not in reasoning + content
    assert result.usage.generated == len(result.tokens)
    assert 0 < result.usage.reasoning <= result.usage.generated
    assert (result.thinking_end == "closed") == bool(result.content)


def test_each_token_is_told_once(demo: lily.Model) -> None:
    reply = demo.chat(CHAT, max_tokens=60, seed=1)
    assert tuple(p.token for p in reply if p.token is not None) == reply.result().tokens


def test_without_thinking_there_is_no_trace_of_it(demo: lily.Model) -> None:
    for seed in range(3):
        result = demo.chat(CHAT, thinking=False, max_tokens=60, seed=seed).result()
        assert (result.reasoning, result.usage.reasoning) == ("", 0)
        assert result.content
        assert "think>" not in result.content


def test_a_cap_within_thinking_leaves_the_content_empty(demo: lily.Model) -> None:
    result = demo.chat(CHAT, thinking=True, max_tokens=5, seed=1).result()
    assert (result.content, result.finish_reason, result.thinking_end) == ("", "length", None)
    assert result.reasoning


@pytest.mark.parametrize("budget", [1, 2, 7])
def test_a_budget_closes_thinking_and_leaves_room_for_the_answer(
    demo: lily.Model, budget: int
) -> None:
    result = demo.chat(CHAT, thinking=budget, max_tokens=80, seed=1).result()
    assert result.thinking_end == "budget"
    assert result.content
    free = demo.chat(CHAT, thinking=True, max_tokens=budget, seed=1).result()
    assert result.tokens[:budget] == free.tokens
    closing = len(demo.encode("\n</think>", special=True))
    assert result.usage.reasoning == budget + closing


def test_a_budget_that_is_not_used_up_changes_nothing(demo: lily.Model) -> None:
    free = demo.chat(CHAT, max_tokens=150, seed=1).result()
    assert free.thinking_end == "closed"
    bound = demo.chat(CHAT, thinking=len(free.tokens), max_tokens=150, seed=1).result()
    assert (bound.tokens, bound.thinking_end) == (free.tokens, "closed")


def test_thinking_ends_when_someone_asks(demo: lily.Model) -> None:
    reply = demo.chat(CHAT, max_tokens=60, seed=1)
    for n, _ in enumerate(reply):
        if n == 3:
            asker = threading.Thread(target=reply.stop_thinking)
            asker.start()
            asker.join()
    result = reply.result()
    assert result.thinking_end == "asked"
    assert result.usage.reasoning < 10
    assert result.content


def test_stop_strings_count_in_the_answer_only(demo: lily.Model) -> None:
    free = demo.chat(CHAT, max_tokens=150, seed=1).result()
    common = next(w for w in free.reasoning.split() if w in free.content.split())
    result = demo.chat(CHAT, max_tokens=150, seed=1, stop=common).result()
    assert result.reasoning == free.reasoning
    assert result.content == free.content.partition(common)[0]
    assert (result.finish_reason, result.stop) == ("stop", common)


def test_a_required_tool_is_called_with_arguments_of_its_types(demo: lily.Model) -> None:
    for seed in range(4):
        reply = demo.chat(
            CHAT,
            tools=[weather, lamp],
            tool_choice="lamp",
            thinking=False,
            max_tokens=120,
            seed=seed,
        )
        _, content, calls = joined(reply)
        result = reply.result()
        assert content == ""
        assert calls
        for i, call in enumerate(result.tool_calls):
            assert call.name == "lamp"
            assert isinstance(call.arguments["on"], bool)
            assert call.arguments.get("colour", "red") in ("red", "green")
            assert calls[i] == call.arguments_json
            assert json.loads(calls[i]) == call.arguments
        assert result.tool_calls


def test_tool_choice_none_gives_no_call_and_keeps_the_prompt(demo: lily.Model) -> None:
    with_tools = demo.chat(CHAT, tools=[weather], max_tokens=1)
    reply = demo.chat(CHAT, tools=[weather], tool_choice="none", max_tokens=30, seed=1)
    assert reply.prompt == with_tools.prompt
    assert reply.sampling.banned_ids == {demo.tokenizer.added_tokens["<tool_call>"]}
    assert reply.result().tool_calls == ()


def test_a_format_holds_after_free_thinking(demo: lily.Model) -> None:
    done = 0
    for seed in range(4):
        reply = demo.chat(CHAT, format=SCHEMA, thinking=6, max_tokens=120, seed=seed)
        result = reply.result()
        assert result.reasoning
        if result.finish_reason == "stop":
            value = json.loads(result.content)
            assert value.keys() == {"name", "old"}
            assert isinstance(value["old"], bool)
            done += 1
    assert done


def test_a_format_without_thinking_holds_from_the_first_token(demo: lily.Model) -> None:
    for seed in range(3):
        reply = demo.chat(CHAT, format=lily.Regex("yes|no"), thinking=False, seed=seed)
        assert reply.text() in ("yes", "no")
        assert reply.finish_reason == "stop"


def test_log_probabilities_are_told_for_each_token(demo: lily.Model) -> None:
    plain = demo.chat(CHAT, max_tokens=20, seed=1).result()
    reply = demo.chat(CHAT, max_tokens=20, seed=1, logprobs=2)
    pieces = [p for p in reply if p.token is not None]
    result = reply.result()
    assert result.tokens == plain.tokens
    assert [p.logprob for p in pieces] == list(result.logprobs or ())
    assert [t.token for t in result.logprobs or ()] == list(result.tokens)


def test_a_conversation_goes_on_from_what_is_there(demo: lily.Model) -> None:
    first = demo.chat(CHAT, thinking=False, max_tokens=20, temperature=0).result()
    messages = [*CHAT, first.message(), {"role": "user", "content": "And then?"}]
    with demo.session() as session:
        cold = demo.chat(messages, session=session, reuse="off", max_tokens=20, temperature=0)
        cold.result()
    warm = demo.chat(messages, reuse="exact", max_tokens=20, temperature=0).result()
    assert warm.usage.reused > 0
    assert warm.tokens == cold.result().tokens


def test_kept_thinking_is_reused_to_the_end_of_the_reply(demo: lily.Model) -> None:
    """Without it the template leaves earlier thoughts out, and reuse ends where they began."""
    reused = []
    for keep in (True, False):
        variables = {"preserve_thinking": keep}
        with demo.session() as session:
            reply = session.chat(CHAT, template=variables, max_tokens=150, seed=1)
            first = reply.result()
            assert (first.finish_reason, first.thinking_end) == ("stop", "closed")
            said = len(reply.prompt) + first.usage.generated
            messages = [*CHAT, first.message(), {"role": "user", "content": "And then?"}]
            again = session.chat(messages, template=variables, max_tokens=1).result()
            reused.append(again.usage.reused)
    assert reused[0] >= said - 1  # the last token ends the turn
    assert 0 < reused[1] < said - first.usage.generated


def test_a_last_message_of_the_assistant_is_followed_by_a_reply_of_its_own(
    demo: lily.Model,
) -> None:
    said = {"role": "assistant", "content": "It is wide and"}
    reply = demo.chat([*CHAT, said], thinking=False, max_tokens=8, seed=1)
    text = demo.decode(reply.prompt)
    assert "It is wide and<|im_end|>\n<|im_start|>assistant\n" in text
    assert reply.text()


def test_the_default_sampling_is_the_checkpoints_and_visible(demo: lily.Model) -> None:
    result = demo.chat(CHAT, max_tokens=1).result()
    assert result.sampling == demo.sampling
    assert demo.chat(CHAT, max_tokens=1, top_k=3).sampling.top_k == 3


def test_leaving_early_keeps_what_came(demo: lily.Model) -> None:
    with demo.chat(CHAT, max_tokens=100, seed=1) as reply:
        seen = [p.token for p in itertools.islice(reply, 5)]
    result = reply.result()
    assert (list(result.tokens), result.finish_reason) == (seen, "cancelled")


def test_async_for_gives_what_for_gives(demo: lily.Model) -> None:
    want = list(demo.chat(CHAT, max_tokens=20, seed=1))

    async def main() -> list[lily.ReplyPiece]:
        return [piece async for piece in await demo.achat(CHAT, max_tokens=20, seed=1)]

    assert asyncio.run(main()) == want


CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n{}"
    "</function>\n</tool_call>"
)
DAYS = "<parameter=days>\n{}\n</parameter>\n"


def scripted(demo: lily.Model, monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
    """Have the model say these, one reply after the other."""
    said = iter(texts)
    chat = demo.chat

    def say(messages: object, **options: object) -> lily.Reply:
        text = lily.Grammar(json.dumps(next(said)).join(("start: ", "\n")))
        reply = chat(messages, thinking=False, **options)  # type: ignore[arg-type]
        from lily.grammar import compile_format

        reply._constraint = compile_format(text, demo.tokenizer)
        return reply

    monkeypatch.setattr(demo, "chat", say)


def test_functions_are_called_until_the_model_has_said_all(
    demo: lily.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[lily.ReplyPiece] = []
    scripted(demo, monkeypatch, CALL.format(DAYS.format(2)), CALL.format(DAYS.format(9)), "Sunny.")
    run = demo.run_tools(CHAT, [weather], on_piece=pieces.append)
    assert [m["role"] for m in run.messages] == [
        "user", "assistant", "tool", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert run.messages[2]["content"] == "Oslo: sunny"
    assert "too far ahead" in run.messages[4]["content"]
    assert run.messages[2]["tool_call_id"] == run.replies[0].tool_calls[0].id
    assert (str(run), run.result.finish_reason) == ("Sunny.", "stop")
    assert "".join(p.content for p in pieces) == "Sunny."
    demo.render_chat([*run.messages, {"role": "user", "content": "Thanks."}])


def test_the_rounds_are_bounded(demo: lily.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(demo, monkeypatch, *[CALL.format("")] * 2)
    run = demo.run_tools(CHAT, [weather], max_rounds=2)
    assert len(run.replies) == 2
    assert run.result.finish_reason == "tool_calls"
    assert run.messages[-1]["role"] == "assistant"


def test_a_coroutine_function_is_refused_before_a_reply(demo: lily.Model) -> None:
    async def weather(city: str) -> str:
        """The weather forecast."""
        return city

    with pytest.raises(ValueError, match="arun_tools"):
        demo.run_tools(CHAT, [weather])


def test_cancelling_the_task_cancels_the_function_it_waits_for(
    demo: lily.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    async def main() -> None:
        called = asyncio.Event()

        async def weather(city: str) -> str:
            """The weather forecast."""
            called.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(city)
            return city

        task = asyncio.create_task(demo.arun_tools(CHAT, [weather]))
        await called.wait()
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=30)
        assert done and task.cancelled()

    scripted(demo, monkeypatch, *[CALL.format("")] * 2)
    asyncio.run(main())
    assert ended == ["Oslo"]


def test_a_reply_that_was_left_behind_gives_its_session_back_at_once(demo: lily.Model) -> None:
    gc.collect()
    before = len(demo._sessions)
    gc.disable()
    try:
        demo.chat(CHAT)
        for _ in demo.chat(CHAT):
            break
        with pytest.raises(ValueError, match="format"):
            demo.chat(CHAT, format=lily.Regex("("))
        assert len(demo._sessions) == before
    finally:
        gc.enable()


def test_coroutine_functions_run_in_the_callers_loop(
    demo: lily.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops = []

    async def weather(city: str) -> dict[str, str]:
        """The weather forecast."""
        loops.append(asyncio.get_running_loop())
        return {"city": city}

    async def main() -> lily.ToolRun:
        loops.append(asyncio.get_running_loop())
        return await demo.arun_tools(CHAT, [weather])

    scripted(demo, monkeypatch, CALL.format(""), "Done.")
    run = asyncio.run(main())
    assert loops[0] is loops[1]
    assert json.loads(run.messages[2]["content"]) == {"city": "Oslo"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"thinking": -1}, "thinking: -1"),
        ({"thinking": 1.5}, "thinking: 1.5"),
        ({"temprature": 1}, "temprature"),
        ({"tools": [{"type": "retrieval"}]}, r"tools\[0\]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [weather], "tool_choice": "snow"}, "tool_choice"),
        ({"tools": [weather], "format": "json"}, "format"),
        ({"format": {"type": "nonsense"}}, "format"),
        ({"format": 3}, "format"),
        ({"format": {"const": math.nan}}, "format"),
        ({"format": DEEP}, "format"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"logprobs": 1.5}, "logprobs"),
        ({"format": {"$ref": "#"}}, "format"),
        ({"reuse": "some"}, "reuse"),
        ({"logprobs": 50}, "logprobs"),
    ],
)
def test_wrong_options_are_refused_by_name(
    demo: lily.Model, options: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        demo.chat(CHAT, **options)  # type: ignore[arg-type]


def test_another_models_session_is_refused(demo: lily.Model) -> None:
    with demo.without() as other, pytest.raises(ValueError, match="another model"):
        demo.chat(CHAT, session=other.session())


def test_messages_that_are_none_are_refused(demo: lily.Model) -> None:
    for messages in ([], "hi", [{"role": "user", "content": [{"type": "image_url"}]}]):
        with pytest.raises(ValueError, match="messages"):
            demo.chat(messages)  # type: ignore[arg-type]
