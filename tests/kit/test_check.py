"""The check finds the fault of every reward that has one, and no fault in the others."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import open_clip
import pytest
import torch
from torch import Tensor

from flowgrpo.kit.check import CheckPlan, check_on
from flowgrpo.kit.entries import parse_reward
from flowgrpo.kit.findings import FAULT, Report
from flowgrpo.kit.folder import materials, read_folder
from flowgrpo.kit.material import Material
from flowgrpo.kit.trial import Trial
from flowgrpo.kit.usefulness import check_distribution
from flowgrpo.kit.versions import NEAR, OTHER, grainy
from flowgrpo.rewards.base import RewardSpec
from flowgrpo.rewards.registry import build
from flowgrpo.training.folder.run_folder import save_image

CULPRITS = Path(__file__).with_name("culprits.py")


def examine(spec: RewardSpec | str, material: Material, **plan) -> Report:
    entry = spec if isinstance(spec, RewardSpec) else RewardSpec(f"{CULPRITS}:{spec}")
    trial = Trial(entry)
    report = Report(trial.name, trial.task, plan.get("accepted", ()))
    return check_on(trial, {"drawn": material}, CheckPlan(**plan), report)


@pytest.mark.parametrize(
    ("name", "crimes", "faults"),
    [
        ("noisy", {"random"}, 1),
        ("OwnNoise", {"random"}, 1),
        ("Drifting", {"state"}, 1),
        ("normalised", {"batch"}, 1),
        ("numbered", {"order"}, 1),
        ("contrast", {"blank"}, 1),
        ("doubling", {"mutation"}, 0),
        ("Holding", {"gradients"}, 1),
        ("Keeping", {"gradients"}, 1),
        ("Hoarding", {"memory"}, 0),
        ("corner", {"resize"}, 0),
        ("squeezed", {"scores"}, 1),
        ("columnar", {"scores"}, 1),
        ("halved", {"dtype"}, 0),
        ("offset", {"range"}, 0),
        ("ends", {"no-prompt"}, 0),
        ("short_prompts", {"long-prompt"}, 1),
        ("of_64", {"tiny", "oblong", "huge"}, 0),
        ("spoiling", {"columns"}, 1),
    ],
)
def test_a_culprit_is_convicted_of_its_crime_and_of_nothing_else(
    name: str, crimes: set[str], faults: int, scenes: Material
):
    report = examine(name, scenes)
    assert report.convictions == crimes, report.text()
    assert report.count(FAULT) == faults, report.text()


def test_a_comparison_that_rounding_decides_should_take_close_scores_as_equal(scenes: Material):
    [finding] = [one for one in examine("Rounded", scenes).findings if one.code == "order"]
    assert finding.advice.endswith("take close scores as equal, by `margin` of win_rate.")


TINY_CLIP = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("clip")
    settings = {"model_cfg": TINY_CLIP, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.25] * 3}}
    (folder / "open_clip_config.json").write_text(json.dumps(settings))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        torch.save(open_clip.CLIP(**TINY_CLIP).state_dict(), folder / "open_clip_pytorch_model.bin")
    return str(folder)


@pytest.mark.parametrize(
    "spec",
    [
        RewardSpec(f"{CULPRITS}:brightness"),
        RewardSpec("jpeg_compressibility"),
        RewardSpec("jpeg_incompressibility"),
        RewardSpec("gold"),
        RewardSpec("gold", options={"dense": True}),
        RewardSpec("proxy"),
        RewardSpec("win_rate", options={"judge": "gold", "judge_options": {"dense": True}}),
        RewardSpec(f"{CULPRITS}:Unlike"),
    ],
    ids=lambda spec: spec.name.rpartition(":")[2],
)
def test_a_reward_without_a_fault_is_not_convicted(spec: RewardSpec, scenes: Material):
    report = examine(spec, scenes)
    assert report.convictions == set(), report.text()
    assert {"cost", "noise"} <= {finding.code for finding in report.findings}


def test_a_clip_score_is_not_convicted(clip_folder: str, scenes: Material):
    """An untrained model's scores differ by little more than rounding, so its noise is not tested."""
    report = examine(RewardSpec("clip_score", options={"model": clip_folder}), scenes)
    assert report.convictions <= {"noise"}, report.text()
    assert any("cut long prompts" in finding.seen for finding in report.findings if finding.code == "prompt")


def test_a_finding_that_is_meant_can_be_accepted(scenes: Material):
    report = examine("contrast", scenes, accepted=("blank", "blnk"))
    assert report.count(FAULT) == 0
    assert report.unused == ["blnk"]
    assert any(finding.seen.startswith("accepted fault: NaN") for finding in report.findings)


@pytest.mark.parametrize(("offset", "codes"), [(0.0, {"flat-groups"}), (1e9, {"flat-groups", "range"})])
def test_groups_equal_within_are_measured_by_how_they_differ(offset: float, codes: set[str]):
    material = Material(["a"] * 6, ["p"] * 6, {}, [0, 0, 0, 1, 1, 1], list("abcdef"), "six completions")
    report = Report("mine", "text")
    check_distribution(material, torch.tensor([0.0, 0, 0, 1, 1, 1], dtype=torch.float64) + offset, report, "samples")
    assert {finding.code for finding in report.findings} == codes


def test_scores_outside_of_the_declared_range_are_a_fault(scenes: Material):
    assert examine("brightness", scenes, declared=(0.0, 1.0)).convictions == set()
    report = examine("brightness", scenes, declared=(0.0, 0.5))
    assert report.convictions == {"range"}
    assert report.count(FAULT) == 1


FILMS = """
def moving(images, prompts):
    assert images.shape[1] == 4
    assert (images[:, 1, ..., 1:] == images[:, 0, ..., :-1]).all()
    return (images[:, 1] - images[:, 0]).abs().mean(dim=(1, 2, 3))

def frames(images, prompts):
    assert images.shape[1:3] == (4, 3)
    return moving(images, prompts) * 2
"""


def test_a_reward_of_videos_gets_videos(tmp_path: Path, scenes: Material):
    source = tmp_path / "films.py"
    source.write_text(FILMS)
    spec = RewardSpec(f"{source}:moving")
    report = Report("moving", "images", ())
    check_on(Trial(spec, frames=4), {"drawn": scenes}, CheckPlan(frames=4), report)
    assert report.count(FAULT) == 0, report.text()
    (failure,) = [finding for finding in examine(spec, scenes).findings if finding.severity == FAULT]
    assert failure.advice.endswith("A reward of videos is checked with --frames.")
    with pytest.raises(ValueError, match="scores completions, which have no frames"):
        Trial(RewardSpec("math"), "text", frames=4)


def test_rewards_to_compare_with_get_the_same_videos(tmp_path: Path, scenes: Material):
    (tmp_path / "films.py").write_text(FILMS)
    moving, frames = (RewardSpec(f"{tmp_path / 'films.py'}:{name}") for name in ("moving", "frames"))
    plan = CheckPlan(frames=4, against=[frames, RewardSpec("proxy", label="other")])
    report = check_on(Trial(moving, frames=4), {"samples": scenes}, plan, Report("moving", "images"))
    assert report.tables["agreement/samples"] == {
        "frames": {"pearson": pytest.approx(1), "spearman": pytest.approx(1), "order_within": 1}
    }
    assert report.skipped["agreement with gold_dense"] == "it scores pictures, and no videos"
    assert "give single images" in report.skipped["agreement with other"]


STEADY = """
from collections import Counter

shapes = Counter()

def steady(images, prompts):
    shapes[tuple(images.shape[1:3])] += 1
    step, two_steps = (
        (images[:, gap:] - images[:, :-gap]).abs().mean(dim=(1, 2, 3, 4)) for gap in (1, 2)
    )
    return two_steps / (step + 0.002)
"""


@pytest.fixture
def films(tmp_path: Path) -> Path:
    """The samples of a run of videos: two prompts with four videos of five frames each, which move more and more."""
    folder = tmp_path / "run" / "samples"
    folder.mkdir(parents=True)
    drawn = torch.rand(2, 4, 3, 12, 16, generator=torch.Generator().manual_seed(0))
    lines = []
    for prompt, pictures in enumerate(drawn):
        for k, picture in enumerate(pictures):
            save_image(folder / f"{prompt}-{k}.png", torch.stack([picture * (1 - at * k / 20) for at in range(5)]))
            record = {"image": f"{prompt}-{k}.png", "prompt": f"film {prompt}", "frames": 5, "columns": {}}
            lines.append(json.dumps(record) + "\n")
    (folder / "index.jsonl").write_text("".join(lines))
    (tmp_path / "films.py").write_text(STEADY)
    return folder


def shapes_in(trial: Trial) -> Counter[tuple[int, int]]:
    """How often the reward `steady` got samples of each number of frames and colours."""
    return trial.watch.inner.__globals__["shapes"]


@pytest.mark.parametrize("frames", [None, 9])
def test_the_videos_of_a_run_are_checked_as_they_are(frames: int | None, films: Path):
    (material,) = materials(read_folder(films))
    trial = Trial(RewardSpec(f"{films.parents[1] / 'films.py'}:steady"), frames=frames)
    plan = CheckPlan(frames=frames, against=[RewardSpec("proxy", label="other")])
    report = check_on(trial, {"folder": material}, plan, Report("steady", "images"))
    assert report.count(FAULT) == 0, report.text()
    assert set(shapes_in(trial)) == {(5, 3)}
    assert "give single images" in report.skipped.pop("agreement with other")
    assert report.skipped == {}
    # Nothing moves in a blank video, and random frames differ from the next as from the one after it.
    assert report.tables["edges"]["all black"] == 0
    assert report.tables["edges"]["random pixels"] == pytest.approx(1, abs=0.1)
    assert report.tables["versions"]["8 bits (PNG)"]["order_kept"] == 1
    assert set(report.tables["versions"]) == {*NEAR, *OTHER}


def test_pictures_beside_videos_can_become_videos(films: Path, scenes: Material):
    (material,) = materials(read_folder(films))
    spec, sets = RewardSpec(f"{films.parents[1] / 'films.py'}:steady"), {"folder": material, "samples": scenes}
    report = check_on(Trial(spec), sets, CheckPlan(), Report("steady", "images"))
    (note,) = [finding for finding in report.findings if finding.code == "samples"]
    assert note.advice == "Make videos of them with --frames 5, or leave them out with --prompts 0."
    trial = Trial(spec, frames=7)
    report = check_on(trial, sets, CheckPlan(frames=7), Report("steady", "images"))
    assert not report.has("samples")
    assert shapes_in(trial)[7, 3] == 1


def test_a_reward_of_pictures_that_gets_videos_is_not_sent_to_frames(films: Path):
    (material,) = materials(read_folder(films))
    report = check_on(Trial(RewardSpec("proxy")), {"folder": material}, CheckPlan(), Report("proxy", "images"))
    (fault,) = [finding for finding in report.findings if finding.severity == FAULT]
    assert "give single images" in fault.seen
    assert "--frames" not in fault.advice


@pytest.mark.parametrize("change", [change for _, change in {**NEAR, **OTHER}.values()], ids=[*NEAR, *OTHER])
def test_a_version_of_a_video_has_the_versions_of_its_frames(change: Callable[[Tensor], Tensor]):
    videos = torch.rand(2, 3, 3, 12, 16, generator=torch.Generator().manual_seed(0))
    found = change(videos)
    if change is grainy:
        # Each frame has grain of its own, as in a film.
        assert (found[:, 0] - videos[:, 0] - found[:, 1] + videos[:, 1]).abs().max() > 1 / 255
    else:
        assert torch.equal(found, torch.stack([change(video) for video in videos]))


@pytest.mark.parametrize(("labels", "name"), [((None, None), "corner"), ((None, "proxy"), "proxy")])
def test_two_rewards_of_one_name_are_refused_before_anything_is_scored(
    labels: tuple[str | None, ...], name: str, scenes: Material
):
    others = [RewardSpec(f"{CULPRITS}:corner", label=label) for label in labels]
    trial = Trial(RewardSpec(f"{CULPRITS}:brightness"))
    with pytest.raises(ValueError, match=f"two rewards are called '{name}'; give one of them a `label`"):
        check_on(trial, {"samples": scenes}, CheckPlan(against=others), Report("brightness", "images"))
    assert trial.watch.calls == 0


def test_a_yardstick_that_is_named_as_well_is_scored_once(scenes: Material):
    trial = Trial(RewardSpec(f"{CULPRITS}:brightness"))
    plan = CheckPlan(against=[RewardSpec("proxy")])
    report = check_on(trial, {"samples": scenes}, plan, Report("brightness", "images"))
    assert list(report.tables["agreement/samples"]) == ["gold_dense", "proxy"]


@pytest.mark.parametrize("order", [(0, 1, 0), (0, 0, 1), (0, 1, 2)])
def test_the_order_of_the_prompts_does_not_hide_that_they_matter(order: tuple[int, ...], tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "def asked(completions, prompts):\n    return [len(p) + len(c) / 100 for p, c in zip(prompts, completions)]\n"
    )
    prompts = [["what?", "what is longer?", "and this, which is still longer?"][k] for k in order]
    texts = ["aa", "bbb", "cccc"]
    material = Material(texts, prompts, {}, list(order), ["1", "2", "3"], "three completions")
    report = examine(RewardSpec(f"{tmp_path / 'mine.py'}:asked"), material)
    assert [finding.seen for finding in report.findings if finding.code == "prompt"] == []


def test_what_a_reward_says_of_itself_is_shown(scenes: Material, tmp_path: Path):
    source = tmp_path / "mine.py"
    source.write_text(
        "def red(images, prompts):\n    return images[:, 0].mean(dim=(1, 2))\n\nred.report = 'as on a stove'\n"
    )
    assert "it says of itself: as on a stove" in examine(RewardSpec(f"{source}:red"), scenes).text()


def test_a_constant_reward_teaches_nothing(scenes: Material):
    right = scenes.take([row for row in range(24) if not row % 2])
    assert examine(RewardSpec("gold"), right).convictions == {"constant"}


def test_what_cannot_be_judged_of_a_random_reward_is_said(scenes: Material):
    report = examine("noisy", scenes)
    assert {"order", "batch", "noise"} <= set(report.skipped)
    assert "global random generator" in report.text()
    assert "new instances differ" in examine("OwnNoise", scenes).text()
    assert "two new instances agree" in examine("Drifting", scenes).text()


def test_checking_leaves_the_random_generators_alone(scenes: Material):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    examine("brightness", scenes)
    assert torch.equal(torch.rand(3), expected)


def test_a_missing_column_is_named(scenes: Material):
    bare = Material(scenes.samples, scenes.prompts, {}, scenes.groups, scenes.labels, "drawn")
    with pytest.raises(ValueError, match="include"):
        examine("spoiling", bare)


def test_noise_that_a_version_reveals_is_measured(scenes: Material):
    """A win rate turns small differences into whole steps, so it is never less noisy than its judge."""
    plain = examine(RewardSpec("proxy"), scenes)
    won = examine(RewardSpec("win_rate", options={"judge": "proxy"}), scenes)
    share = {name: report.tables["versions"]["shift by one pixel"] for name, report in (("p", plain), ("w", won))}
    assert share["w"]["order_kept"] == pytest.approx(share["p"]["order_kept"])
    assert 0 < share["p"]["noise"] < share["w"]["noise"] < 1


def test_the_report_is_json(scenes: Material):
    record = json.loads(examine("contrast", scenes).as_json())
    assert record["verdict"]["fault"] == 1
    assert record["tables"]["edges"]["all black"] is None
    assert record["tables"]["distribution/drawn"]["count"] == 24


@pytest.mark.parametrize(
    ("spec", "crimes"),
    [
        (RewardSpec("answer"), set()),
        (RewardSpec("answer", options={"extract": "last_number"}), set()),
        (RewardSpec("digit_share"), set()),
        (RewardSpec("length", options={"limit": 10, "buffer": 8}), set()),
        (RewardSpec("majority"), set()),
        (RewardSpec(f"{CULPRITS}:spaced"), {"noise", "whitespace"}),
        (RewardSpec(f"{CULPRITS}:per_word"), {"blank"}),
    ],
    ids=["answer", "last_number", "digit_share", "length", "majority", "spaced", "per_word"],
)
def test_rewards_of_completions(spec: RewardSpec, crimes: set[str], sums: Material):
    report = examine(spec, sums)
    assert report.task == "text"
    assert report.convictions == crimes, report.text()


def test_a_reward_of_parts_gets_the_lines(tmp_path: Path, sums: Material):
    (tmp_path / "mine.py").write_text(
        "from flowgrpo.rewards import Scores\n"
        "def digits(completions, prompts, parts):\n"
        "    assert [''.join(own) for own in parts] == list(completions)\n"
        "    scores = [[float(sum(map(int, filter(str.isdigit, text)))) for text in own] for own in parts]\n"
        "    return Scores([sum(own) for own in scores], parts=scores)\n"
    )
    report = examine(RewardSpec(f"{tmp_path / 'mine.py'}:digits"), sums)
    assert report.convictions == set(), report.text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{name: gold, weight: 0.5}", r"leave weight out .* name, options, label, time_limit \(the others say what"),
        ("{name: gold, optons: {}}", r"leave optons out .* name, options, label, time_limit$"),
        ("{name: 3}", "is no entry of a recipe; write"),
        ("{name: gold, options: {1: 2}}", "is no entry of a recipe; write"),
        ("{name: gold, options: 0}", "is no entry of a recipe; write"),
    ],
)
def test_an_entry_with_other_keys_is_refused_by_their_names(text: str, said: str):
    with pytest.raises(ValueError, match=said):
        parse_reward(text)


def test_an_option_of_another_type_is_told_with_the_name_of_its_reward():
    with pytest.raises(ValueError, match="reward 'reactions' cannot be made: TypeError"):
        build(RewardSpec("reactions", options={"marks": 5, "runs": 5}))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            "brightness",
            "has a gradient with respect to the images, for the recipes draft, refl, drtune, direct_align and "
            "diffusion_opsd",
        ),
        (RewardSpec("jpeg_compressibility"), "has no gradient with respect to the images: it returns a list"),
    ],
)
def test_it_is_said_whether_a_reward_has_a_gradient(spec: RewardSpec | str, said: str, scenes: Material) -> None:
    report = examine(spec, scenes)
    assert report.lines[-1] == said
    assert "gradients" not in {finding.code for finding in report.findings}
