"""``kinformer serve DIR``: a trained run behind HTTP, in the form that OpenAI's clients use."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.lab.cli.options import Changes, Printing, RunFolder, options_as
from kinformer.lab.serving.options import ServeOptions


@dataclass(frozen=True, kw_only=True)
class Options(ServeOptions, Printing):
    """Answer completions and chats by a trained run, many at a time as one batch, until Ctrl-C."""

    folder: RunFolder
    """The run folder."""
    set: Changes = ()  # type: ignore[assignment]
    """A change that leaves the weights as they are, as in --set layers.*.mixer.position.scaling=yarn."""
    json: bool = False
    """Print where the server listens as one JSON object, as {"url": ..., "model": ...}; for --port 0."""


def run(options: Options) -> int:
    """Answer requests until Ctrl-C."""
    from kinformer.lab.serving.server import serve

    serve(options.folder, options_as(ServeOptions, options), options.json)
    return 0
