"""
Upload a model to the Hub so that anyone can load it.

    python hub_upload.py DIR REPO [--private] [--revision BRANCH] [--create-pr] [--native qwen3_5] [--dry-run]

The same as `gated-attention push`; `--help` lists all options, and docs/hub.md explains them.
"""

from gated_attention.hub.command import make_app


def main(arguments: list[str] | None = None) -> None:
    """
    Args:
        arguments (`list[str]`, *optional*): Those of the command line by default.
    """
    make_app()(arguments)


if __name__ == "__main__":
    main()
