"""VQAScore: the probability that a vision-language model says "Yes" when asked whether the image shows the text.

Lin et al., "Evaluating Text-to-Visual Generation with Image-to-Text Generation" (2404.01291), equation 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backbones.model_loading import check_dtype, load_processor, load_transformers, source_name
from ..backbones.sharing import Lease, borrow
from ..options import check_count
from ..pixels import as_frames, to_bytes
from ..scores import Scores

QUESTION = 'Does this figure show "{prompt}"? Please answer yes or no.'
PLACE_OF_PROMPT = "{prompt}"


class VqaScore:
    """Text match: probability that a local vision-language model says "Yes" when asked if the image shows the prompt.

    Any image-text-to-text model of transformers that has a chat template can be used. The paper's own model,
    CLIP-FlanT5, is not one of them. The reward `judge_logprob` asks a model behind a server the same question.

    Args:
        model: folder or model id.
        question: the question, with `{prompt}` in place of the prompt.
        answer: the score is the probability of the first token of this answer.
        against: another answer. If it is given, the score is p(answer) / (p(answer) + p(against)). None gives p(answer)
            itself, as published.
        device: where to score.
        dtype: data type of the weights.
        batch_size: largest number of images, or frames of videos, in one forward pass, and of samples in one call.
        frames: how many frames of a video are scored at most, evenly spaced.

    Raises:
        ValueError: the folder holds no such model or processor, or an option cannot be used.
    """

    name = "vqascore"

    def __init__(
        self,
        model: str,
        *,
        question: str = QUESTION,
        answer: str = "Yes",
        against: str | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 4,
        frames: int = 4,
    ) -> None:
        check_count("vqascore", "batch_size", batch_size)
        check_count("vqascore", "frames", frames)
        if PLACE_OF_PROMPT not in question:
            raise ValueError(f"vqascore: question is {question!r}; it needs {PLACE_OF_PROMPT} where the prompt goes")
        self.lease = _borrow_model(model, device, dtype)
        self.answers = [_first_token(self.lease.value[1], text) for text in (answer, against) if text is not None]
        if len(set(self.answers)) < len(self.answers):
            raise ValueError(f"vqascore: {answer!r} and {against!r} begin with the same token; give other words")
        self.question, self.device, self.batch_size, self.frames = question, device, batch_size, frames

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Scores:
        """Score of each image with its prompt.

        Args:
            images: [B, 3, H, W] in [0, 1]; for videos [B, F, 3, H, W] the frames' scores are averaged.
            prompts: B strings.
            columns: ignored.

        Returns:
            B scores in [0, 1]. Sub-score `mass`: the total probability of `answer` and `against`. If it is small, the
            model says something else.
        """
        frames = as_frames(images, self.frames)
        asked = [self.question.replace(PLACE_OF_PROMPT, prompt) for prompt in prompts for _ in range(frames.shape[1])]
        levels = to_bytes(frames.flatten(0, 1)).cpu()
        parts = [torch.zeros(0, len(self.answers))]
        for start in range(0, len(levels), self.batch_size):
            part = slice(start, start + self.batch_size)
            parts.append(self._probabilities(asked[part], levels[part]).cpu())
        found = torch.cat(parts)
        mass = found.sum(-1)
        scores = found[:, 0] / mass if len(self.answers) > 1 else mass
        scores, mass = (values.view(frames.shape[:2]).mean(1) for values in (scores, mass))
        return Scores(scores, {"mass": mass.tolist()})

    def close(self) -> None:
        """Release the model. It stays in memory while another reward uses it."""
        self.lease.close()

    def _probabilities(self, questions: Sequence[str], levels: Tensor) -> Tensor:
        """Probability of each answer's first token, float32 [N, answers]."""
        model, processor = self.lease.value
        chats = [
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
            for question in questions
        ]
        written = processor.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        # With padding on the left, all texts end at the same place, where the answer begins.
        inputs = processor(
            text=written,
            images=[[picture] for picture in levels],
            padding=True,
            padding_side="left",
            return_tensors="pt",
        ).to(self.device)
        with torch.autocast(torch.device(self.device).type, enabled=False):
            logits = model(**inputs, use_cache=False).logits[:, -1]
        return logits.float().softmax(-1)[:, self.answers]


def _borrow_model(model: str, device: str, dtype: str) -> Lease[tuple[Any, Any]]:
    source, kind = source_name("vqascore", "model", model), check_dtype("vqascore", dtype)

    def load() -> tuple[Any, Any]:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        processor = load_processor("vqascore", AutoProcessor, source)
        if not getattr(processor, "chat_template", None):
            raise ValueError(f"vqascore: {source} has no chat template, so it is not known how to ask the model")
        return load_transformers("vqascore", AutoModelForImageTextToText, source, dtype=kind, device=device), processor

    return borrow(("image_text_to_text", source, dtype, str(torch.device(device))), load)


def _first_token(processor: Any, text: str) -> int:
    ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise ValueError("vqascore: an answer is empty; give a word such as Yes")
    return int(ids[0])
