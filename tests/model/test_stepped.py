"""Streams in single steps: the same tokens as the pipelined loop, forced tokens, log probabilities,
masks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

import lily

PROMPT = list(range(40, 90))
GREEDY = lily.Sampling.greedy()
DRAWN = lily.Sampling(seed=11)
PENALISED = lily.Sampling(
    seed=5, top_k=40, presence_penalty=0.8, frequency_penalty=0.3, repetition_penalty=1.3
)
BIASED = lily.Sampling(seed=2, top_p=0.9, logit_bias={5: 4.0, 6: -100, 7: -1.5})


class Allowed:
    """A constraint that allows the same ids at any time, and ends after `most` tokens."""

    def __init__(self, ids: Collection[int], most: int = 1 << 30) -> None:
        self.ids = sorted(ids)
        self.most = most
        self.accepted: list[int] = []

    @property
    def finished(self) -> bool:
        return len(self.accepted) >= self.most

    def allowed(self) -> NDArray[np.uint32]:
        words = np.zeros(64, np.uint32)
        for id in self.ids:
            words[id // 32] |= np.uint32(1 << id % 32)
        return words

    def accept(self, token: int) -> None:
        if token not in self.ids:
            raise ValueError(f"token {token}: not allowed")
        self.accepted.append(token)


def start(model: lily.Model, sampling: lily.Sampling, n: int | None = 40, **options: object):  # type: ignore[no-untyped-def]
    session = model.session(context=120)
    session.prefill(PROMPT)
    return session.stream(n, sampling, stop_ids=(), **options)


def drawn(stream: lily.Stream) -> list[int]:
    pieces = list(stream)
    assert [p.token for p in pieces[:-1]] == stream.tokens
    assert pieces[-1].token is None
    return stream.tokens


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, PENALISED, BIASED])
@pytest.mark.parametrize("which", ["tiny", "tiny_fast"])
def test_single_steps_draw_what_the_pipeline_draws(
    which: str, sampling: lily.Sampling, request: pytest.FixtureRequest
) -> None:
    model: lily.Model = request.getfixturevalue(which)
    want = drawn(start(model, sampling))
    assert drawn(start(model, sampling, logprobs=0)) == want
    everything = Allowed(range(model.n_tokens))
    assert drawn(start(model, sampling, constraint=everything)) == want == everything.accepted


@pytest.mark.parametrize("options", [{}, {"logprobs": 2}])
def test_forced_tokens_are_as_if_drawn(tiny: lily.Model, options: dict[str, int]) -> None:
    """Forcing what would have been drawn changes nothing, penalties and random numbers included."""
    whole = start(tiny, PENALISED)
    want = drawn(whole)
    for at, n in ((0, 3), (1, 1), (7, 5), (38, 2)):
        stream = start(tiny, PENALISED, **options)
        pieces = list(itertools.islice(stream, at))
        stream.force(want[at : at + n])
        pieces += stream
        assert [p.token for p in pieces[:-1]] == stream.tokens == want
        assert stream._session.tokens == whole._session.tokens
        assert stream._session.pending == want[-1]
        if stream.logprobs is not None:
            assert [p.token for p in stream.logprobs] == want


def test_a_forced_token_changes_what_follows(tiny: lily.Model) -> None:
    stream = start(tiny, GREEDY)
    head = [p.token for p in itertools.islice(stream, 4)]
    stream.force([17, 3])
    rest = [p.token for p in stream][:-1]
    assert rest[:2] == [17, 3]
    session = tiny.session()
    session.prefill(PROMPT)
    for token in (*head, 17, 3):
        assert token is not None
        session.decode(token)
    assert rest[2:] == drawn(session.stream(len(rest) - 2, GREEDY, stop_ids=()))
    assert stream.finish_reason == "length"
    assert len(stream.tokens) == 40


def test_forced_text_obeys_stops_and_limits(tiny: lily.Model) -> None:
    session = tiny.session()
    session.prefill(PROMPT)
    stream = session.stream(100, GREEDY, stop="ZQ", stop_ids=[9])
    stream.force(tiny.encode("abZQx"))
    assert "".join(p.text for p in stream) == "ab"
    assert (stream.finish_reason, stream.stop) == ("stop", "ZQ")
    stream = session.stream(100, GREEDY, stop_ids=[9])
    stream.force([8, 9, 10])
    list(stream)
    assert (stream.finish_reason, stream.tokens, session.pending) == ("stop", [8, 9], 9)
    stream = session.stream(3, GREEDY, stop_ids=())
    stream.force([1, 2, 3, 4])
    assert drawn(stream) == [1, 2, 3]
    assert stream.finish_reason == "length"
    with pytest.raises(ValueError, match=r"tokens\[1\]: -1, expected an id"):
        stream.force([1, -1])


@pytest.mark.parametrize("stepped", [False, True])
def test_steps_use_the_context_to_its_last_position(tiny: lily.Model, stepped: bool) -> None:
    session = tiny.session(context=60)
    session.prefill(PROMPT)
    stream = session.stream(None, GREEDY, stop_ids=(), logprobs=0 if stepped else None)
    stream.force([4, 5])
    assert len(drawn(stream)) == 11
    assert (stream.finish_reason, session.position) == ("length", 60)


def test_only_what_a_constraint_allows_is_drawn(tiny: lily.Model) -> None:
    for sampling in (GREEDY, PENALISED, lily.Sampling(seed=1, temperature=5)):
        only = Allowed([3, 77, 200])
        tokens = drawn(start(tiny, sampling, constraint=only))
        assert set(tokens) <= {3, 77, 200}
        assert len(tokens) == 40
    assert drawn(start(tiny, DRAWN, constraint=Allowed([77]))) == [77] * 40


def test_a_constraint_may_start_late_and_end_the_text(tiny: lily.Model) -> None:
    want = drawn(start(tiny, DRAWN))
    stream = start(tiny, DRAWN)
    list(itertools.islice(stream, 10))
    stream.force(want[10:12])
    late = Allowed([3, 77], most=5)
    stream.constrain(late)
    list(stream)
    assert stream.tokens[:12] == want[:12]
    assert stream.tokens[12:] == late.accepted
    assert len(late.accepted) == 5
    assert stream.finish_reason == "stop"
    with pytest.raises(ValueError, match="token 4: not allowed"):
        start(tiny, DRAWN, constraint=Allowed([3])).force([4])


def test_nothing_allowed_is_an_error_and_the_session_lives(tiny: lily.Model) -> None:
    with pytest.raises(ValueError, match="constraint: allows no token"):
        start(tiny, DRAWN, constraint=Allowed([]))
    bans = dict.fromkeys(range(tiny.n_tokens), -math.inf)
    session = tiny.session()
    session.prefill(PROMPT)
    with pytest.raises(ValueError, match="bans all"):
        session.stream(5, lily.Sampling(logit_bias=bans))
    del bans[9]
    assert drawn(session.stream(3, lily.Sampling(logit_bias=bans), stop_ids=())) == [9] * 3
    with pytest.raises(ValueError, match=r"logit_bias: token 99999, expected below"):
        session.stream(3, lily.Sampling(logit_bias={99999: 1.0}))


def test_logprobs_are_the_log_softmax_of_the_logits(tiny: lily.Model) -> None:
    stream = start(tiny, PENALISED, 12, logprobs=5)
    pieces = list(stream)[:-1]
    session = tiny.session()
    logits = session.prefill(PROMPT)
    for piece, told in zip(pieces, stream.logprobs or (), strict=True):
        assert piece.logprob is told
        scores = logits.log_softmax()
        assert told.token == piece.token
        assert math.isclose(told.logprob, scores[told.token], abs_tol=1e-5)
        assert [id for id, _, _ in told.top] == [id for id, _ in logits.top(5)]
        assert np.allclose([p for _, _, p in told.top], [p for _, p in logits.top(5)], atol=1e-5)
        assert told.bytes == tiny.tokenizer.token_bytes(told.token)
        logits = session.decode(told.token)


def test_results_carry_logprobs_of_every_token(tiny: lily.Model) -> None:
    options = {"max_tokens": 9, "temperature": 0}
    result = tiny.generate(PROMPT, logprobs=0, **options).result()
    assert result.logprobs is not None
    assert tuple(p.token for p in result.logprobs) == result.tokens
    assert all(p.top == () and p.logprob <= 0 for p in result.logprobs)
    assert tiny.generate(PROMPT, **options).result().logprobs is None
    for wrong in (-1, 21):
        with pytest.raises(ValueError, match=f"logprobs: {wrong}, expected 0…20"):
            tiny.generate(PROMPT, logprobs=wrong)


def test_cancelling_ends_single_steps(tiny: lily.Model) -> None:
    stream = start(tiny, DRAWN, None, logprobs=0)
    list(itertools.islice(stream, 3))
    stream._session.cancel()
    assert [p.token for p in stream] == [None]
    assert (stream.finish_reason, len(stream.tokens)) == ("cancelled", 3)
    assert stream._session.pending == stream.tokens[-1]


@pytest.mark.parametrize("other", ["decode", "stream", "reset", "snapshot"])
def test_another_call_to_the_session_ends_single_steps(tiny: lily.Model, other: str) -> None:
    stream = start(tiny, DRAWN, None, logprobs=0)
    taken: Sequence[lily.Piece] = list(itertools.islice(stream, 2))
    stream.force([8])
    next(stream)
    session = stream._session
    again = None
    if other == "decode":
        session.decode(4)
    elif other == "stream":
        again = session.stream(4, GREEDY, stop_ids=())
    elif other == "reset":
        session.reset()
    else:
        session.snapshot()
    before = session.tokens, session.pending
    assert [p.token for p in stream] == [None]
    assert stream.finish_reason == "cancelled"
    assert (session.tokens, session.pending) == before
    assert len(taken) == 2
    if again is not None:
        assert len(drawn(again)) == 4
