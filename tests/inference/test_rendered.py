"""Completions as prompts for images: addressed noises, shared pictures, refused options, and a run with the reward."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.core.addressing import address
from flowgrpo.inference.evaluation import evaluate_model
from flowgrpo.inference.image_samples import model_images
from flowgrpo.inference.rendered import SHARED_NOISE, Rendered, _Painter, written
from flowgrpo.rewards.base import RewardSpec
from flowgrpo.rewards.pixels import load_picture
from flowgrpo.rewards.registry import checked, outline
from flowgrpo.rewards.runner import RewardSet
from flowgrpo.training.checking import check
from flowgrpo.training.recipe_findings import Checked
from flowgrpo.training.session import start
from tests.conftest import Command

SHORT = ("evaluate.steps=2", "rollout.batch=4", "rollout.decode_batch=4")
ASKED: dict[str, Any] = {
    "completions": ["a red circle", "a star", "a red circle"], "prompts": ["circle", "circle", "circle"],
}  # fmt: skip


@pytest.fixture
def looks(tmp_path: Path) -> str:
    """Rewards of images in a file."""
    file = tmp_path / "looks.py"
    file.write_text(
        "def red(images, prompts):\n    return images[:, 0].mean(dim=(1, 2))\n"
        "def cut(images, prompts, truncated=None):\n    return [0.0 if truncated is None else 1.0] * len(prompts)\n"
        "def keys(images, prompts, noise_key):\n    return [float(key) for key in noise_key]\n"
        "class Apart:\n"
        "    whole_group = True\n"
        "    def __call__(self, images, prompts):\n        return [float(len(prompts))] * len(prompts)\n"
        "def words(images, prompts, letters):\n    return [float(len(p) + n) for p, n in zip(prompts, letters)]\n"
    )
    return str(file)


def options(looks: str, model: Path | str, **others: Any) -> dict[str, Any]:
    return {"reward": f"{looks}:red", "model": str(model), "set": list(SHORT), **others}


def redness(images: Tensor) -> list[float]:
    found: list[float] = images[:, 0].mean(dim=(1, 2)).tolist()
    return found


@pytest.mark.parametrize(
    ("completion", "prompt"),
    [
        ("a cat", "a cat"),
        (" a cat \n", "a cat"),
        ("<think>a dog</think>\n\na cat", "a cat"),
        ("<think>a dog</think> so <answer>a cat</answer>", "a cat"),
        ("<tool>cats?</tool><result>many</result> <answer>a cat</answer>", "a cat"),
        ("so <answer>a cat", ""),
        ("", ""),
    ],
)
def test_the_prompt_is_read_from_a_completion(completion: str, prompt: str) -> None:
    assert written(completion) == prompt


def test_images_begin_with_the_noises_of_their_key(random_pipeline: Path, looks: str) -> None:
    reward = Rendered(**options(looks, random_pipeline, count=2))
    keys = [7, 7, 8]
    scores = reward(**ASKED, noise_key=keys).values
    texts = [text for text in ASKED["completions"] for _ in range(2)]
    noises = [address(SHARED_NOISE, key, k) for key in keys for k in range(2)]
    images = redness(model_images(str(random_pipeline), texts, noises, SHORT))
    expected = [(images[2 * k] + images[2 * k + 1]) / 2 for k in range(3)]
    assert scores.tolist() == pytest.approx(expected, abs=1e-6)
    assert scores[0] != scores[2]
    # Without a key, the words of the prompt choose the noises, and the order of completions has no effect.
    first, second, third = reward(**ASKED).values.tolist()
    assert first == third != second
    swapped = reward(ASKED["completions"][1::-1], ASKED["prompts"][:2]).values.tolist()
    assert swapped == pytest.approx([second, first], abs=1e-6)
    reward.close()


def test_the_other_reward_judges_by_what_was_asked_for(random_pipeline: Path, looks: str) -> None:
    judge = {**options(looks, random_pipeline), "reward": f"{looks}:words"}
    letters = [0, 0, 100]
    assert Rendered(**judge)(**ASKED, letters=letters).values.tolist() == [6.0, 6.0, 106.0]
    wanted = ["circle, red", "b", "c"]
    named = Rendered(**judge, column="wanted")
    assert named(**ASKED, letters=letters, wanted=wanted).values.tolist() == [11.0, 1.0, 101.0]
    with pytest.raises(ValueError, match=r"rendered: the column 'wanted' has 3; give the words of a prompt"):
        named(**ASKED, letters=letters, wanted=["a", 3, "c"])
    # A column that the other reward needs is missed before anything is made.
    with pytest.raises(ValueError, match="reward 'rendered' takes `letters`, which the prompts do not have"):
        RewardSet([RewardSpec("rendered", options=judge)]).score(ASKED["completions"], ASKED["prompts"])


def test_a_reward_of_whole_groups_compares_images_of_one_noise(random_pipeline: Path, looks: str) -> None:
    own = options(looks, random_pipeline, count=3)
    asked = ASKED["completions"], ["circle"] * 3
    # A reward that takes no group ids is called with one group at a time: three completions and one noise.
    apart = RewardSet([RewardSpec("rendered", options={**own, "reward": f"{looks}:Apart"})])
    assert apart.score(*asked, groups=[4, 4, 4]).values[:, 0].tolist() == [3.0] * 3
    with pytest.raises(ValueError, match="reward 'rendered' compares whole groups: pass `groups`"):
        apart.score(*asked)
    apart.close()
    judge = {"reward": "win_rate", "reward_options": {"judge": f"{looks}:red"}}
    judged = RewardSet([RewardSpec("rendered", options={**own, **judge})])
    found = judged.score(*asked, {"noise_key": [7] * 3}, [4] * 3).values[:, 0].tolist()
    judged.close()
    noises = [address(SHARED_NOISE, 7, k) for k in range(3)]
    texts = [text for text in asked[0][:2] for _ in range(3)]
    images = redness(model_images(str(random_pipeline), texts, noises * 2, SHORT))
    wins = sum(images[k] > images[3 + k] for k in range(3)) / 3
    # The first and the last completion are equal, so they tie.
    assert found == pytest.approx([(wins + 0.5) / 2, 1 - wins, (wins + 0.5) / 2])


def test_the_other_reward_gets_the_columns_of_a_run_that_it_names(random_pipeline: Path, looks: str) -> None:
    columns = {"noise_key": [3, 3, 4], "truncated": [True, False, False]}
    for name, expected in {"cut": [1.0, 1.0, 1.0], "keys": [3.0, 3.0, 4.0]}.items():
        own = {**options(looks, random_pipeline), "reward": f"{looks}:{name}"}
        several = RewardSet([RewardSpec("rendered", options=own)])
        assert several.score(ASKED["completions"], ASKED["prompts"], columns).values[:, 0].tolist() == expected
        several.close()


def test_rewards_share_the_images_and_repeated_prompts_are_made_once(
    random_pipeline: Path, looks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    of_class = _Painter._made

    def counted(self: _Painter, texts: Sequence[str], noises: Sequence[int]) -> Tensor:
        made.append(len(texts))
        return of_class(self, texts, noises)

    monkeypatch.setattr(_Painter, "_made", counted)
    own = options(looks, random_pipeline, plain=True)
    several = RewardSet(
        [
            RewardSpec("rendered", label="one", options=own),
            RewardSpec("rendered", label="two", options=own),
        ]
    )
    found = several.score(ASKED["completions"], ASKED["prompts"])
    # Two different completions, and the prompt itself.
    assert made == [3]
    assert torch.equal(found.values[:, 0], found.values[:, 1])
    plain, gain = (torch.tensor(found.sub_scores["one"][name]) for name in ("plain", "gain"))
    assert torch.equal(gain, found.values[:, 0] - plain)
    assert len(plain.unique()) == 1
    several.score(["a square"], ["circle"])
    assert made == [3, 2]
    several.close()
    alone = RewardSet([RewardSpec("rendered", options=own)])
    alone.score(["a square"], ["circle"])
    reward: Any = alone.rewards[0].function
    assert reward._painter.value._asked == []
    alone.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": 3}, "rendered: model is 3; give a run, a pipeline folder, a hub id or `scenes`"),
        ({"model": "arithmetic"}, "rendered: model.path 'arithmetic' is a language model"),
        ({"model": "nowhere"}, "rendered: model.path 'nowhere' is not a folder"),
        ({"count": 0}, "rendered: count is 0; give the number of images of a completion, 1 or more"),
        ({"set": "evaluate.steps=2"}, "rendered: set is 'evaluate.steps=2'; give a list of KEY=VALUE"),
        ({"set": ["evaluate.stepz=2"]}, "rendered: set has 'evaluate.stepz=2'; it may change evaluate.steps, "),
        ({"set": ["sampler.kernel=mine.py:kernel"]}, "rendered: set has 'sampler.kernel=mine.py:kernel'"),
        ({"set": ["evaluate.steps=0"]}, "rendered: (.|\n)*evaluate.steps"),
        ({"set": ["model.call.heigth=64"]}, "rendered: model.call.heigth: .* did you mean 'height'"),
        ({"column": "prompts"}, "rendered: column is 'prompts', and no prompt file has such a column"),
        ({"column": "truncated"}, "rendered: column is 'truncated', and no prompt file has such a column"),
        ({"column": ""}, "rendered: column is '', and no prompt file has such a column"),
        ({"reward": "math"}, "rendered: the reward 'math' scores no images; choose a reward that takes `images`"),
        (
            {"reward": "win_rate", "reward_options": {"judge": "gold"}, "plain": True},
            "rendered: plain is true, but 'win_rate' compares the images of a group",
        ),
        ({"column": 3}, "rendered: column is 3; give the name of a column of the prompt file"),
        ({"plain": "yes"}, "rendered: plain is 'yes'; give true or false"),
        ({"reward": "nothing"}, "rendered: the reward 'nothing' for `reward` cannot be made"),
        ({"counts": 2}, "reward 'rendered' has no option 'counts'; did you mean 'count'?"),
    ],
)
def test_wrong_options_are_refused_before_a_model_loads(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked(RewardSpec("rendered", options={"reward": "gold", "model": "scenes", **wrong}))


def test_a_run_that_has_not_finished_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("base: mixgrpo_guard\n")
    with pytest.raises(ValueError, match=r"rendered: .*run has no trained weights yet; finish it with `flowgrpo res"):
        checked(RewardSpec("rendered", options={"reward": "gold", "model": str(run)}))


def test_a_run_of_text_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("base: text\n")
    own = {"reward": "gold", "model": str(run), "set": list(SHORT)}
    with pytest.raises(ValueError, match=r"rendered: .*run is a run of text, and makes no images; name a run or a mod"):
        checked(RewardSpec("rendered", options=own))


def test_a_check_knows_what_the_other_reward_needs(small_text: list[str], looks: str) -> None:
    def found(reward: str, *words: str, **others: Any) -> Checked:
        own = {"reward": f"{looks}:{reward}", "model": "scenes", **others}
        entry = json.dumps([{"name": "rendered", "options": own}])
        return check(load_recipe("text", [*small_text, f"rewards={entry}", *words]))

    rounds = "rollout.budget={choice: until, rounds: 3}"
    assert found("red", rounds).texts("fault") == found("Apart").texts("fault") == []
    [fault] = found("Apart", rounds).texts("fault")
    assert fault.endswith("and rendered compares whole groups; leave one of them out")
    # The training prompts and the held-out prompts lack the column.
    faults = found("words").texts("fault")
    assert len(faults) == 2
    assert all("reward 'rendered' takes `letters`, which the prompts do not have" in fault for fault in faults)
    [note] = found("red", model="nobody/nothing").texts("unknown")
    assert note == (
        "reward rendered: model nobody/nothing is not a folder here, so it is taken for a hub id, which is read when "
        "a run starts"
    )


def test_it_scores_completions_alone() -> None:
    reward = outline(RewardSpec("rendered", options={"reward": "gold", "model": "scenes"}))
    reward.check("completions", ["noise_key"], grouped=True)
    with pytest.raises(ValueError, match="reward 'rendered' scores `completions`, but the samples here are images"):
        reward.check("images", [], grouped=True)


def test_a_run_draws_new_noises_and_its_evaluation_can_be_made_again(
    small_text: list[str], random_pipeline: Path, looks: str, tmp_path: Path, command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    told: list[set[int]] = []
    of_class = Rendered.__call__

    def heard(self: Rendered, **given: Any) -> Any:
        told.append(set(given["noise_key"]))
        return of_class(self, **given)

    monkeypatch.setattr(Rendered, "__call__", heard)
    entry = json.dumps({"name": "rendered", "options": options(looks, random_pipeline)})
    recipe = load_recipe("text", [*small_text, f"rewards=[{entry}]", "run.iterations=2"])
    start(recipe, tmp_path / "run").trainer(Silent()).train()
    first, one, two, last = told
    assert first == last
    assert [len(first), len(one), len(two)] == [5, 3, 3]
    assert len(first | one | two) == 11
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples" / "index.jsonl").read_text().splitlines()]
    kept = [line["rewards"] for line in lines if line["phase"] == "eval" and line["iteration"] == 2]
    means = evaluate_model(str(tmp_path / "run"), recipe, out=tmp_path / "out")
    assert told[-1] == first
    assert means["rendered"][0] == pytest.approx(sum(line["rendered"] for line in kept) / len(kept), abs=1e-7)
    # Every sample in the index has its image, which has the score. Images of iteration 1 were not kept.
    samples = tmp_path / "run" / "samples"
    assert {(line["phase"], line["iteration"]) for line in lines} == {("eval", 0), ("train", 0), ("eval", 2)}
    shown = [(line, [samples / one["image"] for one in line["rendered"]["rendered"]]) for line in lines]
    for line, (image,) in shown:
        assert redness(load_picture(image)[None]) == pytest.approx([line["rewards"]["rendered"]], abs=0.003)
    assert {path for _, files in shown for path in files} == {*samples.glob("*/*.png")}
    again = [json.loads(line) for line in (tmp_path / "out" / "index.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if line["phase"] == "eval" and line["iteration"] == 2]
    for one, other in zip(evaluated, again, strict=True):
        [before], [after] = one["rendered"]["rendered"], other["rendered"]["rendered"]
        assert (samples / before["image"]).read_bytes() == (tmp_path / "out" / after["image"]).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["text", "text in rounds", "masked"])
def test_all_samples_of_a_prompt_have_the_key_of_their_iteration(
    task: str, small_text: list[str], tmp_path: Path
) -> None:
    seen = tmp_path / "seen.jsonl"
    (tmp_path / "keys.py").write_text(
        "import json\n"
        "def keys(completions, prompts, noise_key):\n"
        f"    with open({str(seen)!r}, 'a') as file:\n"
        "        file.writelines(json.dumps([p, k]) + '\\n' for p, k in zip(prompts, noise_key))\n"
        "    return [float(len(text) % 3) for text in completions]\n"
    )
    reward = f"rewards=[{{name: '{tmp_path}/keys.py:keys'}}]"
    if task == "masked":
        lines = ["model.train=lora", "rollout={prompts: 2, group: 4, batch: 8}", "evaluate={every: 1, prompts: 2}"]
    else:
        rounds = ["rollout.budget={choice: until, rounds: 3}"] if task.endswith("rounds") else []
        lines = [*small_text, "evaluate={every: 1, prompts: 2}", "rollout.prompts=2", *rounds]
    recipe = load_recipe(task.partition(" ")[0], [*lines, reward, "run={iterations: 2, checkpoint_every: 2}"])
    start(recipe, tmp_path / "run").trainer(Silent()).train()
    told = [tuple(json.loads(line)) for line in seen.read_text().splitlines()]
    lines_of = {pair: told.count(pair) for pair in told}
    training, evaluations = recipe.rollout.group, 3
    # Two held-out prompts with one key each, and two prompts with a key in each of two iterations.
    assert len(lines_of) == 6
    assert sorted(lines_of.values())[:2] == [evaluations] * 2
    assert all(count >= training for count in sorted(lines_of.values())[2:])
