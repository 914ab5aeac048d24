"""What commands read of a run folder beside its model: its tokenizer and its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kinformer.core.errors import KinformerError

if TYPE_CHECKING:
    from kinformer.data import Corpus, Labelled, Split, Tokenizer
    from kinformer.family.runs import Run


def tokenizer_of(run: Run) -> Tokenizer:
    """The tokenizer that the run was trained with."""
    from kinformer.data import ByteTokenizer, FileTokenizer

    if run.tokenizer == "bytes":
        return ByteTokenizer()
    return FileTokenizer(run.folder / run.tokenizer)


@dataclass(frozen=True)
class HeldOut:
    """Data to measure on; ``same`` says whether it is the very data that the run was trained on."""

    corpus: Corpus
    split: Split
    same: bool
    note: str

    @property
    def identity(self) -> dict[str, Any]:
        """For JSON."""
        return self.corpus.identity | {"split": self.split.name, "same_as_run": self.same}


def held_out(run: Run, data: str | None, split: str, max_bytes: int | None, holdout: float | None = None) -> HeldOut:
    """The ``split`` of ``data`` (a corpus' name, path or "-"; None: the run's own), at most ``max_bytes`` of it.

    ``holdout``: the share that is held out, the run's own if None.
    """
    from kinformer.core.errors import choose
    from kinformer.data import open_corpus

    spec = data if data is not None else run.data.get("spec")
    if not isinstance(spec, str):
        raise KinformerError(f"{run.folder}: does not say what data it was trained on; give --data PATH.")
    corpus = open_corpus(
        spec, tokenizer=tokenizer_of(run), holdout=run.data.get("holdout") if holdout is None else holdout
    )
    part = corpus.splits[choose(split, corpus.splits, "--split")]
    trained_on = (run.data.get("identity") or {}).get("fingerprint")
    same = corpus.fingerprint == trained_on
    note = "" if same else note_of(corpus, data is not None, trained_on)
    return HeldOut(corpus, part if max_bytes is None else first_bytes(part, max_bytes), same, note)


def first_bytes(split: Split, count: int) -> Split:
    """The beginning of ``split`` that stands for ``count`` bytes (of a tokenizer's ids, up to the next mark)."""
    if split.marks is None:
        return split.take(count)
    enough = int(split.marks[:, 1].searchsorted(count))
    return split.take(int(split.marks[min(enough, len(split.marks) - 1), 0]))


def note_of(corpus: Corpus | Labelled, asked_for: bool, trained_on: str | None) -> str:
    """What to tell of figures on other data than the run's own."""
    if trained_on is None:
        return f"the run does not say what data it was trained on; {corpus.name} may have been part of it."
    reason = "is other data than the run was trained on" if asked_for else "has changed since the run was trained"
    return (
        f"{corpus.name} {reason} (now {corpus.fingerprint[:19]}, then {trained_on[:19]}); "
        "the figure is not comparable with those of the run."
    )
