"""Parts of the embedded pipeline's build that need no long training."""

from pathlib import Path

import torch

from flowgrpo.pipelines.scenes import (
    TOKENS,
    BuildSettings,
    DenoiserTraining,
    build_pipeline,
    build_tokenizer,
    build_vae,
    guided_training,
)
from flowgrpo.scenes.prompts import all_prompts


def test_the_tokenizer_is_the_same_however_often_it_is_made(tmp_path: Path) -> None:
    made = []
    for number in range(4):
        build_tokenizer(tmp_path / str(number))
        files = sorted(p for p in (tmp_path / str(number)).rglob("*") if p.is_file())
        made.append([(file.name, file.read_bytes()) for file in files])
    assert all(files == made[0] for files in made)


def test_every_word_of_the_world_is_one_token(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path)
    for prompt in all_prompts():
        assert len(tokenizer(prompt.text).input_ids) == len(prompt.text.split()) + 2
    spelled = tokenizer("zebra").input_ids
    assert len(spelled) == 7
    assert tokenizer.unk_token_id not in spelled[1:-1]


def test_the_guided_stage_learns_the_models_own_guided_prediction(tmp_path: Path) -> None:
    """The target is v_u + w (v_c - v_u) of the average as it stood, for every state and prompt."""
    settings = BuildSettings(guidance=2.0, guidance_steps=4)
    training = DenoiserTraining(build_pipeline(build_vae(), tmp_path, settings), settings)
    with torch.no_grad():
        for parameter in training.average.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    guided = guided_training(training.averaged(), settings)
    assert guided.teacher is not None
    tokenizer = guided.pipe.tokenizer
    texts = ["a red circle", "two blue squares", ""]
    ids = tokenizer(texts, padding="max_length", max_length=TOKENS, return_tensors="pt").input_ids
    x, sigma = torch.randn(3, 8, 8, 8), torch.tensor([0.2, 0.5, 0.9])
    target = guided.teacher(x, sigma, ids)

    def plain(rows: torch.Tensor) -> torch.Tensor:
        embeds, _, pooled, _ = guided.pipe.encode_prompt(
            [texts[k] for k in rows], None, None, max_sequence_length=0, do_classifier_free_guidance=False
        )
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return guided.pipe.transformer(x, embeds, pooled, 1000 * sigma, return_dict=False)[0].float()

    conditional, blank = plain(torch.tensor([0, 1, 2])), plain(torch.tensor([2, 2, 2]))
    torch.testing.assert_close(target, blank + 2.0 * (conditional - blank), rtol=0.05, atol=0.02)
    assert not torch.allclose(target[:2], conditional[:2], atol=1e-3)
    torch.testing.assert_close(target[2], conditional[2], rtol=0.05, atol=0.02)

    before = [p.clone() for p in guided.modules.parameters()]
    guided.update(torch.randn(4, 8, 8, 8), ids[[0, 1, 0, 1]], 1e-3)
    assert any(not torch.equal(a, b) for a, b in zip(before, guided.modules.parameters()))
    assert torch.equal(guided.teacher(x, sigma, ids), target)
