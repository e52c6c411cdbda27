"""The gallery's files, built from small run folders written here."""

import base64
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from flowgrpo.cli.app import app
from flowgrpo.gallery import build, pages
from flowgrpo.gallery.build import SCRIPTS, build_gallery, render
from flowgrpo.gallery.page_files import MARKER
from flowgrpo.gallery.pages import inline_json, script
from flowgrpo.gallery.thumbnails import CACHE
from flowgrpo.inference.model_recipes import is_run
from tests.gallery.folders import HOSTILE, Elements, add_records, data_of, files_of, record, write_run, written


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


def test_data_hold_every_sample_with_its_image_and_scores(run: Path) -> None:
    page = build_gallery(run)
    assert page == run / "gallery" / "index.html"
    data = data_of(page)
    site = data["site"]
    assert (site["text"], site["live"], site["rewards"], site["columns"]) == (False, False, ["gold"], ["skill"])
    (described,) = site["runs"]
    assert (described["name"], described["facts"]) == ("a run", [["recipe", "flow_grpo"]])
    assert [(one["file"], one["iteration"], one["count"]) for one in site["sets"]] == [
        ("r0-eval-000000", 0, 4),
        ("r0-eval-000005", 5, 4),
        ("r0-eval-000010", 10, 4),
    ]
    pairs = data["r0-pairs"]
    assert [(pairs["ids"][prompt], seed, phase) for prompt, seed, phase in pairs["pairs"]] == [
        ("1", "8", 0),
        ("2", "8", 0),
        ("1", "7", 0),
        ("2", "7", 0),
    ]
    assert pairs["columns"] == [["counting"], ["counting"]]
    for iteration in (0, 5, 10):
        scores, details = data[f"r0-eval-{iteration:06d}"], data[f"r0-eval-{iteration:06d}-0"]["details"]
        assert scores["pairs"] == [0, 1, 2, 3]
        assert scores["rewards"] == [[iteration / 10, 0.0, iteration / 10, 0.0]]
        for pair, thumb, detail in zip(pairs["pairs"], scores["thumbs"], details):
            assert detail["image"] == f"iter-{iteration:06d}/eval-{pairs['ids'][pair[0]]}-{pair[1]}-0.png"
            assert (page.parent / described["base"] / detail["image"]).is_file()
            assert (page.parent / "thumbs" / thumb[:2] / f"{thumb[2:]}.webp").is_file()
            assert (detail["notes"], detail["parts"]) == ([[0, "found two circles"]], [["gold / dense", 0.5]])
    curves = data["r0-curves"]["metrics"]
    assert curves["iterations"] == [0, 1, 10]
    assert ["eval/gold", [0.25, None, 0.75]] in curves["series"]


def test_the_list_of_files_names_all_others_by_their_content(run: Path) -> None:
    page = build_gallery(run)
    before = data_of(page)
    listed = dict(before["site"]["files"])
    assert set(listed) == set(before) - {"site"}
    add_records(run, [record(20, 1, 8, 0.5, prompt=f"1 {HOSTILE}")])
    after = dict(data_of(build_gallery(run))["site"]["files"])
    changed = {name for name in after if after[name] != listed.get(name)}
    assert changed == {"r0-eval-000020", "r0-eval-000020-0"}


def test_a_rebuild_writes_only_what_changed(run: Path) -> None:
    folder = build_gallery(run).parent
    old = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    for path in old:
        path.touch()
    touched = {path: path.stat().st_mtime_ns for path in old}
    add_records(run, [record(20, 1, 8, 0.5, prompt=f"1 {HOSTILE}")])
    build_gallery(run)
    rewritten = {path.relative_to(folder).as_posix() for path in old if path.stat().st_mtime_ns != touched[path]}
    assert rewritten == {MARKER, CACHE, "data/site.js"}


def test_the_list_of_files_is_orderafter_what_it_lists(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    write = build.write_bytes

    def watched(path: Path, content: bytes) -> None:
        order.append(path.name)
        write(path, content)

    monkeypatch.setattr(build, "write_bytes", watched)
    build_gallery(run)
    assert order[-2:] == ["site.js", "index.html"]
    assert len(order) == len(data_of(run / "gallery" / "index.html")) + 1


def test_details_are_cut_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MORE", 2)
    run = write_run(tmp_path / "run", [written(0, number, f"text {number}") for number in range(5)])
    data = data_of(build_gallery(run))
    assert data["site"]["more"] == 2
    parts = [data[f"r0-eval-000000-{part}"]["details"] for part in range(3)]
    assert [[one["completion"] for one in part] for part in parts] == [
        ["text 0", "text 1"],
        ["text 2", "text 3"],
        ["text 4"],
    ]


def test_hostile_text_is_in_no_file_as_markup(run: Path) -> None:
    page = build_gallery(run)
    for name, content in files_of(page.parent).items():
        if name.endswith((".js", ".html")):
            assert b"</script><img" not in content
            assert content.isascii() or name == "index.html"
    elements = Elements(page.read_text())
    tags = [tag for tag, _ in elements.tags]
    assert tags.count("script") == 1
    assert "img" not in tags
    assert not [key for _, attributes in elements.tags for key in attributes if key.startswith("on")]
    assert data_of(page)["r0-pairs"]["prompts"] == [f"1 {HOSTILE}", f"2 {HOSTILE}"]


def test_names_that_mean_something_to_the_language_stay_names(tmp_path: Path) -> None:
    names = {"__proto__": 1.0, "constructor": 2.0, "</script>": 3.0}
    row = record(0, 1, 7, 1.0, rewards=names, columns={"__proto__": "x"}, notes={"__proto__": "y"})
    data = data_of(build_gallery(write_run(tmp_path / "run", [row])))
    assert data["site"]["rewards"] == list(names)
    assert data["site"]["columns"] == ["__proto__"]
    assert data["r0-eval-000000"]["rewards"] == [[1.0], [2.0], [3.0]]


def test_a_data_file_is_one_call_with_text() -> None:
    value = {"<!--": "</SCRIPT>", "lone": "\ud800", "lines": "\u2028\u2029", "quote": '");alert(1);("'}
    text = script("r0-pairs", value).decode("ascii")
    assert text.startswith('flowgrpoGallery("r0-pairs","')
    assert text.endswith('");\n')
    assert not set("<>&") & set(text)
    assert json.loads(json.loads(text[len('flowgrpoGallery("r0-pairs",') : -3])) == value


def test_json_between_tags_has_no_character_that_ends_it() -> None:
    value = {"<!--": "</SCRIPT>", "lone": "\ud800", "lines": "\u2028\u2029", "entity": "&lt;"}
    text = inline_json(value)
    assert not re.search(r"[<>&\u2028\u2029\ud800-\udfff]", text)
    assert json.loads(text) == value


@pytest.mark.parametrize("embedded", [None, {"site": {"prompt": HOSTILE}}])
def test_policy_admits_the_script_and_style_of_the_page_and_data_beside_it(embedded: dict[str, Any] | None) -> None:
    elements = Elements(render(embedded))
    policy = next(a["content"] for _, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    digests = {
        tag: f"'sha256-{base64.b64encode(hashlib.sha256(elements.text(tag).encode()).digest()).decode()}'"
        for tag in ("script", "style")
    }
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["style-src"] == digests["style"]
    assert rules["script-src"] == (digests["script"] if embedded else f"'self' file: {digests['script']}")
    assert rules["img-src"] == rules["media-src"] == ("data:" if embedded else "'self' file:")
    assert len(rules) == 7


def test_page_needs_no_network_and_parses_no_markup() -> None:
    page = render().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|[\"'(]//|@import|fetch\(|XMLHttpRequest|WebSocket|sendBeacon", page)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|srcdoc|javascript:", page
    )
    assert {key for _, has in Elements(page).tags for key in has} & {"src"} == set()
    assert {has["href"] for _, has in Elements(page).tags if "href" in has} == {"#pictures", "#results"}


def test_every_script_of_the_package_is_in_the_page() -> None:
    folder = Path(pages.__file__).parent
    assert sorted([*SCRIPTS, "vote.js"]) == sorted(path.name for path in folder.glob("*.js"))  # served, not built in
    assert len(SCRIPTS) >= 10


@pytest.mark.parametrize("tail", ['{"phase": "eval", "iterat', '{"phase": "eval", "prompt": "caf\\u00', "7"])
def test_truncated_last_line_costs_only_itself(run: Path, tail: str) -> None:
    whole = data_of(build_gallery(run))
    for name in ("samples/index.jsonl", "metrics.jsonl"):
        with (run / name).open("a") as log:
            log.write(tail)
    data = data_of(build_gallery(run))
    assert data["site"]["runs"][0]["skipped"] == 2
    data["site"]["runs"][0]["skipped"] = 0
    assert data == whole


def test_text_run_has_no_images(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [written(0, 1, "six"), written(5, 1, "seven"), written(5, 1, "", phase="train")])
    page = build_gallery(run, tmp_path / "site")
    assert not [name for name in files_of(page.parent) if name.startswith(("thumbs", "samples"))]
    data = data_of(page)
    assert data["site"]["text"] is True
    assert data["r0-eval-000005-0"]["details"][0]["completion"] == "seven"
    assert data["r0-train-000005-0"]["details"][0]["completion"] == ""


def test_training_samples_alone_make_a_gallery(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [record(3, 1, seed, 0.1 * seed, phase="train") for seed in range(2)])
    site = data_of(build_gallery(run))["site"]
    assert [(one["phase"], one["iteration"], one["count"]) for one in site["sets"]] == [("train", 3, 2)]
    assert site["runs"][0]["summary"] == []


def test_special_characters_in_image_names_survive_as_addresses(tmp_path: Path) -> None:
    name = 'a b/50% #1? "é".png'
    run = write_run(tmp_path / "run", [record(0, 1, 1, 1.0, image=name)])
    out = tmp_path / "site"
    data = data_of(build_gallery(run, out))
    assert data["r0-eval-000000-0"]["details"][0]["image"] == "a%20b/50%25%20%231%3F%20%22%C3%A9%22.png"
    assert (out / "samples" / "0" / name).read_bytes() == (run / "samples" / name).read_bytes()


def test_several_runs_share_names_and_keep_their_samples_apart(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", [record(0, 1, 7, 0.1)], name="one")
    second = write_run(tmp_path / "b c", [record(0, 1, 7, 0.9, rewards={"proxy": 0.9, "gold": 0.2})], name="two")
    with pytest.raises(ValueError, match=r"2 runs have no common folder.*--out"):
        build_gallery([first, second])
    data = data_of(build_gallery([first, second], tmp_path / "site"))
    assert data["site"]["rewards"] == ["gold", "proxy"]
    assert [one["rewards"] for one in (data["r0-eval-000000"], data["r1-eval-000000"])] == [
        [[0.1], [None]],
        [[0.2], [0.9]],
    ]
    assert [run["base"] for run in data["site"]["runs"]] == ["samples/0/", "samples/1/"]
    assert [one["scored"] for one in data["site"]["sets"]] == [[0], [0, 1]]
    linked = data_of(build_gallery([first, second], tmp_path / "linked", link=True))
    assert [run["base"] for run in linked["site"]["runs"]] == ["../a/samples/", "../b%20c/samples/"]
    assert not (tmp_path / "linked" / "samples").exists()


def test_runs_of_images_and_of_text_do_not_mix(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "images", [record(0, 1, 7, 0.1)]),
        write_run(tmp_path / "text", [written(0, 1, "six")]),
    ]
    with pytest.raises(ValueError, match=r"text is a run of completions, and .*images is a run of images"):
        build_gallery(runs, tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_remaking_knows_model_steps_and_call(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [record(0, 1, 7, 0.1, noise=2**60 + 1, path=[[2, 0], [5, 1]])])
    config = {
        "name": "x",
        "model": {"path": "my/model", "call": {"guidance_scale": 4.5}},
        "sampler": {"steps": 12, "kernel": "cps"},
        "evaluate": {"steps": 40, "call": {"guidance_scale": 7.0}},
    }
    (run / "config.yaml").write_text(json.dumps(config))
    data = data_of(build_gallery(run))
    assert data["site"]["runs"][0]["remake"] == {
        "model": "my/model",
        "steps": 12,
        "evaluation_steps": 40,
        "settings": [["sampler", "kernel cps"], ["call", "guidance_scale 4.5"], ["evaluation", "guidance_scale 7.0"]],
        "result": None,
        "place": "../",
        "start": None,
    }
    detail = data["r0-eval-000000-0"]["details"][0]
    assert (detail["noise"], detail["path"]) == ("1152921504606846977", [[2, 0], [5, 1]])


def test_a_page_knows_which_evaluation_the_result_of_a_run_is_from(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [record(0, 1, 7, 0.1)])
    (run / "config.yaml").write_text(json.dumps({"name": "x", "evaluate": {"results": "best"}}))
    assert data_of(build_gallery(run))["site"]["runs"][0]["remake"]["result"] is None
    (run / "best.json").write_text(json.dumps({"iteration": 40, "score": 0.5, "measure": {}}))
    assert data_of(build_gallery(run))["site"]["runs"][0]["remake"]["result"] == 40


def test_one_evaluation_and_no_metrics_make_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [record(0, 1, 7, None, rewards={}, columns={}, notes={}, sub_scores={})])
    (run / "metrics.jsonl").unlink()
    (run / "samples" / "iter-000000" / "eval-1-7-0.png").unlink()
    data = data_of(build_gallery(run))
    assert data["site"]["rewards"] == data["r0-curves"]["metrics"]["series"] == []
    assert data["r0-eval-000000"]["thumbs"] == [None]
    assert data["r0-eval-000000-0"]["details"] == [{"parts": [], "notes": []}]


def test_large_seeds_and_small_ratios_keep_their_digits(tmp_path: Path) -> None:
    rows = [{"iteration": 1, "ratio/first": 1.00000012}]
    data = data_of(build_gallery(write_run(tmp_path / "run", [record(0, 1, 2**63 - 1, 1.0)], rows)))
    assert data["r0-pairs"]["pairs"] == [[0, "9223372036854775807", 0]]
    assert data["r0-curves"]["metrics"]["series"][0][1][0] > 1.0000001


def test_credentials_of_the_recipe_are_not_published(run: Path) -> None:
    (run / "config.yaml").write_text(
        "rewards: [{api_key: sk-hush, url: 'grpc://me:sk-hush@host/x', max_tokens: 64}]\nHF_TOKEN: sk-hush\n"
    )
    page = build_gallery(run)
    assert not [name for name, content in files_of(page.parent).items() if b"sk-hush" in content]
    assert "max_tokens: 64" in data_of(page)["site"]["runs"][0]["config"]


def test_building_again_is_idempotent_and_leaves_no_temporary_files(run: Path, tmp_path: Path) -> None:
    for out in (None, tmp_path / "site"):
        folder = build_gallery(run, out).parent
        first = files_of(folder)
        assert files_of(build_gallery(run, out).parent) == first
        assert len([name for name in first if name.startswith("thumbs/")]) == 12
        assert len([name for name in first if name.startswith("samples/")]) == (12 if out else 0)
        assert not [name for name in first if name.endswith(".tmp")]
        assert set(json.loads(first[MARKER])["files"]) == set(first) - {MARKER}


def test_building_again_replaces_only_its_own_files(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "site"
    build_gallery(run, out)
    (out / "CNAME").write_text("mine")
    index = run / "samples" / "index.jsonl"
    kept = [line for line in index.read_text().splitlines() if json.loads(line)["iteration"] != 5]
    index.write_text("\n".join(kept))
    changed = run / "samples" / json.loads(kept[0])["image"]
    changed.write_bytes(changed.read_bytes() + b"again")
    build_gallery(run, out)
    after = files_of(out)
    assert after["CNAME"] == b"mine"
    assert not [name for name in after if "000005" in name]
    assert after["samples/0/" + json.loads(kept[0])["image"]].endswith(b"again")
    assert len([name for name in after if name.startswith("thumbs/")]) == 8


def test_interrupted_build_keeps_the_old_data_and_is_cleaned_up(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "site"
    old = data_of(build_gallery(run, out))
    add_records(run, [record(0, 9, 9, 1.0)])

    def half(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:10])
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copy2", half)
        with pytest.raises(OSError, match="disk full"):
            build_gallery(run, out)
    assert data_of(out / "index.html") == old
    assert not [name for name in files_of(out) if name.endswith(".tmp") or "eval-9-9" in name]
    index = run / "samples" / "index.jsonl"
    index.write_text("\n".join(index.read_text().splitlines()[:-1]))  # what was half built is not wanted any more
    build_gallery(run, out)
    assert data_of(out / "index.html") == old
    assert len([name for name in files_of(out) if name.startswith("thumbs/")]) == 12


def test_folder_of_somebody_else_is_refused(run: Path, tmp_path: Path) -> None:
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


def test_a_marker_of_another_form_is_refused_and_folders_in_it_stay(run: Path) -> None:
    page = build_gallery(run)
    (page.parent / "sub").mkdir()
    (page.parent / MARKER).write_text(json.dumps({"files": ["sub", "index.html"]}))
    build_gallery(run)
    assert (page.parent / "sub").is_dir()
    (page.parent / MARKER).write_text(json.dumps({"files": None}))
    with pytest.raises(ValueError, match="was not written by the gallery"):
        build_gallery(run)


def test_a_recipe_and_an_index_with_odd_values_are_shown(run: Path) -> None:
    config = run / "config.yaml"
    recipe = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**recipe, "model": {**recipe.get("model", {}), "call": 5}}))
    index = run / "samples" / "index.jsonl"
    first, *rest = index.read_text().splitlines()
    record = json.loads(first)
    record["rewards"] = {**record["rewards"], "huge": 10**400}
    index.write_text("\n".join([json.dumps(record), *rest]) + "\n")
    assert build_gallery(run).is_file()


@pytest.mark.slow
def test_temporaries_of_killed_builds_go_and_those_of_others_stay(run: Path, tmp_path: Path):
    host, dead = socket.gethostname(), _ended_process()
    out = tmp_path / "site"
    out.mkdir()
    # A build that was killed before it listed its files left a folder that is none of a gallery yet.
    stale = out / f".{MARKER}.{host}-{dead}-1.tmp"
    stale.write_text("{")
    build_gallery(run, out)
    assert not stale.exists()
    gone = [out / "data" / f".site.js.{host}-{number}-1.tmp" for number in (dead, os.getpid())]
    kept = [
        out / "data" / f".site.js.{host}-{os.getppid()}-1.tmp", out / "data" / f".site.js.elsewhere-{dead}-1.tmp",
        out / "data" / ".mine.tmp",
    ]  # fmt: skip
    for path in gone + kept:
        path.write_text("x")
    build_gallery(run, out)
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in kept)


def _ended_process() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_folder_whose_name_is_not_utf_8(run: Path, tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff"))
    run.rename(odd)
    page = build_gallery(odd, out=tmp_path / "page", link=True)
    assert any(b"../b%FF/samples/" in content for content in files_of(page.parent).values())
    with pytest.raises(ValueError, match=r"has a name that is not UTF-8; rename it"):
        is_run(str(odd))


def test_the_command_says_how_many_samples_of_which_runs_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("one"), [record(at, prompt, 7, 0.5) for at in (0, 1) for prompt in (0, 1, 2)])
    write_run(Path("two"), [record(0, 0, 7, 0.5)])

    def said(*words: str) -> list[str]:
        done = CliRunner().invoke(app, ["gallery", *words])
        assert done.exit_code == 0, done.output
        return done.output.splitlines()

    both = "2 runs, 7 samples: 6 of one, 1 of two"
    assert said("one", "two", "--out", "both") == ["both/index.html", both]
    assert said("one", "two", "--single", "page.html") == ["page.html", both]
    assert said("two") == ["two/gallery/index.html", "1 run, 1 sample"]
    # A sheet shows some of the samples only.
    assert said("one", "--sheet", "sheet.png") == ["sheet.png"]
