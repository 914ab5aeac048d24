"""``kinformer generate DIR --prompt TEXT``: streams the continuation; what it cost goes to standard error."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from kinformer.cli.options import Changes, Count, Machine, Number, RunFolder, Text, require
from kinformer.cli.output import print_json, size
from kinformer.cli.parsing import overrides
from kinformer.cli.store import StoreOptions, check_store, equipped
from kinformer.core.errors import KinformerError

if TYPE_CHECKING:
    from kinformer.data import Tokenizer
    from kinformer.generation.session import Session

MOST_NEW = 256


@dataclass(frozen=True, kw_only=True)
class Options(StoreOptions, Machine):
    """Continue a text: every token is written as soon as it is drawn."""

    folder: RunFolder
    """The run folder."""
    set: Changes = ()
    """A change that leaves the weights as they are, as in --set layers.*.mixer.position.scaling=yarn."""
    prompt: Text = None
    """The text to continue; - reads standard input."""
    prompt_file: Text = None
    """A file with the text to continue."""
    max_new_tokens: Count = None
    """Tokens to draw: 256 if not given, or as many as the model's positions allow."""
    temperature: float = 1.0
    """Above 1 more surprising, below 1 less; 0 always takes the most probable token."""
    top_k: Count = None
    """Draw from the N most probable tokens only."""
    top_p: Number = None
    """Draw from the fewest tokens whose probability together reaches X."""
    stop: tuple[str, ...] = ()
    """End before this text appears; may be given again."""
    samples: int = 1
    """Continue the prompt so many times; several are written one after the other when all are done."""
    chunk: int = 1024
    """Tokens of the prompt that the model sees at a time."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Type of the weights in memory."""
    json: bool = False
    """Print one JSON object instead of text, at the end."""
    seed: Count = None
    """Decides the draws; a new one each time if not given."""


@dataclass
class Cost:
    """What is reported: prompt and new tokens (over all samples), seconds for each."""

    prompt: int
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, that of the first included."""
        return self.tokens / self.seconds if self.seconds else 0.0


def run(options: Options) -> int:
    """Generate and report."""
    from kinformer.cli.runs import tokenizer_of
    from kinformer.family.runs import open_run

    check_store(options)
    require("--samples", options.samples, 1)
    require("--max-new-tokens", options.max_new_tokens, 1)
    text = _prompt(options)
    run = open_run(options.folder)
    if run.model.get("kind") == "encoder":
        raise KinformerError(
            f"{options.folder}: is a run of {run.member!r}, an encoder, which reads whole texts and continues none; "
            "give a run of a causal member."
        )
    tokenizer = tokenizer_of(run)
    tokens = tokenizer.encode(text)
    if not len(tokens):
        raise KinformerError("the prompt is empty; give at least one character with --prompt or --prompt-file.")
    options = options if options.seed is not None else replace(options, seed=secrets.randbits(32))
    session, new = _session(options, run, len(tokens))
    return _generate(options, session, tokenizer, tokens, new)


def _prompt(options: Options) -> str | bytes:
    if (options.prompt is None) == (options.prompt_file is None):
        raise KinformerError("there must be one prompt; give --prompt TEXT, --prompt - or --prompt-file PATH.")
    if options.prompt_file is not None:
        from kinformer.data.files import reading

        with reading(options.prompt_file):
            return Path(options.prompt_file).read_bytes()
    assert options.prompt is not None
    return sys.stdin.buffer.read() if options.prompt == "-" else options.prompt


def _session(options: Options, run: Any, prompt: int) -> tuple[Session, int]:
    """A session for one row, and how many tokens to draw."""
    import torch

    from kinformer.generation.packed import pack
    from kinformer.generation.session import Session

    assert options.seed is not None
    device = options.prepare(options.seed)
    model = run.load(overrides(options.set)).to(device, torch.bfloat16 if options.weights == "bf16" else None)
    model = equipped(run, pack(model, options.samples), options, options.samples)
    new = options.max_new_tokens
    if new is None:
        limit = MOST_NEW if model.max_length is None else model.max_length - prompt + 1
        new = max(1, min(MOST_NEW, limit))
    session = Session(
        model,
        chunk=options.chunk,
        room=new,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    session.require(new, [prompt])
    return session, new


def _generate(options: Options, session: Session, tokenizer: Tokenizer, tokens: Any, new: int) -> int:
    import torch

    cost = Cost(len(tokens))
    writers = [_Writer(tokenizer, options.stop, None) for _ in range(options.samples)]
    if options.samples == 1 and not options.json:
        writers[0].out = sys.stdout
    status = 0
    begun = time.perf_counter()
    try:
        session.feed(torch.from_numpy(tokens)[None])
        session = session if options.samples == 1 else session.fork(options.samples)
        cost.prompt_seconds, begun = time.perf_counter() - begun, time.perf_counter()
        _draw(session, writers, new, cost)
    except KeyboardInterrupt:
        status = 130
    cost.seconds = time.perf_counter() - begun if cost.tokens else 0.0
    for writer in writers:
        writer.finish()
    _print(options, session, writers, cost)
    return status


def _draw(session: Session, writers: Sequence[_Writer], new: int, cost: Cost) -> None:
    for row_tokens in session.stream(new):
        for writer, token in zip(writers, row_tokens, strict=True):
            if not writer.stopped:
                cost.tokens += 1
                writer.feed(token)
        if all(writer.stopped for writer in writers):
            return


class _Writer:
    """One sample: its tokens, its text so far, and where the text is written as it comes."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], out: TextIO | None) -> None:
        from kinformer.generation.stops import StopText

        self.out = out
        self.tokens: list[int] = []
        self.text = ""
        self._decoder = tokenizer.stream()
        self._stop = StopText(stops)

    @property
    def stopped(self) -> bool:
        return self._stop.stopped

    def feed(self, token: int) -> None:
        self.tokens.append(token)
        self._write(self._stop.feed(self._decoder.feed(token)))

    def finish(self) -> None:
        self._write(self._stop.feed(self._decoder.finish()) + self._stop.finish())

    def _write(self, text: str) -> None:
        self.text += text
        if self.out is not None and text:
            self.out.write(text)
            self.out.flush()


def _print(options: Options, session: Session, writers: Sequence[_Writer], cost: Cost) -> None:
    facts = {"seed": session.seed, "state_bytes": session.state_bytes, "tokens_per_second": cost.tokens_per_second}
    if options.json:
        samples = [{"text": writer.text, "tokens": writer.tokens, "stopped": writer.stopped} for writer in writers]
        print_json({"run": options.folder, "prompt_tokens": cost.prompt, "samples": samples} | facts)
        return
    if options.samples > 1:
        for number, writer in enumerate(writers, start=1):
            print(f"--- sample {number} of {options.samples} ---\n{writer.text}")
    elif sys.stdout.isatty():
        print()
    print(
        f"{cost.prompt} prompt tokens in {cost.prompt_seconds:.3f} s; {cost.tokens} new tokens, "
        f"{cost.tokens_per_second:.1f} tokens/s; state {size(session.state_bytes)} ({session.state_bytes} bytes); "
        f"seed {session.seed}",
        file=sys.stderr,
    )
