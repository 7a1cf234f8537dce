"""Structured output by constrained decoding: the schema goes to the engine, the answer is parsed into it."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.runnables import RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_openai_function
from pydantic import BaseModel

if TYPE_CHECKING:
    from langchain_core.runnables import Runnable


def response_format(schema: dict[str, Any] | type, *, strict: bool | None) -> dict[str, Any]:
    """The request field that constrains an answer to a schema."""
    function = convert_to_openai_function(schema, strict=strict)
    described: dict[str, Any] = {"name": function["name"], "schema": function["parameters"]}
    if strict is not None:
        described["strict"] = strict
    return {"type": "json_schema", "json_schema": described}


def parser_for(schema: dict[str, Any] | type) -> Runnable[Any, Any]:
    """What turns an answer into an instance of a pydantic class, or else into a dict."""
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return PydanticOutputParser(pydantic_object=schema)
    return JsonOutputParser()


def with_raw(model: Runnable[Any, Any], parser: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """Return {"raw", "parsed", "parsing_error"}, and never fail on an answer that cannot be parsed."""
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")
