"""Forms of claims: the proportions of the papers, the rest of the embedded recipe, and one factor of the prompts."""

import pytest

from flowgrpo.bench.claims.forms import FORMS, PROMPTS, REWARD, UNSHARED, Form, nfe
from flowgrpo.configs.load import load_image_recipe, load_recipe, recipe_names

# (NFE_old, NFE_θ) of an image. MixGRPO's tables give the first five; BranchGRPO's baselines train all or 60 % of 20
# steps, of which the last is deterministic here.
PAPERS = {
    "dance_grpo": (25, 14),
    "dance_grpo_4of25": (25, 4),
    "mixgrpo": (25, 4),
    "mixgrpo_flash": (16, 4),
    "mixgrpo_flash_star": (8, 4),
    "dance_grpo_19of20": (20, 19),
    "dance_grpo_12of20": (20, 12),
    "flow_grpo": (10, 9),
    "grpo_guard": (10, 9),
}


@pytest.mark.parametrize("name", PAPERS)
def test_forms_have_the_papers_evaluations(name: str) -> None:
    found = nfe(FORMS[name].recipe())
    old, theta = PAPERS[name]
    # The window of Flash meets other numbers of steps over the run: the paper's 16 is a mean.
    assert found.old == pytest.approx(old, abs=0.6 if name == "mixgrpo_flash" else 1e-9)
    assert found.theta == pytest.approx(theta)
    assert found.old_shared <= found.old
    assert found.theta_shared <= found.theta


@pytest.mark.parametrize("name", ["dance_grpo", "mixgrpo", "mixgrpo_flash", "mixgrpo_flash_star"])
def test_nothing_is_shared_where_samples_start_from_their_own_noise(name: str) -> None:
    found = nfe(FORMS[name].recipe([UNSHARED]))
    assert (found.old_shared, found.theta_shared) == pytest.approx((found.old, found.theta))


def test_pruning_and_mixing_save_what_the_paper_says() -> None:
    """Ratios of states, a state with gradients as 3.78 forward ones, as the seconds of MixGRPO's table have it."""

    def cost(name: str) -> float:
        found = nfe(FORMS[name].recipe())
        return found.old_shared + 3.78 * found.theta_shared

    every, some = cost("dance_grpo_19of20"), cost("dance_grpo_12of20")
    assert cost("branchgrpo") / some == pytest.approx(1.05, abs=0.2)
    assert cost("branchgrpo_depth") / every == pytest.approx(0.45, abs=0.08)
    assert cost("branchgrpo_mix") / every < 0.26


def test_the_model_is_embedded_and_the_proportions_are_published() -> None:
    embedded, published = load_image_recipe("mixgrpo"), load_image_recipe("mixgrpo@published")
    form = FORMS["mixgrpo"].recipe()
    for section in ("model", "data", "evaluate"):
        assert getattr(form, section) == getattr(embedded, section)
    for section in ("sampler", "objective", "advantage", "penalties", "credit", "clamp"):
        assert getattr(form, section) == getattr(published, section)
    assert form.optimizer.learning_rate == embedded.optimizer.learning_rate != published.optimizer.learning_rate
    assert form.optimizer.schedule == embedded.optimizer.schedule
    assert form.optimizer.updates == published.optimizer.updates != embedded.optimizer.updates
    assert form.optimizer.ema == published.optimizer.ema
    assert form.rollout.group == published.rollout.group
    assert form.rollout.batch == embedded.rollout.batch


# GARDO compares its reward with rewards beside it, and a form has one reward.
@pytest.mark.parametrize("method", sorted({*recipe_names("images")} - {"gardo"}))
def test_all_published_recipes_have_a_form_with_one_factor(method: str) -> None:
    form = Form(method)
    recipe = form.recipe()
    if not form.published:
        assert recipe == load_image_recipe(method, [REWARD])
        return
    paper = load_recipe(f"{method}@published", [REWARD])
    # Updates that take whole groups need a prompt each; updates by edges share the edges of any number of prompts.
    groups = paper.optimizer.updates if paper.optimizer.cut == "prompts" else 1
    assert recipe.rollout.prompts == max(round(paper.rollout.prompts / PROMPTS), groups)
    assert recipe.optimizer.updates == paper.optimizer.updates


def test_both_sides_of_a_pair_have_the_same_images() -> None:
    def images(name: str) -> tuple[int, int]:
        rollout = FORMS[name].recipe().rollout
        return rollout.prompts, rollout.group

    assert len({images(name) for name in ("dance_grpo", "mixgrpo", "mixgrpo_flash", "mixgrpo_flash_star")}) == 1
    assert len({images(f"dance_grpo_{n}of20") for n in (12, 19)} | {images("branchgrpo_depth")}) == 1
    assert len({images(name) for name in ("flow_grpo", "grpo_guard", "diffusion_nft")}) == 1
