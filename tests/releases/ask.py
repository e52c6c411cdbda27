"""Asks released code for numbers: `python -m tests.releases.ask CLONES [NAME ...]`.

CLONES is a folder with a git clone of each repository, `CLONES/NAME` for `https://github.com/OWNER/NAME`. Functions and
classes are taken by name from a file of one commit, or statements by their lines, and run on seeded inputs. Inputs and
outputs are written to `numbers/NAME.json`, with the repository, the commit, the file and the names, so that the tests
compare without a network. Only numbers are kept, never text of a release.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.releases.asked_blocks import BLOCK_MODELS
from tests.releases.asked_credit import CREDIT
from tests.releases.asked_losses import LOSSES
from tests.releases.asked_models import MODELS
from tests.releases.asked_preferences import PREFERENCES
from tests.releases.asked_schedules import SCHEDULES
from tests.releases.asked_steps import STEPS_OF
from tests.releases.asked_tokens import TOKENS
from tests.releases.asked_tools import OF_TOOLS
from tests.releases.asking import NUMBERS, Question, plain, taken

QUESTIONS: dict[str, Question] = {
    **STEPS_OF,
    **SCHEDULES,
    **CREDIT,
    **LOSSES,
    **TOKENS,
    **PREFERENCES,
    **MODELS,
    **BLOCK_MODELS,
    **OF_TOOLS,
}


def main() -> None:
    """Ask all questions, or the named ones, and write the numbers."""
    clones, *chosen = sys.argv[1:]
    for name in chosen or QUESTIONS:
        question = QUESTIONS[name]
        numbers = question.ask(taken(Path(clones) / question.repository.partition("/")[2], question))
        text = json.dumps({"source": question.source, **plain(numbers)})
        (NUMBERS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(f"{name}: {len(text)} bytes")


if __name__ == "__main__":
    main()
