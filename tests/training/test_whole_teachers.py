"""Teachers that are whole models: whose predictions they are, beside LoRAs and the reference, and what is refused."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, SD3Transformer2DModel
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import dump_recipe, load_image_recipe, load_recipe
from flowgrpo.estimate.estimates import estimate
from flowgrpo.parts.traits import keeps_base
from flowgrpo.pipelines import acceleration
from flowgrpo.pipelines.acceleration import compile_blocks
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.pipelines.denoiser import Denoiser
from flowgrpo.pipelines.policy import FlowPolicy
from flowgrpo.training import session
from flowgrpo.training.checking import check
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.recipe_launches import check_shards
from flowgrpo.training.session import Session, start
from flowgrpo.training.trainer import Trainer
from flowgrpo.weights.blocks import repeated_blocks
from flowgrpo.weights.trained import LoraSpec, TrainedWeights, trainable_modules
from flowgrpo.weights.whole_teachers import check_whole_teacher, load_whole_teacher
from tests.parts.own_parts import same_when_resumed
from tests.tiny_pipelines import require
from tests.training import test_processes, test_sharding
from tests.training.test_processes import REWARDS, lines, run_all
from tests.training.test_sharding import FSDP
from tests.training.test_teachers import NOISY, lora, predictions, words_of

__all__ = ["lora"]


def changed(pipeline: Path, folder: Path, **settings: Any) -> Path:
    """A pipeline with a denoiser of other weights and maybe another architecture, without text encoders and VAE."""
    shutil.copytree(pipeline, folder, ignore=shutil.ignore_patterns("text_encoder*", "tokenizer*", "transformer"))
    config = {**SD3Transformer2DModel.load_config(pipeline, subfolder="transformer"), **settings}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        SD3Transformer2DModel.from_config(config).save_pretrained(folder / "transformer")
    return folder


@pytest.fixture(scope="module")
def large(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A denoiser with another number of layers and another width than the model's."""
    more = {"num_layers": 3, "num_attention_heads": 3, "caption_projection_dim": 48}
    return changed(random_pipeline, tmp_path_factory.mktemp("large") / "pipeline", **more)


def trainer_of(model: Path, folder: Path, *more: str, name: str = "diffusion_opd") -> Trainer:
    return Session(load_recipe(name, words_of(model, *more)), RunFolder.create(folder, "")).trainer(Silent())


def whole(path: Path, **call: Any) -> str:
    return f"model.teachers=[{json.dumps({'path': str(path), 'call': call})}]"


def parameters_of(trainer: Trainer) -> list[torch.nn.Parameter]:
    """The parameters of the teacher."""
    with trainer.task.policy.as_teacher("teacher"):
        return list(trainer.task.policy.denoiser.pipe.transformer.parameters())


def move(trainer: Trainer) -> None:
    with torch.no_grad():
        for parameter in trainer.task.weights.parameters():
            parameter.add_(0.05)
        trainer.task.weights.write()


# -- whose predictions ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_whole_teacher_predicts_as_a_run_of_its_model_does(train, dtype, random_pipeline, large, tmp_path) -> None:
    """To the last bit, whatever has become of the trained weights, and these are as before."""
    kind = (f"model.dtype={dtype}", f"model.train={train}")
    trainer = trainer_of(random_pipeline, tmp_path / "a", whole(large), *kind)
    other = tmp_path / "other"
    shutil.copytree(random_pipeline, other, ignore=shutil.ignore_patterns("transformer"))
    shutil.copytree(large / "transformer", other / "transformer")
    its_own = trainer_of(other, tmp_path / "b", *kind)
    move(trainer)
    with torch.no_grad():
        before = predictions(trainer)
        with trainer.task.policy.as_teacher("teacher"):
            taught = predictions(trainer)
        assert torch.equal(taught, predictions(its_own))
        assert torch.equal(predictions(trainer), before)
    assert not torch.equal(taught, before)
    frozen = parameters_of(trainer)
    assert {id(p) for p in frozen}.isdisjoint(id(p) for p in trainer.task.weights._computing().values())
    # Torch chooses how to multiply by this, and nothing may be rounded differently from a run of the model.
    assert {p.requires_grad for p in frozen} == {train == "full"}


@pytest.mark.slow
@pytest.mark.parametrize("plan", [NOISY, "sampler.steps=4"])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_teacher_that_is_the_base_has_no_distance_at_all(kind, plan, random_pipeline, tmp_path) -> None:
    """Exactly 0 before training. After it, the teacher is the reference, so both penalties are the same number."""
    both = "penalties=[{name: taught, weight: 1.0}, {name: kl, weight: 0.1}]"
    words = [whole(random_pipeline), plan, both, f"model.train={kind}", "model.dtype=bfloat16"]
    trainer = trainer_of(random_pipeline, tmp_path / "run", *words)
    for moved in (False, True):
        if moved:
            move(trainer)
        _, e = trainer.collect(0)
        seen = []
        for transitions, batch in trainer.objective.batches(e, 0, None):
            scored = trainer.task.policy.score(e, transitions, batch)
            assert torch.equal(scored.to_teacher(), scored.to_reference())
            seen.append(float(scored.to_teacher().detach().abs().max()))
        assert (max(seen) > 0.0) == (min(seen) > 0.0) == moved


@pytest.mark.slow
def test_each_prompt_has_its_own_teacher_of_any_kind(random_pipeline, large, lora, tmp_path) -> None:
    """A whole model, a LoRA, the model with guidance and the model itself, in one run that also has a reference."""
    names = ["whole", "lora", "guided", "self"]
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": f"a {color} circle", "teacher": name}
        for color, name in zip(["red", "blue", "green", "white"], names)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    teachers = [
        {"name": "whole", "path": str(large)}, {"name": "lora", "lora": str(lora)},
        {"name": "guided", "call": {"guidance_scale": 3.0}}, {"name": "self"},
    ]  # fmt: skip
    words = [f"data.train={prompts}", f"model.teachers={json.dumps(teachers)}", NOISY, "rollout.prompts=4"]
    kl = "penalties=[{name: taught, weight: 1.0}, {name: kl, weight: 0.1}]"
    trainer = trainer_of(random_pipeline, tmp_path / "run", *words, kl)
    _, e = trainer.collect(0)
    policy, found = trainer.task.policy, dict[str, float]()
    for transitions, batch in trainer.objective.batches(e, 0, None):
        scored = policy.score(e, transitions, batch)
        edges = transitions.state[transitions.edges_of(batch)].tolist()
        owners = [e.teachers[transitions.prompt[k]] for k in edges]
        policy.bind(e.plan)
        for name in set(owners):
            rows = [row for row, owner in enumerate(owners) if owner == name]
            states = [edges[row] for row in rows]
            velocity = policy.velocity_of(e.prompts)
            given = transitions.x[states], transitions.step, [transitions.prompt[k] for k in states]
            with torch.no_grad():
                own = velocity(*given)
                with policy.as_teacher(name):
                    taught = velocity(*given)
            expected = scored.scale * (own - taught)
            torch.testing.assert_close(scored.to_teacher()[rows], expected, rtol=1e-4, atol=1e-5)
            found[name] = max(found.get(name, 0.0), float(expected.abs().max()))
    assert set(found) == set(names)
    assert found.pop("self") == 0.0
    assert min(found.values()) > 1e-4
    assert len(set(found.values())) == 3
    record = trainer.update(e, torch.zeros(len(e.rollout.parent)))
    assert record["taught"] > 0.0


@pytest.mark.slow
def test_all_weights_learn_from_their_base_with_guidance(random_pipeline, tmp_path) -> None:
    """Such a teacher is the kept copy of the weights, which stays as it was."""
    words = ["model.train=full", "optimizer.learning_rate=0.0001", "model.teachers=[{call: {guidance_scale: 3.0}}]"]
    trainer = trainer_of(random_pipeline, tmp_path / "run", *words)
    with torch.no_grad(), trainer.task.policy.as_teacher("teacher"):
        before = predictions(trainer)
    _, e = trainer.collect(0)
    found = [trainer.update(e, torch.zeros(len(e.rollout.parent)))["taught"] for _ in range(5)]
    with torch.no_grad(), trainer.task.policy.as_teacher("teacher"):
        assert torch.equal(predictions(trainer), before)
    assert 0.0 < found[-1] < 0.9 * found[0]


@pytest.mark.slow
@pytest.mark.parametrize("train", ["lora", "full"])
def test_the_policy_comes_nearer_to_a_whole_teacher(train, random_pipeline, large, tmp_path) -> None:
    """The result holds the trained weights alone, and the teacher is as it was."""
    rate = {"lora": 0.01, "full": 0.002}[train]
    words = [whole(large), f"model.train={train}", f"optimizer.learning_rate={rate}", "run.iterations=20"]
    trainer = start(load_recipe("diffusion_opd", words_of(random_pipeline, *words)), tmp_path / "run").trainer(Silent())
    with torch.no_grad(), trainer.task.policy.as_teacher("teacher"):
        before = predictions(trainer)
    trainer.train()
    with torch.no_grad(), trainer.task.policy.as_teacher("teacher"):
        assert torch.equal(predictions(trainer), before)
    assert all(parameter.grad is None for parameter in parameters_of(trainer))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [line["taught"] for line in lines if "taught" in line]
    assert len(found) == 20
    assert sum(found[-4:]) < 0.5 * sum(found[:4])
    if train == "full":
        kept = load_file(tmp_path / "run/pipeline/transformer/diffusion_pytorch_model.safetensors")
        ours = SD3Transformer2DModel.from_pretrained(random_pipeline, subfolder="transformer").state_dict()
        assert {name: value.shape for name, value in kept.items()} == {name: v.shape for name, v in ours.items()}


@pytest.mark.slow
@pytest.mark.parametrize("train", ["lora", "full"])
def test_a_run_with_whole_teachers_resumes_to_the_last_bit(train, random_pipeline, large, tmp_path) -> None:
    words = words_of(
        random_pipeline, whole(large), f"model.train={train}", "run.iterations=2", "run.checkpoint_every=1"
    )
    same_when_resumed("diffusion_opd", [*words, "optimizer.updates=2"], tmp_path)


@pytest.mark.slow
def test_a_run_is_a_teacher_by_its_result(random_pipeline, lora, tmp_path) -> None:
    """Of a run of all weights it is the pipeline, and of a run of a LoRA it is the LoRA."""
    words = words_of(random_pipeline, "run.iterations=1", "optimizer.learning_rate=0.001")
    for train in ("lora", "full"):
        recipe = load_recipe("diffusion_opd", [*words, f"model.train={train}"])
        start(recipe, tmp_path / train).trainer(Silent()).train()
    for train, result in (("lora", "lora"), ("full", "pipeline")):
        named = {
            "lora": f"model.teachers=[{{lora: '{tmp_path}/lora/lora'}}]",
            "full": whole(tmp_path / "full/pipeline"),
        }
        by_run = trainer_of(random_pipeline, tmp_path / f"a{train}", whole(tmp_path / train))
        by_result = trainer_of(random_pipeline, tmp_path / f"b{train}", named[train])
        with torch.no_grad():
            found = []
            for trainer in (by_run, by_result):
                with trainer.task.policy.as_teacher("teacher"):
                    found.append(predictions(trainer))
            assert torch.equal(*found), result
            assert not torch.equal(found[0], predictions(by_run)), result


@pytest.mark.slow
def test_a_run_says_that_a_teacher_has_changed(random_pipeline, large, lora, tmp_path) -> None:
    from flowgrpo.training.folder.named_files import changed_inputs, measured_inputs

    teacher, adapter = tmp_path / "teacher", tmp_path / "lora"
    shutil.copytree(large, teacher)
    shutil.copytree(lora, adapter)
    teachers = [{"name": "a", "path": str(teacher)}, {"name": "b", "lora": str(adapter)}]
    recipe = dump_recipe(
        load_recipe("diffusion_opd", words_of(random_pipeline, f"model.teachers={json.dumps(teachers)}"))
    )
    inputs = measured_inputs(recipe)
    (tmp_path / "inputs.json").write_text(json.dumps(inputs))
    assert list(changed_inputs(recipe, inputs, tmp_path)) == []
    for folder, file, key in (
        (teacher, "transformer/diffusion_pytorch_model.safetensors", "model.teachers.0.path"),
        (adapter, "pytorch_lora_weights.safetensors", "model.teachers.1.lora"),
    ):
        before = (folder / file).read_bytes()
        state = {name: value + 1.0 for name, value in load_file(folder / file).items()}
        save_file(state, folder / file)
        [said] = changed_inputs(recipe, measured_inputs(recipe), tmp_path)
        assert f"{folder / file} ({key}/{file})" in said
        (folder / file).write_bytes(before)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("key", ["WanPipeline, 2.2 with two experts", "StableDiffusionXLPipeline", "Krea2Pipeline"])
def test_the_denoisers_of_other_families_are_lent_as_well(key, kind, tmp_path) -> None:
    """At each step the velocity is the teacher's own pipeline's: of two experts, both are the teacher's.

    Krea 2 multiplies in another order if its weights can have a gradient, so it differs if only one of the two can.
    """
    require(key)
    tiny = TINY[key]
    student, teacher = tiny.fresh(), tiny.fresh()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        for module in trainable_modules(teacher).values():
            for parameter in module.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    teacher.save_pretrained(tmp_path)
    # Both are read from the file: on some processors a product depends on where the weights lie in memory.
    teacher = type(teacher).from_pretrained(tmp_path)
    check_whole_teacher("model.teachers.0.path", tmp_path, None)
    spec = LoraSpec(rank=2, alpha=2.0)
    weights = TrainedWeights.full(student) if kind == "full" else TrainedWeights.lora(student, spec, seed=0)
    TrainedWeights.given(teacher, kind)
    lent = load_whole_teacher("model.teachers.0.path", str(tmp_path), student, weights.modules, torch.float32)
    weights.add_whole_teacher("whole", lent)
    ours, theirs = (Denoiser(pipe, num_steps=4, call=tiny.call) for pipe in (student, teacher))
    policy = FlowPolicy(ours, weights, teachers={"whole": {}})
    ours.self_check(["a red circle"])
    policy.require_calls(["a red circle"])
    x = torch.randn(1, *ours.probe.latent_shape, generator=torch.Generator().manual_seed(1))
    for step in range(4):
        with torch.no_grad():
            own, expected = (denoiser.velocity(x, step, ["a red circle"]) for denoiser in (ours, theirs))
            with policy.as_teacher("whole"):
                found = ours.velocity(x, step, ["a red circle"])
        assert torch.equal(found, expected)
        assert not torch.equal(found, own)


@pytest.mark.slow
def test_a_whole_teacher_computes_as_the_model_does(random_pipeline, large, tmp_path, monkeypatch) -> None:
    """With the same kernels of attention, and with compiled blocks; teachers with the same path share their weights."""
    asked = []
    monkeypatch.setattr(acceleration, "use_attention", lambda pipe, name: asked.append((pipe.transformer, name)))
    monkeypatch.setattr(session, "use_attention", lambda pipe, name: None)
    for module in (acceleration, session):
        monkeypatch.setattr(module, "compile_blocks", functools.partial(compile_blocks, backend="aot_eager"))
    teachers = [
        {"name": name, "path": str(path)} for name, path in (("a", large), ("b", random_pipeline), ("c", large))
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "a red circle", "teacher": name}) + "\n" for name in "bb"))
    words = [
        f"model.teachers={json.dumps(teachers)}",
        "model.compile=true",
        "model.attention=native",
        "model.train=full",
    ]
    trainer = trainer_of(random_pipeline, tmp_path / "run", *words, f"data.train={prompts}")
    policy, found = trainer.task.policy, {}
    for name in "abc":
        with policy.as_teacher(name):
            found[name] = policy.denoiser.pipe.transformer
    assert found["a"] is found["c"]
    assert asked == [(found["a"], "native"), (found["b"], "native")]
    for module in found.values():
        assert all(block._compiled_call_impl is not None for block in repeated_blocks(module))
    _, e = trainer.collect(0)
    scored = policy.score(e, *next(trainer.objective.batches(e, 0, None)))
    assert scored.to_teacher().detach().abs().max() == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_give_the_run_of_one(sharded, random_pipeline, large, lora, tmp_path) -> None:
    """Three prompts of two teachers, so that each process has another number of calls of each.

    With shards, both teachers are the base with a call, which is a copy of the weights in shards as well.
    """
    rows = [{"prompt": f"a {color} circle", "teacher": name} for color, name in zip(["red", "blue", "green"], "aab")]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds: list[dict[str, Any]] = [{"path": str(large)}, {"lora": str(lora)}]
    if sharded:
        kinds = [{"call": {"guidance_scale": scale}} for scale in (3.0, 6.0)]
    teachers = json.dumps([{"name": name, **kind} for name, kind in zip("ab", kinds)])
    rewards = tmp_path / "rewards.py"
    rewards.write_text(REWARDS)
    recipe = load_recipe("diffusion_opd", words_of(
        random_pipeline, f"data.train={prompts}", f"model.teachers={teachers}", "run.iterations=2",
        "rollout={prompts: 3, group: 2, batch: 2, decode_batch: 2}", "optimizer.eps=0.01",
        f"rewards=[{{name: '{rewards}:level'}}]",
        *(["model.train=full", "optimizer.learning_rate=0.02"] if sharded else ["optimizer.learning_rate=0.5"]),
    ))  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    words = ["train", str(tmp_path / "recipe.yaml"), "--out"]
    run_all(
        [
            {"words": [*words, str(tmp_path / "one")], "log": "one", "count": 1},
            {
                "words": [*words, str(tmp_path / "two")],
                "log": "two",
                "count": 2,
                "environment": FSDP if sharded else {},
            },
        ],
        tmp_path,
    )
    assert json.loads((tmp_path / "two.json").read_text()) == [0, 0], (tmp_path / "two-0.txt").read_text()
    (test_sharding if sharded else test_processes).require_equal(tmp_path / "two", tmp_path / "one")
    assert [line["taught"] > 0 for line in lines(tmp_path / "two", "metrics.jsonl")[:2]] == [True, True]


# -- what is refused -----------------------------------------------------------------------------------------------


def faults(model: Path, *words: str) -> list[str]:
    return check(load_recipe("diffusion_opd", words_of(model, *words))).texts("fault", "needed")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"in_channels": 9}, "in_channels is 9 in the transformer of {}, and {} in the model; "),
        ({"joint_attention_dim": 9}, "joint_attention_dim is 9 in the transformer of {}, and {} in the model; "),
        ({"pooled_projection_dim": 9}, "pooled_projection_dim is 9 in the transformer of {}, and {} in the model; "),
        (
            {"_class_name": "FluxTransformer2DModel"},
            "the transformer of {} is a FluxTransformer2DModel, and the model's is a {}; ",
        ),
    ],
)
def test_a_teacher_with_other_inputs_is_refused_before_the_run(
    settings, said, random_pipeline, large, tmp_path
) -> None:
    [key] = settings
    shutil.copytree(large, tmp_path / "teacher")
    config = tmp_path / "teacher/transformer/config.json"
    own = json.loads((random_pipeline / "transformer/config.json").read_text())
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    [fault] = faults(random_pipeline, whole(tmp_path / "teacher"))
    assert fault.startswith(f"model.teachers.0.path: {said.format(tmp_path / 'teacher', own[key])}name a pipeline with")


def test_other_latents_and_other_predictions_are_refused(random_pipeline, large, tmp_path) -> None:
    for part, file, key, value in (
        ("vae", "config.json", "scaling_factor", 0.5),
        ("vae", "config.json", "shift_factor", 0.1),
        ("scheduler", "scheduler_config.json", "prediction_type", "v_prediction"),
    ):
        teacher, student = tmp_path / f"t{key}", tmp_path / f"s{key}"
        shutil.copytree(large, teacher)
        shutil.copytree(large, student)
        for folder, given in ((teacher, value), (student, "epsilon" if part == "scheduler" else None)):
            settings = folder / part / file
            if given is not None:
                settings.write_text(json.dumps({**json.loads(settings.read_text()), key: given}))
        with pytest.raises(ValueError, match=rf"{key} is .* in the {part} of .*name a pipeline with the latents"):
            check_whole_teacher("model.teachers.0.path", teacher, student)
    check_whole_teacher("model.teachers.0.path", large, random_pipeline)


@pytest.mark.slow
def test_settings_that_a_file_leaves_out_have_the_default_of_their_class(random_pipeline, tmp_path) -> None:
    """An old file of a scheduler does not say that the model predicts noise. One of flow matching never says it."""
    folders = {name: tmp_path / name for name in ("silent", "noise", "other", "flow")}
    for folder in folders.values():
        TINY["StableDiffusionPipeline"].fresh().save_pretrained(folder)
    for name, change in (("silent", {}), ("other", {"prediction_type": "v_prediction"})):
        file = folders[name] / "scheduler/scheduler_config.json"
        rest = {key: value for key, value in json.loads(file.read_text()).items() if key != "prediction_type"}
        file.write_text(json.dumps({**rest, **change}))
    shutil.copy(random_pipeline / "scheduler/scheduler_config.json", folders["flow"] / "scheduler")
    key = "model.teachers.0.path"
    check_whole_teacher(key, folders["silent"], folders["noise"])
    check_whole_teacher(key, folders["noise"], folders["silent"])
    for teacher, student, said in (
        ("silent", "other", "prediction_type is 'epsilon' in the scheduler of .*, and 'v_prediction' in the model"),
        ("other", "silent", "prediction_type is 'v_prediction' in the scheduler of .*, and 'epsilon' in the model"),
        ("flow", "noise", "prediction_type is 'flow_prediction' in the scheduler of .*, and 'epsilon' in the model"),
    ):
        with pytest.raises(ValueError, match=said):
            check_whole_teacher(key, folders[teacher], folders[student])
        pipe = DiffusionPipeline.from_pretrained(folders[student])
        with pytest.raises(ValueError, match=said):
            load_whole_teacher(key, str(folders[teacher]), pipe, trainable_modules(pipe), torch.float32)


@pytest.mark.slow
def test_a_large_teacher_of_the_hub_is_read_from_the_cache_without_a_network(
    random_pipeline, tmp_path, monkeypatch
) -> None:
    """Weights in several files, for which diffusers asks the hub unless it is told that there is none."""
    commit = 40 * "a"
    stored = tmp_path / "models--some--teacher"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs/main").write_text(commit)
    pipe = DiffusionPipeline.from_pretrained(random_pipeline, text_encoder_3=None, tokenizer_3=None)
    pipe.save_pretrained(stored / "snapshots" / commit, max_shard_size="100KB")
    assert len(list((stored / "snapshots" / commit / "transformer").glob("*.safetensors"))) > 1
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    lent = load_whole_teacher("key", "some/teacher", pipe, trainable_modules(pipe), torch.float32)
    for name, value in pipe.transformer.state_dict().items():
        assert torch.equal(lent["transformer"].state_dict()[name], value), name


def test_the_denoisers_are_as_many(random_pipeline, large, tmp_path) -> None:
    """Of two experts, a teacher has two as well."""
    shutil.copytree(large, tmp_path / "two")
    shutil.copytree(large / "transformer", tmp_path / "two/transformer_2")
    index = tmp_path / "two/model_index.json"
    parts = json.loads(index.read_text())
    index.write_text(json.dumps({**parts, "transformer_2": parts["transformer"]}))
    for teacher, student, said in (
        (tmp_path / "two", large, "has the denoisers transformer and transformer_2, and the model has transformer;"),
        (large, tmp_path / "two", "has the denoisers transformer, and the model has transformer and transformer_2;"),
    ):
        with pytest.raises(ValueError, match=said):
            check_whole_teacher("model.teachers.0.path", teacher, student)
    check_whole_teacher("model.teachers.0.path", tmp_path / "two", tmp_path / "two")


def test_only_safetensors_are_read_and_they_must_be_whole(random_pipeline, large, tmp_path) -> None:
    shutil.copytree(large, tmp_path / "cut")
    [file] = (tmp_path / "cut/transformer").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-9])
    [fault] = faults(random_pipeline, whole(tmp_path / "cut"))
    assert f"{file} is cut short or damaged" in fault
    file.rename(file.with_suffix(".bin"))
    [fault] = faults(random_pipeline, whole(tmp_path / "cut"))
    assert "has weights in .bin files, and a teacher is read from .safetensors files" in fault


@pytest.mark.parametrize("place", ["model.teachers.0.path", "model.path"])
def test_weights_of_a_variant_alone_are_refused_before_the_run(place, random_pipeline, large, tmp_path) -> None:
    """`from_pretrained` does not read them unless it is told their variant."""
    shutil.copytree(random_pipeline if place == "model.path" else large, tmp_path / "half")
    [file] = (tmp_path / "half/transformer").glob("*.safetensors")
    words = [whole(large), f"model.path={tmp_path}/half"] if place == "model.path" else [whole(tmp_path / "half")]
    for end in (".fp16", ".fp16-00001-of-00001", "-00001-of-00001.fp16"):
        file = file.rename(file.with_name(f"diffusion_pytorch_model{end}.safetensors"))
        [fault] = faults(random_pipeline, *words)
        assert f"{tmp_path}/half/transformer holds only weights of the variant fp16, which are not read;" in fault
    shutil.copy(file, file.with_name("diffusion_pytorch_model.safetensors"))
    assert faults(random_pipeline, *words) == []


@pytest.mark.slow
def test_files_that_lack_weights_and_settings_that_no_list_has_are_refused(random_pipeline, large, tmp_path) -> None:
    shutil.copytree(large, tmp_path / "lacking")
    [file] = (tmp_path / "lacking/transformer").glob("*.safetensors")
    state = load_file(file)
    state.pop("proj_out.bias")
    save_file(state, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"lack 1 of its weights, such as proj_out\.bias"):
        trainer_of(random_pipeline, tmp_path / "a", whole(tmp_path / "lacking"))
    for settings, said in (({"patch_size": 3}, "The size of tensor"), ({"pos_embed_max_size": 3}, "Height")):
        other = changed(random_pipeline, tmp_path / next(iter(settings)), **settings)
        with pytest.raises(ValueError, match=rf"model\.teachers\.0 cannot be called as the model is \({said}"):
            trainer_of(random_pipeline, tmp_path / f"run-{said}", whole(other))


def test_what_is_no_whole_model_is_told_apart(random_pipeline, lora, tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("{}")
    shutil.copytree(lora, tmp_path / "adapted/lora")
    (tmp_path / "adapted/config.yaml").write_text("{}")
    (tmp_path / "whole/pipeline").mkdir(parents=True)
    (tmp_path / "whole/config.yaml").write_text("{}")
    for path, more, said in (
        (tmp_path / "run", (), "is a run without the folder pipeline or lora: it is not finished, or"),
        (lora, (), "holds no model_index.json; give a finished run, .* and name a LoRA with lora in place of path"),
        (random_pipeline / "model_index.json", (), "is a file; give a finished run"),
        (tmp_path / "none", (), "is not a folder; give a finished run"),
        (tmp_path / "adapted", ("model.train=full",), "is a run of a LoRA, and a LoRA teaches beside a frozen model"),
    ):
        with pytest.raises(ValueError, match=said):
            check(load_recipe("diffusion_opd", words_of(random_pipeline, whole(path), *more))).require()
    with pytest.raises(ValueError, match="is a run that trained all weights; write path: "):
        check(
            load_recipe("diffusion_opd", words_of(random_pipeline, f"model.teachers=[{{lora: {tmp_path}/whole}}]"))
        ).require()
    assert check(load_recipe("diffusion_opd", words_of(random_pipeline, whole(tmp_path / "adapted")))).require()
    unknown = check(load_recipe("diffusion_opd", words_of(random_pipeline, "model.teachers=[{path: some/model}]")))
    assert [
        text for text in unknown.texts("unknown") if "model.teachers.0.path some/model is not a folder here" in text
    ]


@pytest.mark.slow
@pytest.mark.parametrize("train", ["lora", "full"])
def test_a_control_net_with_layers_of_the_model_takes_no_whole_teacher(train: str, tmp_path: Path) -> None:
    """The control net of Z-Image has its embedders, and would keep the student's while the teacher predicts."""
    pipe = TINY["ZImageControlNetPipeline"].fresh()
    pipe.save_pretrained(tmp_path)
    weights = TrainedWeights.lora(pipe, LoraSpec(), seed=0) if train == "lora" else TrainedWeights.full(pipe)
    with pytest.raises(
        ValueError, match="the controlnet of ZImageControlNetPipeline computes with layers of the model"
    ):
        load_whole_teacher("model.teachers.0.path", str(tmp_path), pipe, weights.modules, torch.float32)


def test_links_out_of_a_run_are_not_followed(random_pipeline, large, tmp_path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("{}")
    (run / "pipeline").symlink_to(large)
    [fault] = faults(random_pipeline, whole(run))
    assert "has links that lead out of it" in fault


def test_code_of_a_teachers_folder_is_never_imported(random_pipeline, large, tmp_path) -> None:
    """The denoiser's class is the model's, whatever the folder says."""
    shutil.copytree(large, tmp_path / "coded")
    index, code = tmp_path / "coded/model_index.json", tmp_path / "coded/transformer/mine.py"
    code.write_text("raise SystemExit('this code ran')\n")
    parts = json.loads(index.read_text())
    index.write_text(json.dumps({**parts, "transformer": ["mine", "Mine"]}))
    config = tmp_path / "coded/transformer/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "_class_name": "Mine"}))
    [fault] = faults(random_pipeline, whole(tmp_path / "coded"))
    assert "is a Mine, and the model's is a SD3Transformer2DModel" in fault


def test_shards_and_the_reference(random_pipeline) -> None:
    recipe = load_image_recipe("diffusion_opd", ["model={train: full, teachers: [{path: scenes}]}"])
    with pytest.raises(ValueError, match=r"a whole teacher .* is not cut into shards; launch with --use_deepspeed"):
        check_shards(recipe)
    assert not keeps_base(recipe)
    assert keeps_base(
        load_image_recipe("diffusion_opd", ["model={train: full, teachers: [{call: {guidance_scale: 2}}]}"])
    )


# -- what a run needs ----------------------------------------------------------------------------------------------


def test_the_estimate_counts_the_weights_and_the_calls_of_a_whole_teacher(random_pipeline, large) -> None:
    """By its own size. Teachers with the same path share their weights, and each has half of the prompts."""

    def of(*teachers: dict[str, Any], dtype: str = "float32") -> Any:
        words = words_of(random_pipeline, f"model.teachers={json.dumps(teachers)}", f"model.dtype={dtype}")
        return estimate(load_image_recipe("diffusion_opd", words))

    def numbers(folder: Path) -> int:
        [file] = (folder / "transformer").glob("*.safetensors")
        return sum(value.numel() for value in load_file(file).values())

    itself, same, other = of({}), of({"path": str(random_pipeline)}), of({"path": str(large)})
    assert itself.resting["teachers"] == 0
    assert same.resting["teachers"] == 4 * numbers(random_pipeline)
    assert other.resting["teachers"] == 4 * numbers(large)
    assert of({"path": str(large)}, dtype="bfloat16").resting["teachers"] == 2 * numbers(large)
    two = of({"name": "a", "path": str(large)}, {"name": "b", "path": str(large), "call": {"guidance_scale": 2.0}})
    assert two.resting["teachers"] == other.resting["teachers"]
    # Without the LoRA, the denoiser itself needs a little less.
    assert 0.8 * itself.flops["training"] < same.flops["training"] < itself.flops["training"]
    assert other.flops["training"] > 1.2 * same.flops["training"]
    own = 2 * same.flops["training"] - other.flops["training"]
    assert own > 0
    assert other.peak > same.peak > itself.peak
    # Unknown shapes, and shapes that the run would refuse.
    for path in ("nobody/knows", "Qwen/Qwen-Image"):
        assert of({"path": path}).resting["teachers"] == same.resting["teachers"]
