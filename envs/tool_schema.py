"""A typed function -> the schema that the model sees, from its hints and a docstring in Google's style."""

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import TypedDict

from rlflow.envs.base import ToolSchema
from rlflow.envs.callables import name_of
from rlflow.errors import ConfigError

_SECTION = re.compile(
    r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Example|Examples|Note|Notes):\s*$", re.MULTILINE
)
_ARGUMENT = re.compile(r"^\s*(\w+)(?:\s*\([^)]*\))?\s*:\s*(.*)$")


@dataclass(kw_only=True, slots=True, frozen=True)
class Signature:
    """A function's arguments."""

    schema: ToolSchema
    adapter: TypeAdapter[dict[str, Any]]

    def checked(self, arguments: Mapping[str, object]) -> dict[str, Any]:
        """The arguments in the function's types. Raises ValueError, worded for the model, when they do not fit."""
        try:
            return self.adapter.validate_python(dict(arguments))
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)]
            raise ValueError("; ".join(faults)) from error


def signature_of(function: Callable[..., object]) -> Signature:
    """The function's schema, and a check of the arguments that a model gives it.

    Raises ConfigError when hints or the docstring are missing, or when JSON cannot hold a type.
    """
    name = name_of(function)
    description, documented = _docstring(inspect.getdoc(function) or "")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters
        fields = {each.name: _field(each, hints, documented) for each in parameters.values()}
        if not description:
            raise TypeError("it has no docstring")
        arguments = TypedDict("Arguments", fields)  # pyright: ignore  made from the function
        arguments.__pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=False)  # pyright: ignore
        adapter: TypeAdapter[Any] = TypeAdapter(arguments)
        schema = adapter.json_schema(schema_generator=_Untitled)
    except (TypeError, NameError, ValueError, PydanticUserError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"tool {name}: {reason}; a tool needs type hints that JSON can hold, and a docstring that describes each "
            "argument below `Args:`"
        ) from error
    schema.pop("additionalProperties", None)
    schema.setdefault("properties", {})
    function_schema = {"name": name, "description": description, "parameters": schema}
    return Signature(schema={"type": "function", "function": function_schema}, adapter=adapter)


def _field(parameter: inspect.Parameter, hints: Mapping[str, Any], documented: Mapping[str, str]) -> Any:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise TypeError(f"argument {parameter.name} has no name of its own to callers")
    if parameter.name not in hints:
        raise TypeError(f"argument {parameter.name} has no type hint")
    if parameter.name not in documented:
        raise TypeError(f"argument {parameter.name} is not described")
    described = Annotated[hints[parameter.name], Field(description=documented[parameter.name])]
    return described if parameter.default is parameter.empty else NotRequired[described]


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """A docstring -> the description of the function, and that of each argument."""
    parts = _SECTION.split(text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    arguments: dict[str, str] = {}
    last, indentation = None, None
    for line in next(
        (sections[name] for name in ("Args", "Arguments", "Parameters") if name in sections), ""
    ).splitlines():
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        indentation = indent if indentation is None else indentation
        found = _ARGUMENT.match(line) if indent <= indentation else None
        if found:
            last = found.group(1)
            arguments[last] = found.group(2).strip()
        elif last is not None:
            arguments[last] = f"{arguments[last]} {line.strip()}".strip()
    return " ".join(parts[0].split()), {name: text for name, text in arguments.items() if text}


class _Untitled(GenerateJsonSchema):
    """Leaves out the titles, which only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def typed_dict_schema(self, schema: Any) -> dict[str, Any]:
        made = super().typed_dict_schema(schema)
        made.pop("title", None)
        return made
