"""The JSON Schema of a policy's config, generated from the rules that check policies."""

import dataclasses
from typing import Any

from lossscale_core._base import KINDS
from lossscale_core._settings import Rule, rules_of

_TYPES = {float: "number", int: "integer", bool: "boolean"}


def policy_schema() -> dict[str, Any]:
    """Return the JSON Schema of the configs that `policy_from_dict` and `load_policy` accept.

    JSON Schema cannot compare two keys, so that the schema accepts configs that break `min_scale` ≤ `init_scale` ≤
    `max_scale`. Loading such a config raises `PolicyError`.

    Returns:
        A dict of JSON Schema, draft 2020-12.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "lossscale policy",
        "description": "min_scale must not exceed init_scale, nor init_scale max_scale; loading a policy checks this.",
        "type": "object",
        "required": ["kind"],
        "properties": {"kind": {"enum": list(KINDS)}},
        # Not oneOf: its validators report that none of the kinds fits, instead of the key that is wrong in this one.
        "allOf": [
            {"if": _is_kind(kind), "then": _policy_schema(kind, policy_type)} for kind, policy_type in KINDS.items()
        ],
    }


def _is_kind(kind: str) -> dict[str, Any]:
    return {"properties": {"kind": {"const": kind}}, "required": ["kind"]}


def _policy_schema(kind: str, policy_type: type[Any]) -> dict[str, Any]:
    fields = list(rules_of(policy_type))
    return {
        "properties": {"kind": {"const": kind}, **{field.name: _value_schema(rule) for field, rule in fields}},
        "required": [field.name for field, _ in fields if field.default is dataclasses.MISSING],
        "additionalProperties": False,
    }


def _value_schema(rule: Rule) -> dict[str, Any]:
    name = _TYPES[rule.type]
    schema: dict[str, Any] = {"description": rule.text, "type": [name, "null"] if rule.optional else name}
    if rule.type is not bool:
        schema.update(minimum=rule.minimum, maximum=rule.maximum)
    return schema
