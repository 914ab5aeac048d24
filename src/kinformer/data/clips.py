"""Recorded clips and their transcripts: which files, which words, which speaker, which part of the data.

    clips/7_theo_3.wav        transcripts.tsv:  file<TAB>transcript[<TAB>speaker[<TAB>split]]
    clips/9_lucas_0.wav                         a.wav<TAB>call me at noon<TAB>ann<TAB>train

A table is TSV, CSV or JSON lines and stands beside the clips, under any name; its first line may name its columns, also
as Common Voice (path, sentence, client_id) and Hugging Face (file_name, transcription) do, and LJSpeech's lines of
``name|text|normalised text`` are read. Tables ``train.tsv``, ``dev.tsv`` and ``test.tsv``, or one in each folder of
those names, are the splits. Without a table the transcript is the first field of a file's name, up to the first
underscore, and the speaker is the second where every name has three or more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from kinformer.data.files import SourceFile, folder_files, reading, single_file
from kinformer.data.image_source import SPLITS
from kinformer.data.tables import TableFormat, lines_of, read_cells
from kinformer.data.wav import ENDINGS, sound_info
from kinformer.runtime.errors import KinformerError, nearest
from kinformer.runtime.parsing import parse_json_line
from kinformer.runtime.progress import note_once
from kinformer.runtime.words import plural

TABLE = "transcripts.tsv"
HELD_OUT = 0.05
_TABLES: dict[str, TableFormat] = {".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl"}
_COLUMNS = {
    "file": ("file", "path", "file_name", "filename", "audio"),
    "transcript": ("transcript", "transcription", "sentence", "text"),
    "speaker": ("speaker", "speaker_id", "client_id"),
    "split": ("split",),
}
"""The names of columns, ours first."""


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
        exists, table = path.exists(), path.is_file()
    if not exists:
        raise KinformerError(f"{path} does not exist; give a folder of WAV or FLAC files, or a .tsv that lists them.")
    tables = [path] if table else _tables(path)
    if tables:
        clips = [clip for item in tables for clip in _listed(item, path)]
        files = [*map(single_file, tables), *(single_file(Path(clip.path)) for clip in clips)]
    else:
        files = [file for file in folder_files(path, empty=True) if Path(file.name).suffix.lower() in ENDINGS]
        clips = _named(files)
    if not clips:
        raise KinformerError(f"{path}: holds no sound; give a folder of WAV or FLAC files, or a .tsv that lists them.")
    infos = (sound_info(clip.path) for clip in clips)
    clips = [replace(clip, samples=info.samples, rate=info.rate) for clip, info in zip(clips, infos, strict=True)]
    return clips, files, bool(tables)


def _tables(folder: Path) -> list[Path]:
    """Return the tables of transcripts in ``folder``: the table of the usual name, the tables of the splits, or the
    only table."""
    if (folder / TABLE).is_file():
        return [folder / TABLE]
    tables = [Path(file.path) for file in folder_files(folder, empty=True) if Path(file.name).suffix.lower() in _TABLES]
    parts = [table for table in tables if _split_of(table, folder)]
    if any(_split_of(table, folder) == "train" for table in parts):
        if others := [table for table in tables if table not in parts]:
            note_once(
                f"note: {folder}: the splits have tables, so {plural(len(others), 'other table')} are not read, "
                f"{others[0].name} among them."
            )
        return parts
    if len(tables) > 1:
        raise KinformerError(
            f"{folder}: holds {plural(len(tables), 'table')}, {tables[0].name} and {tables[1].name} among them; give "
            f"the one with the transcripts as `data`, or call it {TABLE}."
        )
    return tables


def _split_of(table: Path, folder: Path) -> str:
    """Return the split that a table is of, by its name or its folder's; empty if none."""
    parts = table.relative_to(folder).parts if table != folder else (table.name,)
    return SPLITS.get(table.stem.lower(), SPLITS.get(parts[0].lower(), "") if len(parts) > 1 else "")


def _listed(table: Path, place: Path) -> list[Clip]:
    """Return the clips that a table lists; ``place`` is the table, or the folder of the data."""
    clips, split, there = [], _split_of(table, place) if table != place else "", _Beside(table.parent)
    for number, row in _rows(table):
        clips.append(_clip(table, number, row, split, there))
    if not clips:
        raise KinformerError(f"{table}: lists no clip; write file, transcript and, if known, speaker and split.")
    return clips


def _rows(table: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the number of every line that lists a clip, and its cells by the names of their columns."""
    with reading(table), table.open("rb") as file:
        if (kind := _TABLES.get(table.suffix.lower(), "tsv")) == "jsonl":
            for number, line in enumerate(lines_of(file, str(table)), start=1):
                row = parse_json_line(table, number, line, "write one object per line") if line.strip() else None
                if isinstance(row, dict):
                    row = {str(name).lower(): str(value) for name, value in row.items() if value is not None}
                    yield number, {name: row[key] for name, key in _columns_in(list(row)).items()}
            return
        columns: list[str] | None = None
        for number, raw in _cells(file, str(table), kind):
            cells = [_decoded(cell, table, number).strip() for cell in raw]
            if columns is None:
                named = _columns_in([cell.lower() for cell in cells])
                if {"file", "transcript"} <= named.keys():
                    by_name = {key: name for name, key in named.items()}
                    columns = [by_name.get(cell.lower(), cell) for cell in cells]
                    continue
                columns = ["file", "transcript", "speaker", "split"]
            if not 2 <= len(cells) <= len(columns):
                raise KinformerError(
                    f"{table}, line {number}: has {plural(len(cells), 'column')} where file, transcript and, if known, "
                    "speaker and split are expected; mend it, or name the columns in the first line."
                )
            yield number, dict(zip(columns, cells, strict=False))


def _columns_in(names: Sequence[str]) -> dict[str, str]:
    """Return which of ``names`` is which column."""
    taken = {ours: next((name for name in usual if name in names), None) for ours, usual in _COLUMNS.items()}
    return {ours: name for ours, name in taken.items() if name is not None}


def _cells(file: BinaryIO, place: str, kind: TableFormat) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the lines of a table in cells; of LJSpeech's lines, the name and the normalised text."""
    name, bar, _ = file.readline().partition(b"|")
    file.seek(0)
    if kind == "tsv" or not bar or b"," in name:
        yield from read_cells(file, place, kind)
        return
    for number, line in enumerate(lines_of(file, place), start=1):
        if line:
            cells = line.split(b"|")
            yield number, [cells[0], cells[-1]]


def _decoded(cell: bytes, table: Path, number: int) -> str:
    try:
        return cell.decode("utf-8")
    except UnicodeDecodeError as error:
        raise KinformerError(
            f"{table}, line {number}: is no UTF-8 text ({error.reason}); save the transcripts as UTF-8."
        ) from None


class _Beside:
    """The sound files under the folder of a table, which names them by their paths, names or names without endings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, name: str) -> Path | None:
        path = self.folder / name
        if name and path.is_file():
            return path
        beside = self.names.get(name)
        return None if beside is None else Path(beside)

    @cached_property
    def names(self) -> dict[str, str | None]:
        """The path of every name, None of one that several files have."""
        names: dict[str, str | None] = {}
        for file in folder_files(self.folder, empty=True):
            if (path := Path(file.name)).suffix.lower() in ENDINGS:
                names |= {name: None if name in names else file.path for name in (path.name, path.stem)}
        return names


def _clip(table: Path, number: int, row: dict[str, str], split: str, beside: _Beside) -> Clip:
    file, transcript, split = row.get("file", ""), row.get("transcript", ""), row.get("split", "").lower() or split
    if not transcript:
        raise KinformerError(f"{table}, line {number}: its transcript is empty; complete or remove the line.")
    path = beside(file)
    if path is None:
        names = ", or name the columns file and transcript in the first line" if number == 1 else ""
        raise KinformerError(
            f"{table}, line {number}: the file {table.parent / file} is missing; mend its name or remove the "
            f"line{names}."
        )
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
