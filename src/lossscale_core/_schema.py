"""The JSON Schema of a policy's config, drawn from the same rules that check it."""

import operator
from typing import Any

from lossscale_core._config import KINDS
from lossscale_core._policy import DynamicScaling
from lossscale_core._settings import Rule, rules_of

_TYPES = {float: "number", int: "integer", bool: "boolean"}
_EXPONENTS = range(-126, 127)
_ORDERED = "ordered_scales"
_FROM_BOUND = {"minimum": operator.ge, "exclusiveMinimum": operator.gt}


def policy_schema() -> dict[str, Any]:
    """Return a JSON Schema (draft 2020-12) of what `policy_from_dict` and `load_policy` accept.

    JSON Schema cannot compare two keys. That `min_scale` ≤ `init_scale` ≤ `max_scale` is therefore spelled out for
    every power of two: the schema is exact where one of two keys is a power of two (as every default is), and lets two
    others pass in the wrong order only where no power of two lies between them.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "lossscale policy",
        "type": "object",
        "required": ["kind"],
        "properties": {"kind": {"enum": list(KINDS)}},
        "allOf": [
            {"if": _is_kind(kind), "then": _policy_schema(kind, policy_type)} for kind, policy_type in KINDS.items()
        ],
        "$defs": {
            _ORDERED: {
                "allOf": [_ordered_at(2.0**exponent, keyword) for exponent in _EXPONENTS for keyword in _FROM_BOUND]
            }
        },
    }


def _is_kind(kind: str) -> dict[str, Any]:
    return {"properties": {"kind": {"const": kind}}, "required": ["kind"]}


def _policy_schema(kind: str, policy_type: type[Any]) -> dict[str, Any]:
    properties = {field.name: _value_schema(rule) for field, rule in rules_of(policy_type)}
    schema: dict[str, Any] = {
        "properties": {"kind": {"const": kind}, **properties},
        "additionalProperties": False,
    }
    if kind == "fixed":
        schema["required"] = ["init_scale"]
    if "min_scale" in properties:
        schema["$ref"] = f"#/$defs/{_ORDERED}"
    return schema


def _value_schema(rule: Rule) -> dict[str, Any]:
    name = _TYPES[rule.type]
    schema: dict[str, Any] = {"description": rule.text, "type": [name, "null"] if rule.optional else name}
    if rule.type is not bool:
        schema.update(minimum=rule.minimum, maximum=rule.maximum)
    return schema


def _ordered_at(bound: float, keyword: str) -> dict[str, Any]:
    """Say of one power of two: what reaches it on the left of `min ≤ init ≤ max` reaches it on the right."""
    init, least, most = (_reaches(name, bound, keyword) for name in ("init_scale", "min_scale", "max_scale"))
    return {"if": init, "then": most, "else": {"not": least}}


def _reaches(name: str, bound: float, keyword: str) -> dict[str, Any]:
    """Say that a key, or its default where it is left out, is on the upper side of `bound`."""
    reached = {"properties": {name: {keyword: bound}}}
    default_reaches = _FROM_BOUND[keyword](getattr(DynamicScaling(), name), bound)
    return reached if default_reaches else {**reached, "required": [name]}
