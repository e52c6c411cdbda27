"""`flowgrpo plan` on composed recipes: what it prints, and what it refuses."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

from flowgrpo.cli.app import app
from flowgrpo.configs.load import RecipeError, load_image_recipe
from flowgrpo.configs.schema import Recipe

SMALL = ("rollout.prompts=4", "rollout.group=2", "run.iterations=4")


def plan(*words: str) -> str:
    found = CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    assert found.exit_code == 0
    return found.output


def test_yaml_is_the_whole_composed_recipe():
    name = "grpo_guard+flux_dev+ocr+gpus8"
    made = Recipe.model_validate(yaml.safe_load(plan(name, "--yaml", "run.seed=3")))
    assert made == load_image_recipe(name, ["run.seed=3"])


def test_the_embedded_world_is_estimated_only_if_a_card_is_named():
    assert "estimate" not in plan("mixgrpo_flash_guard", *SMALL)
    output = plan("mixgrpo_flash_guard", "--gpu", "4090", "--gpus", "2", "--utilisation", "0.5", *SMALL)
    assert "estimate for 2 × RTX 4090, from shapes alone; rewards are not counted" in output
    assert "at an assumed 50% of 165.2 TFLOP/s" in output
    assert "4 iterations" in output


def test_a_plan_in_chunks_has_the_same_counts():
    whole, chunks = plan("mixgrpo_flash_guard", *SMALL), plan("mixgrpo_flash_guard", *SMALL, "rollout.chunk=2")
    line = "sampled and decoded 2 prompts at a time; the lines below do not depend on it\n"
    assert line in chunks
    assert chunks.replace(line, "") == whole


def test_what_waits_in_host_memory_is_a_row_of_the_estimate():
    output = plan("mixgrpo_flash_guard", "--gpu", "4090", *SMALL, "model.offload=[vae]", "rollout.store=host")
    assert "VAE (in host memory)" in output
    assert "rollout states (in host memory)" in output


def test_a_launch_with_shards_is_estimated_as_such():
    output = plan("mixgrpo_flash_guard", "--gpus", "4", "--sharding", "fsdp2", *SMALL, "model.train=full")
    assert "estimate for 4 × H100 SXM, full weights in shards by FSDP2, from shapes alone" in output
    assert "changes nothing" not in output
    lora = plan("mixgrpo_flash_guard", "--gpus", "4", "--sharding", "fsdp2", *SMALL)
    assert "estimate for 4 × H100 SXM, frozen weights in shards by FSDP2, from shapes alone" in lora
    assert "note: zero2 changes nothing here: one GPU has everything" in plan(
        "mixgrpo_flash_guard", "--sharding", "zero2", *SMALL
    )


def test_a_model_without_known_shapes_has_its_counts_and_no_estimate():
    output = plan("mixgrpo_flash_guard", "model.path=somebody/something", *SMALL)
    assert "per prompt, by window of trained steps:" in output
    assert "no estimate of memory and time: the shapes of 'somebody/something' are not known" in output


def test_layers_that_the_model_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has no linear layer named nope; model.lora.targets can name add_k_proj, "):
        plan("mixgrpo_flash_guard", "--gpu", "4090", *SMALL, "model.lora.targets=[nope]")


def test_the_plan_counts_the_lora_of_the_start(tmp_path: Path) -> None:
    def planned(layer: str, width: int) -> str:
        a, b = torch.ones(3, width), torch.ones(width, 3)
        state = {f"transformer.{layer}.lora_A.weight": a, f"transformer.{layer}.lora_B.weight": b}
        save_file(state, tmp_path / "x.safetensors")
        start = f"model.lora={{start: '{tmp_path / 'x.safetensors'}'}}"
        return plan("mixgrpo_flash_guard", "--gpu", "4090", *SMALL, "model.train=lora", start)

    assert "trains a LoRA of rank 3, alpha 3," in planned("transformer_blocks.0.attn.to_q", 128)
    with pytest.raises(ValueError, match=r"has no linear layer named transformer_blocks\.0\.attn\.query; .*start"):
        planned("transformer_blocks.0.attn.query", 128)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("default",), "trains all weights, with a learning rate of 0.0001"),
        (("grpo_guard", "model.lora.rank=8"), "trains a LoRA of rank 8, alpha 32, with a learning rate of"),
        (("text",), "trains all weights, with a learning rate of 0.00035"),
        (
            ("flow_grpo", "schedules=[{key: penalties.kl.weight, end: 0, over: 20, after: 5}]"),
            "penalties.kl.weight goes from 0.01 to 0, from iteration 5 on, over 20 iterations",
        ),
        (("flash_grpo", "sampler.plan.each=prompt"), "each prompt draws a window of its own; the table counts"),
        (
            ("text", "schedules=[{key: rewards.answer.weight, end: 2, over: 20}]"),
            "rewards.answer.weight goes from 1 to 2, over 20 iterations",
        ),
        (("default+flux_dev",), "trains a LoRA of rank 64, alpha 128, with a learning rate of 0.0003"),
    ],
)
def test_the_plan_says_what_is_trained(words: tuple[str, ...], said: str):
    assert said in plan(*words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("default",), "at most 4 of 12, each at all 3 noise levels"),
        (("default", "objective.times=2"), "at most 4 of 12, each at 2 of 3 noise levels"),
        (("dgpo",), "all 12, each at 4 of 5 noise levels"),
        (
            ("diffusion_nft", "objective.times=null", "sampler.sigmas=[1.0,0.75,0.5,0.25,0.0]"),
            "all 12, each at all 3 noise levels",
        ),
        (("default", "optimizer.epochs=2"), "all 12, each at all 3 noise levels"),
    ],
)
def test_a_loss_of_images_has_a_line_for_them_and_no_columns_of_trained_steps(words: tuple[str, ...], said: str):
    output = plan(*words)
    assert f"trained images of a prompt: {said}" in output
    assert "trained steps" not in output
    assert "trained states" not in output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("mixgrpo_flash_guard", "--gpu", "h900"), "no figures for the GPU 'h900'; use one of h100"),
        (("text", "--gpu", "h900"), "no figures for the GPU 'h900'; use one of h100"),
        (("text", "--gpus", "33"), "rollout.prompts is 32 on 33 GPUs"),
        (("mixgrpo_flash_guard", "--gpu", "h100", "--utilisation", "1.5"), "use a number in"),
        (("vgpo", "--gpus", "2"), "compare the steps of all prompts"),
        (("ac_flow", "--gpus", "2"), "a critic is trained in one process only; use"),
        (
            ("default", "--gpus", "2", "--sharding", "fsdp2", "model.compile=true"),
            "are not compiled; use",
        ),
        (("mixgrpo_flash_guard", "--sharding", "zero3"), "sharding is 'zero3'; use one of fsdp2, zero2"),
    ],
)
def test_impossible_machines_are_refused(words: tuple[str, ...], said: str):
    with pytest.raises(ValueError, match="use") as caught:
        plan(*words)
    assert said in str(caught.value)


def test_unknown_parts_are_refused_by_name():
    with pytest.raises(RecipeError, match="no part 'sd3'"):
        plan("flow_grpo+sd3")


def test_a_recipe_of_a_masked_model_has_an_estimate_of_memory() -> None:
    output = plan("masked", "--gpu", "4090", "--gpus", "2")
    assert "estimate of memory for 2 × RTX 4090, from shapes alone" in output
    assert re.search(r"sampling \(one at a time\) +\d+\.\d\d\n +training", output)
    assert "estimate" not in plan("masked")
    with pytest.raises(ValueError, match="--sharding has no effect for masked"):
        plan("masked", "--gpu", "h100", "--sharding", "zero2")


def test_the_plan_of_a_masked_model_says_if_completions_may_be_finished_early() -> None:
    early = "these are the most: a completion that is finished before its last step is not evaluated again\n"
    assert "evaluations of the model for a completion" in plan("masked")
    assert early not in plan("masked")
    assert early not in plan("mixgrpo_flash_guard", *SMALL)
    for word in ("sampler.order.threshold=0.9", "generation.stop_at_end=true"):
        assert early in plan("masked", word)


def test_a_recipe_of_text_has_an_estimate_of_memory() -> None:
    output = plan("text", "--gpu", "4090", "--gpus", "2")
    assert "estimate of memory for 2 × RTX 4090, from shapes alone" in output
    assert "training (one at a time)" in output
    assert re.search(r"most at once +\d+\.\d\d  of 24\n", output)
    assert "estimate" not in plan("text")


def test_a_drawing_replaces_no_file_of_another_kind(tmp_path: Path):
    recipe = tmp_path / "my.yaml"
    recipe.write_text("base: default\n")
    with pytest.raises(ValueError, match=r"my\.yaml exists and is no \.svg file; name a file that ends in \.svg"):
        plan(str(recipe), "--svg", str(recipe))
    assert recipe.read_text() == "base: default\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("default", "--iteration", "2"), "--iteration belongs to --draw or --svg"),
        (("default", "--yaml", "--draw"), "--draw has no effect with --yaml"),
        (("text", "--utilisation", "0.7"), "--utilisation has no effect for text"),
        (("text", "--sharding", "fsdp2"), "--sharding has no effect for text"),
    ],
)
def test_options_that_would_do_nothing_are_refused(words: tuple[str, ...], said: str):
    with pytest.raises(ValueError, match="leave") as caught:
        plan(*words)
    assert said in str(caught.value)


def test_the_judge_of_a_win_rate_is_checked() -> None:
    said = "win_rate: the judge 'unifiedreward_think' cannot be made: "
    with pytest.raises(ValueError, match=said):
        plan("pref_grpo@published", "rewards=[{name: win_rate, options: {judge: unifiedreward_think}}]")
    with pytest.raises(ValueError, match=r"win_rate: the judge 'gold' cannot be made: .*did you mean 'dense'"):
        plan("default", "rewards=[{name: win_rate, options: {judge: gold, judge_options: {dens: true}}}]")


def test_of_many_windows_the_first_are_listed_and_the_others_counted() -> None:
    lines = plan("dance_grpo", "run.iterations=400").splitlines()
    start = lines.index("per prompt, by window of trained steps:")
    uses = [int(line.split()[0]) for line in lines[start + 2 : start + 8]]
    found = re.fullmatch(r"  and (\d+) more windows, in (\d+) iterations", lines[start + 8])
    assert found is not None
    assert int(found[1]) > 94
    assert sum(uses) + int(found[2]) == 400
    assert lines[start + 9].startswith("evaluations of the denoiser")
    assert "more windows" not in plan("mixgrpo")
    # Seven are listed as they are: a line about one more would be as long.
    seven = plan("mixgrpo", "sampler.steps=11")
    assert len(re.findall(r"^ +\d+ +\d+–\d+ ", seven, re.MULTILINE)) == 7
    assert "more windows" not in seven


def test_teachers_of_a_paper_may_be_missing_and_own_teachers_may_not() -> None:
    said = "teachers/ocr does not exist; name a .safetensors file or a folder that holds a LoRA"
    assert f"needed: {said}\n" in plan("diffusion_opd@published")
    with pytest.raises(ValueError, match=r"^mine does not exist; name a \.safetensors file"):
        plan("diffusion_opd@published", "model.teachers=[{lora: mine}]")


def test_a_plan_says_what_teachers_are_and_what_they_read() -> None:
    own = "a teacher says how it would take each trained step: the model itself, with "
    assert f"{own}an average of its weights (decay 0.99); it reads '{{detailed}}'\n" in plan("d_opsd")
    start = plan("d_opsd", "model.teachers=[{template: '{detailed}!'}]", "reference=null")
    assert f"{own}the weights of the start; it reads '{{detailed}}!'\n" in start
    assert "note:" not in start
    present = plan("d_opsd", "model.teachers=[{template: '{detailed}', weights: present}]", "reference=null")
    assert f"{own}its present weights; it reads '{{detailed}}'\n" in present
    assert "note: model.teachers.0 has the present weights, so each step moves the teacher too" in present
    assert f"{own}the weights of the start; it is called with guidance_scale 1.8\n" in plan("diffusion_opd")


def test_images_of_a_paper_may_be_missing_and_own_images_may_not() -> None:
    said = "no prompt file 'videos/metadata.jsonl' (in "
    assert f"needed: {said}" in plan("ddrl@published")
    with pytest.raises(ValueError, match=r"^no prompt file 'mine\.jsonl' .* as penalties\.data\.source$"):
        plan("ddrl@published", "penalties.data.source=mine.jsonl")


def test_a_server_that_was_not_asked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_TOKEN", raising=False)
    assert "not checked: the server of reward win_rate at http://127.0.0.1:8000/v1\n" in plan("pref_grpo@published")
    output = plan("default", "rewards=[{name: remote, options: {url: 'http://127.0.0.1:9', token_env: NO_TOKEN}}]")
    assert (
        "not checked: the server of reward remote at http://127.0.0.1:9 (its token is missing here: export NO_TOKEN "
        "where the run starts)\n"
    ) in output
    assert output.count("not checked: ") == 1
    assert "not checked: " not in plan("default")


def test_a_plan_counts_scouts_and_says_when_they_save_nothing():
    """Of a prompt: 48 scouts of six steps, and twelve images of ten steps."""
    output = plan("sol_rl", "run.iterations=2")
    line = "scouts: 48 a prompt, of 6 steps each; the seeds of 12 of them, extremes, are sampled with all 10 steps\n"
    assert line in output
    assert "they cost a prompt 288 evaluations, and each of them is decoded and scored by every reward" in output
    assert "(NFE of the old policy, of θ): (34, 3), with shared states (34, " in output
    assert "note:" not in output
    assert "scouts" not in plan("diffusion_nft", "run.iterations=2")
    # 20 scouts of four steps and twelve images of ten are 200 evaluations, as many as twenty images.
    words = ("sol_rl", "run.iterations=2", "rollout.scouts.group=20")
    assert (
        "note: scouts save nothing: with the images of their seeds they take as many evaluations as 20 images"
        in plan(*words, "rollout.scouts.steps=4")
    )
    assert "note:" not in plan(*words, "rollout.scouts.steps=3")


def test_a_plan_says_that_scouts_say_less_where_steps_draw_noise():
    words = ("mixgrpo_guard", "run.iterations=2", "sampler.plan.shared_noise=false")
    scouts = "rollout.scouts={group: 48, steps: 3}"
    assert "note: steps of sampler.plan window draw noise, so a seed does not decide its image" in plan(*words, scouts)
    assert "a seed does not decide" not in plan(*words)
