"""GenEval: does the image show the objects of the prompt, in the right number, colour and position?

Ghosh et al., "GenEval: An Object-Focused Framework for Evaluating Text-to-Image Alignment" (2310.11513): a detector
finds objects, CLIP names their colours, and rules compare them with the prompt's metadata. Liu et al., "Flow-GRPO"
(2505.05470), section 4.1, use it as a reward with partial credit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backbones.detector import Detection, load_detector
from ..backbones.towers import Towers, transformers_towers
from ..options import check_count
from ..pixels import as_frames
from ..scores import Scores
from .geneval_rules import COLOURS, Verdict, judge, read_wanted

SCORES = ("partial", "strict", "benchmark")
THRESHOLD, COUNTING_THRESHOLD = 0.3, 0.9
MOST_OF_A_CLASS = 16
BACKGROUND = 0x99 / 255
TEMPLATES = ("a photo of a {colour} {label}", "a photo of a {colour}-colored {label}", "a photo of a {colour} object")


class Geneval:
    """Objects, counts, colours and positions that GenEval's metadata asks for, checked with a detector and CLIP.

    It differs from the benchmark in two ways: the weights of the detector are not mmdetection's, and a partial score
    has no negative terms.

    Args:
        detector: folder or model id of a transformers Mask2Former that was trained on COCO instances.
        clip: folder or model id of the transformers `CLIPModel` that names colours.
        score: "partial" is the share of the requirements that are met. "strict" is 1 if the image shows exactly the
            wanted objects, and 0 otherwise. "benchmark" is 1 if the image passes the benchmark's own rules, and 0
            otherwise; these rules allow additional objects and obey `exclude`.
        resolution: length in pixels to which the shorter side of an image is scaled for the detector.
        device: where to score.
        dtype: data type of the weights.
        batch_size: largest number of images, or frames of videos, in one forward pass of the detector.
        frames: how many frames of a video are scored at most, evenly spaced.

    Raises:
        ValueError: a folder holds no such model, or an option cannot be used.
    """

    name = "geneval"

    def __init__(
        self,
        detector: str = "facebook/mask2former-swin-small-coco-instance",
        *,
        clip: str = "openai/clip-vit-large-patch14",
        score: str = "partial",
        resolution: int = 800,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 8,
        frames: int = 4,
    ) -> None:
        if score not in SCORES:
            raise ValueError(f"geneval: score is {score!r}; give one of {', '.join(SCORES)}")
        for option, value in {"resolution": resolution, "batch_size": batch_size, "frames": frames}.items():
            check_count("geneval", option, value)
        self.towers = transformers_towers("geneval", clip, device=device, dtype=dtype)
        self.detector = load_detector("geneval", detector, device=device, dtype=dtype, resolution=resolution)
        self.score, self.device, self.batch_size, self.frames = score, device, batch_size, frames

    def __call__(
        self,
        images: Tensor,
        prompts: Sequence[str],
        include: Sequence[Any],
        exclude: Sequence[Any] | None = None,
        tag: Sequence[Any] | None = None,
    ) -> Scores:
        """Score a batch by its metadata.

        Args:
            images: [B, 3, H, W] in [0, 1]; for videos [B, F, 3, H, W] the frames' scores are averaged.
            prompts: ignored.
            include: for each prompt a list of `{class, count, color?, position?: [relation, index]}`, or its JSON text;
                None if the reward does not apply to the prompt. It does not apply either if nothing is wanted and
                nothing is excluded.
            exclude: for each prompt a list of `{class, count}`; `count` or more objects of the class are a fault.
            tag: for each prompt the tested skill; for "counting" the detector needs a higher confidence.

        Returns:
            B scores in [0, 1]; sub-scores `partial`, `strict` and `benchmark`. Notes and `answers` say what is wrong,
            in the first frame of a video.

        Raises:
            ValueError: an entry cannot be read, or asks for a class that the detector does not know.
        """
        labels = self.detector.value.labels
        none = [None] * len(prompts)
        asked = [
            None if wanted is None else (read_wanted(wanted, labels), read_wanted(unwanted or [], labels), skill)
            for wanted, unwanted, skill in zip(include, exclude or none, tag or none, strict=True)
        ]
        asked = [entry if entry is not None and (entry[0] or entry[1]) else None for entry in asked]
        frames = as_frames(images, self.frames)
        wanted = [row for row, entry in enumerate(asked) if entry is not None]
        verdicts = self._verdicts(frames[wanted], [asked[row] for row in wanted])
        subs: dict[str, list[float]] = {name: [math.nan] * len(asked) for name in SCORES}
        notes = [""] * len(asked)
        answers: list[str | None] = [None] * len(asked)
        for row, own in zip(wanted, verdicts):
            for name in SCORES:
                subs[name][row] = math.fsum(float(getattr(verdict, name)) for verdict in own) / len(own)
            notes[row] = "; ".join(own[0].faults)
            answers[row] = notes[row] or "as asked"
        return Scores(subs[self.score], subs, notes, answers=answers)

    def close(self) -> None:
        """Release the models. Each stays in memory while another reward uses it."""
        self.detector.close()
        self.towers.close()

    def _verdicts(self, frames: Tensor, asked: Sequence[Any]) -> list[list[Verdict]]:
        """Return the verdicts on the frames of each video, by the entries of its row."""
        verdicts: list[list[Verdict]] = [[] for _ in asked]
        places = [(row, frame) for row in range(len(asked)) for frame in range(frames.shape[1])]
        for start in range(0, len(places), self.batch_size):
            part = places[start : start + self.batch_size]
            pictures = torch.stack([frames[place] for place in part])
            for (row, _), picture, objects in zip(part, pictures, self.detector.value(pictures, THRESHOLD)):
                include, exclude, tag = asked[row]
                colours = functools.partial(name_colours, self.towers.value, picture)
                verdicts[row].append(judge(_most_confident(objects, tag), include, exclude, colours))
        return verdicts


def _most_confident(objects: Sequence[Detection], tag: Any) -> list[Detection]:
    threshold = COUNTING_THRESHOLD if tag == "counting" else THRESHOLD
    kept: list[Detection] = []
    for detection in objects:
        alike = sum(other.label == detection.label for other in kept)
        if detection.score > threshold and alike < MOST_OF_A_CLASS:
            kept.append(detection)
    return kept


@torch.no_grad()
def name_colours(towers: Towers, image: Tensor, objects: Sequence[Detection]) -> list[str]:
    """Return the colour of each object, one of the ten colours of GenEval.

    An object is cut out of its image, and everything around it becomes grey. CLIP compares the result with three
    sentences for each colour.

    Args:
        towers: the towers of a CLIP model.
        image: [3, H, W] in [0, 1].
        objects: all of one class.
    """
    if not objects:
        return []
    texts = [template.format(colour=colour, label=objects[0].label) for colour in COLOURS for template in TEMPLATES]
    sentences = towers.embed_texts(texts).unflatten(0, (len(COLOURS), len(TEMPLATES))).mean(1)
    sentences = torch.nn.functional.normalize(sentences, dim=-1)
    crops = []
    for detection in objects:
        left, top, right, bottom = (int(edge) for edge in detection.box)
        alone = torch.where(detection.mask.to(image.device), image.float(), BACKGROUND)
        crops.append(towers.prepare(alone[None, :, top:bottom, left:right]))
    best = (towers.embed_pixels(torch.cat(crops)) @ sentences.T).argmax(-1)
    return [COLOURS[place] for place in best.tolist()]
