"""Warm equals cold, whatever was computed before and in whatever order.

LILY_TALKS sets how many random conversations are held.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lily
from lily.reuse import take_up

ROUNDS = int(os.environ.get("LILY_TALKS", "20"))
CHECKPOINT = Path(__file__).resolve().parents[2] / "examples" / "demo_model" / "checkpoint"
SYSTEM = {"role": "system", "content": "You are the keeper of an old house and speak of it."}
SAID = [
    "Who was standing at the door?",
    "The Count opened the letter.",
    "Why?",
    "It was late in the evening when the carriage came, and nobody had lit the lamps.",
    "Tell me what the old man did with the key after the lady had gone up the stairs.",
]
Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def demo() -> Iterator[lily.Model]:
    with lily.Model.load(CHECKPOINT, precision="float32") as model:
        yield model


@pytest.fixture
def tiny(checkpoint: Callable[..., Path]) -> Iterator[lily.Model]:
    with lily.Model.load(checkpoint("tiny"), precision="float32", chunk=32) as model:
        yield model


def run(model: lily.Model, prompt: Any, n: int = 8, **options: Any) -> lily.Result:
    return model.generate(prompt, max_tokens=n, temperature=0, **options).result()


def ids(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 250, n).tolist()


def lamp(on: bool) -> str:
    """Switch the lamp."""
    return "done"


CALLED: Messages = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "lamp", "arguments": '{"on": true}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "It is light."},
]


class Talk:
    """A conversation held by chance: new turns, edits, forks, rewinds, tools, other modes in
    between, with thinking and without."""

    def __init__(self, model: lily.Model, seed: int) -> None:
        self.model = model
        self.random = random.Random(seed)
        self.messages: Messages = [SYSTEM] if self.random.random() < 0.7 else []
        self.session: lily.Session | None = None

    def say(self) -> None:
        self.messages.append({"role": "user", "content": self.random.choice(SAID)})

    def step(self) -> lily.Usage:
        chance = self.random.random
        if len(self.messages) > 3 and chance() < 0.3:  # go back to an earlier turn and say other
            users = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
            del self.messages[self.random.choice(users) :]
        if self.session is None and chance() < 0.4:
            self.session = self.model.session()
        elif self.session is not None and chance() < 0.2:
            self.session = None
        if self.session is not None and chance() < 0.3:
            self.session = self.session.fork()
        if self.session is not None and chance() < 0.3:
            self.session.rewind(self.random.randrange(self.session.position + 1))
        self.say()
        options: dict[str, Any] = {"thinking": chance() < 0.5, "max_tokens": 1 + int(12 * chance())}
        if chance() < 0.4:
            options["tools"] = [lamp]
            self.messages += CALLED if chance() < 0.5 else []
        if chance() < 0.3:  # states that decode steps made are about, and must not be used
            self.reply(reuse="any", **options)
        warm = self.reply(reuse="exact", **options)
        cold = self.model.chat(self.messages, temperature=0, reuse="off", **options).result()
        assert warm.tokens == cold.tokens, (self.messages, options, warm.usage)
        assert warm.usage.reused < warm.usage.prompt
        self.messages.append(warm.message())
        return warm.usage

    def reply(self, **options: Any) -> lily.ReplyResult:
        reply = self.model.chat(self.messages, session=self.session, temperature=0, **options)
        return reply.result()


def test_exact_reuse_never_changes_a_token(demo: lily.Model) -> None:
    reused = 0
    for seed in range(ROUNDS):
        talk = Talk(demo, seed)
        for _ in range(talk.random.randint(2, 5)):
            reused += talk.step().reused
    assert reused > 20 * ROUNDS


@pytest.mark.parametrize("more", [1, 17])
@pytest.mark.parametrize("stored", [31, 32, 33, 35, 63, 64, 65, 67, 127, 128, 129, 131])
def test_stored_prefixes_go_on_bit_for_bit(tiny: lily.Model, stored: int, more: int) -> None:
    """Lengths around multiples of a chunk (32), of the delta scan's and of attention's blocks."""
    prompt = ids(stored + more)
    run(tiny, prompt[: stored + 1])  # keeps the state before its last token
    session = tiny.session()
    reused, _ = take_up(session, prompt, "exact")
    assert reused == (stored if more > 1 or stored + 1 == len(prompt) else 0)
    warm = session.prefill(prompt[reused:])
    cold_session = tiny.session()
    cold = cold_session.prefill(prompt)
    assert np.isfinite(np.asarray(cold)).all()
    assert np.array_equal(np.asarray(warm), np.asarray(cold))
    layers = tiny.info.config.layer_types.count("linear_attention")
    for layer in range(layers):
        assert np.array_equal(session._live().state(layer), cold_session._live().state(layer))
    assert run(tiny, prompt, reuse="exact").tokens == run(tiny, prompt, reuse="off").tokens


def test_nothing_of_another_prompt_is_reachable(tiny: lily.Model) -> None:
    run(tiny, ids(60, seed=1), 20)
    other = ids(60, seed=2)
    session = tiny.session()
    assert take_up(session, other, "any") == (0, "nothing stored begins this prompt")
    warm = np.asarray(session.prefill(other))
    assert np.array_equal(warm, np.asarray(tiny.session().prefill(other)))


def test_two_questions_after_one_system_prompt(demo: lily.Model) -> None:
    system = {"role": "system", "content": " ".join(SAID * 4)}
    first, second = ([system, {"role": "user", "content": text}] for text in SAID[:2])
    with lily.Model.load(CHECKPOINT, precision="float32") as model:
        assert run(model, first, reuse="exact").usage.reused == 0
        warm = run(model, second, reuse="exact")
        assert model._turn_starts(model.encode_chat(second))[1] == warm.usage.reused > 200
        assert "no stored state" in warm.usage.reuse_note
    assert warm.tokens == run(demo, second, reuse="off").tokens


@pytest.mark.parametrize("thinking", [True, False])
def test_a_reply_is_reused_at_least_up_to_its_question(demo: lily.Model, thinking: bool) -> None:
    """The template drops what was thought, so the next prompt leaves the text where it began."""
    talk: Messages = [{"role": "user", "content": "What did he find under the floor?"}]
    first = run(demo, talk, 20, thinking=thinking)
    start = demo._turn_starts(demo.encode_chat(talk, thinking=thinking))[-1]
    talk += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And then?"},
    ]
    assert run(demo, talk, thinking=thinking).usage.reused >= start > 0


def test_only_the_tail_of_a_long_prompt_is_computed_again(
    tiny: lily.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lily.store.INTERVAL", 64)
    prompt = ids(1000)
    run(tiny, prompt, 1)
    for cut in (990, 700, 130):
        changed = prompt[:cut] + ids(1000 - cut, seed=3)
        warm = run(tiny, changed, reuse="exact")
        assert cut - 64 <= warm.usage.reused <= cut
        assert warm.tokens == run(tiny, changed, reuse="off").tokens


def test_modes_say_what_they_leave_out(tiny: lily.Model) -> None:
    prompt = ids(40)
    first = run(tiny, prompt, 10)
    assert (first.usage.reused, first.usage.reuse_note) == (0, "nothing stored begins this prompt")
    longer = prompt + list(first.tokens) + [5, 6]
    exact = run(tiny, longer, 1, reuse="exact").usage
    assert exact.reused == 39
    assert exact.reuse_note == "exact: a state after 49 tokens has decode steps in it"
    assert run(tiny, longer, 1, reuse="off").usage.reuse_note == "reuse is off"
    every = run(tiny, longer[:51], 1, reuse="any").usage
    assert every.reused == 49
    again = run(tiny, prompt, 1).usage
    assert (again.reused, again.reuse_note) == (39, "")


def test_a_session_holds_whether_prefill_alone_made_its_state(tiny: lily.Model) -> None:
    session = tiny.session()
    assert session.exact
    session.prefill(ids(40))
    kept = session.snapshot()
    assert session.exact
    assert kept.exact
    session.decode(3)
    assert not session.exact
    session.prefill(ids(20))
    assert not session.exact
    session.restore(kept)
    assert session.exact
    session.score(ids(20))
    assert session.exact
    list(session.stream(1, stop_ids=()))
    assert session.exact  # what was drawn is not consumed yet
    list(session.stream(2, stop_ids=()))
    assert not session.exact
    session.reset()
    assert session.exact


@pytest.mark.parametrize("value", ["warm", "", "Any", None])
def test_a_mode_that_is_none_is_refused(tiny: lily.Model, value: Any) -> None:
    with pytest.raises(ValueError, match="reuse: found .*, expected"):
        tiny.generate(ids(5), reuse=value)
    with pytest.raises(ValueError, match="reuse: found .*, expected"):
        tiny.session().generate(ids(5), reuse=value)


def test_streamed_and_buffered_replies_report_the_same_reuse(tiny: lily.Model) -> None:
    prompt = ids(50)
    run(tiny, prompt)
    counts = []
    for streamed in (True, False, True):
        generation = tiny.generate(prompt, max_tokens=4, temperature=0)
        if streamed:
            for _ in generation:
                pass
        counts.append(generation.result().usage.reused)
    assert counts == [49, 49, 49]


def test_without_memory_for_it_a_session_still_reuses_its_own(
    checkpoint: Callable[..., Path],
) -> None:
    with lily.Model.load(checkpoint("tiny"), precision="float32", reuse_memory=0) as model:
        prompt = ids(40)
        assert run(model, prompt).usage.reuse_note == "reuse_memory is 0"
        assert run(model, prompt).usage.reused == 0
        session = model.session()
        first = run(model, prompt, session=session)
        longer = prompt + list(first.tokens) + [5]
        assert run(model, longer, session=session).usage.reused == 47
        assert model.reuse_stats().entries == 0
    with pytest.raises(ValueError, match="reuse_memory: -1, expected at least 0"):
        lily.Model.load(checkpoint("tiny"), reuse_memory=-1)


def test_many_short_prompts_level_off_at_the_budget(checkpoint: Callable[..., Path]) -> None:
    budget = 3_000_000
    with lily.Model.load(checkpoint("tiny"), chunk=32, reuse_memory=budget) as model:
        levels = []
        for seed in range(200):
            run(model, ids(20, seed=seed + 1000), 1)
            levels.append(model.reuse_stats())
        assert all(s.bytes <= budget for s in levels)
        assert levels[-1].evictions > 0
        assert levels[-1].bytes > budget / 2
        assert levels[100].entries == pytest.approx(levels[-1].entries, abs=2)
        kept = [entry.snapshot for entry in model._store._entries.values()]
        assert all(s.kv_bytes <= 2 * s.kv_bytes_trimmed for s in kept), "no idle memory is kept"
        last, owners = kept[-1], [s.kv_owners for s in kept]
        assert owners[-1] == 2, "its last token's state and its reply's share their memory"
    del kept
    assert last.kv_owners == 1, "closing gives the memory back"
    assert model.reuse_stats().bytes == 0


def test_turns_of_one_conversation_share_their_memory(tiny: lily.Model) -> None:
    """Each turn that left the text of the last reply kept a copy of the whole KV cache alive."""
    prompt, points = ids(100), []
    for turn in range(6):
        run(tiny, prompt, 4, reuse="exact")
        points.append(len(prompt) - 1)
        prompt = prompt[:-1] + ids(50, seed=turn)
    kept = [e.snapshot for e in tiny._store._entries.values() if e.position in points]
    assert len(kept) == 6
    assert len({s.kv_identity for s in kept}) == 1


def test_rewind_reaches_what_the_model_keeps(tiny: lily.Model) -> None:
    prompt = ids(60)
    run(tiny, prompt)
    session = tiny.session()
    session.prefill(prompt + ids(10, seed=4))
    assert session.rewind(65) == 59
    assert session.pending is None
    session.prefill(prompt[59:])
    cold = tiny.session()
    assert np.array_equal(np.asarray(session.logits), np.asarray(cold.prefill(prompt)))


def test_reset_forgets_all_but_what_the_model_keeps(tiny: lily.Model) -> None:
    session = tiny.session()
    run(tiny, ids(60), 20, session=session)
    session.reset()
    assert (session.position, session.pending, session.exact) == (0, None, True)
    other = ids(40, seed=5)
    warm = np.asarray(session.prefill(other))
    assert np.array_equal(warm, np.asarray(tiny.session().prefill(other)))


def test_a_reply_that_was_left_early_harms_nothing(tiny: lily.Model) -> None:
    prompt = ids(70)
    for left_after in (0, 1, 5):
        generation = tiny.generate(prompt, temperature=0)
        for n, _ in enumerate(generation):
            if n == left_after:
                break
        generation.close()
    warm = run(tiny, prompt, reuse="exact")
    assert warm.usage.reused == 69
    assert warm.tokens == run(tiny, prompt, reuse="off").tokens


@pytest.mark.parametrize("budget", [None, 400_000])
def test_generations_at_once_do_not_disturb_each_other(
    checkpoint: Callable[..., Path], budget: int | None
) -> None:
    """All go on from the same stored state, whose KV rows only one of them may extend in place."""
    with lily.Model.load(
        checkpoint("tiny"), precision="float32", chunk=32, reuse_memory=budget
    ) as model:
        common = ids(90)
        prompts = [common + ids(30, seed=10 + i) for i in range(4)]
        cold = [run(model, p, 20, reuse="off").tokens for p in prompts]
        run(model, common)
        wrong: list[Any] = []

        def work(i: int) -> None:
            for _ in range(8):
                result = run(model, prompts[i], 20, reuse="exact")
                if result.tokens != cold[i]:
                    wrong.append((i, result.usage))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        if budget is None:
            assert model.reuse_stats().hits > 20
