"""The command line. ``graphglue demo`` serves a small model, and checks every step it serves."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from graphglue import demo as demonstration
from graphglue.demo import DemoResult
from graphglue.errors import GraphGlueError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)

_WIDTH = 160  # of a table that goes to a file


class Device(str, enum.Enum):
    """Where to run: auto takes CUDA where there is a GPU."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Level(str, enum.Enum):
    """Which checks to run."""

    FULL = "full"
    STATIC = "static"


@app.callback()
def graphglue() -> None:
    """Glue a decode step's fill, metadata prep and forward into CUDA-graph replay."""


@app.command()
def demo(
    trace: Annotated[
        Path | None, typer.Option(help="CSV of arrivals: TIMESTAMP, ContextTokens, GeneratedTokens.")
    ] = None,
    device: Annotated[Device, typer.Option(help="auto takes CUDA where there is a GPU.")] = Device.AUTO,
    requests: Annotated[int, typer.Option(min=1, help="How many requests to serve.")] = 96,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seeds arrivals, prompts and weights.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Also write the result to this file.")] = None,
) -> None:
    """Serve a small transformer through graphglue, and compare every step with its eager twin.

    Exits with 1 if any metadata tensor or sampled token differs, with 2 if the demo can not run.
    """
    _check_files(("--json", json))
    with _refusing("demo"):
        with tqdm(total=requests, desc="requests", unit="req", disable=None, leave=False) as bar:
            result = demonstration.run(trace, device.value, requests, seed, on_finish=bar.update)
        _print(result, Console(soft_wrap=True))
        if json is not None:
            result.write_json(json)
    raise typer.Exit(0 if result else 1)


@app.command()
def bench(
    device: Annotated[Device, typer.Option(help="auto takes CUDA where there is a GPU.")] = Device.AUTO,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw it, into a .png; needs matplotlib.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Timed steps of each row; 2000, or 20 on the CPU.")] = None,
    buckets: Annotated[str | None, typer.Option(help="Requests of each bucket, such as 1,4,16.")] = None,
    only: Annotated[str | None, typer.Option(help="Sections to run, such as floor,slots.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="sglang=DIR or breakable=DIR, its unpacked wheel.")] = None,
    trace: Annotated[Path | None, typer.Option(help="CSV of arrivals, as demo takes, for the section ranks.")] = None,
) -> None:
    """Measure what a decode step costs the host, in all the ways there are to launch it.

    Exits with 1 if a section breaks off, with 2 if the benchmark can not run as asked.
    """
    from graphglue.bench import command  # loads torch's compiler and, for a plot, matplotlib

    _check_files(("--json", json), ("--plot", plot))
    with _refusing("bench"):
        settings = command.parsed(device.value, steps, buckets, only, peer or [], trace)
        report = command.run_and_write(settings, json, plot)
    command.show(report)
    raise typer.Exit(1 if report.broken else 0)


@app.command()
def audit(
    target: Annotated[
        str,
        typer.Argument(metavar="MODULE:FACTORY", help="Returns a Runner, or (Runner, perturb).", show_default=False),
    ],
    json: Annotated[Path | None, typer.Option(help="Also write the certificate to this file.")] = None,
    level: Annotated[Level, typer.Option(help="static runs trace, same_ops and pointers only.")] = Level.FULL,
) -> None:
    """Check what the preps of a runner declare, and give a certificate.

    Exits with 1 if any check fails, with 2 if the audit can not run.
    """
    from graphglue.audit import command

    _check_files(("--json", json))
    with _refusing("audit"):
        certificate = command.run(target, level.value, json)
    command.show(certificate)
    raise typer.Exit(0 if certificate.passed else 1)


@app.command()
def ladder(
    trace: Annotated[Path | None, typer.Option(help="CSV of arrivals, as demo takes, to count steps of.")] = None,
    histogram: Annotated[Path | None, typer.Option(help='JSON of batch sizes, such as {"1": 20, "7": 3}.')] = None,
    buckets: Annotated[int, typer.Option(min=1, help="How many sizes, at most.")] = 16,
    tokens: Annotated[bool, typer.Option("--tokens", help="Count the chunks of a trace's prompts.")] = False,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="The largest chunk; 2048.")] = None,
    step_ms: Annotated[float | None, typer.Option(help="How long a trace's decode steps last; 20.")] = None,
    max_running: Annotated[int | None, typer.Option(min=1, help="How many requests run at once; all.")] = None,
    multiple: Annotated[int, typer.Option(min=1, help="What every size is a multiple of.")] = 1,
    max_size: Annotated[int | None, typer.Option(min=1, help="The largest size; else the largest count.")] = None,
    cost_per_bucket: Annotated[float, typer.Option(help="What one size costs, in padded rows.")] = 0.0,
    every: Annotated[int, typer.Option(min=1, help="The even ladder's distance.")] = 8,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw it, into a .png; needs matplotlib.")] = None,
) -> None:
    """Find the ladder that pads a trace or a histogram least, and hold it beside the usual ones.

    Exits with 2 if a file or an option can not be used.
    """
    from graphglue.ladders import command, counts
    from graphglue.ladders.plot import check

    _check_files(("--json", json), ("--plot", plot))
    with _refusing("ladder"):
        if plot is not None:
            check(plot)
        found = counts.counted(trace, histogram, tokens, max_tokens, step_ms, max_running)
        report = command.run(found, buckets, multiple, max_size, cost_per_bucket, every)
        command.write(report, json, plot)
    command.show(report)


@app.command()
def report(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="What json.dump(runner.stats(), file) wrote; one a rank.")
    ],
    html: Annotated[Path | None, typer.Option(help="Also write it as a page.")] = None,
    png: Annotated[Path | None, typer.Option(help="Also draw it; needs matplotlib.")] = None,
    budget: Annotated[str | None, typer.Option(help="Name the keys to drop for it, such as 512MiB.")] = None,
) -> None:
    """Show what runners did: the ladder's use, padded rows, routes, reasons, quarantines, memory.

    Exits with 2 if a file can not be read.
    """
    from graphglue.report import command

    _check_files(("--html", html), ("--png", png))
    with _refusing("report"):
        command.run(files, html, png, None if budget is None else command.parsed_bytes(budget))


@app.command()
def diff(first: Path, second: Path) -> None:
    """Name the first step at which two ranks' flight records part.

    Exits with 1 if they do, with 2 if one can not be read or they have no step in common.
    """
    from graphglue.flight import FlightRecord, parting

    with _refusing("diff"):
        found = parting(FlightRecord.read(first), FlightRecord.read(second))
    typer.echo("they tell the same" if found is None else found.spelled())
    raise typer.Exit(0 if found is None else 1)


@app.command()
def rerun(
    file: Annotated[Path, typer.Argument(help="What runner.flight_record().write(FILE) wrote.")],
    factory: Annotated[
        str | None, typer.Option(metavar="MODULE:FACTORY", help="Returns a Runner like the recorded one, on the CPU.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=1, help="Its number; the last whose sources were kept.")] = None,
) -> None:
    """Repeat a step of a flight record on the CPU tape, glued and eagerly; without a factory, list its steps.

    Exits with 1 if the runs differ or give other integers than were recorded, with 2 if it can not be repeated.
    """
    from graphglue.flight import FlightRecord
    from graphglue.rerun import repeat

    with _refusing("rerun"):
        if factory is None:
            for one in FlightRecord.read(file).steps:
                typer.echo(one.spelled() + ("" if one.batch is None else "; can be repeated with --factory"))
            return
        found = repeat(file, factory, step)
    typer.echo(found.spelled())
    raise typer.Exit(0 if found else 1)


@app.command()
def doctor() -> None:
    """Say what works on this machine, what falls back to what, and what to install. Always exits with 0."""
    from graphglue.doctor import examine

    table = Table("", "part", "seen", "instead", "what helps", title_justify="left")
    for found in examine():
        mark = Text("works", "green") if found.works else Text("missing", "yellow")
        table.add_row(mark, *(Text(text) for text in (found.part, found.seen, found.instead, found.advice)))
    Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH).print(table)


def _check_files(*options: tuple[str, Path | None]) -> None:
    """Refuse what can be no file to write, before anything is run."""
    for option, path in options:
        if path is not None and not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"{path.absolute().parent} is no directory", param_hint=option)
        if path is not None and path.is_dir():
            raise typer.BadParameter(f"{path} is a directory; expected the name of a file", param_hint=option)


@contextmanager
def _refusing(command: str) -> Iterator[None]:
    """Say what can not be used or written, and exit with 2."""
    try:
        yield
    except BrokenPipeError:  # whoever reads has seen enough
        raise
    except (GraphGlueError, OSError) as error:
        said = f"a file can not be written: {error}" if isinstance(error, OSError) else str(error)
        typer.echo(f"graphglue {command}: {said}", err=True)
        raise typer.Exit(2) from error


def _print(result: DemoResult, console: Console) -> None:
    say = partial(console.print, highlight=False, markup=False)
    say(f"device    {result.device}, {result.dtype}, torch {result.torch_version}")
    say(f"arrivals  {result.arrivals}; {result.fitting}")
    say(
        f"served    {result.num_requests} requests, {result.num_prompt_tokens} prompt tokens read, "
        f"{result.num_tokens} generated in {result.num_steps} steps of up to {result.largest_batch} requests"
    )
    console.print(_routes(result))
    say(f"padded    {result.padded_share:.1%} of the rows of decode steps with requests")
    say(f"prompts   {_prompts(result)}")
    say(f"host time {_times(result)}")
    say(f"compared  {_compared(result)}")
    verdict = "bold green" if result else "bold red"
    console.print(f"[{verdict}]{result.num_differences} differences[/]", highlight=False)
    if result.differences:
        console.print(_differences(result))


def _routes(result: DemoResult) -> Table:
    table = Table("step", "prep", "forward", "reason", title="steps by route and reason", title_justify="left")
    table.add_column("steps", justify="right")
    for what, steps in (("decode", result), ("prefill", result.prefill)):
        for way in steps.routes:
            table.add_row(what, way.prep, way.forward, way.reason, str(way.num_steps))
    return table


def _prompts(result: DemoResult) -> str:
    steps, buckets = result.prefill, result.prefill_buckets
    return (
        f"read in segments with eager breaks, up to {steps.largest_batch} in a step, chunked at {buckets[-1]} tokens; "
        f"buckets {list(buckets)}, {steps.padded_share:.1%} of the rows padded"
    )


def _times(result: DemoResult) -> str:
    if result.glued_us is None or result.eager_us is None:
        return "no step was replayed whole, so there is none to tell"
    return (
        f"glued {result.glued_us:.0f} us a step, eager {result.eager_us:.0f} us "
        "(medians over the steps that were replayed whole)\n"
        f"          {result.timing_note}"
    )


def _compared(result: DemoResult) -> str:
    both = (result, result.prefill)
    num_tensors = sum(steps.num_tensors_compared for steps in both)
    num_tokens = sum(steps.num_tokens_compared for steps in both)
    text = f"{num_tensors} tensors bit for bit, {num_tokens} sampled tokens"
    if num_unpadded := sum(steps.num_tokens_compared_unpadded for steps in both):
        text += f", {num_unpadded} tokens with prompts read whole and unpadded decoding"
    return text


def _differences(result: DemoResult) -> Table:
    columns = ("step", "tensor", "row", "glued", "expected")
    table = Table(*columns, title="the first of them", title_justify="left")
    for found in result.differences:
        row = "shape" if found.row is None else str(found.row)
        table.add_row(str(found.step), found.name, row, found.glued, found.expected)
    return table
