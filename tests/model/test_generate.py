"""Streams, generations, cancelling, sampling: what a caller sees."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import lily

GREEDY = lily.Sampling.greedy()
PROMPT = list(range(40, 90))


def greedy_by_hand(model: lily.Model, prompt: list[int], n: int) -> list[int]:
    """Argmax over the real tokens, one decode call at a time."""
    session = model.session()
    scores = session.prefill(prompt)
    tokens = []
    for _ in range(n):
        tokens.append(int(np.asarray(scores)[: model.tokenizer.n_tokens].argmax()))
        scores = session.decode(tokens[-1])
    return tokens


@pytest.mark.parametrize("n_prompt", [1, 5, 120, 127, 128, 129, 300])
def test_the_pipelined_loop_equals_single_steps(tiny: lily.Model, n_prompt: int) -> None:
    prompt = np.random.default_rng(n_prompt).integers(0, 280, n_prompt).tolist()
    stream = tiny.session()
    stream.prefill(prompt)
    drawn = stream.stream(24, GREEDY, stop_ids=())
    assert [p.token for p in drawn if p.token is not None] == greedy_by_hand(tiny, prompt, 24)


def test_padding_rows_are_never_drawn(tiny: lily.Model) -> None:
    n = tiny.tokenizer.n_tokens
    for sampling in (GREEDY, lily.Sampling(temperature=5.0, seed=1), lily.Sampling(seed=2)):
        result = tiny.generate(PROMPT, max_tokens=200, sampling=sampling).result()
        assert max(result.tokens) < n


def test_generation_is_repeatable_and_seeds_matter(tiny: lily.Model) -> None:
    def run(**options: object) -> tuple[int, ...]:
        return tiny.generate(PROMPT, max_tokens=30, **options).result().tokens

    assert run(temperature=0) == run(temperature=0)
    assert run(seed=1) == run(seed=1)
    assert run(seed=1) != run(seed=2)
    assert run() != run()


def test_result_counts_and_reasons(tiny: lily.Model) -> None:
    result = tiny.generate(PROMPT, max_tokens=7, temperature=0).result()
    assert (result.finish_reason, len(result.tokens)) == ("length", 7)
    assert (result.usage.prompt, result.usage.reused, result.usage.generated) == (50, 0, 7)
    assert result.timings.first_token_s > 0
    assert result.timings.decode_tok_s > 0
    joined = "".join(p.text for p in tiny.generate(PROMPT, max_tokens=7, temperature=0))
    assert joined == result.text == tiny.decode(result.tokens, skip_special=True)


def test_a_natural_end_is_a_stop_and_not_a_length(tiny: lily.Model) -> None:
    tokens = tiny.generate(PROMPT, max_tokens=12, temperature=0).result().tokens
    session = tiny.session()
    session.prefill(PROMPT)
    stream = session.stream(100, GREEDY, stop_ids=[tokens[5]])
    pieces = list(stream)
    first = tokens.index(tokens[5])
    assert stream.finish_reason == "stop"
    assert stream.tokens == list(tokens[: first + 1])
    assert [p.token for p in pieces][-1] is None
    assert session.position == len(PROMPT) + first
    assert session.pending == tokens[5]


def test_context_is_used_to_the_last_position(tiny: lily.Model) -> None:
    with tiny.session(context=60) as session:
        session.prefill(PROMPT)
        stream = session.stream(None, GREEDY, stop_ids=())
        list(stream)
        assert stream.finish_reason == "length"
        assert session.position == 60
        assert len(stream.tokens) == 11  # the last one is drawn and not consumed


def test_stop_strings_are_cut_exactly(tiny: lily.Model) -> None:
    text = tiny.generate(PROMPT, max_tokens=40, temperature=0).text()
    stop = text[10:14]
    generation = tiny.generate(PROMPT, max_tokens=40, temperature=0, stop=stop)
    pieces = [p.text for p in generation]
    result = generation.result()
    assert result.text == "".join(pieces) == text[: text.index(stop)]
    assert (result.finish_reason, result.stop) == ("stop", stop)


def test_leaving_the_loop_keeps_the_session_exact(tiny: lily.Model) -> None:
    session = tiny.session()
    session.prefill(PROMPT)
    want = session.stream(30, GREEDY, stop_ids=())
    list(want)
    for cut in (1, 2, 9, 29):
        session.reset()
        session.prefill(PROMPT)
        first = list(itertools.islice(session.stream(100, GREEDY, stop_ids=()), cut))
        rest = session.stream(30 - cut, GREEDY, stop_ids=())
        list(rest)
        assert [p.token for p in first] + rest.tokens == want.tokens


def test_a_sampled_stream_continues_with_the_same_numbers(tiny: lily.Model) -> None:
    """The random counter is the position: a cut stream draws what the whole one did."""
    sampling = lily.Sampling(seed=9, presence_penalty=0.7, repetition_penalty=1.2)
    session = tiny.session()
    session.prefill(PROMPT)
    whole = session.stream(30, sampling, stop_ids=())
    list(whole)
    session.reset()
    session.prefill(PROMPT)
    first = list(itertools.islice(session.stream(100, sampling, stop_ids=()), 11))
    rest = session.stream(19, sampling, stop_ids=())
    list(rest)
    assert [p.token for p in first] + rest.tokens == whole.tokens


def test_penalties_and_bias_have_an_effect(tiny: lily.Model) -> None:
    plain = tiny.generate(PROMPT, max_tokens=60, temperature=0).result().tokens
    banned = plain[0]
    without = tiny.generate(PROMPT, max_tokens=60, temperature=0, logit_bias={banned: -100})
    assert banned not in without.result().tokens
    wanted = tiny.generate(PROMPT, max_tokens=5, temperature=0, logit_bias={77: 1000.0}).result()
    assert wanted.tokens == (77,) * 5
    strong = tiny.generate(PROMPT, max_tokens=60, temperature=0, presence_penalty=1000.0).result()
    assert len(set(strong.tokens)) == len(strong.tokens)
    repeated = tiny.generate(
        PROMPT, max_tokens=5, temperature=0, logit_bias={77: 1000.0}, frequency_penalty=600.0
    )
    assert repeated.result().tokens[:3].count(77) == 2


@pytest.mark.parametrize("options", [{"temperature": 0, "top_p": 0.3}, {"top_p": 0}, {"top_k": 1}])
def test_edge_values_are_greedy(tiny: lily.Model, options: dict[str, float]) -> None:
    want = tiny.generate(PROMPT, max_tokens=20, temperature=0).result().tokens
    assert tiny.generate(PROMPT, max_tokens=20, **options).result().tokens == want


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1}, {"top_p": 1.5}, {"min_p": float("nan")}, {"temprature": 1}, {"seed": -1}],
)
def test_bad_options_are_named(tiny: lily.Model, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        tiny.generate(PROMPT, **options)


def test_cancel_from_another_thread(tiny: lily.Model) -> None:
    session = tiny.session()
    session.prefill(PROMPT)
    stream = session.stream(None, GREEDY, stop_ids=())
    threading.Timer(0.05, session.cancel).start()
    pieces = list(stream)
    assert stream.finish_reason == "cancelled"
    assert session.position == len(PROMPT) + len(stream.tokens) - 1
    assert pieces[-1].token is None


def test_cancel_in_prefill_keeps_whole_chunks(tiny: lily.Model) -> None:
    session = tiny.session()

    def stop(done: int, total: int) -> None:
        if done >= 64:
            session.cancel()

    with pytest.raises(lily.Cancelled):
        session.prefill(PROMPT * 6, progress=stop)
    assert session.position % 32 == 0
    assert 64 <= session.position < 300
    assert session.logits is None
    session.prefill((PROMPT * 6)[session.position :])
    want = tiny.session().prefill(PROMPT * 6)
    assert np.array_equal(np.asarray(session.logits), np.asarray(want))


def test_an_exception_from_progress_passes_through(tiny: lily.Model) -> None:
    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Stop

    session = tiny.session()
    with pytest.raises(Stop):
        session.prefill(PROMPT * 2, progress=stop)
    assert session.position == 32


def test_reuse_in_a_chat(tiny: lily.Model) -> None:
    session = tiny.session()
    messages = [{"role": "user", "content": "hello there, who are you?"}]
    first = session.generate(messages, max_tokens=8, temperature=0).result()
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "and what can you do?"},
    ]
    warm = session.generate(messages, max_tokens=8, temperature=0).result()
    assert warm.usage.reused > 0
    cold = tiny.generate(messages, max_tokens=8, temperature=0).result()
    assert cold.usage.reused == 0
    assert warm.tokens == cold.tokens


def test_going_on_where_a_reply_was_cut_computes_no_token_twice(tiny: lily.Model) -> None:
    """A pending token inside the reused part was consumed twice."""
    session = tiny.session()
    first = session.generate(PROMPT, max_tokens=8, temperature=0).result()
    longer = [*PROMPT, *first.tokens, 5, 6, 7]
    warm = session.generate(longer, max_tokens=8, temperature=0).result()
    assert warm.usage.reused == len(PROMPT) + 7
    assert session.tokens[: len(longer)] == longer
    assert warm.tokens == tiny.generate(longer, max_tokens=8, temperature=0).result().tokens


def test_an_old_stream_does_not_disturb_a_new_one(tiny: lily.Model) -> None:
    session = tiny.session()
    session.prefill(PROMPT)
    old = session.stream(100, GREEDY, stop_ids=())
    next(old)
    new = session.stream(5, GREEDY, stop_ids=())
    assert next(old).token is None
    assert old.finish_reason == "cancelled"
    del old
    assert len([p for p in new if p.token is not None]) == 5
    session.prefill([1, 2, 3])
    late = session.stream(100, GREEDY, stop_ids=())
    next(late)
    session.prefill([4])
    next(late)
    assert late.finish_reason == "cancelled"


def test_a_refused_stream_ends_no_other(tiny: lily.Model) -> None:
    session = tiny.session()
    session.prefill(PROMPT)
    with pytest.raises(ValueError, match="expected below") as refused:
        session.stream(4, lily.Sampling(logit_bias={10**6: 1.0}))
    stream = session.stream(4, GREEDY, stop_ids=())
    next(stream)
    del refused  # and with it what was left of the refused stream
    gc.collect()
    assert sum(p.token is not None for p in stream) == 3
    assert stream.finish_reason == "length"


def test_progress_counts_the_whole_prompt(tiny: lily.Model) -> None:
    seen: list[tuple[int, int]] = []
    session = tiny.session()
    session.prefill(PROMPT)
    longer = [*PROMPT, *PROMPT]
    session.generate(longer, max_tokens=1, progress=lambda *a: seen.append(a)).result()
    assert seen == [(82, 100), (100, 100)]


def test_wrong_calls_are_refused_and_change_nothing(tiny: lily.Model) -> None:
    session = tiny.session(context=64)
    session.prefill(PROMPT)
    before = np.asarray(session.logits)
    with pytest.raises(lily.ContextError, match="50 \\+ 20 tokens, expected at most 64"):
        session.prefill(list(range(20)))
    for tokens in ([], [512], [-1], [2**40], [[1, 2]], ["a"], [1.5]):
        with pytest.raises(ValueError, match="token"):
            session.prefill(tokens)
    for prompt in ([1.5], [True], b"ab", None, {"role": "user"}):
        with pytest.raises(ValueError, match="token"):
            tiny.generate(prompt)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_tokens"):
        session.stream(0)
    with pytest.raises(ValueError, match="context"):
        session.fork(0)
    with pytest.raises(lily.ContextError, match="prompt: 65 tokens"):
        session.generate([1] * 65)
    with pytest.raises(ValueError, match="prompt"):
        tiny.generate("")
    with pytest.raises(ValueError, match="logits"):
        tiny.session().stream(5)
    assert session.position == 50
    assert np.array_equal(np.asarray(session.logits), before)


def test_threads_share_a_model(tiny: lily.Model) -> None:
    prompts = [PROMPT[i:] for i in range(8)]
    want = [tiny.generate(p, max_tokens=12, temperature=0).result().tokens for p in prompts]
    got: list[object] = [None] * 8

    def work(i: int) -> None:
        got[i] = tiny.generate(prompts[i], max_tokens=12, temperature=0).result().tokens

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == want


def test_a_reply_is_done_beside_a_prompt_that_is_not(tiny: lily.Model) -> None:
    """A prompt gives the device away between its chunks."""
    begun, done = threading.Event(), threading.Event()
    waited = []

    def between_chunks(computed: int, total: int) -> None:
        begun.set()
        if computed < total and not waited:
            waited.append(done.wait(60))

    def reply() -> None:
        begun.wait(60)
        tiny.generate(PROMPT, max_tokens=5, temperature=0).result()
        done.set()

    other = threading.Thread(target=reply, daemon=True)
    other.start()
    tiny.session().prefill(PROMPT * 10, progress=between_chunks)
    other.join()
    assert waited == [True]


def test_the_interpreter_lock_is_free_in_prefill(tiny: lily.Model) -> None:
    ticks = 0
    done = False

    def tick() -> None:
        nonlocal ticks
        while not done:
            ticks += 1
            time.sleep(0.001)

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    tiny.session().prefill(PROMPT * 40)
    done = True
    ticker.join()
    assert ticks > 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_to_spawn(tiny: lily.Model) -> None:
    """The device's threads do not exist in the child: a call would hang."""
    session = tiny.session()
    session.prefill(PROMPT)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            session.prefill([1])
        except lily.DeviceError as error:
            code = 0 if "spawn" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    session.prefill([1])


def test_closing(checkpoint) -> None:
    model = lily.Model.load(checkpoint("tiny"))
    session = model.session()
    model.close()
    model.close()
    for call in (lambda: session.prefill([1]), model.session, lambda: model.generate([1])):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_a_second_thread_is_refused_and_changes_nothing(tiny: lily.Model) -> None:
    session = tiny.session()
    refused: list[str] = []

    def intrude() -> None:
        calls: list[Callable[[], object]] = [
            lambda: session.prefill([1]),
            lambda: session.decode(1),
            session.snapshot,
            session.reset,
            session.discard_pending,
            lambda: session.tokens,
            lambda: session.logits,
        ]
        for call in calls:
            with pytest.raises(ValueError, match="another thread") as error:
                call()
            refused.append(str(error.value))

    def progress(done: int, total: int) -> None:
        if not refused:
            thread = threading.Thread(target=intrude)
            thread.start()
            thread.join()

    prompt = (PROMPT * 10)[:400]
    logits = np.asarray(session.prefill(prompt, progress=progress))
    assert len(refused) == 7
    assert session.tokens == prompt
    assert np.array_equal(logits, np.asarray(tiny.session().prefill(prompt)))
