"""Recent snapshots of a model's sessions, within a budget of memory."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

from lily import _core
from lily.errors import DeviceError
from lily.html import table_html

INTERVAL: Final = 2048
"""Tokens between the snapshots of a long prompt."""

_ID_BYTES: Final = 4

Key = tuple[int, bytes]  # tokens, their hash


@dataclass(frozen=True, slots=True)
class ReuseStats:
    """What a model keeps of earlier prompts, and what that was good for.

    Attributes:
        entries: snapshots that are kept.
        bytes: their memory. KV memory that several share counts once; while a session uses it,
            it is the session's.
        budget: most bytes that may be kept.
        hits, misses: prompts that began with a snapshot's text, and those that did not.
        reused_tokens: tokens that need not be computed again, over all hits.
        evictions: snapshots that made room for others.
    """

    entries: int
    bytes: int
    budget: int
    hits: int
    misses: int
    reused_tokens: int
    evictions: int

    def __repr__(self) -> str:
        return (
            f"ReuseStats({self.entries} snapshots, {self.bytes / 1e6:.1f} of"
            f" {self.budget / 1e6:.1f} MB, {self.hits} hits, {self.misses} misses,"
            f" {self.reused_tokens:,} tokens reused, {self.evictions} evictions)"
        )

    def _repr_html_(self) -> str:
        return table_html(
            [
                ("kept", f"{self.entries} snapshots, {self.evictions} have made room"),
                ("memory", f"{self.bytes / 1e6:.1f} of {self.budget / 1e6:.1f} MB"),
                ("prompts that could go on", f"{self.hits} of {self.hits + self.misses}"),
                ("tokens not computed again", f"{self.reused_tokens:,}"),
            ]
        )


class _Entry(NamedTuple):
    snapshot: _core.Snapshot
    position: int
    exact: bool
    bytes: int
    memory: int  # names the KV memory


class _Memory:
    """KV memory that the entries of one history share."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = nbytes
        self.keys: set[Key] = set()


class SnapshotStore:
    """Snapshots by the tokens that they have consumed. Any thread may use it.

    A snapshot owns its recurrent state. KV memory is shared with whoever has the same history: it
    counts whole, once, as soon as nobody outside uses it. What was not used for longest goes first.

    Args:
        budget: most bytes to keep; 0 keeps nothing.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()  # the least recently used first
        self._memories: dict[int, _Memory] = {}
        self._lengths: dict[int, int] = {}  # position → entries
        self._fresh: set[int] = set()  # memories that entries have joined since settle()
        self._own_bytes = 0  # of all but KV memory
        self._hits = self._misses = self._reused = self._evictions = 0
        self._lock = threading.RLock()
        self._busy = False

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Hold the lock; False inside a call of the same thread, where the garbage collector may
        have ended a generation."""
        with self._lock:
            if self._busy:
                yield False
                return
            self._busy = True
            try:
                yield True
            finally:
                self._busy = False

    def accepts(self, nbytes: int) -> bool:
        """Whether a snapshot of so many bytes, KV rows included, can be kept at all."""
        return nbytes <= self.budget

    def spacing(self, n_tokens: int, nbytes: int) -> int:
        """Tokens between snapshots of `nbytes` in a prompt of `n_tokens`: as many as half the
        budget holds, but not closer than INTERVAL."""
        most = max(1, self.budget // 2 // max(nbytes, 1))
        return INTERVAL * max(1, -(-(n_tokens // INTERVAL) // most))

    def put(self, snapshot: _core.Snapshot) -> None:
        """Keep a snapshot. One that prefill made replaces one of the same tokens that decode
        steps made."""
        if snapshot.position == 0 or not self.accepts(snapshot.nbytes + snapshot.kv_bytes_trimmed):
            return
        key = (snapshot.position, _digest(snapshot.token_bytes))
        with self._turn() as free:
            if not free:
                return
            known = self._entries.get(key)
            if known is not None:
                self._entries.move_to_end(key)
                if known.exact or not snapshot.exact:
                    return
                self._remove(key)
            self._add(key, snapshot)
            self._fresh.add(snapshot.kv_identity)
            self._fit()

    def find(self, tokens: bytes, *, exact: bool = False) -> _core.Snapshot | None:
        """The snapshot with the longest text that `tokens` (uint32) begins with.

        Args:
            exact: leave out those that decode steps had a part in.
        """
        with self._turn() as free:
            return self._find(tokens, exact) if free else None

    def take(self, tokens: bytes, *, exact: bool, beyond: int) -> _core.Snapshot | None:
        """As `find`, for a prompt of which `beyond` tokens are there already: only a longer text
        is of use. Counts as a hit or a miss."""
        with self._turn() as free:
            found = self._find(tokens, exact) if free else None
            if found is None or found.position <= beyond:
                self._misses += beyond == 0
                return None
            self._hits += 1
            self._reused += found.position
            return found

    def _find(self, tokens: bytes, exact: bool) -> _core.Snapshot | None:
        whole = memoryview(tokens)
        state = hashlib.blake2b(digest_size=16)
        begin = 0
        keys = []
        for length in sorted(self._lengths):
            end = _ID_BYTES * length
            if end > len(whole):
                break
            state.update(whole[begin:end])
            begin = end
            keys.append((length, state.copy().digest()))
        for key in reversed(keys):
            entry = self._entries.get(key)
            if entry is not None and (entry.exact or not exact):
                self._entries.move_to_end(key)
                return entry.snapshot
        return None

    def settle(self) -> None:
        """Give back memory after a session has closed: snapshots of one history come to share the
        memory of the longest, and memory of which more than half lies idle is cut to size."""
        with self._turn() as free:
            if not free:
                return
            for memory in self._fresh:
                if memory not in self._memories:
                    continue
                longest = self._longest(memory)
                for key, entry in list(self._entries.items()):
                    if entry.memory != memory and entry.snapshot.precedes(longest):
                        self._replace(key, entry.snapshot.sharing(longest))
            self._fresh.clear()
            self._trim()
            self._fit()

    def _fit(self) -> None:
        """Come back to within the budget."""
        if self._bytes() > self.budget:
            self._trim()
        while self._bytes() > self.budget:
            self._remove(next(iter(self._entries)))
            self._evictions += 1

    def _bytes(self) -> int:
        idle = (m for m in self._memories.values() if not self._in_use(m))
        return self._own_bytes + sum(m.bytes for m in idle)

    def _in_use(self, memory: _Memory) -> bool:
        """Whether others than the store's entries hold it: a session, or a caller's snapshots."""
        some = self._entries[next(iter(memory.keys))].snapshot
        return some.kv_owners > len(memory.keys)

    def _longest(self, memory: int) -> _core.Snapshot:
        keys = self._memories[memory].keys
        return self._entries[max(keys, key=lambda key: key[0])].snapshot

    def _trim(self) -> None:
        for name, memory in list(self._memories.items()):
            longest = self._longest(name)
            if memory.bytes <= 2 * longest.kv_bytes_trimmed or self._in_use(memory):
                continue
            try:
                short = longest.trimmed()
            except DeviceError:
                return  # no room to copy: the rest stays as large as it is
            for key in list(memory.keys):
                self._replace(key, self._entries[key].snapshot.sharing(short))

    def stats(self) -> ReuseStats:
        """Counts so far."""
        with self._turn():
            return ReuseStats(
                entries=len(self._entries),
                bytes=self._bytes(),
                budget=self.budget,
                hits=self._hits,
                misses=self._misses,
                reused_tokens=self._reused,
                evictions=self._evictions,
            )

    def close(self) -> None:
        """Forget all snapshots and keep none from now on."""
        self.budget = 0
        with self._turn():
            for key in list(self._entries):
                self._remove(key)

    def _add(self, key: Key, snapshot: _core.Snapshot) -> None:
        entry = _Entry(
            snapshot, snapshot.position, snapshot.exact, snapshot.nbytes, snapshot.kv_identity
        )
        self._entries[key] = entry
        self._join(key, entry)
        self._lengths[entry.position] = self._lengths.get(entry.position, 0) + 1
        self._own_bytes += entry.bytes

    def _join(self, key: Key, entry: _Entry) -> None:
        memory = self._memories.get(entry.memory)
        if memory is None:
            memory = self._memories[entry.memory] = _Memory(entry.snapshot.kv_bytes)
        memory.keys.add(key)

    def _leave(self, key: Key, entry: _Entry) -> None:
        memory = self._memories[entry.memory]
        memory.keys.discard(key)
        if not memory.keys:
            del self._memories[entry.memory]

    def _replace(self, key: Key, snapshot: _core.Snapshot) -> None:
        """Put the same state with other KV memory in an entry's place."""
        old = self._entries[key]
        new = old._replace(snapshot=snapshot, memory=snapshot.kv_identity)
        self._join(key, new)
        self._entries[key] = new
        self._leave(key, old)

    def _remove(self, key: Key) -> None:
        entry = self._entries.pop(key)
        self._leave(key, entry)
        self._own_bytes -= entry.bytes
        self._lengths[entry.position] -= 1
        if not self._lengths[entry.position]:
            del self._lengths[entry.position]


def _digest(tokens: bytes) -> bytes:
    return hashlib.blake2b(tokens, digest_size=16).digest()
