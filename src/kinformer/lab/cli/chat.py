"""``kinformer chat DIR``: a text continued in turns, line by line, with the state carried from one to the next."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field

from kinformer.lab.cli.options import Changes, Hidden, Printing, RunFolder, options_as
from kinformer.lab.runs.options import GenerateOptions
from kinformer.runtime.errors import KinformerError

AGAIN, END = "/new", "/quit"


@dataclass(frozen=True, kw_only=True)
class Options(GenerateOptions, Printing):
    """Continue a text in turns. A line /new begins a new text; /quit, or the end of the input, ends."""

    folder: RunFolder
    """The run folder."""
    set: Changes = ()  # type: ignore[assignment]
    """A change that leaves the weights as they are, as in --set layers.*.mixer.position.scaling=yarn."""
    before: str = ""
    """What stands before every line of yours in the text; a backslash and n are a new line."""
    after: str = "\\n"
    """What stands after every line of yours, and which the run continues; a backslash and n are a new line."""
    samples: Hidden = 1  # type: ignore[assignment]
    json: bool = False
    """Print a JSON object for every turn, one on a line, instead of text as it is drawn."""
    task_options: Hidden = field(default_factory=dict)


def run(options: Options) -> int:
    """Read lines and stream what follows each, until the input ends."""
    from dataclasses import replace

    from kinformer.lab.runs.inference import converse

    stop = tuple(text.replace("\\n", "\n") for text in options.stop)
    settings = replace(options_as(GenerateOptions, options), stop=stop, task_options={})
    conversation = converse(options.folder, settings)
    asks = sys.stdout.isatty()
    while True:
        if asks:
            print("> ", end="", flush=True)
        try:
            line = sys.stdin.buffer.readline().decode("utf-8", "replace")
        except KeyboardInterrupt:
            line = ""
        if not line or line.strip() == END:
            return 0
        if line.strip() == AGAIN:
            conversation.session = None
            continue
        text = options.before + line.rstrip("\r\n") + options.after
        try:
            pieces = conversation.turn(text.replace("\\n", "\n"))
            if options.json:
                print(json.dumps({"line": line.rstrip("\r\n"), "text": "".join(pieces)}, ensure_ascii=False), end="")
            else:
                for piece in pieces:
                    print(piece, end="", flush=True)
        except KeyboardInterrupt:  # this turn alone ends
            pass
        except KinformerError as error:
            if not asks:
                raise
            print(f"kinformer: {error} {AGAIN} begins a new text.", file=sys.stderr)
        print(flush=True)
