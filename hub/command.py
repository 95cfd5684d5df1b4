"""`gated-attention push` and `hub_upload.py`: one definition of their options. Heavy imports stay inside, so that `--help` answers at once."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the model or adapter, never written to.")],
    repo_id: Annotated[str, typer.Argument(metavar="REPO", help="Repository on the Hub, as user/name.")],
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository private when it is created.")
    ] = False,
    revision: Annotated[
        str | None,
        typer.Option(help="Branch to upload to, made if it does not exist; or refs/pr/1 of an open pull request."),
    ] = None,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Propose the upload as a pull request; the repository must exist.")
    ] = False,
    native: Annotated[
        Literal["qwen3_5", "qwen3_next", "lfm3"] | None,
        typer.Option(help="Export as this stock architecture first, which needs no custom code."),
    ] = None,
    widen_gates: Annotated[
        bool, typer.Option("--widen-gates", help="With --native: repeat headwise gates for each channel.")
    ] = False,
    base_model: Annotated[
        str | None,
        typer.Option(help="Hub id of what the model was made of; default: what the certificate or the adapter says."),
    ] = None,
    license: Annotated[
        str | None,
        typer.Option(help="Licence id for the card; default: that of the folder's card, or of the base model's."),
    ] = None,
    inspection: Annotated[
        Path | None, typer.Option(help="Folder that `gated-attention inspect --out` wrote: figures for the card.")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Pattern of other files that go along; may be repeated.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Prepare and check everything, print the plan, send nothing.")
    ] = False,
) -> None:
    """Upload a model so that anyone can load it, after loading exactly what is sent without this package."""
    from .errors import UploadError
    from .push import push_folder

    try:
        push_folder(
            folder,
            repo_id,
            private=private,
            revision=revision,
            create_pr=create_pr,
            native=native,
            widen_gates=widen_gates,
            base_model=base_model,
            license=license,
            inspection=inspection,
            include=tuple(include or ()),
            dry_run=dry_run,
            echo=typer.echo,
        )
    except (UploadError, OSError) as error:
        typer.echo(f"gated-attention: {error}", err=True)
        raise typer.Exit(code=1) from error


def make_app() -> typer.Typer:
    """The command by itself, as `hub_upload.py` is."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(push)
    return app
