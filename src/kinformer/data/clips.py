"""Recorded clips and their transcripts: which files, which words, which speaker, which part of the data.

    clips/7_theo_3.wav        transcripts.tsv:  file<TAB>transcript[<TAB>speaker[<TAB>split]]
    clips/9_lucas_0.wav                         a.wav<TAB>call me at noon<TAB>ann<TAB>train

A table's paths are relative to it, and its first line may name its columns. Without a table the transcript is the first
field of a file's name, up to the first underscore, and the speaker is the second where every name has three or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path

from kinformer.data.files import SourceFile, folder_files, reading, single_file
from kinformer.data.image_source import SPLITS
from kinformer.data.wav import ENDINGS, sound_info
from kinformer.runtime.errors import KinformerError, nearest
from kinformer.runtime.words import plural

TABLE = "transcripts.tsv"
HELD_OUT = 0.05
_COLUMNS = ("file", "transcript", "speaker", "split")


@dataclass(frozen=True)
class Clip:
    """A file and its transcript. ``samples`` of a channel come at ``rate`` a second; ``split``
    is empty where the data do not name it."""

    name: str
    path: str
    transcript: str
    speaker: str = ""
    split: str = ""
    samples: int = 0
    rate: int = 0


@dataclass(frozen=True, kw_only=True)
class Holdout:
    """The rule of held-out clips: for the test, one ``speaker`` or the clips whose
    names match ``pattern``; else a ``share``."""

    speaker: str | None = None
    pattern: str | None = None
    share: float | None = None


def find_clips(path: Path) -> tuple[list[Clip], list[SourceFile], bool]:
    """Return the clips under ``path`` (a folder or a table), all files that name them, and whether a table does.

    Errors: ``KinformerError`` for a path without clips, a line that is none, and sound that cannot be read or is empty.
    """
    with reading(path):
        table = path if path.is_file() else path / TABLE if (path / TABLE).is_file() else None
    if table is not None:
        clips = _listed(table)
        files = [single_file(table), *(single_file(Path(clip.path)) for clip in clips)]
    else:
        if not path.exists():
            raise KinformerError(f"{path} does not exist; give a folder of WAV or FLAC files, or a .tsv of them.")
        files = [file for file in folder_files(path, empty=True) if Path(file.name).suffix.lower() in ENDINGS]
        clips = _named(files)
    if not clips:
        raise KinformerError(f"{path}: holds no sound; give a folder of WAV or FLAC files, or a .tsv of them.")
    infos = (sound_info(clip.path) for clip in clips)
    clips = [replace(clip, samples=info.samples, rate=info.rate) for clip, info in zip(clips, infos, strict=True)]
    return clips, files, table is not None


def _listed(table: Path) -> list[Clip]:
    """Return the clips that a table lists."""
    with reading(table):
        raw = table.read_bytes()
    try:
        lines = raw.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise KinformerError(f"{table}: is no UTF-8 text ({error.reason}); save the transcripts as UTF-8.") from None
    columns, clips = list(_COLUMNS), []
    for number, line in enumerate(lines, start=1):
        cells = [cell.strip() for cell in line.split("\t")]
        named = [cell.lower() for cell in cells]
        if number == 1 and {"file", "transcript"} <= set(named):
            columns = named
            continue
        if not 2 <= len(cells) <= len(columns):
            raise KinformerError(
                f"{table}, line {number}: has {plural(len(cells), 'column')} where file, transcript and, if known, "
                "speaker and split are expected, with tabs between; mend it."
            )
        row = dict(zip(columns, cells, strict=False))
        clips.append(_clip(table, number, row))
    return clips


def _clip(table: Path, number: int, row: dict[str, str]) -> Clip:
    file, transcript, split = row.get("file", ""), row.get("transcript", ""), row.get("split", "").lower()
    if not transcript:
        raise KinformerError(f"{table}, line {number}: its transcript is empty; complete or remove the line.")
    path = table.parent / file
    if not file or not path.is_file():
        raise KinformerError(f"{table}, line {number}: there is no file {path}; mend its name or remove the line.")
    if split and split not in SPLITS:
        raise KinformerError(f"{table}, line {number}: its split {split!r} is unknown; {nearest(split, SPLITS)}")
    return Clip(file, str(path), transcript, row.get("speaker", ""), SPLITS.get(split, ""))


def _named(files: Sequence[SourceFile]) -> list[Clip]:
    """Return the clips of a folder, by their names."""
    fields = [Path(file.name).stem.split("_") for file in files]
    has_speakers = all(len(parts) > 2 for parts in fields)
    clips = []
    for file, parts in zip(files, fields, strict=True):
        if not parts[0].strip():
            raise KinformerError(
                f"{file.path}: its name begins with no transcript, as 7_theo_0.wav does; rename it, or list the clips "
                f"in {TABLE}."
            )
        first = file.name.split("/")[0]
        split = SPLITS.get(first, "") if "/" in file.name else ""
        clips.append(Clip(file.name, file.path, parts[0].strip(), parts[1] if has_speakers else "", split))
    return clips


def split_clips(clips: Sequence[Clip], holdout: Holdout, place: str) -> dict[str, list[Clip]]:
    """Return the clips of each split: as the data say, a speaker's or a pattern's for the test, and
    missing splits by a hash of the names."""
    by_split: dict[str, list[Clip]] = {name: [] for name in ("", "train", "validation", "test")}
    for clip in clips:
        by_split[clip.split].append(clip)
    chosen = _chosen(clips, holdout, place)
    if chosen:
        names = {clip.name for clip in chosen}
        by_split = {name: [clip for clip in some if clip.name not in names] for name, some in by_split.items()}
        by_split["test"] = chosen
    rest = by_split["train"] + by_split[""]
    order = sorted(rest, key=lambda clip: sha256(clip.name.encode("utf-8", "surrogateescape")).digest())
    count = math.ceil((HELD_OUT if holdout.share is None else holdout.share) * len(rest))
    for name in ("test", "validation"):
        if by_split[name]:
            continue
        if name == "validation" and holdout.share is not None and not chosen and not _has_split(clips, "test"):
            by_split[name] = by_split["test"]
        else:
            by_split[name], order = order[:count], order[count:]
    retained = {clip.name for clip in order}
    train = [clip for clip in rest if clip.name in retained]
    if not train:
        raise KinformerError(f"{place}: too few clips ({len(clips)}) to hold some out; give more data.")
    return {"train": train, "validation": by_split["validation"], "test": by_split["test"]}


def _has_split(clips: Sequence[Clip], split: str) -> bool:
    return any(clip.split == split for clip in clips)


def _chosen(clips: Sequence[Clip], holdout: Holdout, place: str) -> list[Clip]:
    """Return the clips that the rule holds out for the test."""
    if holdout.speaker is not None and holdout.pattern is not None:
        raise KinformerError(
            f"`held_out_speaker` {holdout.speaker} and `test_clips` {holdout.pattern} contradict; give one of them."
        )
    if holdout.speaker is not None:
        speakers = sorted({clip.speaker for clip in clips if clip.speaker})
        if holdout.speaker not in speakers:
            speakers_text = f"its speakers are {', '.join(speakers)}" if speakers else "it does not say who speaks"
            raise KinformerError(f"`held_out_speaker` {holdout.speaker}: is not in {place}; {speakers_text}.")
        return [clip for clip in clips if clip.speaker == holdout.speaker]
    if holdout.pattern is not None:
        chosen = [clip for clip in clips if fnmatch(clip.name, holdout.pattern)]
        if not chosen:
            raise KinformerError(
                f"`test_clips` {holdout.pattern}: matches no file of {place}, such as {clips[0].name}; mend the "
                "pattern."
            )
        return chosen
    return []
