"""The four graded parts of structured output, worked out by hand."""

import importlib.util
import json
import math

import pytest

from flowgrpo.rewards import MissingDependency, RewardError, RewardSet, RewardSpec
from flowgrpo.rewards.text.json_output import JsonOutput, read_json

# The module shares one reward, because it starts a process.
pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "required": ["name", "age"],
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def reward():
    pytest.importorskip("jsonschema")
    made = JsonOutput(schema=SCHEMA, seconds=30)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("text", "value", "alone"),
    [
        (' {"a": 1}\n', {"a": 1}, True),
        ("42", 42, True),
        ('```json\n{"a": 1}\n```', {"a": 1}, False),
        ('It is {"a": "}"} I think.', {"a": "}"}, False),
        ("```\nnot json\n```\n[1]", [1], False),
        ('"' + "[" * 1000 + '"', "[" * 1000, True),
        ("[" * 100 + "]" * 100, json.loads("[" * 100 + "]" * 100), True),
    ],
)
def test_where_the_value_is(text: str, value: object, alone: bool) -> None:
    assert read_json(text) == (value, alone)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("no", "Expecting value"),
        ("{'a': 1}", "property name"),
        ('{"a": 1', "Expecting ',' delimiter"),
        ("NaN", "NaN is not JSON"),
        ('{"n": 1e999}', "1e999 is too large a number"),
        ("[-Infinity]", "-Infinity is not JSON"),
        ("[" * 101 + "]" * 101, "nested 101 deep"),
        ("[" * 99_999, "nested 99999 deep"),
        ('{"a":' * 20_000, "100000 deep|20000 deep"),
        (" " * 100_001, "100001 characters are too long"),
    ],
)
def test_what_has_no_value(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_json(text)
    scores = JsonOutput()([text], [""], expected=[1])
    assert (scores.values, scores.sub_scores["content"]) == ([0], [0])


@pytest.mark.parametrize(
    ("value", "share"),
    [
        ({"name": "Ann", "age": 3}, 1),
        ({"name": "Ann", "age": 3, "tags": []}, 1),
        ({"name": "Ann", "age": -1}, (1 + 0 + 1) / 3),
        ({"name": "Ann"}, (1 + 0 + 1) / 3),
        ({"name": "Ann", "age": 3, "x": 1}, (1 + 1 + 0) / 3),
        ({"name": "Ann", "age": 3, "tags": ["a", 1]}, (1 + 1 + (0.5 + 1) / 2 + 1) / 4),
        ({}, 1 / 3),
        ([], 0),
        ("Ann", 0),
    ],
)
def test_share_of_a_schema(reward: JsonOutput, value: object, share: float) -> None:
    scores = reward([json.dumps(value)], [""])
    assert scores.sub_scores["schema"] == [pytest.approx(share, abs=1e-12)]
    assert scores.values == [pytest.approx((2 + share) / 3, abs=1e-12)]


def test_schemas_with_references_and_of_the_column(reward: JsonOutput) -> None:
    own = {"$defs": {"n": {"type": "number"}}, "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}}}
    texts = ['{"a": 1, "b": "x"}', '{"a": 1}', '{"name": "Ann", "age": 3}']
    scores = reward(texts, [""] * 3, schema=[own, json.dumps(own), None])
    assert scores.sub_scores["schema"] == [0.5, 1, 1]


@pytest.mark.parametrize(
    ("expected", "value", "share"),
    [
        ({"a": 1, "b": "x"}, {"a": 1.0, "b": "x", "c": 0}, 1),
        ({"a": 1, "b": "x"}, {"a": True, "b": "x"}, 0.5),
        ({"a": {"b": 1, "c": 2}, "d": [1, 2]}, {"a": {"b": 1}, "d": [1, 2]}, 0.75),
        ({"a": [1, 2]}, {"a": [2, 1]}, 0),
        ({"a": 1}, [1], 0),
        ([1, {"a": False}], [1, {"a": False}], 1),
        ({}, {}, 1),
        ('{"a": 1}', {"a": 1}, 1),
    ],
)
def test_share_of_the_expected_fields(expected: object, value: object, share: float) -> None:
    scores = JsonOutput()([json.dumps(value)], [""], expected=[expected])
    assert scores.sub_scores["content"] == [share]
    assert math.isnan(scores.sub_scores["schema"][0])
    assert scores.values == [pytest.approx((2 + share) / 3)]


def test_weights_and_notes_through_the_runner() -> None:
    options = {"weights": {"structure": 0, "format": 1, "content": 3}}
    rewards = RewardSet([RewardSpec("json_output", options=options)])
    texts = ['so {"a": 1}', '{"a": 1}', "{", "{}"]
    batch = rewards.score(texts, ["p"] * 4, {"expected": [{"a": 1}, {"a": 2}, {"a": 1}, None]})
    assert batch.values[:, 0].tolist() == [0.75, 0.25, 0, 1]
    assert batch.notes["json_output"][0] == "text beside the JSON value"
    assert batch.notes["json_output"][2].startswith("no JSON: Expecting property name")


def test_a_schema_that_takes_for_ever_is_given_up() -> None:
    pytest.importorskip("jsonschema")
    reward = JsonOutput({"pattern": "^(a+)+$"}, seconds=1)
    scores = reward([json.dumps("a" * 50 + "b"), '"aa"'], ["", ""])
    assert scores.sub_scores["schema"] == [0, 1]
    assert scores.notes == ["the schema was given up: it took longer than 1 s", ""]
    reward.close()


@pytest.mark.parametrize("schema", [{"type": "text"}, "{", '{"$ref": "#/nowhere"}', {"$ref": "http://127.0.0.1:9/x"}])
def test_a_schema_that_is_none_stops_the_run(schema: object) -> None:
    pytest.importorskip("jsonschema")
    with pytest.raises(ValueError, match=r"json_output: the option `schema` "):
        JsonOutput(schema)
    with pytest.raises(RewardError, match=r"not JSON|not a JSON schema"):
        RewardSet([RewardSpec("json_output")]).score(["1"], ["p"], {"schema": [schema]})


def test_a_schema_is_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonschema")
    from flowgrpo.rewards.text.json_schema import share

    asked: list[object] = []
    monkeypatch.setattr("urllib.request.urlopen", lambda *arguments, **_: asked.append(arguments))
    with pytest.raises(ValueError, match="is not found"):
        share({"$ref": "http://schemas.invalid/x"}, 1)
    assert asked == []


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="pip install jsonschema"):
        RewardSet([RewardSpec("json_output", options={"schema": {}})])
    assert RewardSet([RewardSpec("json_output")]).score(["1"], ["p"]).values.item() == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {"form": 1}}, r"names 'form'; did you mean 'format'\?"),
        ({"weights": {"format": -1}}, "the weight of format is -1"),
        ({"weights": [1]}, r"weights is \[1\]; give part: weight"),
        ({"weights": dict.fromkeys(("structure", "format", "schema", "content"), 0)}, "all weights are 0"),
        ({"seconds": "1"}, "seconds is '1'"),
    ],
)
def test_wrong_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JsonOutput(**options)


def test_a_number_beyond_float_is_not_valid_and_stops_nothing() -> None:
    pytest.importorskip("jsonschema")
    schema = {"properties": {"price": {"type": "number", "multipleOf": 0.01}}}
    texts = ['{"price": 1' + "0" * 310 + "}", '{"price": 1}']
    scores = JsonOutput(schema=schema, seconds=30)(texts, ["", ""])
    assert scores.sub_scores["schema"] == [0, 1]
