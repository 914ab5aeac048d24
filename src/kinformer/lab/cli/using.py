"""The commands that use a trained run: evaluate, generate, chat, predict, embed, serve, index, trace and calibrate."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from kinformer.lab.calibration.options import CalibrateOptions
from kinformer.lab.cli.form import CommonOptions, Hidden, UsingRun
from kinformer.lab.cli.output import print_json, printable, shown
from kinformer.lab.runs.options import (
    EmbedOptions,
    EvaluateOptions,
    GenerateOptions,
    IndexOptions,
    PredictOptions,
    ServeOptions,
    TraceOptions,
)
from kinformer.lab.training.logging import size
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.files import absolute
from kinformer.runtime.parsing import dump_json

if TYPE_CHECKING:
    from kinformer.lab.tasks.next_token import Generated

Inputs = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE|FOLDER|-")]


@dataclass(frozen=True, kw_only=True)
class Evaluate(EvaluateOptions, CommonOptions):
    """Measure runs: models of text in bits per byte, their files in order, every token scored once."""

    folders: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """The run folder; several are measured one after the other and shown side by side."""

    def run(self) -> int:
        """Evaluate the runs, print their metrics, and return the exit status."""
        from kinformer.lab.runs.inference import evaluate

        report = evaluate(self.folders, self, quiet=self.json or self.quiet)
        return self.show(report.facts, report.text)


@dataclass(frozen=True, kw_only=True)
class Generate(GenerateOptions, UsingRun):
    """Continue a text and write every token at once, draw or classify images, or translate lines as they come.

    The cost of the generation goes to standard error.
    """

    opening: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT")] = None
    """The text to continue; - reads standard input, as a translation does where nothing is given."""
    prompt: str | None = None
    """The same by name."""
    prompt_file: str | None = None
    """A file with the text to continue."""
    no_echo: bool = False
    """Write the continuation only, without the prompt before it."""
    json: bool = False
    """Print one JSON object instead of text, at the end."""

    def run(self) -> int:
        """Generate, print the result, and return the exit status."""
        from kinformer.lab.runs.inference import generate
        from kinformer.lab.runs.run import open_run

        by_line = open_run(self.folder).task.generation.prompt == "lines"
        prompt = self._read_prompt(by_line)
        echo = ""
        if not self.no_echo and not by_line and isinstance(prompt, str | bytes):
            echo = prompt.decode("utf-8", "replace") if isinstance(prompt, bytes) else prompt
        result = generate(self.folder, prompt, self, None if self.json else _Echo(echo))
        if not hasattr(result, "facts"):
            self._print(result, echo)
        elif self.json:
            print_json(result.facts)
        else:
            print(result.facts.get("out", ""))
            if not self.quiet:
                print(result.text, file=sys.stderr)
        return 130 if result.interrupted else 0

    def _read_prompt(self, by_line: bool) -> str | bytes | Iterator[bytes] | None:
        """Return the prompt; with ``by_line`` an iterator of the lines of standard input."""
        texts = [text for text in (self.opening, self.prompt, self.prompt_file) if text is not None]
        if len(texts) > 1:
            raise KinformerError("there must be one prompt; give PROMPT, --prompt TEXT, or --prompt-file PATH.")
        if self.prompt_file is not None:
            from kinformer.lab.data.files import plain_bytes

            return plain_bytes(Path(self.prompt_file))
        if by_line and texts in ([], ["-"]):
            return iter(sys.stdin.buffer.readline, b"")
        return sys.stdin.buffer.read() if texts == ["-"] else next(iter(texts), None)

    def _print(self, result: Generated, echo: str) -> None:
        speed, state = result.tokens_per_second, result.state_bytes
        if self.json:
            samples = [{"text": item.text, "tokens": item.tokens, "stopped": item.stopped} for item in result.samples]
            facts: dict[str, Any] = {"run": self.folder, "prompt_tokens": result.prompt_tokens, "samples": samples}
            facts |= {"seed": result.seed, "state_bytes": state, "tokens_per_second": speed}
            facts |= {} if result.exits is None else {"exits": result.exits.facts}
            facts |= {} if result.drafting is None else {"drafts": result.drafting.facts}
            print_json(facts)
            return
        if self.samples > 1:
            for number, sample in enumerate(result.samples, start=1):
                print(f"--- sample {number} of {self.samples} ---\n{echo}{shown(sample.text)}")
        elif sys.stdout.isatty():
            print()
        if self.quiet:
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


class _Echo:
    """Writes every piece of text at once, and the prompt before the first piece: an error in the prompt comes before
    any piece."""

    def __init__(self, prompt: str) -> None:
        self._before = prompt

    def __call__(self, text: str) -> None:
        sys.stdout.write(self._before + shown(text))
        sys.stdout.flush()
        self._before = ""


AGAIN, END = "/new", "/quit"


@dataclass(frozen=True, kw_only=True)
class Chat(GenerateOptions, UsingRun):
    """Continue a text in turns; the state is carried from turn to turn.

    A model that was imported with a chat template answers messages instead. A line /new begins a new text; /quit, or
    the end of the input, ends the chat.
    """

    before: str | None = None
    """The text before every line of yours, in place of a chat template; a backslash and n are a new line."""
    after: str | None = None
    """The text after every line of yours, which the run then continues (a new line if not given), in place of a chat
    template; a backslash and n are a new line."""
    samples: Hidden = 1
    json: bool = False
    """Print a JSON object for every turn, one on a line, instead of text at once."""

    def run(self) -> int:
        """Read lines and stream the continuation of each line, until the input ends."""
        from kinformer.generation.sampling import ends_of_text
        from kinformer.lab.runs.inference import converse
        from kinformer.lab.serving.fields import ChatTemplate

        stop = tuple(text.replace("\\n", "\n") for text in self.stop)
        conversation = converse(self.folder, replace(self, stop=stop))
        run: Any = conversation.subject.run
        template, messages = None, list[dict[str, str]]()
        if run.chat_template is not None and self.before is None and self.after is None:
            template = ChatTemplate(run.chat_template, (), run.prompts.get("special_tokens"))
            if template.end and not ends_of_text(conversation.subject.model):
                conversation.options = replace(conversation.options, stop=(*stop, template.end))
        before, after = self.before or "", "\\n" if self.after is None else self.after
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
                messages.clear()
                continue
            line = line.rstrip("\r\n")
            try:
                if template is None:
                    pieces = conversation.turn((before + line + after).replace("\\n", "\n"))
                else:
                    messages += [{"role": "user", "content": line}, {"role": "assistant", "content": ""}]
                    pieces = conversation.answer(template.prompt(messages[:-1]))
                text = ""
                for piece in pieces:
                    text += piece
                    if messages:
                        messages[-1]["content"] = text
                    if not self.json:
                        print(shown(piece), end="", flush=True)
                if self.json:
                    print(dump_json({"line": line, "text": text}), end="")
            except KeyboardInterrupt:  # Ctrl-C ends this turn, not the chat
                pass
            except KinformerError as error:
                if not asks:
                    raise
                del messages[-2:]
                print(f"kinformer: {error} {AGAIN} begins a new text.", file=sys.stderr)
            print(flush=True)


@dataclass(frozen=True, kw_only=True)
class Predict(PredictOptions, UsingRun):
    """Predict: classes of texts or images, masked tokens, transcripts, translations, answers, actions."""

    inputs: Inputs = "-"
    """What to predict from: a file (lines, .tsv, .csv, .jsonl), a folder (of texts, images or sound), or - for lines on
    standard input."""
    out: str | None = None
    """Write the predictions to this file: JSON lines, CSV or TSV, by its ending (.jsonl, .csv, .tsv)."""
    json: bool = False
    """Print a JSON object for every item, one on a line."""

    def run(self) -> int:
        """Predict, and write every prediction without delay."""
        from kinformer.lab.runs.inference import predictions
        from kinformer.lab.tables import check_table, writing_table

        _check_files(self.inputs, self.out)
        if self.out is not None:
            check_table("out", self.out)
        with ExitStack() as files:
            write = None
            for predicted in predictions(self.folder, self.inputs, self):
                if self.out is not None:
                    write = write or files.enter_context(writing_table(self.out))
                    write(predicted.row)
                elif self.json:
                    print(dump_json(predicted.row), flush=True)
                else:
                    print(printable(" ".join(predicted.line.splitlines())), flush=True)
        return 0


@dataclass(frozen=True, kw_only=True)
class Embed(EmbedOptions, UsingRun):
    """Make a vector of every text, image or sound: the last hidden states of a trained run, their mean, the first or
    the last."""

    inputs: Inputs = "-"
    """Texts: a file (lines, .tsv, .csv, .jsonl), a folder, or - for lines on standard input. Of a run of images or
    speech: a file or a folder."""
    out: str | None = None
    """Write the vectors to this file: .npz (the arrays vectors [items, dim], names and, with labels, labels) or
    .jsonl (item, label and vector)."""
    json: bool = False
    """Print a JSON object for every item, one on a line, as without `out`."""

    def run(self) -> int:
        """Embed the items, and write every vector without delay."""
        from kinformer.lab.runs.inference import check_vectors, embeddings, writing_vectors

        _check_files(self.inputs, self.out)
        if self.out is not None:
            check_vectors(self.out)
        vectors = embeddings(self.folder, self.inputs, self)
        if self.out is None:
            for embedded in vectors:
                print(dump_json(embedded.row), flush=True)
            return 0
        with writing_vectors(self.out) as write:
            for embedded in vectors:
                write(embedded)
        return 0


def _check_files(inputs: str, out: str | None) -> None:
    """Refuse to wait for items from a terminal, and to write over the input file."""
    if inputs == "-" and getattr(sys.stdin, "isatty", bool)():
        raise KinformerError("there must be something to predict from; give a FILE, a FOLDER, or lines by a pipe.")
    if inputs != "-" and out is not None and absolute(out) == absolute(inputs):
        raise KinformerError(f"`out` {out}: is the input file; give another.")


@dataclass(frozen=True, kw_only=True)
class Serve(ServeOptions, UsingRun):
    """Answer completions and chats by a trained run, many at a time as one batch, until Ctrl-C."""

    json: bool = False
    """Print the address of the server as one JSON object, as in {"url": ..., "model": ...}; useful with --port 0."""

    def run(self) -> int:
        """Answer requests until Ctrl-C."""
        from kinformer.lab.serving.server import serve

        serve(self.folder, self, self.json)
        return 0


@dataclass(frozen=True, kw_only=True)
class Index(IndexOptions, UsingRun):
    """Write the run's vector of every context of a text, and the token that came next, into a datastore for kNN-LM.

    The same command continues a build that was stopped.
    """

    def run(self) -> int:
        """Build the datastore, or continue to build it, and print a report."""
        from kinformer.lab.runs.index import index

        done = index(self.folder, self, quiet=self.json or self.quiet)
        store, new = done.store, done.new
        speed = f" in {done.seconds:.0f} s, {new / done.seconds:,.0f} a second" if new else ""
        lines = [f"{store.folder}: {plural(new, 'new entry')}{speed}; {store.entries:,} in all, {size(done.bytes)}"]
        if done.lists is not None:
            where = "in which train, evaluate and generate search unless told otherwise"
            lines.append(f"sorted into {plural(done.lists, 'list')}, {where}")
        return self.show(done.facts, lines)


@dataclass(frozen=True, kw_only=True)
class Trace(TraceOptions, UsingRun):
    """Trace a run on a text: attention weights of every layer and head, buckets, spans, exits, hidden states."""

    text: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")] = None
    """The text; - reads standard input."""
    file: str | None = None
    """A file with the text."""
    out: str | None = None
    """The file to write: .html, an interactive page, or .npz, all tensors; if not given, RUN.html in this folder, or
    no file with --json."""

    def run(self) -> int:
        """Trace the text, write the page or the arrays, and print a line about each mixer."""
        from kinformer.lab.runs.trace import check, facts_of, lines_of, trace, write

        default = None if self.json else f"{Path(self.folder).name}.html"
        out = self.out or default
        if out is not None:
            check(Path(out))
        traced = trace(self.folder, self._text(), self)
        if out is not None:
            write(traced, Path(out))
        if self.json:
            print_json({"out": out} | facts_of(traced))
        else:
            print(f"{out}: {traced.title}", *lines_of(traced), sep="\n  ")
        return 0

    def _text(self) -> str:
        if (self.text is None) == (self.file is None):
            raise KinformerError("there must be one text to trace; give TEXT, - for standard input, or --file PATH.")
        if self.file is not None:
            from kinformer.lab.data.files import plain_bytes, reading_corpus

            with reading_corpus(self.file):
                return plain_bytes(Path(self.file)).decode("utf-8")
        return sys.stdin.read() if self.text == "-" else str(self.text)


@dataclass(frozen=True, kw_only=True)
class Calibrate(CalibrateOptions, UsingRun):
    """Find the lowest threshold of early exits whose risk is bounded, and keep it in the run.

    A sample is a prompt from the text and its greedy continuation, or a source and its translation. Its loss is between
    0 and 1: the difference between the text with early exits and the text of all layers (textual), or how much worse
    the text with early exits is (risk).
    With --search, thresholds of every exit are found by their cost in bits per byte instead.
    """

    def run(self) -> int:
        """Calibrate the run, print the result, and return the exit status."""
        from kinformer.lab.calibration.calibrate import calibrate

        result = calibrate(self.folder, self, quiet=self.json or self.quiet)
        return self.show(result.facts, result.text)
