"""`flowgrpo adapter`: the adapter of a run as a file for another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .output import output_file, say
from .trusting import LinksOption, trust_run


def adapter(
    run: Annotated[Path, typer.Argument(help="A run folder, or its folder `lora`.")],
    out: Annotated[Path, typer.Option(help="New .safetensors file.")],
    tool: Annotated[str, typer.Option("--for", help="`comfyui` or `kohya`.")] = "comfyui",
    trust: LinksOption = False,
) -> None:
    """Write the LoRA of a run as a file for ComfyUI or kohya's scripts; its strength there is 1."""
    from ..intake.links import check_links
    from ..training.folder.files import writing
    from ..weights.other_tools import TOOLS, write_for

    chosen = next((known for known in TOOLS if known == tool), None)
    if chosen is None:
        raise ValueError(f"--for is {tool!r}; use comfyui or kohya")
    output_file(out)
    trust_run(trust, [run])
    check_links(run)
    lora = run / "lora" if (run / "config.yaml").is_file() else run
    if lora != run and not lora.is_dir():
        raise ValueError(
            f"{run} has no folder `lora`: it has trained all weights, or it has not ended; finish it with `flowgrpo "
            f"resume {run}`"
        )
    with writing(out):
        remark = write_for(chosen, lora, out)
    say(str(out))
    say(f"note: {remark}")
