"""Estimates of memory and time, on the embedded pipeline's shapes: by hand, and what each setting changes."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flowgrpo.configs.image_recipe import ModelConfig, TeacherConfig
from flowgrpo.configs.layers import machine_of
from flowgrpo.configs.load import load_image_recipe
from flowgrpo.configs.schema import Recipe
from flowgrpo.estimate.estimates import GIB, GPUS, Estimate, duration, estimate, gpu_of, table
from flowgrpo.estimate.memory import at_once
from flowgrpo.estimate.models import model_of
from flowgrpo.pipelines.architectures import architecture_of, built
from flowgrpo.training.model_paths import model_folder
from flowgrpo.training.planning import forecast
from flowgrpo.training.prompt_embeddings import SPARE_EMBEDDINGS

WINDOW = {"name": "frozen", "size": 2}
ELEMENTS = 8 * 8 * 8


KL = {"name": "kl", "weight": 0.1}


def recipe(**sections: Any) -> Recipe:
    plain: dict[str, Any] = {
        "rewards": [{"name": "gold"}],
        "model": {"lora": {"rank": 4, "alpha": 8.0}, "release_text_encoders": False},
        "sampler": {"steps": 5, "plan": {"shared_noise": False, "window": WINDOW}},
        "rollout": {"prompts": 8, "group": 3, "batch": 6, "decode_batch": 4},
        "optimizer": {"updates": 2},
        "run": {"iterations": 10},
        "evaluate": {"every": 4, "prompts": 16},
    }
    given = {**plain, **sections}
    for name, section in plain.items():
        if isinstance(section, dict):
            given[name] = {**section, **sections.get(name, {})}
    return Recipe.model_validate(given)


def of(gpus: int = 1, **sections: Any) -> Estimate:
    return estimate(recipe(**sections), "h100", gpus)


def test_evaluations_and_gradients_are_those_of_the_plan():
    made = recipe()
    model, counts = model_of(made.model), forecast(made).counts[0]
    assert (counts.evaluations, counts.trained_states, counts.leaves) == (15, 6, 3)
    cost, found = model.evaluation, estimate(made)
    assert found.flops["sampling"] == pytest.approx(8 * 15 * cost.forward)
    assert found.flops["training"] == pytest.approx(8 * 6 * (cost.forward + cost.backward))
    assert found.flops["decoding"] == pytest.approx(8 * 3 * model.decode_flops)
    assert found.evaluation == pytest.approx(16 * (5 * cost.forward + model.decode_flops))
    assert (found.iterations, found.evaluations) == (10, 4)
    total = 10 * sum(found.flops.values()) + 4 * found.evaluation
    assert found.run_seconds == pytest.approx(total / (989.4e12 * found.utilisation))


def test_quick_evaluations_count_where_they_are_made_alone():
    plain, found = of(), of(evaluate={"every": 4, "quick": {"every": 2, "prompts": 5}})
    # After 0, 4, 8 and 10 iterations all prompts are evaluated, so the few are evaluated alone after 2 and 6.
    assert (plain.quick_evaluations, found.quick_evaluations, found.evaluations) == (0, 2, 4)
    assert found.quick == pytest.approx(found.evaluation * 5 / 16)
    assert found.run_seconds == pytest.approx(plain.run_seconds + 2 * found.seconds(found.quick))
    assert "10 iterations, 4 evaluations, 2 quick ones" in "\n".join(table(found))


def test_memory_is_by_hand():
    found, model = of(), model_of(recipe().model)
    attention = 3 * 8 + 1 * 4  # three blocks with eight projections each, the last without `to_add_out`
    assert model.trained == (attention + 3) * 4 * (128 + 128)
    assert found.resting["LoRA"] == found.resting["gradients"] == found.resting["averages"] == 4 * model.trained
    assert found.resting["optimizer"] == 8 * model.trained
    assert found.resting["reference"] == 0
    # Float32, of eight prompts: three states before each trained step and after the last, the predictions of six of
    # them, and three leaves.
    assert model.elements == ELEMENTS
    assert found.resting["rollout states"] == 8 * ELEMENTS * 4 * (9 + 6 + 3)
    assert of(model={"dtype": "bfloat16"}).resting["rollout states"] == 8 * ELEMENTS * 2 * (9 + 6 + 3)
    cost = model.evaluation
    assert found.passing == {
        "sampling": 6 * cost.working,
        "decoding": 4 * model.decode_bytes,
        "training": 6 * (cost.saved + cost.working),
    }
    assert found.peak == max(at_once(found.resting, found.passing).values()) > found.start


def test_only_training_has_gradients():
    resting = {"denoiser": 100, "gradients": 40}
    assert at_once(resting, {"sampling": 10, "decoding": 30, "training": 20}) == {
        "sampling": 110,
        "decoding": 130,
        "training": 160,
    }
    found = of(model={"train": "full"}, optimizer={"learning_rate": 1e-5})
    wide = replace(found, passing=found.passing | {"decoding": found.passing["training"] + 1})
    assert wide.peak == found.peak


def test_gradient_checkpointing_saves_memory_and_costs_a_second_evaluation():
    plain, less = of(), of(model={"gradient_checkpointing": True})
    cost = model_of(recipe().model).evaluation
    assert less.passing["training"] == 6 * (cost.kept + cost.block + cost.working) < plain.passing["training"]
    assert less.flops["training"] - plain.flops["training"] == pytest.approx(8 * 6 * cost.recompute)
    assert less.flops["sampling"] == plain.flops["sampling"]


def test_a_compiled_denoiser_samples_with_the_activations_of_a_training_pass():
    plain, compiled = of(), of(model={"compile": True})
    assert compiled.passing["sampling"] == plain.passing["training"] > plain.passing["sampling"]
    assert compiled.passing["training"] == plain.passing["training"]


def test_guidance_evaluates_every_state_twice():
    plain, guided = of(), of(model={"call": {"guidance_scale": 4.0}})
    for part in ("sampling", "training"):
        assert guided.flops[part] == pytest.approx(2 * plain.flops[part])
        assert guided.passing[part] == 2 * plain.passing[part]
    assert guided.flops["decoding"] == plain.flops["decoding"]
    assert guided.resting["prompt embeddings"] == 2 * plain.resting["prompt embeddings"]


def test_quantised_linear_layers_take_a_byte_a_number_and_a_scale_a_row():
    config = ModelConfig(dtype="bfloat16")
    plain, fewer = model_of(config), model_of(config.model_copy(update={"quantize": "float8"}))
    with torch.device("meta"):
        transformer = built(*architecture_of(model_folder("scenes")).denoiser, torch.bfloat16)
    linear = [part.weight for part in transformer.modules() if isinstance(part, torch.nn.Linear)]
    assert plain.denoiser - fewer.denoiser == sum(w.numel() - 4 * w.shape[0] for w in linear) > 0
    assert plain.trained == fewer.trained
    packed = model_of(config.model_copy(update={"quantize": "nf4"}))
    linear = [part.weight for part in transformer.transformer_blocks.modules() if isinstance(part, torch.nn.Linear)]
    scales = [-(-w.numel() // 64) for w in linear]
    left = sum(-(-w.numel() // 2) + n + 4 * -(-n // 256) for w, n in zip(linear, scales))
    assert plain.denoiser - packed.denoiser == sum(2 * w.numel() for w in linear) - left


def test_a_penalty_to_the_base_asks_it_once_for_each_trained_state():
    plain, held = of(), of(penalties=[KL])
    added = held.flops["training"] - plain.flops["training"]
    assert added == pytest.approx(8 * 6 * model_of(recipe().model).evaluation.forward)
    assert held.resting == plain.resting


def test_a_search_for_bounds_asks_it_before_every_optimizer_step_but_the_first():
    lines = {"surrogate": "bapo"}
    two = {"updates": 2, "epochs": 2}
    plain, searched = of(objective=lines, optimizer=two), of(objective={**lines, "balance": {}}, optimizer=two)
    added = searched.flops["training"] - plain.flops["training"]
    assert added == pytest.approx(1.5 * 8 * 6 * model_of(recipe().model).evaluation.forward)


@pytest.mark.parametrize(("dtype", "size", "masters"), [("float32", 4, 0), ("bfloat16", 2, 4)])
def test_full_weights_are_trained_in_float32_and_may_have_a_reference(dtype: str, size: int, masters: int):
    full = {"train": "full", "dtype": dtype}
    model = model_of(recipe(model=full).model)
    found = of(model=full, penalties=[KL])
    assert size * model.trained <= found.resting["denoiser"] < 1.1 * size * model.trained
    assert found.resting["masters"] == masters * model.trained
    assert found.resting["LoRA"] == 0
    assert found.resting["reference"] == size * model.trained
    assert found.resting["optimizer"] == 8 * model.trained
    assert model.evaluation.backward > 1.6 * model.evaluation.forward


def test_released_text_encoders_are_there_only_while_prompts_are_encoded():
    kept, released = of(), of(model={"release_text_encoders": True})
    model = model_of(recipe().model)
    assert kept.resting["text encoders"] == model.encoders > 0
    assert released.resting["text encoders"] == 0
    assert released.start >= model.denoiser + model.vae + model.encoders
    # All prompts of the files are encoded then; in the other case those of two iterations and an evaluation are kept.
    assert kept.resting["prompt embeddings"] == (2 * 8 + 16 + 1) * model.prompt_bytes
    assert released.resting["prompt embeddings"] > kept.resting["prompt embeddings"]


def test_embeddings_of_many_prompts_wait_in_host_memory(tmp_path: Path):
    prompts, model = tmp_path / "many.txt", model_of(recipe().model)
    count = 3 * SPARE_EMBEDDINGS // model.prompt_bytes
    prompts.write_text("".join(f"prompt {number}\n" for number in range(count)))
    lines = {"data": {"train": str(prompts), "heldout": None}, "run": {"iterations": count}}
    found = of(model={"release_text_encoders": True}, **lines)
    assert found.resting["prompt embeddings"] == SPARE_EMBEDDINGS
    assert found.waiting["prompt embeddings"] == count * model.prompt_bytes - SPARE_EMBEDDINGS
    assert any(line.startswith("    prompt embeddings (in host memory) ") for line in table(found))
    assert "prompt embeddings" not in of(model={"release_text_encoders": False}, **lines).waiting


def test_evaluations_that_are_guided_or_larger_cost_more_and_iterations_do_not():
    every = {"every": 4, "prompts": 16}
    plain, guided = of(), of(evaluate={**every, "call": {"guidance_scale": 3.0}})
    smaller = of(evaluate={**every, "call": {"height": 32, "width": 32}})
    cost = model_of(recipe().model).evaluation
    assert guided.evaluation - plain.evaluation == pytest.approx(16 * 5 * cost.forward)
    assert guided.resting["prompt embeddings"] == 3 * plain.resting["prompt embeddings"]
    # Prompts are encoded alike for all sizes, and for guidance of any strength.
    assert smaller.resting["prompt embeddings"] == plain.resting["prompt embeddings"]
    twice = of(evaluate={**every, "call": {"guidance_scale": 3.0}}, model={"reference_call": {"guidance_scale": 2.0}})
    assert twice.resting["prompt embeddings"] == guided.resting["prompt embeddings"]
    negative = of(evaluate={**every, "call": {"negative_prompt": "blue"}})
    assert negative.resting["prompt embeddings"] == 2 * plain.resting["prompt embeddings"]
    small = {"lora": {"rank": 4, "alpha": 8.0}, "release_text_encoders": False, "call": {"height": 32, "width": 32}}
    model = model_of(recipe(model=small).model)
    assert smaller.evaluation == pytest.approx(16 * (5 * model.evaluation.forward + model.decode_flops))
    assert smaller.evaluation < plain.evaluation
    assert plain.flops == guided.flops == smaller.flops
    assert plain.passing == smaller.passing
    assert guided.passing["sampling"] == 2 * plain.passing["sampling"]
    assert guided.passing["training"] == plain.passing["training"]
    # Rollouts of smaller images than evaluations: the memory of sampling and decoding is the evaluations'.
    full = of(model=small, evaluate={**every, "call": {"height": 64, "width": 64}})
    assert full.evaluation == pytest.approx(plain.evaluation)
    assert full.passing["decoding"] == plain.passing["decoding"]
    assert full.flops["decoding"] == pytest.approx(8 * 3 * model.decode_flops)


def test_a_guided_reference_is_evaluated_twice_and_has_embeddings_of_its_own():
    plain, guided = (of(model={"reference_call": call}, penalties=[KL]) for call in ({}, {"guidance_scale": 3.0}))
    cost, without = model_of(recipe().model).evaluation, of()
    steps = 8 * 6
    assert plain.flops["training"] - without.flops["training"] == pytest.approx(steps * cost.forward)
    assert guided.flops["training"] - without.flops["training"] == pytest.approx(steps * 2 * cost.forward)
    assert guided.flops["sampling"] == plain.flops["sampling"]
    # One text without guidance, and two texts with it.
    assert guided.resting["prompt embeddings"] == 3 * plain.resting["prompt embeddings"]


def test_a_teacher_is_evaluated_with_its_call_and_its_lora_is_in_memory(tmp_path: Path):
    """Each of two teachers has half of the prompts. A LoRA that is not here counts as one of the trained size."""
    visited: dict[str, Any] = {"penalties": [{"name": "taught", "weight": 1.0}]}
    file, guided = tmp_path / "pytorch_lora_weights.safetensors", {"guidance_scale": 3.0}
    save_file({"a.to_q.lora_A.weight": torch.ones(2, 6), "a.to_q.lora_B.weight": torch.ones(5, 2)}, file)
    teachers = [{"name": "a", "lora": str(file), "call": guided}, {"name": "b", "lora": "nowhere"}]
    plain, model = of(), model_of(recipe().model)
    found, narrow = (of(model={"teachers": teachers, "dtype": dtype}, **visited) for dtype in ("float32", "bfloat16"))
    assert found.resting["teachers"] == 4 * (22 + model.trained)
    assert narrow.resting["teachers"] == 2 * (22 + model.trained)
    assert found.flops["training"] - plain.flops["training"] == pytest.approx(8 * 6 * 1.5 * model.evaluation.forward)
    # The guided call has two texts more.
    assert found.resting["prompt embeddings"] == 3 * plain.resting["prompt embeddings"]
    assert of(model={"teachers": [{"call": guided}]}, **visited).resting["teachers"] == 0


def test_what_a_teacher_reads_is_kept_beside_the_prompts(monkeypatch: pytest.MonkeyPatch):
    """With the encoders in memory, the contexts of two iterations are kept."""
    visited: dict[str, Any] = {"penalties": [{"name": "taught", "weight": 1.0}]}
    plain, model = of(model={"teachers": [{}]}, **visited), model_of(recipe().model)
    found = of(model={"teachers": [{"template": "a large {prompt}"}]}, **visited)
    assert found.flops == plain.flops
    kept = found.resting["prompt embeddings"] - plain.resting["prompt embeddings"]
    assert kept == 2 * 8 * model.prompt_bytes


def test_a_teacher_that_sees_pictures_reads_their_tokens():
    path, call = "black-forest-labs/FLUX.2-klein-4B", {"height": 512, "width": 512}

    def ratio(**teacher: Any) -> float:
        config = ModelConfig(path=path, dtype="bfloat16", call=call, teachers=[TeacherConfig(**teacher)])
        return model_of(config).teacher_branches

    assert ratio() == 1.0
    # 1024 tokens of the state and 512 of the text, and 4096 more of a picture of a million pixels.
    assert 3.6 < ratio(image="target") < 5.0


def test_the_image_beside_a_prompt_is_one_state_more_in_each_call():
    """Three states of a prompt are trained in one call of six, with the image of each of the two prompts."""
    penalty = {"name": "data", "source": "scenes:pairs", "column": "chosen", "weight": 0.1}
    plain, found, model = of(), of(penalties=[penalty]), model_of(recipe().model)
    cost = model.evaluation
    assert found.flops["training"] == pytest.approx(4 / 3 * plain.flops["training"])
    assert found.flops["sampling"] == plain.flops["sampling"]
    assert found.passing["training"] - plain.passing["training"] == 2 * cost.saved
    # With the encoders in memory, the captions of two iterations are kept; without, all that are drawn.
    assert found.resting["prompt embeddings"] - plain.resting["prompt embeddings"] == 2 * 8 * model.prompt_bytes
    released = {"model": {"release_text_encoders": True}}
    more = (
        of(penalties=[penalty], **released).resting["prompt embeddings"] - of(**released).resting["prompt embeddings"]
    )
    assert more == 10 * 8 * model.prompt_bytes


@pytest.mark.parametrize(("gpus", "share", "turns"), [(1, 8, 8), (2, 4, 4), (3, 3, 4), (4, 2, 2), (8, 1, 2)])
def test_gpus_share_prompts_and_wait_for_the_busiest_in_each_optimizer_step(gpus: int, share: int, turns: int):
    """Two steps of four prompts each: on 3 GPUs 2 + 2 of the first, on 8 one of each step while four GPUs wait."""
    one, found = of(), of(gpus)
    assert found.flops["sampling"] == pytest.approx(one.flops["sampling"] * share / 8)
    assert found.flops["training"] == pytest.approx(one.flops["training"] * turns / 8)
    assert found.resting["rollout states"] == one.resting["rollout states"] * share // 8
    assert found.resting["gradients"] == one.resting["gradients"] * (1 if gpus == 1 else 2)
    assert found.resting["denoiser"] == one.resting["denoiser"]


def test_a_loss_of_the_forward_process_evaluates_images_at_its_noise_levels():
    def training(**objective: Any) -> float:
        return of(sampler={"plan": "ode"}, objective={"name": "forward", "times": 2, **objective}).flops["training"]

    cost = model_of(recipe().model).evaluation
    gradient = cost.forward + cost.backward
    assert training(noise="image") == training(skip=1) == pytest.approx(8 * 3 * 2 * gradient)
    # Half of the iterations have pure noise, which is one state for the three images of a prompt.
    assert training() == pytest.approx(8 * (3 * 2 - (3 - 1) / 2) * gradient)


def test_a_loss_of_the_forward_process_keeps_predictions_until_it_trains_them():
    """Of 8 x 3 images at two noise levels; a policy that lags behind is the sampling policy."""

    def predictions(optimizer: dict[str, Any], penalties: Sequence[dict[str, Any]] = (), **objective: Any) -> float:
        found = of(
            sampler={"plan": "ode"}, objective={"name": "forward", "times": 2, **objective}, optimizer=optimizer,
            penalties=list(penalties),
        )  # fmt: skip
        images = 8 * 3 * ELEMENTS * 4
        return found.resting["rollout states"] / images - 1  # the final state of each image

    lagging = {"old": {"decay": 0.9}}
    assert predictions({"updates": 1}) == 0
    assert predictions({"updates": 1}, **lagging) == 2
    assert predictions({"updates": 2}) == predictions({"updates": 2}, **lagging) == 2
    assert predictions({"updates": 1, "epochs": 2}) == 2
    assert predictions({"updates": 1}, [KL]) == 2
    assert predictions({"updates": 1}, [KL], **lagging) == 4
    assert predictions({"updates": 2}, [KL]) == 3


def test_more_peak_is_less_time_and_the_same_memory():
    slow, fast = estimate(recipe(), "4090"), estimate(recipe(), "h100")
    assert slow.iteration_seconds / fast.iteration_seconds == pytest.approx(989.4 / 165.2)
    assert slow.peak == fast.peak
    half = estimate(recipe(), "h100", utilisation=2 * fast.utilisation)
    assert half.run_seconds == pytest.approx(fast.run_seconds / 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("h900",), "h100"),
        (("h100", 9), "8 on 9 GPUs"),
        (("h100", 0), "at least 1"),
        (("h100", 1, 0.0), "use a number in"),
        (("h100", 1, 1.5), "use a number in"),
    ],
)
def test_impossible_machines_are_refused(arguments: tuple[Any, ...], said: str):
    with pytest.raises(ValueError, match=said):
        estimate(recipe(), *arguments)


def test_the_table_says_that_it_is_an_estimate_and_what_it_assumes():
    lines = table(of(2))
    text = "\n".join(lines)
    assert lines[0].startswith("estimate for 2 × H100 SXM")
    assert "rewards are not counted" in lines[0]
    assert "an assumed 20% of 989.4 TFLOP/s" in text
    assert "10 iterations, 4 evaluations" in text
    assert "more memory than the GPU has" not in text
    rows = [line for line in lines if line.startswith("    ")]
    assert len(rows) >= 8


@pytest.mark.parametrize(
    ("device", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "4090"), ("NVIDIA H100 PCIe", None), ("the CPU", None),
        ("NVIDIA GH200 480GB", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA A100 80GB PCIe", "a100"),
    ],
)  # fmt: skip
def test_a_gpu_is_known_by_the_name_that_its_driver_gives(device: str, key: str | None):
    assert gpu_of(device) == key


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (4e-5, "< 1 ms"), (0.00123, "1.2 ms"), (0.0421, "42 ms"), (0.42, "0.42 s"),
     (3.456, "3.46 s"), (95.0, "95 s"), (600.0, "10 min"), (7199.0, "120 min"),
     (36_000.0, "10 h"), (1_000_000.0, "11.6 d")],
)  # fmt: skip
def test_times_have_few_figures(seconds: float, text: str):
    assert duration(seconds) == text


def test_of_a_tiny_model_each_row_says_something():
    found = estimate(load_image_recipe("dance_grpo"), "h100")
    rows = [line for line in table(found) if line.startswith("    ")]
    assert any("ms" in row for row in rows)
    assert any("< 0.01" in row for row in rows)
    assert not [row for row in rows if re.search(r" 0\.00( s|$)", row)]
    assert len({len(row) for row in rows if not re.search(r"most at once|run  ", row)}) == 1  # aligned


@pytest.mark.parametrize("source", ["flow_grpo+sd35_medium+ocr+gpus1_24gb", "mixgrpo+flux_dev+pickscore+gpus1"])
def test_recipes_for_a_card_fit_on_it(source: str):
    machine = machine_of(source)
    found = estimate(load_image_recipe(source), machine["gpu"], machine["gpus"], prompts=machine.get("prompts"))
    assert found.peak < 0.92 * GPUS[machine["gpu"]].gib * GIB
    assert math.isfinite(found.run_seconds)


def test_a_prompt_file_is_read_again_when_it_has_changed(tmp_path: Path):
    prompts, sizes = tmp_path / "prompts.txt", []
    for count in (20, 40):
        prompts.write_text("".join(f"prompt {number}\n" for number in range(count)))
        sizes.append(
            of(model={"release_text_encoders": True}, data={"train": str(prompts), "heldout": None}).resting[
                "prompt embeddings"
            ]
        )
    assert sizes[1] == 2 * sizes[0] > 0


def test_what_waits_in_host_memory_is_on_the_card_while_it_is_used():
    plain = of()
    model = model_of(recipe().model)
    found = of(model={"offload": ["vae", "text_encoders"]}, rollout={"store": "host"})
    assert found.waiting == {
        "VAE": model.vae,
        "text encoders": model.encoders,
        "rollout states": plain.resting["rollout states"],
    }
    assert not found.waiting.keys() & found.resting.keys()
    assert sum(plain.resting.values()) - sum(found.resting.values()) == sum(found.waiting.values())
    assert found.passing["decoding"] - plain.passing["decoding"] == model.vae
    assert found.passing["encoding"] == model.encoders
    assert plain.start - found.start == model.vae
    assert (plain.waiting, "encoding" in plain.passing) == ({}, False)
    lines = [line for line in table(found) if "(in host memory)" in line]
    assert [line.split("(")[0].strip() for line in lines] == ["VAE", "text encoders", "rollout states"]


def test_a_loss_that_differentiates_rewards_keeps_the_graph_of_the_decoder() -> None:
    def found(*words: str) -> Estimate:
        return estimate(
            load_image_recipe("draft", ["rollout={prompts: 6, group: 2, batch: 4, decode_batch: 3}", *words])
        )

    model = model_of(load_image_recipe("draft").model, differentiates=True)
    image, prediction = found(), found("objective.at=prediction", "sampler.plan.window.size=2")
    graph = 3 * (model.decode_graph + model.decode_bytes)
    assert image.passing["decoding with gradients"] == graph
    # At a prediction, the graph of the denoiser waits for the gradient of the reward.
    assert prediction.passing["decoding with gradients"] == graph + image.passing["training"]
    # The weights of the decoder have no gradient, so its backward pass costs as much as its forward pass.
    assert model.decode_graph_flops == pytest.approx(2 * model.decode_flops, rel=0.01)
    # So it does at a recovered image, once for each noise level and branch.
    aligned = estimate(
        load_image_recipe(
            "direct_align",
            ["rollout={prompts: 6, group: 2, batch: 4, decode_batch: 3}", "objective={times: 2, inversion: true}"],
        )
    )
    assert aligned.passing["decoding with gradients"] == prediction.passing["decoding with gradients"]
    images = image.flops["training"] - 12 * model.decode_graph_flops
    assert aligned.flops["training"] == pytest.approx(4 * (images / 3 + 12 * model.decode_graph_flops))
    predictions = prediction.flops["training"] - 24 * model.decode_graph_flops
    assert images / 3 == pytest.approx(predictions / 2)


def test_scouts_are_sampled_and_decoded_and_not_trained():
    """Of a prompt: seven scouts of two steps beside three images of five; states of scouts wait only before them."""
    plain, found = of(), of(rollout={"scouts": {"group": 7, "steps": 2}})
    model = model_of(recipe().model)
    assert found.flops["sampling"] == pytest.approx(8 * (15 + 14) * model.evaluation.forward)
    assert found.flops["decoding"] == pytest.approx(8 * (3 + 7) * model.decode_flops)
    assert found.flops["training"] == plain.flops["training"]
    assert found.resting == plain.resting
    many = {"group": 100, "steps": 2}
    assert of(rollout={"scouts": many}).resting["rollout states"] == 8 * ELEMENTS * 4 * 100
    # Two prompts at a time have fewer states than the rollout.
    assert of(rollout={"scouts": {"group": 70, "steps": 2}, "chunk": 2}).resting == plain.resting
