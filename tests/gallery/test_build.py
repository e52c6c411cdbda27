"""The gallery, built from small run folders written here."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flowgrpo.gallery.build import MARKER, build_gallery, inline_json, payload, summarize
from flowgrpo.gallery.records import check_image, read_run

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
HOSTILE = '</script><img src=x onerror="alert(1)"> <!--<script> &lt; \u2028\u2029 @@policy@@'


def record(iteration: int, prompt_id: int, seed: int, gold: float | None, **changes: Any) -> dict[str, Any]:
    name = f"iter-{iteration:06d}/eval-{prompt_id}-{seed}-{changes.get('sample', 0)}.png"
    return {
        "phase": "eval",
        "iteration": iteration,
        "prompt": f"prompt {prompt_id}",
        "prompt_id": prompt_id,
        "seed": seed,
        "sample": 0,
        "image": name,
        "rewards": {"gold": gold},
        "sub_scores": {"gold": {"dense": 0.5}},
        "notes": {"gold": "found two circles"},
        "columns": {"skill": "counting"},
    } | changes


def written(iteration: int, prompt_id: int, completion: object, **changes: Any) -> dict[str, Any]:
    """A record of a text run."""
    row = record(iteration, prompt_id, 7, float(iteration > 0), **changes)
    del row["image"]
    return row | {"completion": completion}


def write_run(folder: Path, records: list[dict[str, Any]], metrics: list[dict[str, Any]] | None = None) -> Path:
    (folder / "samples").mkdir(parents=True)
    (folder / "config.yaml").write_text("name: a run\nrecipe: flow_grpo\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics or []))
    (folder / "samples" / "index.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    for row in (row for row in records if "image" in row):
        image = folder / "samples" / row["image"]
        if image.resolve().is_relative_to(folder.resolve()):
            image.parent.mkdir(parents=True, exist_ok=True)
            image.write_bytes(PNG)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two prompts, two seeds each, evaluated at 0, 5 and 10; not written in paired order."""
    records = [
        record(iteration, prompt_id, seed, (iteration / 10) * (prompt_id == 1), prompt=f"{prompt_id} {HOSTILE}")
        for seed in (8, 7)
        for iteration in (0, 5, 10)
        for prompt_id in (1, 2)
    ]
    metrics = [{"iteration": 0, "eval/gold": 0.25}, {"iteration": 1, "reward/gold": 0.3, "ratio/first": 1.0}]
    return write_run(tmp_path / "run", records, [*metrics, {"iteration": 10, "eval/gold": 0.75, "kl": 1e-3}])


class Elements(HTMLParser):
    """What a browser's parser makes of the page: tags, attributes, the text in each script and style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self.texts.append("")
        self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts[-1] += data

    def text(self, tag: str, **attributes: str) -> str:
        wanted = [
            text
            for (name, has), text in zip(self.tags, self.texts)
            if name == tag and all(has.get(key) == value for key, value in attributes.items())
        ]
        return wanted[-1]


def data_of(page: Path) -> dict[str, Any]:
    return json.loads(Elements(page.read_text()).text("script", type="application/json"))


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_page_holds_every_pair_with_its_images_and_scores(run: Path) -> None:
    page = build_gallery(run)
    assert page == run / "gallery" / "index.html"
    data = data_of(page)
    assert data["name"] == "a run"
    assert data["text"] is False
    assert data["facts"] == [["recipe", "flow_grpo"]]
    assert data["checkpoints"] == [0, 5, 10]
    assert [(pair["id"], pair["seed"]) for pair in data["pairs"]] == [
        ("1", "8"),
        ("2", "8"),
        ("1", "7"),
        ("2", "7"),
    ]
    for pair in data["pairs"]:
        for iteration, shot in zip(data["checkpoints"], pair["shots"]):
            assert shot["image"] == f"iter-{iteration:06d}/eval-{pair['id']}-{pair['seed']}-0.png"
            assert (page.parent / data["prefix"] / shot["image"]).is_file()
            assert shot["rewards"] == [iteration / 10 if pair["id"] == "1" else 0.0]
            assert shot["notes"] == [[0, "found two circles"]]
            assert shot["parts"] == [["gold / dense", 0.5]]
        assert pair["columns"] == ["counting"]
    assert data["iterations"] == [0, 1, 10]
    assert {"key": "eval/gold", "values": [0.25, None, 0.75]} in data["series"]


def test_hostile_text_stays_text(run: Path) -> None:
    page = build_gallery(run).read_text()
    assert "</script><img" not in page
    assert not set("\u2028\u2029") & set(page)
    elements = Elements(page)
    tags = [tag for tag, _ in elements.tags]
    assert tags.count("script") == 2
    assert "img" not in tags
    assert not [key for _, attributes in elements.tags for key in attributes if key.startswith("on")]
    data = json.loads(elements.text("script", type="application/json"))
    assert data["pairs"][0]["prompt"] == f"1 {HOSTILE}"


def test_json_between_tags_has_no_character_that_ends_it() -> None:
    value = {"<!--": "</SCRIPT>", "lone": "\ud800", "lines": "\u2028\u2029", "entity": "&lt;"}
    text = inline_json(value)
    assert not re.search(r"[<>&\u2028\u2029\ud800-\udfff]", text)
    assert json.loads(text) == value


def test_policy_admits_exactly_the_script_and_style_of_the_page(run: Path) -> None:
    elements = Elements(build_gallery(run).read_text())
    policy = next(a["content"] for _, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(elements.text(tag).encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_page_needs_no_network(run: Path) -> None:
    page = build_gallery(run).read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|[\"'(]//|@import|fetch\(|XMLHttpRequest|innerHTML|outerHTML|insertAdjacent", page)
    assert {"src", "href"}.isdisjoint(key for _, has in Elements(page).tags for key in has)


@pytest.mark.parametrize("tail", ['{"phase": "eval", "iterat', '{"phase": "eval", "prompt": "caf\\u00', "7"])
def test_truncated_last_line_costs_only_itself(run: Path, tail: str) -> None:
    whole = data_of(build_gallery(run))
    for name in ("samples/index.jsonl", "metrics.jsonl"):
        with (run / name).open("a") as log:
            log.write(tail)
    data = data_of(build_gallery(run))
    assert data["skipped"] == 2
    assert data | {"skipped": 0} == whole


@pytest.mark.parametrize(
    "image",
    [
        "../config.png",
        "iter-000000/../../secret.png",
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
def test_image_outside_samples_is_refused(run: Path, image: object) -> None:
    row = record(0, 9, 9, 1.0) | {"image": image}
    with (run / "samples" / "index.jsonl").open("a") as log:
        log.write(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"index\.jsonl, line 13: `image`"):
        build_gallery(run)
    assert not (run / "gallery").exists()


def test_link_that_leads_outside_samples_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(PNG)
    (run / "samples" / "link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(ValueError, match="leads outside"):
        check_image("link.png", run / "samples", "here")
    assert check_image("iter-000000/x.png", run / "samples", "here") == "iter-000000/x.png"


HOSTILE_COMPLETIONS = (
    "",
    " \n\t ",
    "<think>a\n\n  b\tc\r\n</think>",
    HOSTILE,
    "<script>alert(1)</script>",
    "</ScRiPt ><svg onload=alert(1)>",
    "]]><!-- </style></textarea></title></noscript>",
    "javascript:alert(1) ${alert(1)} `@@data@@` \\u003c/script>",
    "one\u2028two\u2029three\x00\x1b[31m\x85\ufeff",
    "\u202e\u0645\u0631\u062d\u0628\u0627 \u2066abc",
    "\U0001f469\u200d\U0001f52c\U0001f44d\U0001f3fd Z\u0351\u036b\u0343\u036a",
    "lone \ud800 and \udfff",
    "x" * 1_000_000,
    "</script>" * 100_000,
)


def test_completions_come_to_the_page_as_they_were_written(tmp_path: Path) -> None:
    texts = HOSTILE_COMPLETIONS
    records = [
        written(iteration, prompt_id, text)
        for iteration, order in ((0, texts), (5, texts[::-1]))
        for prompt_id, text in enumerate(order)
    ]
    page = build_gallery(write_run(tmp_path / "run", records))
    source = page.read_text()
    assert not set("\u2028\u2029\u202e\x00") & set(source)
    elements = Elements(source)
    assert [tag for tag, _ in elements.tags].count("script") == 2
    assert {"img", "svg", "textarea"}.isdisjoint(tag for tag, _ in elements.tags)
    assert not [key for _, attributes in elements.tags for key in attributes if key.startswith("on")]
    data = data_of(page)
    assert data["text"] is True
    assert [tuple(shot["completion"] for shot in pair["shots"]) for pair in data["pairs"]] == list(
        zip(texts, texts[::-1])
    )
    assert data["pairs"][0]["shots"][0] == {
        "completion": "",
        "rewards": [0.0],
        "parts": [["gold / dense", 0.5]],
        "notes": [[0, "found two circles"]],
    }
    assert data["summary"][0]["gained"] == len(texts)


def test_text_run_has_no_files_but_its_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [written(0, 1, "six"), written(5, 1, "seven"), written(5, 1, 3, phase="train")])
    out = tmp_path / "site"
    build_gallery(run, out)
    assert set(files_of(out)) == {"index.html", MARKER}
    assert data_of(out / "index.html")["pairs"][0]["shots"][1]["completion"] == "seven"


@pytest.mark.parametrize("first", ["image", "completion"])
def test_images_and_completions_do_not_mix(tmp_path: Path, first: str) -> None:
    image, text = record(0, 1, 7, 1.0), written(0, 1, "six")
    ordered = [image, text] if first == "image" else [text, image]
    run = write_run(tmp_path / "run", [text | {"phase": "train"}, ordered[0], ordered[0], ordered[1]])
    with pytest.raises(ValueError, match=r"index\.jsonl, line 4: .*`(image|completion)`.*either of images or of text"):
        build_gallery(run)
    assert not (run / "gallery").exists()


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
    with (run / "samples" / "index.jsonl").open("a") as log:
        log.write(json.dumps(row | changes) + "\n")
    with pytest.raises(ValueError, match=rf"index\.jsonl, line 2: .*{message}"):
        build_gallery(run)


def test_special_characters_in_image_names_survive_as_addresses(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [record(0, 1, 1, 1.0, image='a b/50% #1? "é".png')])
    out = tmp_path / "site"
    data = data_of(build_gallery(run, out))
    assert data["pairs"][0]["shots"][0]["image"] == "a%20b/50%25%20%231%3F%20%22%C3%A9%22.png"
    assert (out / "samples" / 'a b/50% #1? "é".png').read_bytes() == PNG


def test_pairs_need_the_same_prompt_and_seed(tmp_path: Path) -> None:
    records = [
        record(10, 1, 7, 0.9),
        record(0, 2, 7, 0.2),
        record(0, 1, 7, 0.1),
        record(0, 1, 8, 0.3),
        record(10, 3, 7, 0.4),
        record(10, 2, 7, 0.5, prompt="prompt 2, reworded"),
        record(0, 1, 7, 0.0, phase="train"),
    ]
    pairs = read_run(write_run(tmp_path / "run", records)).pairs
    shots = [[shot and (shot.prompt_id, shot.seed, shot.rewards["gold"]) for shot in pair.shots] for pair in pairs]
    assert shots == [
        [("1", "7", 0.1), ("1", "7", 0.9)],
        [("2", "7", 0.2), None],
        [("1", "8", 0.3), None],
        [None, ("3", "7", 0.4)],
        [None, ("2", "7", 0.5)],
    ]


def test_several_images_of_one_seed_pair_by_order_and_a_repeat_replaces(tmp_path: Path) -> None:
    records = [
        record(0, 1, 7, 0.2, sample=1),
        record(0, 1, 7, 0.1, sample=0),
        record(5, 1, 7, 9.9, sample=4),
        record(5, 1, 7, 0.4, sample=5),
        record(5, 1, 7, 0.3, sample=4),
    ]
    pairs = read_run(write_run(tmp_path / "run", records)).pairs
    assert [[shot.rewards["gold"] for shot in pair.shots if shot] for pair in pairs] == [
        [0.1, 0.3],
        [0.2, 0.4],
    ]


def test_summary_averages_seeds_before_prompts_and_leaves_out_missing_rewards(tmp_path: Path) -> None:
    # Gains: prompt 1: 0.6 and 0.2, mean 0.4; prompt 2: -0.2; prompt 3: 0; prompt 4: not applicable at 10.
    ends = [(1, 7, 0.0, 0.6), (1, 8, 0.5, 0.7), (2, 7, 0.9, 0.7), (3, 7, 0.2, 0.2), (4, 7, 1.0, float("nan"))]
    records = [
        record(iteration, prompt_id, seed, value)
        for prompt_id, seed, base, tuned in ends
        for iteration, value in ((0, base), (4, 5.0), (10, tuned))
    ]
    metrics = [{"iteration": 0, "eval/gold": 0.4}, {"iteration": 10, "eval/gold": 0.5}]
    found = summarize(read_run(write_run(tmp_path / "run", records, metrics)), "gold")
    assert found is not None
    per_prompt = [0.4, -0.2, 0.0]
    mean = sum(per_prompt) / 3
    error = (sum((gain - mean) ** 2 for gain in per_prompt) / 2 / 3) ** 0.5
    assert found["before"] == pytest.approx(1.6 / 4)
    assert found["after"] == pytest.approx(2.2 / 4)
    assert found["error"] == pytest.approx(error)
    assert [found[key] for key in ("prompts", "pairs", "gained", "lost")] == [3, 4, 2, 1]
    assert found["whole"] == [0.4, 0.5]


def test_one_evaluation_and_no_metrics_make_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [record(0, 1, 7, None, rewards={}, columns={}, notes={}, sub_scores={})])
    (run / "metrics.jsonl").unlink()
    (run / "samples" / "iter-000000" / "eval-1-7-0.png").unlink()
    data = data_of(build_gallery(run))
    assert data["checkpoints"] == [0]
    assert data["summary"] == data["series"] == data["rewards"] == []
    assert data["pairs"][0]["shots"] == [{"image": None, "rewards": [], "parts": [], "notes": []}]


def test_metrics_keep_the_last_of_a_repeated_iteration_and_no_infinities(tmp_path: Path) -> None:
    rows = [{"iteration": 2, "kl": 1.0, "grad_norm": float("inf")}, {"iteration": 1, "kl": float("nan")}]
    run = write_run(tmp_path / "run", [record(0, 1, 7, 1.0)], [*rows, {"iteration": 2, "kl": 3.0, "note": "x"}])
    data = payload(read_run(run), "../samples/")
    assert data["iterations"] == [1, 2]
    assert data["series"] == [{"key": "kl", "values": [None, 3.0]}]


def test_large_seeds_and_small_ratios_keep_their_digits(tmp_path: Path) -> None:
    rows = [{"iteration": 1, "ratio/first": 1.00000012}]
    data = data_of(build_gallery(write_run(tmp_path / "run", [record(0, 1, 2**63 - 1, 1.0)], rows)))
    assert data["pairs"][0]["seed"] == "9223372036854775807"
    assert data["series"][0]["values"][0] > 1.0000001


def test_credentials_of_the_recipe_are_not_published(run: Path) -> None:
    (run / "config.yaml").write_text(
        "rewards: [{api_key: sk-hush, url: 'grpc://me:sk-hush@host/x', max_tokens: 64}]\nHF_TOKEN: sk-hush\n"
    )
    page = build_gallery(run).read_text()
    assert "sk-hush" not in page
    assert "max_tokens: 64" in page


def test_building_again_is_idempotent_and_leaves_no_temporary_files(run: Path, tmp_path: Path) -> None:
    for out in (None, tmp_path / "site"):
        folder = build_gallery(run, out).parent
        first = files_of(folder)
        assert files_of(build_gallery(run, out).parent) == first
        names = {"index.html", MARKER}
        assert {name for name in first if not name.startswith("samples/")} == names
        assert len(first) - len(names) == (12 if out else 0)


def test_building_again_replaces_only_its_own_files(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "site"
    build_gallery(run, out)
    (out / "CNAME").write_text("mine")
    index = run / "samples" / "index.jsonl"
    kept = [line for line in index.read_text().splitlines() if json.loads(line)["iteration"] != 5]
    index.write_text("\n".join(kept))
    changed = run / "samples" / json.loads(kept[0])["image"]
    changed.write_bytes(PNG + b"again")
    build_gallery(run, out)
    after = files_of(out)
    assert after["CNAME"] == b"mine"
    assert not [name for name in after if "iter-000005" in name]
    assert after["samples/" + json.loads(kept[0])["image"]] == PNG + b"again"
    assert len(after) == 8 + 3


def test_interrupted_build_keeps_the_old_page_and_is_cleaned_up(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "site"
    old = build_gallery(run, out).read_bytes()
    with (run / "samples" / "index.jsonl").open("a") as log:
        log.write(json.dumps(record(0, 9, 9, 1.0)) + "\n")
    new = run / "samples" / record(0, 9, 9, 1.0)["image"]
    new.write_bytes(PNG)

    def half(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:10])
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copy2", half)
        with pytest.raises(OSError, match="disk full"):
            build_gallery(run, out)
    assert (out / "index.html").read_bytes() == old
    assert set(files_of(out).values()) >= {PNG, old}
    assert not [name for name in files_of(out) if name.endswith(".tmp") or "eval-9-9" in name]
    build_gallery(run, out)
    assert len(data_of(out / "index.html")["pairs"]) == 5


def test_folder_of_somebody_else_is_refused(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "site"
    out.mkdir()
    build_gallery(run, out)
    for mine in (tmp_path / "mine", run / "gallery"):
        mine.mkdir()
        (mine / "index.html").write_text("mine")
        with pytest.raises(ValueError, match="was not written by the gallery"):
            build_gallery(run, mine)
        assert files_of(mine) == {"index.html": b"mine"}
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="was not written by the gallery"):
        build_gallery(run, tmp_path / "file")


def test_marker_cannot_delete_outside_its_folder(run: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    page = build_gallery(run)
    (page.parent / MARKER).write_text(json.dumps({"files": ["../../victim.txt", str(victim), "index.html"]}))
    build_gallery(run)
    assert victim.read_text() == "mine"


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not a run folder.*flowgrpo train"):
        build_gallery(tmp_path / "missing")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.yaml").write_text("name: bare\n")
    with pytest.raises(ValueError, match=r"no samples yet.*after the first evaluation"):
        build_gallery(bare)
    trained = write_run(tmp_path / "trained", [record(1, 1, 1, 1.0, phase="train")])
    with pytest.raises(ValueError, match=r"no evaluation samples.*1 records.*evaluation on"):
        build_gallery(trained)
    assert not (trained / "gallery").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [("iteration", "0"), ("prompt", None), ("prompt_id", 1.5), ("seed", True), ("rewards", [1.0])],
)
def test_malformed_record_names_file_line_and_field(tmp_path: Path, key: str, value: object) -> None:
    run = write_run(tmp_path / "run", [record(0, 1, 7, 1.0), record(0, 2, 7, 1.0) | {key: value}])
    with pytest.raises(ValueError, match=rf"index\.jsonl, line 2: `{key}` is .*must be"):
        build_gallery(run)
