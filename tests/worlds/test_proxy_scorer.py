"""The learned scorer of scenes: what counts as a negative, the loss by hand, and a scorer saved and read back."""

import json
import math
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from safetensors.torch import load_file, save_file

from flowgrpo.rewards import RewardSet, RewardSpec
from flowgrpo.worlds.scenes import proxy_training as training
from flowgrpo.worlds.scenes.draw import Thing, draw
from flowgrpo.worlds.scenes.gold import Found, verify
from flowgrpo.worlds.scenes.proxy_scorer import CONFIG, TOKENS, VOCABULARY, WEIGHTS, Proxy, WordTokenizer
from flowgrpo.worlds.scenes.proxy_training import contrastive_loss, draw_scenes, shown, train_proxy
from flowgrpo.worlds.scenes.scene_prompts import SKILLS, Item, all_prompts, compose, disturb, ground_colour, meaning
from tests.rewards.slopes import slope_ratio
from tests.tiny_rewards import pictures

PROMPTS = ["a red circle", "two blue squares", "a star above a cross"]


def silent(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scorer") / "proxy"
    train_proxy(path, seed=5, steps=2, report=silent)
    return path


@pytest.fixture(scope="module")
def scorer(folder: Path) -> Proxy:
    return Proxy(str(folder))


def drawn(count: int = 3) -> torch.Tensor:
    return draw_scenes(count, np.random.default_rng(2)).pictures.float() / 255


def test_meaning_ignores_wording_and_nothing_else() -> None:
    prompts = all_prompts()
    by_items: dict[Any, set[Any]] = {}
    for prompt in prompts:
        by_items.setdefault(prompt.items, set()).add(meaning(prompt.items))
    assert all(len(found) == 1 for found in by_items.values())
    # 5 shapes; 10 pairs; 5·3 counts in 7 colours; 30 colours; 10 pairs in 4 relations; 10 pairs in 30 colourings.
    assert len({meaning(p.items) for p in prompts}) == 5 + 10 + 105 + 30 + 40 + 300
    above = (Item("star", relation="above", other=1), Item("cross"))
    assert meaning(above) == meaning((Item("cross", relation="below", other=1), Item("star")))
    assert meaning(above) != meaning((Item("cross", relation="above", other=1), Item("star")))
    assert meaning(above) != meaning((Item("star"), Item("cross")))


def test_a_scene_shows_exactly_what_the_verifier_accepts() -> None:
    rng = np.random.default_rng(3)
    wanted = {meaning(p.items): p.items for p in all_prompts()}
    pools = [[p for p in all_prompts() if p.skill == skill] for skill in SKILLS]
    scenes = [compose(pool[int(rng.integers(len(pool)))].items, rng) for pool in pools for _ in range(4)]
    scenes.append([Thing("circle", "red", 12, 12, 8.0), Thing("star", "red", 50, 50, 8.0)])
    scenes.append([*scenes[4], Thing("cross", "blue", 5, 5, 4.0)])
    accepted = 0
    for things in scenes:
        found = [Found(t.shape, t.colour, t.x, t.y, 100.0, 1.0) for t in things]
        satisfied = {key for key, items in wanted.items() if verify(found, items)[0]}
        assert shown(things) & wanted.keys() == satisfied
        accepted += len(satisfied)
    assert accepted > len(scenes)


def test_drawn_scenes_fit_their_own_prompts() -> None:
    scenes = draw_scenes(60, np.random.default_rng(4))
    assert scenes.fits[torch.arange(60), scenes.asked].all()
    prompts = {p.text: p for p in all_prompts()}
    assert [prompts[text].skill for text in scenes.texts] == list(SKILLS) * 10
    same = scenes.asked[:, None] == scenes.asked
    keys = [meaning(prompts[text].items) for text in scenes.texts]
    assert same.tolist() == [[one == other for other in keys] for one in keys]
    assert scenes.pictures.shape == (60, 3, 64, 64)


def test_loss_of_indifferent_embeddings_counts_the_true_negatives() -> None:
    same = torch.nn.functional.normalize(torch.ones(3, 4), dim=-1)
    none, scale = torch.zeros(3, 3, dtype=torch.bool), torch.tensor(7.0)
    assert contrastive_loss(same, same, scale, none).item() == pytest.approx(math.log(3))
    assert contrastive_loss(same, same, scale, none | True).item() == pytest.approx(0.0)
    one = none.clone()
    one[0, 2] = True
    expected = (math.log(2) + 2 * math.log(3)) / 3
    assert contrastive_loss(same, same, scale, one | torch.eye(3, dtype=torch.bool)).item() == pytest.approx(expected)


def test_loss_value_by_hand_and_no_gradient_through_exempt_pairs() -> None:
    images = torch.eye(2, requires_grad=True)
    texts = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    # Logits 2·[[1, .6], [0, .8]]: rows lose log(1+e^-.8), log(1+e^-1.6); columns log(1+e^-2), log(1+e^-.4).
    expected = sum(math.log1p(math.exp(-gap)) for gap in (0.8, 1.6, 2.0, 0.4)) / 4
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    assert contrastive_loss(images, texts, torch.tensor(2.0), nothing).item() == pytest.approx(expected, rel=1e-6)
    exempt = torch.tensor([[False, True], [False, False]])
    loss = contrastive_loss(images, texts, torch.tensor(2.0), exempt)
    (gradient,) = torch.autograd.grad(loss, images)
    # Image 0 meets text 0 alone: in its row without a rival, in column 0 against image 1.
    pull = -0.5 * 0.5 * 2.0 / (1 + math.exp(2.0))
    torch.testing.assert_close(gradient[0], pull * texts[0])


def test_tokens_of_known_unknown_and_too_many_words() -> None:
    tokenizer = WordTokenizer.of_scenes()
    word = {token: k for k, token in enumerate(tokenizer.vocabulary)}
    ids = tokenizer(["A red circle.", "a zebra", "star " * 30])
    assert ids.shape == (3, TOKENS)
    assert ids[0].tolist() == [word[t] for t in ("<start>", "a", "red", "circle", "<end>")] + [word["<pad>"]] * 7
    assert ids[1, 2] == word["<unk>"]
    assert ids[2].tolist() == [word["<start>"], *[word["star"]] * (TOKENS - 2), word["<end>"]]
    assert int(ids.max()) == word["<end>"]
    table = tokenizer([p.text for p in all_prompts()])
    assert not (table == word["<unk>"]).any()
    assert len({tuple(row) for row in table.tolist()}) == len({p.text for p in all_prompts()})
    with pytest.raises(ValueError, match="end with <end>"):
        WordTokenizer([*tokenizer.vocabulary, "late"])


def test_cosine_by_hand_from_the_files(folder: Path, scorer: Proxy) -> None:
    model = open_clip.CLIP(**json.loads((folder / CONFIG).read_text())["model_cfg"]).eval()
    weights = load_file(folder / WEIGHTS)
    assert all(value.dtype == torch.float16 for value in weights.values())
    model.load_state_dict(weights)
    with torch.no_grad():
        vision = model.encode_image(2 * drawn() - 1)
        text = model.encode_text(WordTokenizer.of_scenes()(PROMPTS))
    expected = (vision * text).sum(-1) / (vision.norm(dim=-1) * text.norm(dim=-1))
    scores = scorer(images=drawn(), prompts=PROMPTS)
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=1e-5)
    assert scores.dtype == torch.float32
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1_200_000
    assert not list(folder.parent.glob(".*"))


def test_a_batch_scores_as_its_members_do(folder: Path, scorer: Proxy) -> None:
    prompts = [*PROMPTS, PROMPTS[0]]
    images = drawn(4)
    singly = [scorer(images=images[i : i + 1], prompts=prompts[i : i + 1]) for i in range(4)]
    whole = scorer(images=images, prompts=prompts)
    torch.testing.assert_close(whole, torch.cat(singly), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(Proxy(str(folder), batch_size=3)(images, prompts), whole, atol=1e-6, rtol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(scorer(images=images, prompts=prompts), whole)


def test_unknown_words_are_alike_and_not_ignored(scorer: Proxy) -> None:
    one = scorer(images=drawn(1), prompts=["a mauve circle"])
    assert torch.equal(one, scorer(images=drawn(1), prompts=["a teal circle"]))
    assert one != scorer(images=drawn(1), prompts=["a circle"])
    assert one != scorer(images=drawn(1), prompts=["a red circle"])


@pytest.mark.parametrize("size", [(128, 128), (32, 32), (64, 128)])
def test_other_sizes_are_resized(scorer: Proxy, size: tuple[int, int]) -> None:
    coarse = torch.rand(3, 3, 5, 5, generator=torch.Generator().manual_seed(1))

    def smooth(height: int, width: int) -> torch.Tensor:
        return torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")

    standard = scorer(images=smooth(64, 64), prompts=PROMPTS)
    torch.testing.assert_close(scorer(images=smooth(*size), prompts=PROMPTS), standard, atol=2e-3, rtol=0)
    assert standard.std() > 4e-3


def test_same_seed_same_scorer_and_the_generator_is_left_alone(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(8)
    before = torch.get_rng_state()
    train_proxy(tmp_path / "again", seed=5, steps=2, report=silent)
    assert torch.equal(before, torch.get_rng_state())
    Proxy(str(tmp_path / "again"))
    assert torch.equal(before, torch.get_rng_state())
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    train_proxy(tmp_path / "other", seed=6, steps=1, report=silent)
    assert (tmp_path / "other" / WEIGHTS).read_bytes() != (folder / WEIGHTS).read_bytes()


def test_training_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "BATCH", 16)
    lines: list[str] = []
    train_proxy(tmp_path / "proxy", seed=0, steps=60, report=lines.append)
    assert float(lines[-1].split()[-1]) < 0.85 * math.log(16)


def test_training_refuses_a_folder_in_use_and_leaves_nothing_behind_when_it_fails(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="is not an empty folder"):
        train_proxy(folder, seed=0, steps=1, report=silent)
    with pytest.raises(ValueError, match="steps is 0"):
        train_proxy(tmp_path / "none", seed=0, steps=0, report=silent)

    def fail(*arguments: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(training, "_fit", lambda *arguments: None)
    monkeypatch.setattr(training, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        train_proxy(tmp_path / "new", seed=0, steps=1, report=silent)
    assert not (tmp_path / "new").exists()


def test_a_folder_without_a_scorer_says_how_to_make_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"nowhere.*flowgrpo build scenes"):
        Proxy(str(tmp_path / "nowhere"))
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    (copied / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=f"lacks {WEIGHTS}"):
        Proxy(str(copied))
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    with pytest.raises(ValueError, match=r"flowgrpo build scenes"):
        Proxy()
    shutil.copytree(folder, tmp_path / "proxy")
    assert Proxy()(drawn(), PROMPTS).shape == (3,)


@pytest.mark.parametrize("fault", ["absent tensor", "extra tensor", "vocabulary", "architecture", "junk"])
def test_files_that_do_not_fit_are_refused(folder: Path, tmp_path: Path, fault: str) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    weights = load_file(copied / WEIGHTS)
    if fault == "absent tensor":
        del weights["text_projection"]
    elif fault == "extra tensor":
        weights["more"] = torch.zeros(1)
    elif fault == "vocabulary":
        words = json.loads((copied / VOCABULARY).read_text())
        (copied / VOCABULARY).write_text(json.dumps([*words[:-1], "late", words[-1]]))
    elif fault == "architecture":
        config = json.loads((copied / CONFIG).read_text())
        config["model_cfg"]["vision_cfg"]["layers"] += 1
        (copied / CONFIG).write_text(json.dumps(config))
    save_file(weights, copied / WEIGHTS)
    if fault == "junk":
        (copied / WEIGHTS).write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="does not load"):
        Proxy(str(copied))


def test_as_a_plugin_in_a_set(folder: Path, scorer: Proxy) -> None:
    rewards = RewardSet([RewardSpec("proxy", options={"folder": str(folder), "batch_size": 2})])
    result = rewards.score(drawn(), PROMPTS, {"include": [None] * 3})
    torch.testing.assert_close(result.values[:, 0], scorer(drawn(), PROMPTS), atol=1e-6, rtol=1e-5)
    assert result.names == ("proxy",)
    with pytest.raises(ValueError, match=r"\[B, 3, H, W\]"):
        scorer(images=drawn().unsqueeze(1), prompts=PROMPTS)


def test_the_packaged_scorer_tells_satisfied_from_disturbed_scenes() -> None:
    scorer, rng = Proxy(), np.random.default_rng(6)
    prompts = [p for p in all_prompts() if p.skill in ("counting", "colors", "color_attr")]
    chosen = [prompts[int(k)] for k in rng.integers(len(prompts), size=150)]

    def pictures(items: list[tuple[Item, ...]]) -> torch.Tensor:
        images = np.stack([draw(compose(each, rng), ground_colour(rng)) for each in items])
        return torch.from_numpy(images).permute(0, 3, 1, 2)

    texts = [p.text for p in chosen]
    right = scorer(images=pictures([p.items for p in chosen]), prompts=texts)
    wrong = scorer(images=pictures([disturb(p.items, rng) for p in chosen]), prompts=texts)
    assert (right[:, None] > wrong).float().mean() > 0.8


def test_the_gradient_is_the_slope_of_the_scores() -> None:
    images = 0.25 + 0.5 * pictures(3, 3, 64, 64)
    assert slope_ratio(Proxy(), images, ["a red circle", "a blue square", "a star"], 1e-3) == pytest.approx(
        1.0, abs=0.02
    )
