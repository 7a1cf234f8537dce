"""The executable tools of the Berkeley Function Calling Leaderboard, from its installed package (`bfcl-eval`).

The package asks for a great deal that its tools do not need, in versions that engines do not go together with:
`pip install --no-deps bfcl-eval` brings them. Their Python is that package's own; they touch no file and no network.
"""

from __future__ import annotations

import copy
import json
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from bidikv.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TYPES: Final = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""What the package's schemas call JSON's types."""


class MissingToolsError(ConfigurationError):
    """The package with the tools is not installed."""

    def __init__(self) -> None:
        super().__init__("this example's tools come in a package: pip install --no-deps bfcl-eval")


class BfclTools:
    """Instances of the package's tool classes, in a state of our own.

    Args:
        state: For each class (such as `GorillaFileSystem`), its initial state in the package's form.
        only: Names of the tools to offer, in that order; None offers all of these classes.
        choices: For tools and their arguments, the values to offer; constrained decoding then yields a sensible call even
            from a very small model.

    Raises:
        MissingToolsError: The package is not installed.
        ConfigurationError: It has no such class or tool.
    """

    def __init__(
        self,
        state: Mapping[str, Mapping[str, Any]],
        *,
        only: Sequence[str] | None = None,
        choices: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    ) -> None:
        try:
            known = import_module("bfcl_eval.constants.executable_backend_config")
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("bfcl_eval"):
                raise
            raise MissingToolsError from error
        self._methods: dict[str, Any] = {}
        schemas: dict[str, dict[str, Any]] = {}
        for name, initial in state.items():
            if name not in known.CLASS_FILE_PATH_MAPPING:
                raise ConfigurationError(f"bfcl-eval has no tools named {name!r}")
            tools = getattr(import_module(known.CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in known.STATELESS_CLASSES:
                # By the name that the package gives it; it is how its own runner starts.
                tools._load_scenario(copy.deepcopy(dict(initial)))  # noqa: SLF001
            for schema in _documented(known.MULTI_TURN_FUNC_DOC_FILE_MAPPING[name]):
                schemas[schema["name"]] = schema
                self._methods[schema["name"]] = getattr(tools, schema["name"])
        offered = list(schemas) if only is None else only
        if unknown := [name for name in offered if name not in schemas]:
            raise ConfigurationError(f"{', '.join(state)} of bfcl-eval have no tool {unknown[0]!r}")
        self._schemas = [_schema(schemas[name], (choices or {}).get(name, {})) for name in offered]
        self._offered = frozenset(offered)

    def schemas(self) -> list[dict[str, Any]]:
        """The tools in the OpenAI API's form, in a fixed order."""
        return copy.deepcopy(self._schemas)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a tool; its result as JSON. Mistaken calls are answered with text, as a model expects."""
        if name not in self._offered:
            return f"error: no tool {name!r}"
        try:
            return json.dumps(self._methods[name](**arguments), default=str)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            # The tools check little of what a model may write.
            return f"error: {name}: {error}"


def _documented(file: str) -> list[dict[str, Any]]:
    text = files("bfcl_eval").joinpath("data", "multi_turn_func_doc", file).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _schema(documented: Mapping[str, Any], choices: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    parameters = _json_schema(documented["parameters"])
    for name, values in choices.items():
        parameters["properties"][name] = {**parameters["properties"][name], "enum": list(values)}
    if choices:
        # Only what has choices is left to write, so that no free text runs on to the end of the answer.
        parameters["properties"] = {name: parameters["properties"][name] for name in choices}
        parameters["required"] = list(choices)
    # Every tool's description begins with the same paragraph on its class.
    description = documented["description"].rpartition("Tool description: ")[2]
    function = {
        "name": documented["name"],
        "description": description,
        "strict": bool(choices),
        "parameters": {**parameters, "additionalProperties": False},
    }
    return {"type": "function", "function": function}


def _json_schema(node: Any) -> Any:
    """The package's spelling of a schema as JSON Schema."""
    if isinstance(node, list):
        return [_json_schema(member) for member in node]
    if not isinstance(node, dict):
        return node
    told = {name: _json_schema(value) for name, value in node.items()}
    kind = told.get("type")
    return {**told, "type": _TYPES.get(kind, kind)} if isinstance(kind, str) else told
