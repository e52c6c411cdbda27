"""The share of a JSON schema that a value satisfies. The reward `json_output` runs this in a process without torch."""

from __future__ import annotations

import math
from typing import Any

from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

ANNOTATIONS = ("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples")


def share(schema: Any, value: Any) -> float:
    """Return the share of a schema's requirements that a value satisfies, in [0, 1]; 1 exactly if the value is valid.

    A schema has the following requirements, and all of them count equally:

    - every property that is required or present: the share of its own schema, 0 if the property is absent;
    - `items`: the mean of the shares of the items;
    - all other keywords together (type, bounds, additionalProperties, anyOf, $ref, ...): satisfied or not.

    This function may never return.

    Raises:
        ValueError: the schema is not a JSON schema, or refers to something outside itself.
    """
    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
        # With an empty registry, a reference to a web address is an error, not a download.
        return _share(kind(schema, registry=Registry()), schema, value)
    except SchemaError as error:
        raise ValueError(f"{error.message}, at {error.json_path}") from None
    except Unresolvable as error:
        raise ValueError(f"the reference {error.ref!r} is not found in the schema") from None


def _is_valid(validator: Any, schema: Any, value: Any) -> bool:
    try:
        return bool(validator.evolve(schema=schema).is_valid(value))
    except ArithmeticError:  # `multipleOf` of a number beyond float
        return False


def _share(validator: Any, schema: Any, value: Any) -> float:
    if _is_valid(validator, schema, value):
        return 1.0
    if not isinstance(schema, dict):
        return 0.0
    properties, items = schema.get("properties", {}), schema.get("items")
    members = value if isinstance(value, dict) else {}
    names = [*schema.get("required", []), *(name for name in properties if name in members)]
    parts = [
        _share(validator, properties.get(name, True), members[name]) if name in members else 0.0
        for name in dict.fromkeys(names)
    ]
    rest = {key: inner for key, inner in schema.items() if key not in {"required", *ANNOTATIONS}}
    # Other keywords, such as additionalProperties, depend on the names of the properties.
    by_name: dict[str, Any] = {"properties": dict.fromkeys(properties, True)} if properties else {}
    if isinstance(items, dict) and isinstance(value, list) and value and "prefixItems" not in schema:
        parts.append(math.fsum(_share(validator, items, item) for item in value) / len(value))
        by_name["items"] = True
    if rest.keys() - by_name.keys():
        parts.append(float(_is_valid(validator, {**rest, **by_name}, value)))
    return math.fsum(parts) / len(parts)
