"""The store of snapshots: what it finds, what it counts, what it drops."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lily.store import INTERVAL, SnapshotStore

ROW = 10  # bytes of KV memory for a token
names = count(1)


@dataclass
class Memory:
    """KV memory of a fake snapshot; `owners` sessions write there as well."""

    rows: int
    owners: int = 0
    name: int = field(default_factory=lambda: next(names))


@dataclass
class Fake:
    """What the store asks of `_core.Snapshot`."""

    tokens: tuple[int, ...]
    exact: bool = True
    nbytes: int = 100
    memory: Memory = field(default_factory=lambda: Memory(8))
    users: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        return len(self.tokens)

    @property
    def token_bytes(self) -> bytes:
        return encode(self.tokens)

    @property
    def kv_bytes(self) -> int:
        return ROW * self.memory.rows

    @property
    def kv_bytes_trimmed(self) -> int:
        return ROW * self.position

    @property
    def kv_identity(self) -> int:
        return self.memory.name

    @property
    def kv_owners(self) -> int:
        return self.memory.owners

    def precedes(self, longer: Fake) -> bool:
        return longer.tokens[: self.position] == self.tokens

    def sharing(self, longer: Fake) -> Fake:
        assert self.precedes(longer)
        return replace(self, memory=longer.memory)

    def trimmed(self) -> Fake:
        return replace(self, memory=Memory(self.position))


def encode(tokens: tuple[int, ...]) -> bytes:
    return np.array(tokens, np.uint32).tobytes()


def put(store: SnapshotStore, *snapshots: Fake) -> None:
    for snapshot in snapshots:
        store.put(snapshot)  # type: ignore[arg-type]


def find(store: SnapshotStore, tokens: tuple[int, ...], exact: bool = False) -> Any:
    return store.find(encode(tokens), exact=exact)


sequences = st.lists(st.integers(0, 1), max_size=6).map(tuple)


@given(st.lists(st.tuples(sequences, st.booleans())), sequences, st.booleans())
def test_it_finds_the_longest_beginning(
    stored: list[tuple[tuple[int, ...], bool]], prompt: tuple[int, ...], exact: bool
) -> None:
    store = SnapshotStore(1 << 30)
    put(store, *(Fake(tokens, e) for tokens, e in stored))
    usable = [
        tokens for tokens, e in stored if tokens == prompt[: len(tokens)] and (e or not exact)
    ]
    found = find(store, prompt, exact)
    longest = max(map(len, usable), default=0)
    assert (found.position if found else 0) == longest
    assert found is None or found.tokens == prompt[:longest]
    assert found is None or found.exact or not exact


@given(
    st.lists(
        st.tuples(sequences, st.booleans(), st.integers(0, 3), st.integers(6, 30), st.booleans())
    ),
    st.integers(0, 1500),
)
def test_it_counts_what_it_keeps_and_stays_within_its_budget(
    steps: list[tuple[tuple[int, ...], bool, int, int, bool]], budget: int
) -> None:
    store = SnapshotStore(budget)
    for tokens, exact, owners, rows, settles in steps:
        put(store, Fake(tokens, exact, memory=Memory(rows, 99 if owners == 0 else 0)))
        if settles:
            store.settle()
        kept: list[Any] = [entry.snapshot for entry in store._entries.values()]
        memories = {s.kv_identity: s.kv_bytes for s in kept if not s.kv_owners}
        stats = store.stats()
        assert stats.entries == len(kept)
        assert stats.bytes == sum(s.nbytes for s in kept) + sum(memories.values()) <= budget
    store.close()
    assert (store.stats().entries, store.stats().bytes) == (0, 0)
    put(store, Fake((1,)))
    assert find(store, (1,)) is None


def test_the_one_that_was_not_used_for_longest_goes_first() -> None:
    store = SnapshotStore(3 * (100 + ROW))
    put(store, Fake((1,)), Fake((2,)), Fake((3,)))
    assert find(store, (1, 5))
    put(store, Fake((4,)))
    assert [find(store, (i,)) is not None for i in (1, 2, 3, 4)] == [True, False, True, True]
    assert store.stats().evictions == 1


def test_one_too_large_for_the_budget_drops_nothing() -> None:
    store = SnapshotStore(400)
    put(store, Fake((1,)), Fake((2,), nbytes=400))
    assert find(store, (1,))
    assert not find(store, (2,))


def test_shared_memory_counts_once_and_not_while_a_session_uses_it() -> None:
    store = SnapshotStore(1 << 20)
    memory = Memory(50, owners=3)
    put(store, Fake((1,), memory=memory), Fake((1, 2), memory=memory))
    assert store.stats().bytes == 2 * 100
    memory.owners = 2
    assert store.stats().bytes == 2 * 100 + 500


def test_idle_memory_is_cut_before_anything_is_dropped() -> None:
    store = SnapshotStore(250)
    memory = Memory(50, owners=2)
    put(store, Fake((1,), memory=memory))
    memory.owners = 1
    put(store, Fake((2,), memory=Memory(1)))
    assert (store.stats().entries, store.stats().bytes) == (2, 2 * 100 + 2 * ROW)


def test_a_state_of_prefill_replaces_one_of_decode_steps_but_not_the_reverse() -> None:
    store = SnapshotStore(1 << 20)
    put(store, Fake((1, 2), exact=False), Fake((1, 2), exact=True), Fake((1, 2), exact=False))
    assert find(store, (1, 2)).exact
    assert store.stats().entries == 1


def test_settling_shares_memory_of_one_history_and_cuts_what_lies_idle() -> None:
    store = SnapshotStore(1 << 20)
    short, long = Fake((1,), memory=Memory(64)), Fake((1, 2, 3), memory=Memory(64))
    other = Fake((7,), memory=Memory(2))
    put(store, short, other, long)
    store.settle()
    assert find(store, (1,)).memory is find(store, (1, 2, 3)).memory
    assert find(store, (1,)).memory.rows == 3
    assert find(store, (7,)).memory is other.memory
    assert store.stats().bytes == 3 * 100 + ROW * (3 + 2)


def test_memory_that_a_session_writes_to_is_left_alone() -> None:
    store = SnapshotStore(1 << 20)
    put(store, Fake((1,), memory=Memory(64, owners=2)))
    store.settle()
    assert find(store, (1,)).memory.rows == 64


@pytest.mark.parametrize(("room", "steps"), [(100, 1), (10, 1), (5, 2), (1, 10)])
def test_a_long_prompt_is_cut_as_finely_as_half_the_budget_allows(room: int, steps: int) -> None:
    assert SnapshotStore(2 * room * 7).spacing(10 * INTERVAL, 7) == steps * INTERVAL


def test_hits_and_misses() -> None:
    store = SnapshotStore(1 << 20)
    put(store, Fake((1, 2)))
    tokens = encode((1, 2, 3))
    assert store.take(tokens, exact=True, beyond=0) is not None
    assert store.take(tokens, exact=True, beyond=2) is None  # the session had as much itself
    assert store.take(encode((5,)), exact=True, beyond=0) is None
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.reused_tokens) == (1, 1, 2)
    assert "1 snapshots" in repr(stats)
    assert "1 hits" in repr(stats)


def test_threads_may_use_it_at_once() -> None:
    store = SnapshotStore(20 * 180)

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(200):
            tokens = tuple(random.integers(0, 3, random.integers(1, 5)).tolist())
            put(store, Fake(tokens))
            find(store, tokens)
            store.settle()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = [entry.snapshot for entry in store._entries.values()]
    memories = {s.kv_identity: s.kv_bytes for s in kept}
    assert store.stats().bytes == sum(s.nbytes for s in kept) + sum(memories.values())
