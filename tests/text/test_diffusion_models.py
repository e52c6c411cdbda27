"""LLaDA and Dream load by path without their own code, train with the recipes of masked models, and are saved."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.schema import MaskedRecipe, TextRecipe
from flowgrpo.inference import text_inference
from flowgrpo.inference.text_inference import open_weights, recipe_of, task_of
from flowgrpo.text.diffusion_models import type_of
from flowgrpo.text.masked_model import Frame, MaskedLanguageModel, load_masked_model
from flowgrpo.text.model_folder import check_language_folder
from flowgrpo.training.folder.model_card import CARD
from flowgrpo.training.masked.masked_task import MaskedTask
from flowgrpo.training.session import start
from tests.text.diffusion_folders import DREAM_SPECIAL, FOLDERS, llada_folder, moe_folder

KINDS = tuple(FOLDERS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("diffusion")
    return {kind: make(place / kind) for kind, make in FOLDERS.items()}


def loaded(folders: dict[str, Path], kind: str, **options: Any) -> MaskedLanguageModel:
    return load_masked_model(str(folders[kind]), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_sees_all_others_and_no_padding(folders: dict[str, Path], kind: str) -> None:
    for attention in ("sdpa", "eager"):
        language = loaded(folders, kind, attention=attention, chat=False)
        frames = [language.encode("one and two"), language.encode("9")]
        x = torch.tensor([[5, language.mask, 7], [language.mask, 8, 9]])
        together = language.logits(frames, x)
        for row in range(2):
            alone = language.logits(frames[row : row + 1], x[row : row + 1])
            torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-5)
        later = x.clone()
        later[:, 2] = 11
        assert (language.logits(frames, later)[:, 0] - together[:, 0]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_some_places_are_those_of_all(folders: dict[str, Path], kind: str) -> None:
    model = loaded(folders, kind).model
    ids = torch.arange(12).view(2, 6)
    places = torch.tensor([[4, 5], [0, 3]])
    every = model(ids).logits
    torch.testing.assert_close(model(ids, None, places).logits, every[torch.tensor([[0], [1]]), places])


def test_dream_predicts_a_token_one_position_before_it(folders: dict[str, Path]) -> None:
    model = loaded(folders, "dream").model
    ids = torch.tensor([[3, 4, 5, 6]])
    mask = {"full_attention": None}
    output = model.lm_head(model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state)
    torch.testing.assert_close(model(ids).logits[:, 1:], output[:, :-1])


def test_special_tokens_are_found_where_they_are_named(folders: dict[str, Path]) -> None:
    llada, dream = loaded(folders, "llada"), loaded(folders, "dream")
    named = llada.tokenizer.convert_tokens_to_ids
    assert llada.tokenizer.mask_token_id is None
    assert llada.mask == named("<|mdm_mask|>")
    assert llada.ends == (named("<|endoftext|>"), named("<|eot_id|>"))
    named = dream.tokenizer.convert_tokens_to_ids
    assert dream.mask == named("<|mask|>") == 256 + DREAM_SPECIAL.index("<|mask|>")
    assert dream.ends == (named("<|endoftext|>"), named("<|im_end|>"))
    assert loaded(folders, "dream", chat=False).ends == (named("<|endoftext|>"),)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_go_through_the_chat_template(folders: dict[str, Path], kind: str) -> None:
    language = loaded(folders, kind, system="be brief")
    text = language.tokenizer.decode(language.encode("2+2?")[0])
    assert text.index("be brief") < text.index("2+2?") < text.index("assistant")
    talk = [{"role": "system", "content": "rhyme"}, {"role": "user", "content": "2+2?"}]
    assert "be brief" not in language.tokenizer.decode(language.encode("2+2?", talk)[0])
    plain = loaded(folders, kind, chat=False)
    assert plain.tokenizer.decode(plain.encode("2+2?")[0]) == "2+2?"
    with pytest.raises(ValueError, match="the prompts are conversations"):
        plain.encode("2+2?", talk)
    with pytest.raises(ValueError, match=r"chat_template_kwargs\.tone: .* does not read 'tone'"):
        loaded(folders, kind, chat_template_kwargs={"tone": "kind"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_model_samples_as_the_published_code_does(folders: dict[str, Path], kind: str) -> None:
    def steps(*words: str) -> tuple[int, str]:
        recipe = recipe_of(str(folders[kind]), words)
        assert isinstance(recipe, MaskedRecipe)
        return recipe.sampler.steps, recipe.sampler.order.short

    assert steps() == (128, "blocks")
    assert steps("generation.tokens=16") == (16, "blocks")
    assert steps("sampler.steps=4", "sampler.order={name: random}") == (4, "random")


def test_a_hub_id_is_of_a_masked_model_if_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_inference, "type_of", lambda path: "llada")
    assert isinstance(recipe_of("someone/model", masked=True), MaskedRecipe)
    assert isinstance(recipe_of("someone/model"), TextRecipe)


def words_of(folder: Path, data: Path, train: str) -> list[str]:
    reward = data.with_name("reward.py")
    reward.write_text("def kinds(completions, prompts):\n    return [float(len(set(text))) for text in completions]\n")
    return [
        f"model.path={folder}", f"model.train={train}", f"data={{train: {data}, heldout: {data}}}",
        "generation.tokens=6", "sampler.steps=3", "rollout={prompts: 2, group: 4, batch: 8}",
        f"rewards=[{{name: '{reward}:kinds'}}]", "optimizer={learning_rate: 0.01, warmup: 0}",
        "run={iterations: 2, checkpoint_every: 1}", "evaluate={every: 2, prompts: 2}",
    ]  # fmt: skip


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A plain prompt, and a conversation."""
    talk = [{"role": "system", "content": "count"}, {"role": "user", "content": "from one"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("say 7", talk)))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("recipe", "train"), [("masked", "lora"), ("diffu_grpo", "lora"), ("coupled_grpo", "full")])
def test_a_run_ends_with_weights_that_load(
    recipe: str, train: str, kind: str, folders: dict[str, Path], prompts: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = tmp_path / "run"
    trainer = start(load_recipe(recipe, words_of(folders[kind], prompts, train)), run).trainer(Silent())
    trainer.train()
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["ratio/first_error"] == 0.0
    assert metrics[0]["grad_norm"] > 0
    assert task_of(str(run)) == "masked"
    settings = recipe_of(str(run))
    assert isinstance(settings, MaskedRecipe)
    found = open_weights(str(run), settings).pipe
    frame, x = found.encode("say 7"), torch.full((1, 6), found.mask)
    logits = found.logits([frame], x)
    base = load_masked_model(str(folders[kind])).logits([frame], x)
    assert (logits - base).abs().max() > 1e-3
    # The card's own program gives the likeliest tokens of the trained weights.
    result = run / ("lora" if train == "lora" else "model")
    program = re.search(r"```python\n(.*?)```", (result / CARD).read_text(), re.DOTALL)
    assert program is not None
    capsys.readouterr()
    names: dict[str, Any] = {}
    exec(compile(program[1], "card", "exec"), names)
    expected = found.logits([found.encode("a prompt")], x)
    torch.testing.assert_close(names["logits"], expected, rtol=1e-5, atol=1e-5)
    assert capsys.readouterr().out == found.decode(expected[0].argmax(-1).tolist()) + "\n"


@pytest.mark.parametrize("token", [None, 5000, -1])
def test_a_mask_token_that_the_model_does_not_know_is_refused(token: int | None, tmp_path: Path) -> None:
    folder = llada_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    # Without the key, the configuration has the id of LLaDA's own tokenizer.
    changed = {key: value for key, value in config.items() if key != "mask_token_id"}
    changed |= {} if token is None else {"mask_token_id": token}
    (folder / "config.json").write_text(json.dumps(changed))
    number = 126336 if token is None else token
    with pytest.raises(ValueError, match=f"has the id {number}, .* write its id as mask_token_id into config.json"):
        load_masked_model(str(folder))


def test_padding_that_the_model_does_not_know_is_the_mask_token(tmp_path: Path) -> None:
    language = load_masked_model(str(llada_folder(tmp_path / "model")))
    language.tokenizer.add_tokens(["<more>", "<and more>"])
    language.tokenizer.add_special_tokens({"pad_token": "<new>"})
    assert language.tokenizer.pad_token_id >= language.model.get_input_embeddings().num_embeddings
    assert language.pad == language.mask
    language.logits([language.encode("a"), language.encode("a longer one")], torch.full((2, 4), language.mask))


ALIKE: list[Any] = [
    *([{"role": "system", "content": system}, {"role": "user", "content": "go on"}] for system in ("rhyme", "count")),
    "go on",
]


def noting(seen: set[tuple[int, ...]], call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A method of a model that also notes the prompts that it gets."""

    def noted(self: MaskedLanguageModel, frames: Sequence[Frame], *more: Any) -> Tensor:
        seen.update(tuple(head) for head, _ in frames)
        return call(self, frames, *more)

    return noted


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["masked", "coupled_grpo"])
def test_prompts_that_end_alike_are_told_apart(
    recipe: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": talk}) + "\n" for talk in ALIKE))
    words = [*words_of(folders["llada"], path, "lora"), f"rollout={{prompts: {len(ALIKE)}, group: 2, batch: 3}}"]
    seen: dict[str, set[tuple[int, ...]]] = {"logits": set(), "scored_logits": set()}
    for name in seen:
        monkeypatch.setattr(MaskedLanguageModel, name, noting(seen[name], getattr(MaskedLanguageModel, name)))
    trainer = start(load_recipe(recipe, words), tmp_path / "run").trainer(Silent())
    trainer.train()
    assert isinstance(trainer.task, MaskedTask)
    language = trainer.task.policy.language
    wanted = {tuple(language.encode("go on", None if isinstance(talk, str) else talk)[0]) for talk in ALIKE}
    assert len(wanted) == len(ALIKE)
    assert seen["logits"] == wanted
    assert seen["scored_logits"] == (set() if recipe == "masked" else wanted)


def test_a_causal_recipe_is_told_which_task_to_write(folders: dict[str, Path]) -> None:
    with pytest.raises(
        ValueError, match=r"model_type is 'llada', which is a masked language model; write task: masked"
    ):
        check_language_folder(folders["llada"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"alibi": True}, "alibi is True, and LLaDA is known with False only"),
        ({"attention_layer_norm": True}, "attention_layer_norm is True"),
    ],
)
def test_layers_that_no_published_llada_has_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = llada_folder(tmp_path / "llada")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ValueError, match=said):
        load_masked_model(str(folder))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"qk_layernorm": False}, "qk_layernorm is False, and LLaDA-MoE is known with True only"),
        ({"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias is True"),
        ({"norm_topk_prob": True}, "norm_topk_prob is True"),
        ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size is 8"),
    ],
)
def test_experts_that_no_published_llada_has_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = moe_folder(tmp_path / "moe")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ValueError, match=said):
        load_masked_model(str(folder))


@pytest.mark.parametrize("written", ["llada", "lladamoe"])
def test_a_model_with_experts_is_known_by_its_type_or_by_its_architecture(written: str, tmp_path: Path) -> None:
    folder = moe_folder(tmp_path / "moe")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LLaDAMoEModelLM"]
    (folder / "config.json").write_text(json.dumps({**config, "model_type": written}))
    assert type_of(str(folder)) == "lladamoe"
    assert load_masked_model(str(folder)).model.config.model_type == "lladamoe"


def test_tied_embeddings_have_no_output_layer(tmp_path: Path) -> None:
    language = load_masked_model(str(llada_folder(tmp_path / "llada", weight_tying=True, include_qkv_bias=True)))
    assert not [name for name, _ in language.model.named_parameters() if name.endswith("transformer.ff_out.weight")]
    table = language.model.get_input_embeddings().weight
    assert language.logits([language.encode("1")], torch.tensor([[language.mask]])).shape == (1, 1, len(table))


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_configuration_keeps_what_the_published_code_reads(
    folders: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    language = loaded(folders, kind)
    language.model.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert saved["rope_theta"] == {"dream": 1000000.0, "lladamoe": 50000.0}.get(kind, 10000.0)
    assert saved["mask_token_id"] == language.mask
    assert "auto_map" in saved
    again = type(language.model).from_pretrained(tmp_path / "again")
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(again.eval()(ids).logits, language.model(ids).logits)
