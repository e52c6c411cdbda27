"""`flowgrpo rewards`: what rewards there are, and what an author of one needs."""

from __future__ import annotations

import typer

from .cli_output import say

rewards_app = typer.Typer(help="List the rewards that are installed, and help to write one.", add_completion=False)


@rewards_app.callback(invoke_without_command=True)
def rewards(context: typer.Context) -> None:
    """List the rewards that are installed."""
    if context.invoked_subcommand is not None:
        return
    from .rewards.registry import available

    for name, line in available().items():
        say(f"{name:<24} {line}")
