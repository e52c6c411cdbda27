"""Queries on a small database: equality of results, parts counted by hand, and statements that must not run."""

import math
from pathlib import Path

import pytest

from flowgrpo.rewards import RewardError, RewardSet, RewardSpec
from flowgrpo.rewards.sandbox.sql import Sql

# The module shares one reward, because it starts a process.
pytestmark = pytest.mark.slow

SCHEMA = """
CREATE TABLE people (id INTEGER PRIMARY KEY, name TEXT, age INT);
CREATE TABLE pets (owner INT, kind TEXT, weight REAL);
INSERT INTO people VALUES (1, 'Ann', 30), (2, 'Bob', 40), (3, 'Cy', 50);
INSERT INTO pets VALUES (1, 'cat', 0.1), (1, 'cat', 0.2), (3, 'dog', 7);
"""
REFERENCE = "SELECT name FROM people WHERE age > 35"


@pytest.fixture(scope="module")
def reward():
    made = Sql(seconds=20)
    yield made
    made.close()


def judge(reward: Sql, query: str, reference: str = REFERENCE):
    return reward([query], [""], [SCHEMA], [reference])


@pytest.mark.parametrize(
    ("query", "reference"),
    [
        ("select name from people where age >= 40 order by name desc", REFERENCE),
        ("Look:\n```sql\nSELECT p.name FROM people AS p WHERE 35 < age;\n```", REFERENCE),
        ("-- a comment\nWITH old AS (SELECT * FROM people WHERE age > 35) SELECT name AS n FROM old", REFERENCE),
        ("VALUES ('Bob'), ('Cy')", REFERENCE),
        ("SELECT 0.3", "SELECT sum(weight) FROM pets WHERE kind = 'cat'"),
        ("SELECT name FROM people WHERE age > 1000 OR age = 999", "SELECT name FROM people WHERE age > 60"),
        ("SELECT name FROM people ORDER BY age, id", "SELECT name FROM people ORDER BY 1"),
        ("SELECT name FROM people ORDER BY id", "SELECT name FROM people ORDER BY age"),
        (
            "SELECT 'Cy' UNION ALL SELECT 'Ann'",
            "SELECT name FROM people WHERE id IN (SELECT owner FROM pets ORDER BY 1)",
        ),
    ],
)
def test_an_equal_result_is_worth_1_however_it_is_written(reward: Sql, query: str, reference: str) -> None:
    scores = judge(reward, query, reference)
    assert (scores.values, scores.notes) == ([1], [""])


@pytest.mark.parametrize(
    ("query", "reference"),
    [
        ("SELECT name FROM people ORDER BY age DESC", "SELECT name FROM people ORDER BY age"),
        ("SELECT kind FROM pets", "SELECT DISTINCT kind FROM pets"),
        ("SELECT age, name FROM people", "SELECT name, age FROM people"),
        ("SELECT name, 1 FROM people WHERE 0", "SELECT name FROM people WHERE 0"),
        ("SELECT 1 WHERE 0", "SELECT name FROM people WHERE age > 60"),
        ("SELECT name FROM people WHERE 0", "SELECT name FROM people WHERE age > 60"),
        ("SELECT name FROM people WHERE age > 60", "SELECT name FROM people"),
        ("SELECT name FROM people", "SELECT name FROM people ORDER BY age"),
        ("SELECT '40'", "SELECT 40"),
        ("SELECT 40.0", "SELECT 40"),
        ("SELECT x'41'", "SELECT 'A'"),
        ("SELECT NULL", "SELECT ''"),
        ("SELECT sum(age) / 3 FROM people", "SELECT avg(age) FROM people"),
        ("SELECT 0.3000001", "SELECT 0.3"),
    ],
)
def test_other_results_are_not_equal(reward: Sql, query: str, reference: str) -> None:
    scores = judge(reward, query, reference)
    assert scores.sub_scores["execution"] == [0]
    assert scores.values[0] < 1
    assert "the reference" in scores.notes[0]


OTHERS = [
    SCHEMA,
    SCHEMA + "UPDATE people SET age = 36 WHERE id = 1;",
    SCHEMA + "DELETE FROM people;",
]


def test_results_have_to_be_equal_on_every_database(reward: Sql):
    queries = [
        "SELECT name FROM people WHERE 35 < age",
        "SELECT name FROM people WHERE age >= 40",
        "VALUES ('Bob'), ('Cy')",
        "SELECT 'Bob' WHERE 0 UNION ALL SELECT name FROM people WHERE age > 35",
    ]
    scores = reward(queries, [""] * 4, [OTHERS] * 4, [REFERENCE] * 4)
    assert scores.sub_scores["execution"] == [1, 0, 0, 1]
    assert (
        scores.notes[1] == scores.notes[2] == "on database 2, 2 rows with 1 columns differ from the reference's result"
    )
    # Each of them is right on the first database.
    assert reward(queries, [""] * 4, [OTHERS[:1]] * 4, [REFERENCE] * 4).values == [1] * 4


def test_no_rows_on_one_database_are_told_apart_by_another(reward: Sql):
    empty = [SCHEMA + "DELETE FROM people;", SCHEMA]
    queries = ["SELECT 1 WHERE 0", "SELECT name FROM people WHERE id > 1"]
    # The second query reads another column, which matters only if no database has a row.
    for databases, right in ((empty[:1], [0, 0]), (empty, [0, 1])):
        scores = reward(queries, [""] * 2, [databases] * 2, [REFERENCE] * 2)
        assert scores.sub_scores["execution"] == right
    assert reward([REFERENCE], [""], [empty[:1]], [REFERENCE]).values == [1]


def test_a_query_without_order_is_not_right_by_chance(reward: Sql):
    scores = judge(reward, "SELECT name FROM people", "SELECT name FROM people ORDER BY age")
    assert scores.notes == ["3 rows with 1 columns have the reference's order by chance; the query needs an ORDER BY"]
    # The other direction is wrong at once.
    scores = judge(reward, "SELECT name FROM people", "SELECT name FROM people ORDER BY age DESC")
    assert scores.notes == ["3 rows with 1 columns differ from the reference's result"]
    # The next query without an order is not run backwards.
    assert judge(reward, "SELECT name FROM people LIMIT 1", "SELECT 'Ann'").values == [1]


def test_types_need_not_count():
    loose = Sql(seconds=20, types=False)
    queries = ["SELECT 2", "SELECT 2.0", "SELECT '2'", "SELECT 2.1"]
    assert loose(queries, [""] * 4, [SCHEMA] * 4, ["SELECT 2.0"] * 4).sub_scores["execution"] == [1, 1, 0, 0]
    loose.close()


def test_databases_of_a_problem_have_the_same_tables(reward: Sql):
    for other, message in (
        ("CREATE TABLE people (id INT);", r"script 2 has people \(id\), and script 1 has people \(id, name, age\)"),
        ("", "script 2 has none"),
        ("CREATE", "a script that fails: incomplete"),
        (5, "give texts"),
    ):
        with pytest.raises(ValueError, match=message):
            reward([REFERENCE], [""], [[SCHEMA, other]], [REFERENCE])
    with pytest.raises(ValueError, match="give texts"):
        reward([REFERENCE], [""], [[]], [REFERENCE])


def test_parts_by_hand(reward: Sql) -> None:
    scores = judge(reward, "SELECT kind FROM people, pets")
    # Touched: people, people.name, people.age; and people, pets, pets.kind.
    assert scores.sub_scores["tables"] == [1 / 5]
    # Pairs: 7 of select|name|from|people|where|age|>|35, and 5 of select|kind|from|people|,|pets; common: from people.
    assert scores.sub_scores["ngram"] == [1 / 11]
    assert scores.sub_scores["syntax"] == [1]
    assert scores.values == [pytest.approx((0 * 3 + 1 + 1 / 5 + 1 / 11) / 6, abs=1e-12)]


def test_weights() -> None:
    reward = Sql(weights={"execution": 0, "syntax": 1, "tables": 0, "ngram": 0}, seconds=20)
    assert reward(["SELECT 1", "SELECT", "nothing"], [""] * 3, [SCHEMA] * 3, [REFERENCE] * 3).values == [1, 0, 0]
    reward.close()


@pytest.mark.parametrize(
    ("query", "note"),
    [
        ("DROP TABLE people", "only a statement that begins with SELECT"),
        ("INSERT INTO people VALUES (4, 'Dee', 60)", "only a statement that begins"),
        ("PRAGMA table_info(people)", "only a statement that begins"),
        ("ATTACH 'stolen.db' AS x", "only a statement that begins"),
        ("QUERY PLAN SELECT 1", "only a statement that begins"),
        ("SELECT 1; DROP TABLE people", "one statement at a time"),
        ("WITH x AS (SELECT 1) DELETE FROM people", "not authorized"),
        ("SELECT * FROM pragma_table_info('people')", "not authorized"),
        ("SELECT load_extension('x')", "not authorized"),
        ("SELECT writefile('stolen', name) FROM people", "no such function|not authorized"),
        ("SELECT nme FROM people", "no such column: nme"),
        ("SELECT \ud800", "surrogates|unrecognized token|wrong type"),
        ("SELECT name FROM people \x00", "null character|one statement at a time|unrecognized token"),
        ("SELECT name FROM", "incomplete input"),
    ],
)
def test_what_does_anything_but_read_has_no_syntax_part(
    reward: Sql, query: str, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scores = judge(reward, query)
    assert scores.sub_scores["syntax"] == scores.sub_scores["tables"] == scores.sub_scores["execution"] == [0]
    assert any(part in scores.notes[0] for part in note.split("|")), scores.notes
    assert list(tmp_path.iterdir()) == []
    # The table is as it was.
    assert judge(reward, REFERENCE).values == [1]


BOMB = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT "


def test_bombs_have_no_result() -> None:
    reward = Sql(seconds=0.5, most_rows=100, memory_mb=256)
    queries = [
        BOMB + "max(x) FROM c",
        BOMB + "x FROM c",
        BOMB + "group_concat(x) FROM c",
        "SELECT hex(zeroblob(1000000000))",
        "SELECT " + "(" * 5000 + "1" + ")" * 5000,
        "SELECT name FROM people WHERE " + "age + " * 3000 + "1",
        "SELECT 1" + " " * 10_000 + ", 2",
        "",
    ]
    scores = reward(queries, [""] * 8, [SCHEMA] * 8, [REFERENCE] * 8)
    assert scores.sub_scores["execution"] == [0] * 8
    assert scores.notes[0] == "it ran longer than 0.5 s"
    assert scores.notes[1] == "the result has more than 100 rows"
    assert all(scores.notes)
    assert scores.notes[6:] == ["10011 characters are too long for a query", "no query"]
    assert judge(reward, REFERENCE).values == [1]
    reward.close()


def test_columns_through_the_runner() -> None:
    rewards = RewardSet([RewardSpec("sql", options={"seconds": 20})])
    batch = rewards.score([REFERENCE] * 2, ["p"] * 2, {"schema": [SCHEMA, None], "query": [REFERENCE, None]})
    assert batch.values[0, 0] == 1
    assert math.isnan(batch.values[1, 0])
    for columns, message in (
        ({"schema": ["CREATE"], "query": ["SELECT 1"]}, "the column `schema` has a script that fails: incomplete"),
        ({"schema": [SCHEMA], "query": ["SELECT x"]}, "the column `query` has 'SELECT x', which fails: no such column"),
        ({"schema": [SCHEMA], "query": ["DELETE FROM pets"]}, "which fails: only a statement that begins"),
        ({"schema": [None], "query": ["SELECT 1"]}, "give texts"),
    ):
        with pytest.raises(RewardError, match=message):
            rewards.score(["SELECT 1"], ["p"], columns)
    rewards.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {"result": 1}}, "weights names 'result'"),
        ({"seconds": 0}, "seconds is 0"),
        ({"most_rows": 0}, "most_rows is 0"),
        ({"memory_mb": 0.5}, "memory_mb is 0.5"),
        ({"types": 1}, "types is 1; give true or false"),
    ],
)
def test_wrong_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sql(**options)
