"""Text rendering: does the image show the words that are quoted in the prompt?

Liu et al., "Flow-GRPO" (2505.05470), section 4.1: r = max(1 - N_e / N_ref, 0). N_e is the edit distance between the
text that was read and the target, and N_ref is the length of the target.
"""

from __future__ import annotations

import math
import queue
import re
import unicodedata
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from ..options import check_count, check_flag
from ..pixels import as_frames, to_bytes
from ..scores import Scores

_QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”')


class Ocr:
    """Text rendering: 1 minus the share of the quoted words that is missing or wrong in the image.

    RapidOCR reads the images. `pip install '.[ocr]'` installs it; the package contains its models.

    Args:
        column: column of the prompt file with the words to be shown. By default these are the words between the first
            pair of double quotes in the prompt, straight or curly.
        substring: if true, an image scores 1 if the words occur anywhere in the text that is read, as published. If
            false, additional text lowers the score, for instance if the words are written twice.
        confidence: lines that are read with a lower confidence are left out; 0 keeps all lines, as published.
        frames: how many frames of a video are read at most, evenly spaced.
        batch_size: largest number of samples in one call.
        workers: how many images are read at the same time.
        threads: processor threads for each worker.
        engine: further settings of RapidOCR by their dotted names, such as `Det.limit_side_len`.

    Raises:
        ValueError: an option cannot be used.
        ModuleNotFoundError: RapidOCR or its runtime is not installed.
    """

    name = "ocr"

    def __init__(
        self,
        *,
        column: str | None = None,
        substring: bool = True,
        confidence: float = 0.0,
        frames: int = 4,
        batch_size: int = 32,
        workers: int = 1,
        threads: int = 1,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        import onnxruntime  # noqa: F401 - without this package, RapidOCR starts and fails at the first image
        from rapidocr import RapidOCR

        counts = {"frames": frames, "batch_size": batch_size, "workers": workers, "threads": threads}
        for option, value in counts.items():
            check_count("ocr", option, value)
        check_flag("ocr", "substring", substring)
        if isinstance(confidence, bool) or not 0 <= confidence < 1:
            raise ValueError(f"ocr: confidence is {confidence!r}; give a number from 0 to below 1")
        settings = {
            "Global.text_score": confidence,
            # This step turns lines that are upside down. A line that should be read is upright.
            "Global.use_cls": False,
            # At a lower level, RapidOCR warns about every image that shows no text.
            "Global.log_level": "error",
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            **(engine or {}),
        }
        self._engines: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            for _ in range(workers):
                self._engines.put(RapidOCR(params=settings))
        except Exception as error:
            raise ValueError(f"ocr: RapidOCR does not start with engine={dict(engine or {})}: {error}") from error
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="ocr")
        self.column, self.substring, self.frames, self.batch_size = column, substring, frames, batch_size

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Scores:
        """Score of the text in each image.

        Args:
            images: [B, 3, H, W] in [0, 1]; for videos [B, F, 3, H, W] the frames' scores are averaged.
            prompts: B strings.
            columns: only the column that the option `column` names is used.

        Returns:
            B scores in [0, 1], NaN if there are no words to be shown. Sub-score `exact`: the share of frames that show
            the words and nothing else. Notes: the text that was read in the first frame. `answers`: the text of all
            frames, in the form in which it is compared.

        Raises:
            ValueError: the prompts do not have the column, or the column holds something other than texts.
        """
        targets = self._targets(prompts, columns)
        frames = as_frames(images, self.frames)
        # The engine expects the channels in the order blue, green, red.
        pictures = to_bytes(frames).flip(2).permute(0, 1, 3, 4, 2).cpu().contiguous().numpy()
        wanted = [row for row, target in enumerate(targets) if target]
        texts = list(self._pool.map(self._read, [frame for row in wanted for frame in pictures[row]]))
        values, exact = [math.nan] * len(targets), [math.nan] * len(targets)
        notes = [""] * len(targets)
        answers: list[str | None] = [None] * len(targets)
        count = frames.shape[1]
        for place, row in enumerate(wanted):
            own = texts[place * count : (place + 1) * count]
            values[row] = sum(text_score(text, targets[row], self.substring) for text in own) / count
            exact[row] = sum(plain(text) == targets[row] for text in own) / count
            notes[row] = f"read: {own[0]}"
            answers[row] = " ".join(map(plain, own))
        return Scores(values, {"exact": exact}, notes, answers=answers)

    def close(self) -> None:
        """Stop reading and release the models."""
        self._pool.shutdown(cancel_futures=True)
        self._engines = queue.SimpleQueue()

    def _targets(self, prompts: Sequence[str], columns: Mapping[str, Any]) -> list[str]:
        if self.column is None:
            return [plain(quoted(prompt)) for prompt in prompts]
        if self.column not in columns:
            raise ValueError(
                f"ocr: the prompts have no column {self.column!r}; leave `column` out to use the quoted words"
            )
        texts = columns[self.column]
        wrong = [text for text in texts if not isinstance(text, (str, type(None)))]
        if wrong:
            raise ValueError(f"ocr: the column {self.column!r} holds {wrong[0]!r}; give texts")
        return [plain(text or "") for text in texts]

    def _read(self, picture: Any) -> str:
        engine = self._engines.get()
        try:
            lines = getattr(engine(picture), "txts", None)
        finally:
            self._engines.put(engine)
        return " ".join(lines or ())


def quoted(prompt: str) -> str:
    """Return the text between the first pair of double quotes, straight or curly; an empty text if there are none.

    >>> quoted('a sign that says "Open late"')
    'Open late'
    """
    found = _QUOTED.search(prompt)
    return (found[1] or found[2] or "") if found else ""


def plain(text: str) -> str:
    """Return a text as it is compared: lower case, no white space, and full-width characters as ordinary ones.

    >>> plain("Open  LATE！")
    'openlate!'
    """
    return "".join(unicodedata.normalize("NFKC", text).lower().split())


def text_score(text: str, target: str, substring: bool = True) -> float:
    """Return 1 - min(edit distance, length) / length, where `length` is the length of the target.

    Args:
        text: the text that was read.
        target: in the form of `plain`, not empty.
        substring: if true, the score is 1 if the target occurs in the text.

    >>> text_score("Opan lat", "openlate")
    0.75
    """
    text = plain(text)
    if substring and target in text:
        return 1.0
    return 1 - min(edit_distance(text, target), len(target)) / len(target)


def edit_distance(first: str, second: str) -> int:
    """Return the Levenshtein distance: the fewest insertions, deletions and replacements from one text to the other.

    >>> edit_distance("kitten", "sitting")
    3
    """
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        above, row[0] = row[0], i
        for j, other in enumerate(second, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (letter != other))
    return row[-1]
