"""The OpenAPI description, and requests that are made up from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

import lily
from server.running import running
from server.test_openai_client import MODEL

GETS = ["/v1/models", "/v1/models/{name}", "/health", "/metrics"]
POSTS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/apply-template"]
POSITIVE, NEGATIVE = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
CASES = [
    *((path, "GET", POSITIVE) for path in GETS),
    *((path, "POST", mode) for path in POSTS for mode in (POSITIVE, NEGATIVE)),
]


@pytest.fixture(scope="module")
def schema() -> Iterator[Any]:
    with lily.Model.load(MODEL, context=64) as model, running(model) as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_no_request_breaks_the_server(schema: Any, path: str, method: str, mode: Any) -> None:
    operation = schema[path][method]

    @given(operation.as_strategy(generation_mode=mode))
    @settings(max_examples=15, suppress_health_check=list(HealthCheck))
    def ask(case: Any) -> None:
        case.call_and_validate(
            checks=[not_a_server_error, status_code_conformance, content_type_conformance]
        )

    ask()


def test_the_description_names_every_route(schema: Any) -> None:
    assert {operation.ok().path for operation in schema.get_all_operations()} == {*GETS, *POSTS}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_description_names_both_forms_of_an_answer(schema: Any, path: str) -> None:
    content = schema.raw_schema["paths"][path]["post"]["responses"]["200"]["content"]
    assert content.keys() == {"application/json", "text/event-stream"}
