"""``kinformer generate DIR --prompt TEXT``: streams the continuation; what it cost goes to standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kinformer.lab.cli.options import Changes, Hidden, Printing, RunFolder, options_as
from kinformer.lab.cli.output import print_json
from kinformer.lab.runs.options import GenerateOptions
from kinformer.lab.training.logging import size
from kinformer.runtime.errors import KinformerError, plural

if TYPE_CHECKING:
    from kinformer.lab.tasks.next_token import Generated

TASK_OPTIONS = "GenerationOptions"


@dataclass(frozen=True, kw_only=True)
class Options(GenerateOptions, Printing):
    """Continue a text, every token written as it is drawn, draw or classify images, or translate lines as they come."""

    folder: RunFolder
    """The run folder."""
    set: Changes = ()  # type: ignore[assignment]
    """A change that leaves the weights as they are, as in --set layers.*.mixer.position.scaling=yarn."""
    prompt: str | None = None
    """The text to continue; - reads standard input, as a translation does where nothing is given."""
    prompt_file: str | None = None
    """A file with the text to continue."""
    no_echo: bool = False
    """Write the continuation only, without the prompt before it."""
    json: bool = False
    """Print one JSON object instead of text, at the end."""
    task_options: Hidden = field(default_factory=dict)


def run(options: Options) -> int:
    """Generate, print the result, and return the exit status."""
    from kinformer.lab.runs.inference import generate
    from kinformer.lab.runs.run import open_run

    task = open_run(options.folder).task
    by_line = task.generation.prompt == "lines"
    prompt = _prompt(options, by_line)
    echoes = not options.no_echo and not by_line
    echo = _text(prompt) if echoes and isinstance(prompt, str | bytes) else ""
    write = None if options.json else _Echo(echo)
    result = generate(options.folder, prompt, options_as(GenerateOptions, options), write)
    if hasattr(result, "facts"):
        _print_facts(options, result)
    else:
        _print(options, result, echo)
    return 130 if result.interrupted else 0


class Output(Protocol):
    """An output that went to a file, or was printed while it was generated."""

    @property
    def facts(self) -> Mapping[str, object]: ...
    @property
    def text(self) -> str: ...


def _prompt(options: Options, lines: bool) -> str | bytes | Iterator[bytes] | None:
    """Return the prompt, or ``lines`` as they come."""
    if options.prompt is not None and options.prompt_file is not None:
        raise KinformerError("there must be one prompt; give --prompt TEXT, --prompt - or --prompt-file PATH.")
    if options.prompt_file is not None:
        from kinformer.lab.data.files import plain_bytes

        return plain_bytes(Path(options.prompt_file))
    if lines and options.prompt in (None, "-"):
        return iter(sys.stdin.buffer.readline, b"")
    if options.prompt is None:
        return None
    return sys.stdin.buffer.read() if options.prompt == "-" else options.prompt


def _text(prompt: str | bytes) -> str:
    return prompt.decode("utf-8", "replace") if isinstance(prompt, bytes) else prompt


class _Echo:
    """Writes every piece of text as it comes, and the prompt before the first: by then it was read without an error."""

    def __init__(self, prompt: str) -> None:
        self._before = prompt

    def __call__(self, text: str) -> None:
        sys.stdout.write(self._before + text)
        sys.stdout.flush()
        self._before = ""


def _print_facts(options: Options, result: Output) -> None:
    """Print the facts as JSON, or the file's name, and a text about the output on standard error."""
    if options.json:
        print_json(result.facts)
        return
    print(result.facts.get("out", ""))
    if not options.quiet:
        print(result.text, file=sys.stderr)


def _print(options: Options, result: Generated, echo: str) -> None:
    speed, state = result.tokens_per_second, result.state_bytes
    if options.json:
        samples = [{"text": item.text, "tokens": item.tokens, "stopped": item.stopped} for item in result.samples]
        facts: dict[str, object] = {"seed": result.seed, "state_bytes": state, "tokens_per_second": speed}
        if result.exits is not None:
            facts["exits"] = result.exits.facts
        if result.drafting is not None:
            facts["drafts"] = result.drafting.facts
        print_json({"run": options.folder, "prompt_tokens": result.prompt_tokens, "samples": samples} | facts)
        return
    if options.samples > 1:
        for number, sample in enumerate(result.samples, start=1):
            print(f"--- sample {number} of {options.samples} ---\n{echo}{sample.text}")
    elif sys.stdout.isatty():
        print()
    if options.quiet:
        return
    print(
        f"{plural(result.prompt_tokens, 'prompt token')} in {result.prompt_seconds:.3f} s; "
        f"{plural(result.new_tokens, 'new token')}, {speed:.1f} tokens/s; state {size(state)} "
        f"({plural(state, 'byte')}); seed {result.seed}",
        file=sys.stderr,
    )
    for lines in (result.exits, result.drafting):
        if lines is not None:
            print(lines.text, file=sys.stderr)
