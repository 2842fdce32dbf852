"""What objects say of themselves at a prompt and in a notebook."""

from __future__ import annotations

import dataclasses

import pytest

import lily


def test_a_model_and_what_it_made_say_the_numbers_that_matter(tiny: lily.Model) -> None:
    assert repr(tiny).startswith("Model(")
    assert repr(tiny.info).count("(") == 1, "one line, without the whole configuration"
    assert f"context {tiny.info.context:,}" in repr(tiny.info)
    assert "GB" in repr(tiny.info.memory) or "MB" in repr(tiny.info.memory)
    session = tiny.session(context=100)
    session.prefill([1, 2, 3])
    stream = session.stream(3, lily.Sampling(seed=5), stop_ids=())
    next(stream)
    assert repr(stream) == "Stream(1 tokens, running, seed=5)"
    list(stream)
    assert repr(stream) == "Stream(3 tokens, length, seed=5)"
    assert repr(session) == f"Session(position=5, context=100, pending={session.pending})"
    session.discard_pending()
    assert repr(session) == "Session(position=5, context=100)"
    assert repr(session.snapshot()).startswith("Snapshot(position=5, ")


def test_a_generation_says_how_far_it_is(tiny: lily.Model) -> None:
    generation = tiny.generate([1, 2, 3], max_tokens=4, seed=1)
    assert repr(generation) == "Generation(3 prompt tokens, not begun: '')"
    next(generation)
    assert repr(generation).startswith("Generation(3 prompt tokens, running: ")
    result = generation.result()
    assert repr(generation).startswith(f"Generation(3 prompt tokens, {result.finish_reason}: ")
    assert "3 prompt tokens (0 reused)" in repr(result)
    long = dataclasses.replace(result, text="x" * 1000, stop="END")
    assert len(repr(long)) < 200
    assert "at 'END'" in repr(long)


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        (lily.Sampling(), "Sampling()"),
        (lily.Sampling.greedy(), "Sampling(temperature=0.0)"),
        (lily.Sampling(top_k=5, seed=0), "Sampling(top_k=5, seed=0)"),
        (lily.Sampling(logit_bias={3: -1}), "Sampling(logit_bias={3: -1.0})"),
    ],
)
def test_sampling_says_what_differs_from_the_defaults(sampling: lily.Sampling, said: str) -> None:
    assert repr(sampling) == said
    assert eval(said, {"Sampling": lily.Sampling}) == sampling


def test_tables_for_a_notebook_hold_what_the_text_holds(tiny: lily.Model) -> None:
    html = tiny._repr_html_()
    for name, value in tiny.info._rows():
        assert f"<th>{name}</th>" in html
        assert value.replace("'", "&#x27;") in html
    assert "in all" in tiny.info.memory._repr_html_()
    assert "<th>kept</th>" in tiny.reuse_stats()._repr_html_()
