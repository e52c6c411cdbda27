"""`flowgrpo rewards`: the list of rewards, and tools for the author of a reward."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .output import console, output_file, output_folder, refuse_without, say, summary_lines

if TYPE_CHECKING:
    from ..kit.findings import Report
    from ..kit.given_samples import GivenSample
    from ..rewards.base import RewardSpec

ITERATIONS, MOST, DIFFERENT = 30, 64, 8

SAMPLES = (
    "A run folder, a folder of `sample` or `evaluate --out`, a folder of pictures, or a list: a prompt file with a "
    "column completion or file_name."
)
LIST = "The list of a folder of pictures, if it is elsewhere."

rewards_app = typer.Typer(help="List the rewards that are installed, and help to write one.", add_completion=False)

AS_IN_A_RECIPE = "As in a recipe: name, file.py:name, module:name, or {name: …, options: {…}}"
RewardArgument = Annotated[str, typer.Argument(help=f"{AS_IN_A_RECIPE}.")]
OPTIONS = "key=value; as often as needed."
RewardOptions = Annotated[list[str] | None, typer.Option("--options", help=OPTIONS)]
OneRewardOptions = Annotated[list[str] | None, typer.Option("--options", help=f"If there is one reward: {OPTIONS}")]


@rewards_app.callback(invoke_without_command=True)
def rewards(context: typer.Context) -> None:
    """List the rewards that are installed; `flowgrpo rewards show NAME` lists the options of one."""
    if context.invoked_subcommand is not None:
        return
    from ..rewards.registry import available

    for name, line in available().items():
        say(f"{name:<24} {line}")


@rewards_app.command("show")
def show_rewards(
    rewards: Annotated[list[str], typer.Argument(help=f"{AS_IN_A_RECIPE}; one or more.", metavar="A [B]...")],
) -> None:
    """Show what a reward scores, which columns of the prompts it reads, and its options."""
    from ..kit.entries import parse_rewards
    from ..rewards.about import about

    say("\n\n".join("\n".join(about(spec.name)) for spec in parse_rewards(rewards)))


@rewards_app.command("serve")
def serve_reward(
    reward: RewardArgument,
    options: RewardOptions = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any free port.")] = 8765,
    token_env: Annotated[
        str | None, typer.Option(help="Environment variable that holds the token that a client must send.")
    ] = None,
    host_name: Annotated[
        list[str] | None, typer.Option(help="Another name by which clients reach the server; as often as needed.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="PEM file: serve with TLS, by this certificate.")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file with the certificate's private key.")] = None,
    waiting: Annotated[int, typer.Option(min=0, help="Most requests that may wait while another is scored.")] = 4,
    max_mb: Annotated[int, typer.Option(min=1, help="Megabytes of the largest request.")] = 512,
    max_side: Annotated[int, typer.Option(min=1, help="Pixels of the longest side of an image.")] = 8192,
    memory_mb: Annotated[
        int | None, typer.Option(min=1, help="Megabytes for all requests together; 64 + twice --max-mb if left out.")
    ] = None,
) -> None:
    """Serve a reward over HTTP, for the reward `remote` of a recipe, until SIGTERM or Ctrl-C."""
    from ..kit.entries import parse_rewards
    from ..rewards.serving.serve import serve
    from ..rewards.serving.wire import WireLimits

    (spec,) = parse_rewards([reward], options)
    if spec.label is not None or spec.time_limit is not None:
        raise ValueError(
            f"leave label and time_limit out of {reward!r:.80}; the recipe that asks the server may have them"
        )
    serve(
        spec.name,
        spec.options,
        host=host,
        port=port,
        token_env=token_env,
        waiting=waiting,
        limits=WireLimits(most_bytes=max_mb << 20, most_side=max_side),
        memory=None if memory_mb is None else memory_mb << 20,
        names=host_name or (),
        certificate=certificate,
        key=key,
        report=say,
    )


@rewards_app.command("new")
def new_reward(
    name: Annotated[str, typer.Argument(help="Name of the reward: letters, digits and underscores.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the package; NAME if left out.")] = None,
    text: Annotated[bool, typer.Option("--text", help="The reward scores completions, not images.")] = False,
) -> None:
    """Write a small package with a reward, its entry point, a test and a README."""
    from ..kit.package import new_package

    output_folder((out or Path(name)).parent)
    paths = new_package(name, out, "text" if text else "images")
    for path in paths:
        say(str(path))
    folder = paths[0].parent
    say(f"next: change {paths[-2]}, then `pip install -e {folder}` and `flowgrpo rewards check {name}`")


@rewards_app.command("check")
def check_reward_command(
    reward: RewardArgument,
    images: Annotated[
        Path | None, typer.Option(help="Folder of pictures, or of WAV files, to be scored as well.")
    ] = None,
    metadata: Annotated[Path | None, typer.Option(help="Prompt file with a column file_name, for --images.")] = None,
    options: RewardOptions = None,
    data: Annotated[
        str | None, typer.Option(help="Prompt file; for text it may have the completions in a column completion.")
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=0, help="Prompts that the embedded model samples, or of drawn sounds; 0: none.")
    ] = 6,
    seeds: Annotated[int, typer.Option(min=2, help="Samples of each prompt.")] = 8,
    most: Annotated[int, typer.Option(min=2, help="Largest number of files taken from the folder.")] = MOST,
    against: Annotated[list[str] | None, typer.Option(help="Another reward to compare with.")] = None,
    declared: Annotated[str | None, typer.Option("--range", help="LOW,HIGH: scores must lie between.")] = None,
    accept: Annotated[list[str] | None, typer.Option(help="Code of a finding that is intended.")] = None,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds that one call may take; no limit if left out.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="images, sounds or text, if the reward does not say.")] = None,
    frames: Annotated[
        int | None, typer.Option(min=2, help="For a reward of videos: each picture becomes a video of so many frames.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="JSON file for the report.")] = None,
    optimise: Annotated[bool, typer.Option("--optimise", help="Train for it; show what it prefers.")] = False,
    iterations: Annotated[int, typer.Option(min=1, help="--optimise: number of iterations.")] = ITERATIONS,
    out: Annotated[Path | None, typer.Option(help="--optimise: run folder.")] = None,
) -> None:
    """Look for faults of a reward before any training; exit status 1 if there is one."""
    from ..kit.check import CheckPlan, check_reward
    from ..kit.check_optimised import write_report
    from ..kit.entries import parse_range, parse_rewards

    output_file(json, ".json")
    output_folder(out)
    if not optimise:
        refuse_without({"--iterations": iterations != ITERATIONS, "--out": out is not None}, "--optimise")
    if images is None:
        refuse_without({"--metadata": metadata is not None, "--most": most != MOST}, "--images")
    if optimise and out is not None and out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; name a new folder with --out")
    if optimise and frames is not None:
        raise ValueError("the embedded model makes no videos; leave out --optimise, or --frames")
    if task not in (None, "images", "sounds", "text"):
        raise ValueError(f"--task is {task!r}; use images, sounds or text")
    (spec,) = parse_rewards([reward], options, time_limit)
    plan = CheckPlan(
        images, metadata, data, prompts, seeds, most, parse_rewards(against or []),
        None if declared is None else parse_range(declared), accept or [], task, frames,
    )  # fmt: skip
    _quiet()
    # The status is shown only on a terminal, and disappears afterwards.
    with console.status("") as status:
        report = check_reward(spec, plan, status.update)
    say(report.text())
    failed = report.has("failure", "scores", "absent")
    if report.unused and not (failed or optimise):
        say(f"note: nothing of {', '.join(report.unused)} was found, which --accept names")
    write_report(report, json)
    if optimise and report.task == "sounds":
        raise ValueError("there is no embedded model of sounds to train for it; leave out --optimise")
    if optimise and not failed:
        _optimise(spec, report, iterations, out, json)
    if report.count("fault"):
        raise typer.Exit(1)


@rewards_app.command("compare")
def compare_rewards_command(
    rewards: Annotated[list[str], typer.Argument(help=f"{AS_IN_A_RECIPE}; two or more.", metavar="A B...")],
    options: OneRewardOptions = None,
    samples: Annotated[Path | None, typer.Option(help=SAMPLES)] = None,
    votes: Annotated[
        Path | None,
        typer.Option(help="File of `flowgrpo gallery --vote` to compare with; then one reward is enough."),
    ] = None,
    metadata: Annotated[Path | None, typer.Option(help=LIST)] = None,
    most: Annotated[
        int, typer.Option(min=0, help="Number of samples to show for each two rewards: where they differ most.")
    ] = DIFFERENT,
    json: Annotated[Path | None, typer.Option(help="JSON file for all scores.")] = None,
) -> None:
    """Compare rewards with each other on samples that exist already, or with people's choices."""
    from ..kit.agreement import agreement_with, as_json, notes_on
    from ..kit.compare import compare_rewards
    from ..kit.entries import parse_rewards

    output_file(json, ".json")
    if (samples is None) == (votes is None):
        raise ValueError("give --samples, a run or a folder of pictures, or --votes, a file of people's choices")
    specs = parse_rewards(rewards, options)
    if votes is not None:
        refuse_without({"--metadata": metadata is not None, "--most": most != DIFFERENT}, "--samples")
        _quiet()
        agreements = agreement_with(specs, votes)
        for agreement in agreements:
            say(agreement.text())
        for note in notes_on(votes):
            say(note)
        written = as_json(agreements)
    else:
        assert samples is not None
        given = _given(samples, metadata)
        _quiet()
        found = compare_rewards(specs, given, say)
        say(found.text(most))
        written = found.as_json(most)
    if json is not None:
        from ..training.folder.run_folder import write_text

        json.parent.mkdir(parents=True, exist_ok=True)
        write_text(json, written)


@rewards_app.command("score")
def score_command(
    rewards: Annotated[list[str], typer.Argument(help=f"{AS_IN_A_RECIPE}; one or more.", metavar="A [B]...")],
    samples: Annotated[Path, typer.Option(help=SAMPLES)],
    options: OneRewardOptions = None,
    metadata: Annotated[Path | None, typer.Option(help=LIST)] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="New .jsonl file with a line for each sample, samples of a prompt together: its list's line, and its "
            "scores."
        ),
    ] = None,
) -> None:
    """Score pictures, videos or completions that exist already, also of other programs."""
    from ..kit.entries import parse_rewards
    from ..kit.given_samples import WORDS, score_samples

    output_file(out, ".jsonl")
    if out is not None and out.exists():
        raise ValueError(f"{out} exists; name another file with --out")
    specs = parse_rewards(rewards, options)
    given = _given(samples, metadata)
    _quiet()
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    found = score_samples(specs, given, out, say)
    noun = WORDS[type(given[0].made)].removesuffix("s")
    for kind, summary in found.items():
        for line in summary_lines(summary, noun):
            say(f"{kind}{line}")
    if out is not None:
        say(f"written to {out}")


def _given(samples: Path, metadata: Path | None) -> list[GivenSample]:
    from ..kit.given_samples import given_samples

    if metadata is not None and not samples.is_dir():
        raise ValueError("--metadata belongs to a folder of pictures; a list is named with --samples")
    return given_samples(samples, metadata)


def _optimise(spec: RewardSpec, report: Report, iterations: int, out: Path | None, json: Path | None) -> None:
    import time

    from ..gallery.build import build_gallery
    from ..kit.check_optimised import check_optimised, write_report
    from ..training.reporting.progress import ConsoleReporter

    folder = out or Path("runs") / f"check-{report.reward}-{time.strftime('%Y%m%d-%H%M%S')}"
    say(f"training for it: {iterations} iterations, run folder {folder}")
    before = len(report.findings)
    with ConsoleReporter(console) as reporter:
        written = check_optimised(spec, report, iterations, folder, reporter)
    for finding in report.findings[before:]:
        say(finding.text())
    for path in (*written, build_gallery(folder)):
        say(str(path))
    write_report(report, json)


def _quiet() -> None:
    from ..training.model_paths import quiet_libraries

    quiet_libraries()
