"""The JSON Schema of a policy's config, drawn from the same rules that check it."""

from typing import Any

from lossscale_core._config import KINDS
from lossscale_core._settings import Rule, rules_of

_TYPES = {float: "number", int: "integer", bool: "boolean"}
_EXPONENTS = range(-126, 127)


def policy_schema() -> dict[str, Any]:
    """Return a JSON Schema (draft 2020-12) of what `policy_from_dict` and `load_policy` accept.

    JSON Schema cannot compare two keys. That `min_scale` ≤ `init_scale` ≤ `max_scale` is therefore spelled out for
    every power of two: the schema is exact where those three are powers of two, and lets two others pass in the wrong
    order only where no power of two lies between them.
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
    }


def _is_kind(kind: str) -> dict[str, Any]:
    return {"properties": {"kind": {"const": kind}}, "required": ["kind"]}


def _policy_schema(kind: str, policy_type: type[Any]) -> dict[str, Any]:
    fields = dict((field.name, (field, rule)) for field, rule in rules_of(policy_type))
    defaults = {name: field.default for name, (field, _) in fields.items()}
    properties = {name: _value_schema(rule) for name, (_, rule) in fields.items()}
    schema: dict[str, Any] = {
        "properties": {"kind": {"const": kind}, **properties},
        "additionalProperties": False,
    }
    if kind == "fixed":
        schema["required"] = ["init_scale"]
    if "min_scale" in fields:
        schema["allOf"] = [_ordered_at(2.0**exponent, defaults) for exponent in _EXPONENTS]
    return schema


def _value_schema(rule: Rule) -> dict[str, Any]:
    name = _TYPES[rule.type]
    schema: dict[str, Any] = {"description": rule.text, "type": [name, "null"] if rule.optional else name}
    if rule.minimum is not None:
        schema.update(minimum=rule.minimum, maximum=rule.maximum)
    return schema


def _ordered_at(bound: float, defaults: dict[str, Any]) -> dict[str, Any]:
    """Say of one power of two: what is at or above it on the left is so on the right of `min ≤ init ≤ max`."""
    reaches = {
        name: {
            "properties": {name: {"minimum": bound}},
            **({} if defaults[name] >= bound else {"required": [name]}),
        }
        for name in ("min_scale", "init_scale", "max_scale")
    }
    return {"if": reaches["init_scale"], "then": reaches["max_scale"], "else": {"not": reaches["min_scale"]}}
