"""Reading what a run folder holds."""

import json
from pathlib import Path
from typing import Any

import pytest

from flowgrpo.gallery.run_reading import read_metrics, read_run
from flowgrpo.votes.lines import check_image
from flowgrpo.votes.samples import read_samples
from tests.gallery.folders import HOSTILE, add_records, picture, record, write_run, written


@pytest.mark.parametrize(
    "image",
    [
        "../config.png",
        "iter-000000/../../secret.png",
        "iter-000000/../secret.png",
        "/etc/passwd.png",
        "C:/secret.png",
        "..\\secret.png",
        "iter\n.png",
        "iter-000000/page.html",
        "logo.svg",
        "",
        None,
        3,
    ],
)
def test_image_outside_samples_is_refused(tmp_path: Path, image: object) -> None:
    run = write_run(tmp_path / "run", [record(0, 1, 7, 1.0)])
    add_records(run, [record(0, 9, 9, 1.0) | {"image": image}])
    with pytest.raises(ValueError, match=r"index\.jsonl, line 2: `image`"):
        read_run(run)


def test_link_that_leads_outside_samples_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [record(0, 1, 7, 1.0)])
    picture(tmp_path / "secret.png")
    (run / "samples" / "link.png").symlink_to(tmp_path / "secret.png")
    root = (run / "samples").resolve()
    with pytest.raises(ValueError, match="leads outside"):
        check_image("link.png", root, "here")
    assert check_image("iter-000000/x.png", root, "here") == "iter-000000/x.png"


COMPLETIONS = (
    "",
    " \n\t ",
    "<think>a\n\n  b\tc\r\n</think>",
    HOSTILE,
    "]]><!-- </style></textarea></title></noscript>",
    "javascript:alert(1) ${alert(1)} `@@data@@` \\u003c/script>",
    "one\u2028two\u2029three\x00\x1b[31m\x85\ufeff",
    "\u202e\u0645\u0631\u062d\u0628\u0627 \u2066abc",
    "\U0001f469\u200d\U0001f52c Z\u0351\u036b\u0343\u036a",
    "lone \ud800 and \udfff",
    "x" * 1_000_000,
)


def test_completions_are_read_as_they_were_written(tmp_path: Path) -> None:
    records = [written(0, number, text) for number, text in enumerate(COMPLETIONS)]
    found = read_run(write_run(tmp_path / "run", records))
    assert found.text
    assert tuple(pair.first.completion for pair in found.pairs) == COMPLETIONS


@pytest.mark.parametrize("first", ["image", "completion"])
def test_images_and_completions_do_not_mix(tmp_path: Path, first: str) -> None:
    image, text = record(0, 1, 7, 1.0), written(0, 1, "six")
    ordered = [image, text] if first == "image" else [text, image]
    run = write_run(tmp_path / "run", [ordered[0], ordered[0], ordered[1]])
    with pytest.raises(ValueError, match=r"index\.jsonl, line 3: .*`(image|completion)`.*makes either images or text"):
        read_run(run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": "iter-000000/a.png", "completion": "six"}, "this one has both"),
        ({"image": None, "completion": "six"}, "this one has both"),
        ({}, "this one has neither"),
        ({"completion": None}, "`completion` is None.*must be the text"),
        ({"completion": ["six"]}, "`completion` is .*must be the text"),
        ({"completion": 6}, "`completion` is 6.*must be the text"),
    ],
)
def test_record_is_either_an_image_or_a_completion(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    run = write_run(tmp_path / "run", [written(0, 1, "six")])
    row = written(0, 2, "")
    del row["completion"]
    add_records(run, [row | changes])
    with pytest.raises(ValueError, match=rf"index\.jsonl, line 2: .*{message}"):
        read_run(run)


def test_pairs_need_the_same_phase_prompt_and_seed(tmp_path: Path) -> None:
    records = [
        record(10, 1, 7, 0.9),
        record(0, 2, 7, 0.2),
        record(0, 1, 7, 0.1),
        record(0, 1, 8, 0.3),
        record(10, 3, 7, 0.4),
        record(10, 2, 7, 0.5, prompt="prompt 2, reworded"),
        record(0, 1, 7, 0.0, phase="train"),
        record(0, 1, 7, 0.0, phase="debug"),
    ]
    found = read_run(write_run(tmp_path / "run", records))
    shots = [
        (
            pair.phase,
            pair.first.prompt_id,
            pair.first.seed,
            {at: shot.rewards["gold"] for at, shot in pair.shots.items()},
        )
        for pair in found.pairs
    ]
    assert shots == [
        ("eval", "1", "7", {0: 0.1, 10: 0.9}),
        ("eval", "2", "7", {0: 0.2}),
        ("eval", "1", "8", {0: 0.3}),
        ("eval", "3", "7", {10: 0.4}),
        ("eval", "2", "7", {10: 0.5}),
        ("train", "1", "7", {0: 0.0}),
    ]
    assert (found.iterations("eval"), found.iterations("train")) == ((0, 10), (0,))


def test_several_images_of_one_seed_pair_by_order_and_a_repeat_replaces(tmp_path: Path) -> None:
    records = [
        record(0, 1, 7, 0.2, sample=1),
        record(0, 1, 7, 0.1, sample=0),
        record(5, 1, 7, 9.9, sample=4),
        record(5, 1, 7, 0.4, sample=5),
        record(5, 1, 7, 0.3, sample=4),
    ]
    pairs = read_run(write_run(tmp_path / "run", records)).pairs
    assert [[shot.rewards["gold"] for shot in pair.shots.values()] for pair in pairs] == [[0.1, 0.3], [0.2, 0.4]]


def test_metrics_keep_the_last_of_a_repeated_iteration_and_no_infinities(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    rows = [
        {"iteration": 2, "kl": 1.0, "grad_norm": float("inf"), "steps": {"3": {"count": 1.0}, "x": {"count": 2.0}}},
        {"iteration": 1, "kl": float("nan"), "steps": {"10": {"clip_share": 0.5, "gone": None}, "2": 7}},
        {"iteration": 2, "kl": 3.0, "note": "x", "steps": {"3": {"count": 4.0}}},
        {"iteration": "3"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics, steps, skipped = read_metrics(file)
    assert metrics == ({"iteration": 1}, {"iteration": 2, "kl": 3.0})
    assert steps == ((1, 10, {"clip_share": 0.5}), (2, 3, {"count": 4.0}))
    assert skipped == 1


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not a run folder.*flowgrpo train"):
        read_run(tmp_path / "missing")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.yaml").write_text("name: bare\n")
    with pytest.raises(ValueError, match=r"no samples yet.*after the first evaluation"):
        read_run(bare)
    empty = write_run(tmp_path / "empty", [record(1, 1, 1, 1.0, phase="debug")])
    with pytest.raises(ValueError, match=r"no samples.*1 records.*after the first evaluation"):
        read_run(empty)
    (bare / "config.yaml").write_text("a: [")
    (bare / "samples").mkdir()
    (bare / "samples" / "index.jsonl").touch()
    with pytest.raises(ValueError, match="is not YAML"):
        read_run(bare)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("iteration", "0"),
        ("prompt", None),
        ("prompt_id", 1.5),
        ("seed", True),
        ("rewards", [1.0]),
        ("path", [[1]]),
        ("path", [[1, 2.5]]),
        ("path", "2"),
        ("path", [[True, 1]]),
    ],
)
def test_malformed_record_names_file_line_and_field(tmp_path: Path, key: str, value: object) -> None:
    run = write_run(tmp_path / "run", [record(0, 1, 7, 1.0), record(0, 2, 7, 1.0) | {key: value}])
    with pytest.raises(ValueError, match=rf"index\.jsonl, line 2: `{key}` is .*must be"):
        read_run(run)


def test_steps_of_unmasking_are_texts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [written(0, 1, "7", steps=["_", "7"])])
    index = run / "samples" / "index.jsonl"
    assert read_samples(index)[0][0].steps == ("_", "7")
    add_records(run, [written(0, 2, "7", steps=["_", 7])])
    with pytest.raises(ValueError, match=r"line 2: `steps` is"):
        read_samples(index)
