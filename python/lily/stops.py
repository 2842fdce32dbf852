"""Stop strings: cut a stream of text exactly before the first stop, however it was split."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


class StopStrings:
    """Passes text through until one of the stop strings has appeared.

    The first stop to be *complete* wins, since that is the moment at which generating ends; of
    several that end at the same character the longest wins, so no part of a completed stop is ever
    let through. Which stop matches, and where, does not depend on how the text was cut into pieces.

    Text is held back only while it could still become a stop, and never longer than that. The
    stops form one automaton (Aho and Corasick, 1975), so a character costs constant time on
    average, whatever the number and length of the stops.

    Args:
        stops: the stop strings; one string means one stop. None at all: everything passes.

    Raises:
        ValueError: a stop is empty, or not a string.
    """

    def __init__(self, stops: str | Sequence[str] = ()) -> None:
        # State n is a prefix of some stop. _next[n]: its extensions; _depth[n]: its length;
        # _match[n]: the longest stop that is a suffix of it; _fail[n]: its longest proper suffix
        # that is a state as well.
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        if not isinstance(stops, Iterable):
            raise ValueError(f"stop: {stops!r}, expected a string or a list of strings")
        for index, stop in enumerate([stops] if isinstance(stops, str) else stops):
            if not isinstance(stop, str) or not stop:
                raise ValueError(f"stop[{index}]: {stop!r}, expected a string that is not empty")
            self._add(stop)
        self._fail = self._failures()
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop that ended the text, or None so far."""
        return self._matched

    def push(self, piece: str) -> str:
        """Take the next piece of text and return what may be shown by now.

        Once a stop has matched, the text is over: all later pieces give an empty string.
        """
        if self._matched is not None:
            return ""
        text = self._held + piece
        state = self._state
        for end, char in enumerate(piece, start=len(self._held) + 1):
            while state and char not in self._next[state]:
                state = self._fail[state]
            state = self._next[state].get(char, 0)
            if (stop := self._match[state]) is not None:
                self._matched, self._held = stop, ""
                return text[: end - len(stop)]
        self._state = state
        shown = len(text) - self._depth[state]
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """End the text and return what was held back: half a stop is no stop."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = self._next[state][char]
        self._match[state] = stop

    def _failures(self) -> list[int]:
        fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:  # breadth first: a state's suffixes are shorter, hence done
            state = queue.popleft()
            for char, child in self._next[state].items():
                suffix = fail[state]
                while suffix and char not in self._next[suffix]:
                    suffix = fail[suffix]
                fail[child] = self._next[suffix].get(char, 0)
                if self._match[child] is None:
                    self._match[child] = self._match[fail[child]]
                queue.append(child)
        return fail
