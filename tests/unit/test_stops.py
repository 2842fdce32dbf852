"""Stop strings against the plain definition: first stop to be complete, longest of equals."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lily.stops import StopStrings


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What is shown of `text`, and the stop that ended it."""
    for end in range(1, len(text) + 1):
        if done := [stop for stop in stops if text[:end].endswith(stop)]:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


def feed(stops: StopStrings, pieces: list[str]) -> list[str]:
    return [stops.push(piece) for piece in pieces] + [stops.finish()]


@given(
    st.lists(st.text("ab#", max_size=6), max_size=12),
    st.lists(st.text("ab#", min_size=1, max_size=6), max_size=4),
)
def test_equals_the_definition_however_the_text_is_split(
    pieces: list[str], stops: list[str]
) -> None:
    stream = StopStrings(stops)
    assert ("".join(feed(stream, pieces)), stream.matched) == cut("".join(pieces), stops)


@given(st.text("ab#", max_size=20), st.lists(st.text("ab#", min_size=1, max_size=6), max_size=4))
def test_holds_back_only_what_may_become_a_stop(text: str, stops: list[str]) -> None:
    stream = StopStrings(stops)
    shown = ""
    for end, char in enumerate(text, start=1):
        shown += stream.push(char)
        if stream.matched is None:
            held = text[len(shown) : end]
            assert not held or any(stop.startswith(held) for stop in stops)


def test_stop_spanning_pieces_is_never_partly_shown() -> None:
    stream = StopStrings(["###END"])
    assert feed(stream, ["one #", "##", "EN", "D two"]) == ["one ", "", "", "", ""]
    assert stream.matched == "###END"


def test_half_a_stop_at_the_end_is_delivered() -> None:
    stream = StopStrings("###END")
    assert feed(stream, ["one ##", "#E"]) == ["one ", "", "###E"]
    assert stream.matched is None


@pytest.mark.parametrize("stops", [["END", "END OF"], ["END OF", "END"]])
def test_a_stop_that_begins_another_wins(stops: list[str]) -> None:
    stream = StopStrings(stops)
    assert "".join(feed(stream, ["the END OF it"])) == "the "
    assert stream.matched == "END"


def test_of_stops_that_end_together_the_longest_wins() -> None:
    stream = StopStrings(["END", "###END"])
    assert "".join(feed(stream, ["a ###END"])) == "a "
    assert stream.matched == "###END"


def test_text_after_a_stop_is_dropped() -> None:
    stream = StopStrings(["."])
    assert feed(stream, ["a.b", "c"]) == ["a", "", ""]


def test_one_string_is_one_stop() -> None:
    assert "".join(feed(StopStrings("ab"), ["ba ab"])) == "ba "


@pytest.mark.parametrize("stops", [[""], ["a", ""], "", [None]])
def test_refuses_an_empty_stop(stops: list[str]) -> None:
    with pytest.raises(ValueError, match=r"stop\[\d\]"):
        StopStrings(stops)


def test_long_repetitive_stops_take_linear_time() -> None:
    stream = StopStrings(["a" * n + "b" for n in range(100, 1000, 100)])
    start = time.process_time()
    for _ in range(20_000):
        stream.push("aaaaa")
    assert time.process_time() - start < 5  # about 0.1 s; a quadratic search takes minutes
