"""Sound from files: formats, rates, transcripts, splits, joined clips, and what is told of bad data."""

import struct
import wave
from contextlib import suppress

import numpy as np
import pytest
import torch

from kinformer.lab.data.sound import (
    HIGH,
    LOW,
    PAD,
    Calls,
    Resampler,
    SoundOptions,
    WavStream,
    find_clips,
    open_sound,
    read_sound,
    resample,
    sound_info,
)
from kinformer.runtime.errors import KinformerError


def tone(seconds=0.1, rate=8000, hertz=440.0):
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def write(path, samples, rate=8000, width=2, channels=1):
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.repeat(samples[:, None], channels, 1)
    if width == 1:
        raw = np.round(values * 128 + 128).clip(0, 255).astype(np.uint8).tobytes()
    else:
        scaled = np.round(values * 2 ** (8 * width - 1)).astype("<i8")
        raw = scaled[..., None].view(np.uint8)[..., :width].tobytes()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(raw)
    return path


@pytest.mark.parametrize(("width", "precise"), [(1, 1e-2), (2, 1e-4), (3, 1e-6), (4, 1e-6)])
@pytest.mark.parametrize("channels", [1, 2])
def test_every_width_of_samples(tmp_path, width, precise, channels):
    path = write(tmp_path / "a.wav", tone(), 11025, width, channels)
    samples, rate = read_sound(path)
    assert rate == 11025 and samples.dtype == np.float32
    assert np.abs(samples - tone()).max() < precise
    assert sound_info(path) == (11025, 800, channels)


@pytest.mark.parametrize(("name", "subtype"), [("a.flac", "PCM_16"), ("a.wav", "FLOAT"), ("b.wav", "PCM_24")])
def test_other_sounds_by_soundfile(tmp_path, name, subtype):
    soundfile = pytest.importorskip("soundfile")
    kind = "WAVEX" if name == "b.wav" else None
    soundfile.write(tmp_path / name, np.stack([tone(), tone()], 1), 8000, subtype=subtype, format=kind)
    samples, rate = read_sound(tmp_path / name)
    assert rate == 8000 and np.abs(samples - tone()).max() < 1e-4
    assert sound_info(tmp_path / name).samples == 800


def test_without_soundfile_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    (tmp_path / "a.flac").write_bytes(b"fLaC....")
    with pytest.raises(KinformerError, match=r"pip install 'kinformer\[audio\]'"):
        read_sound(tmp_path / "a.flac")


@pytest.mark.parametrize(("rate", "to"), [(44100, 8000), (8000, 16000), (11025, 8000), (48000, 44100)])
def test_resampling_keeps_tones_and_cuts_off_the_rest(rate, to):
    samples = torch.from_numpy(tone(0.5, rate)).float()
    got = resample(samples, rate, to)
    want = torch.from_numpy(tone(0.5, to)).float()
    inner = slice(to // 50, -to // 50)
    assert len(got) == len(want)
    assert (got - want)[inner].abs().max() < 2e-3
    if to < rate:
        high = resample(torch.from_numpy(tone(0.5, rate, to * 0.55)).float(), rate, to)
        assert high[inner].abs().max() < 2e-2


def test_resampling_piece_by_piece():
    samples = torch.randn(5000)
    stream, cuts = Resampler(44100, 8000), (0, 1, 30, 500, 3000, 5000)
    pieces = [stream.feed(samples[a:b], last=b == 5000) for a, b in zip(cuts, cuts[1:], strict=False)]
    assert torch.allclose(torch.cat(pieces), resample(samples, 44100, 8000), atol=1e-6)


def test_a_stream_of_wav_without_a_length(tmp_path):
    data = bytearray(write(tmp_path / "a.wav", tone()).read_bytes())
    data[40:44] = struct.pack("<I", 0xFFFFFFFF)
    (tmp_path / "b.wav").write_bytes(data)
    with (tmp_path / "b.wav").open("rb") as file:
        stream = WavStream(file)
        pieces = [stream.read(0.03) for _ in range(5)]
    assert [len(piece) for piece in pieces] == [240, 240, 240, 80, 0]
    assert np.abs(np.concatenate(pieces) - tone()).max() < 1e-4
    (tmp_path / "c.wav").write_bytes(b"no sound at all")
    with (tmp_path / "c.wav").open("rb") as file, pytest.raises(KinformerError, match="standard input: is no WAV"):
        WavStream(file)


def test_chunks_around_the_samples_of_a_stream_are_not_heard(tmp_path):
    data = write(tmp_path / "a.wav", tone()).read_bytes()
    more = b"LIST" + struct.pack("<I", 5) + b"abcde\0" + b"id3 " + struct.pack("<I", 400) + bytes(range(200)) * 2
    (tmp_path / "b.wav").write_bytes(data[:12] + more + data[12:] + more)
    form = struct.pack("<HHIIHHHHIH14s", 0xFFFE, 1, 8000, 16000, 2, 16, 22, 16, 4, 1, bytes(14))
    (tmp_path / "c.wav").write_bytes(data[:12] + b"fmt " + struct.pack("<I", 40) + form + data[36:] + more)
    for name in ("b.wav", "c.wav"):
        with (tmp_path / name).open("rb") as file:
            stream = WavStream(file)
            pieces = [stream.read(0.06) for _ in range(4)]
        assert [len(piece) for piece in pieces] == [480, 320, 0, 0]
        assert np.abs(np.concatenate(pieces) - tone()).max() < 1e-4


def changed(data, **fields):
    """A WAV of :func:`write` with other numbers in its head."""
    places = {"format": (20, "<H"), "channels": (22, "<H"), "rate": (24, "<I"), "bits": (34, "<H"), "size": (40, "<I")}
    data = bytearray(data)
    for name, value in fields.items():
        struct.pack_into(places[name][1], data, places[name][0], value)
    return bytes(data)


LIES = {
    "rate 0": (lambda data: changed(data, rate=0), "has 0 samples a second, but 1 to"),
    "rate": (lambda data: changed(data, rate=4_000_000_000), "has 4,000,000,000 samples a second"),
    "4 GB": (
        lambda data: changed(data, size=0xFFFFFFF0),
        "says that it holds 4,294,967,280 bytes of samples, but holds 1,600",
    ),
    "cut": (lambda data: data[:1000], "says that it holds 1,600 bytes of samples, but holds 956"),
    "one byte": (lambda data: data[:-1], "but holds 1,599"),
    "no data": (lambda data: data[:36], "is not readable sound|holds 0 samples"),
    "no channels": (lambda data: changed(data, channels=0), "is not readable sound"),
    "wide": (lambda data: changed(data, bits=64), "is not readable sound"),
    "NaN": (
        lambda data: changed(data[:44], format=3, bits=32) + b"\0\0\xc0\x7f" * 400,
        "sample 0 is nan",
    ),
}


@pytest.mark.parametrize("case", LIES)
def test_files_that_lie_are_refused(tmp_path, case):
    pytest.importorskip("soundfile")
    change, message = LIES[case]
    path = write(tmp_path / "a.wav", tone())
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(KinformerError, match=f"a.wav: .*({message})") as error:
        read_sound(path)
    assert "\n" not in str(error.value)


def test_files_cut_off_anywhere_are_refused(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    write(tmp_path / "a.wav", tone(0.01))
    soundfile.write(tmp_path / "b.wav", tone(0.01), 8000, subtype="FLOAT")
    soundfile.write(tmp_path / "c.flac", tone(0.01), 8000)
    for path in sorted(tmp_path.iterdir()):
        data = path.read_bytes()
        for size in range(len(data)):
            path.write_bytes(data[:size])
            with pytest.raises(KinformerError, match=path.name):
                read_sound(path)
        for place in range(0, len(data) * 8, 5):
            flipped = bytearray(data)
            flipped[place // 8] ^= 1 << place % 8
            path.write_bytes(flipped)
            with suppress(KinformerError):
                read_sound(path)
    (tmp_path / "d.wav").mkdir()
    with pytest.raises(KinformerError, match="d.wav: is a folder"):
        read_sound(tmp_path / "d.wav")


@pytest.fixture
def digits(tmp_path):
    for digit in range(4):
        for speaker in ("ann", "bob"):
            for number in range(5):
                write(tmp_path / f"{digit}_{speaker}_{number}.wav", tone(0.05 + 0.01 * digit))
    return tmp_path


def test_transcripts_from_names(digits):
    sound = open_sound(str(digits), SoundOptions(pattern="*_[0-1].wav"))
    assert (sound.rate, sound.unit, sound.symbols) == (8000, "labels", ("0", "1", "2", "3"))
    test = sound.splits["test"]
    assert len(test.lengths) == 16 and len(sound.splits["train"].lengths) == 22
    number = next(n for n in range(16) if test.name(n) == "2_bob_1.wav")
    assert test.transcript(number) == "2" and len(test.samples(number)) == test.lengths[number] == 560
    again = open_sound(str(digits), SoundOptions(pattern="*_[0-1].wav"))
    assert again.identity == sound.identity


def test_a_held_out_speaker(digits):
    sound = open_sound(str(digits), SoundOptions(speaker="ann"))
    spoken = {
        name: {part.name(n).split("_")[1] for n in range(len(part.lengths))} for name, part in sound.splits.items()
    }
    assert spoken == {"train": {"bob"}, "validation": {"bob"}, "test": {"ann"}}


def test_joined_clips_are_of_one_speaker_and_each_is_there(digits):
    sound = open_sound(str(digits), SoundOptions(join=(3, 5), pattern="*_[0-2].wav"))
    test = sound.splits["test"]
    names = [test.name(n).split(" + ") for n in range(len(test.lengths))]
    assert sorted(sum(names, [])) == sorted(path.name for path in digits.glob("*_[0-2].wav"))
    assert all(3 <= len(some) <= 5 and len({name.split("_")[1] for name in some}) == 1 for some in names)
    for n, some in enumerate(names):
        assert test.transcript(n) == " ".join(name[0] for name in some)
        assert len(test.samples(n)) == test.lengths[n]


def test_a_table_of_transcripts(tmp_path, caplog):
    caplog.set_level("INFO", "kinformer")
    for name, rate in (("a", 8000), ("b", 8000), ("c", 16000), ("d", 8000)):
        write(tmp_path / "clips" / f"{name}.wav", tone(0.1, rate), rate)
    rows = ["file\ttranscript\tsplit", "clips/a.wav\tno go\ttrain", "clips/b.wav\tgo on\ttrain"]
    rows += ["clips/c.wav\tgo\tdev", "clips/d.wav\ton\ttest"]
    (tmp_path / "transcripts.tsv").write_text("\n".join(rows))
    for path in (tmp_path, tmp_path / "transcripts.tsv"):
        sound = open_sound(str(path), SoundOptions())
        assert (sound.unit, sound.symbols) == ("characters", (" ", "g", "n", "o"))
        assert [sound.splits[name].transcript(0) for name in ("validation", "test")] == ["go", "on"]
        assert len(sound.splits["validation"].samples(0)) == 800
    assert "1 of 4 clips have 16,000 samples a second and are resampled to 8,000" in caplog.text
    words = open_sound(str(tmp_path), SoundOptions(units="labels"))
    assert words.symbols == ("go", "no", "on")


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["a.wav"], "line 1: has 1 column where file, transcript"),
        (["a.wav\t"], "line 1: its transcript is empty"),
        (["z.wav\thello"], "line 1: the file .* is missing"),
        (["a.wav\thello\tann\tnowhere"], "line 1: its split 'nowhere' is unknown"),
        (
            ["a.wav\tab\tann\ttrain", "b.wav\tab\tann\tdev", "c.wav\tax\tann\ttest"],
            "has the symbol 'x', which no train",
        ),
        (["a.wav\tab"], r"too few clips \(1\)"),
        ([""], "transcripts.tsv: lists no clip"),
    ],
)
def test_mistakes_in_a_table(tmp_path, lines, told):
    for name in "abc":
        write(tmp_path / f"{name}.wav", tone())
    (tmp_path / "transcripts.tsv").write_text("\n".join(lines) + "\n")
    with pytest.raises(KinformerError, match=told):
        open_sound(str(tmp_path), SoundOptions())


SAID = ["go", "no, go", "on"]
LAYOUTS = {
    "Hugging Face": {"metadata.csv": "file_name,transcription\n{0}.wav,go\n{1}.wav,\"no, go\"\n{2}.wav,on\n"},
    "JSON lines": {"metadata.jsonl": "".join(
        f'{{{{"file_name": "{{{n}}}.wav", "transcription": "{said}"}}}}\n' for n, said in enumerate(SAID)
    )},
    "Common Voice": {
        "train.tsv": "client_id\tpath\tsentence\tup_votes\nann\t{0}.wav\tgo\t2\n",
        "dev.tsv": "client_id\tpath\tsentence\tup_votes\nbob\t{1}.wav\tno, go\t2\n",
        "test.tsv": "client_id\tpath\tsentence\tup_votes\neve\t{2}.wav\ton\t2\n",
        "invalidated.tsv": "client_id\tpath\tsentence\tup_votes\neve\tz.wav\ton\t2\n",
    },
    "LJSpeech": {"metadata.csv": "{0}|GO|go\n{1}|No, go|no, go\n{2}|on|on\n"},
    "another name": {"words.tsv": "\ufeff{0}.wav\tgo\n{1}.wav\tno, go\n{2}.wav\ton\n\n"},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_that_people_have(tmp_path, layout):
    """The names of the clips say nothing, so that a transcript which is taken from one is seen."""
    for name in ("3_x", "4_x", "5_x"):
        write(tmp_path / ("clips" if layout in ("Common Voice", "LJSpeech") else "") / f"{name}.wav", tone())
    for name, text in LAYOUTS[layout].items():
        (tmp_path / name).write_text(text.format("3_x", "4_x", "5_x"))
    clips, files, table = find_clips(tmp_path)
    clips = sorted(clips, key=lambda clip: clip.path)
    assert [clip.transcript for clip in clips] == SAID
    assert table and all(clip.samples == 800 for clip in clips) and len(files) > 3
    if layout == "Common Voice":
        parts = [("train", "ann"), ("validation", "bob"), ("test", "eve")]
        assert [(clip.split, clip.speaker) for clip in clips] == parts


def test_lines_end_at_line_ends_alone_and_tables_are_not_left_out(digits):
    names = sorted(path.name for path in digits.glob("*.wav"))
    (digits / "a.csv").write_text("".join(f"{name},two\u2028lines\n" for name in names))
    assert {clip.transcript for clip in find_clips(digits)[0]} == {"two\u2028lines"}
    (digits / "b.csv").write_text("a,b\n")
    with pytest.raises(KinformerError, match="holds 2 tables, a.csv and b.csv among them"):
        find_clips(digits)
    (digits / "a.csv").unlink()
    with pytest.raises(KinformerError, match="line 1: the file .*/a is missing; .* name the columns file and t"):
        find_clips(digits)


def test_rates_and_rows_that_cannot_be_read(digits):
    with pytest.raises(KinformerError, match="47,999 samples a second cannot be resampled to 16,000.*ffmpeg"):
        Resampler(47_999, 16_000)  # its filters would take 6 GB
    (digits / "a.jsonl").write_text('["3_ann_0.wav", "three"]\n')
    with pytest.raises(KinformerError, match="line 1: its transcript is empty"):
        find_clips(digits)


def test_mistakes(digits):
    for options, told in (
        (SoundOptions(speaker="eve"), "held_out_speaker eve: is not in .*speakers are ann, bob"),
        (SoundOptions(pattern="x*"), r"test_clips x\*: matches no file"),
        (SoundOptions(pattern="*", speaker="ann"), "contradict"),
    ):
        with pytest.raises(KinformerError, match=told):
            open_sound(str(digits), options)
    with pytest.raises(KinformerError, match="does not exist"):
        open_sound(str(digits / "none"), SoundOptions())
    with pytest.raises(KinformerError, match="held_out_speaker ann: is for recordings"):
        open_sound("dtmf", SoundOptions(speaker="ann"))
    write(digits / "5_ann_0.wav", np.zeros(0))
    with pytest.raises(KinformerError, match="5_ann_0.wav: holds 0 samples"):
        open_sound(str(digits), SoundOptions())
    (digits / "5_ann_0.wav").write_bytes(b"")
    with pytest.raises(KinformerError, match="5_ann_0.wav: is empty, not sound; give WAV or FLAC"):
        open_sound(str(digits), SoundOptions())


def test_telephone_tones_are_those_of_their_keys():
    calls = Calls("test")
    for number in range(5):
        samples = calls.samples(number).numpy()
        assert len(samples) == calls.lengths[number] and np.array_equal(samples, calls.samples(number).numpy())
        at = int(calls.before[number])
        for place, key in enumerate(calls.transcript(number).split()):
            length = int(calls.tones[number, place])
            power = np.abs(np.fft.rfft(samples[at : at + length] * np.hanning(length), 8000)) ** 2
            row = np.argmax([power[round(f * 0.98) : round(f * 1.02)].max() for f in LOW])
            column = np.argmax([power[round(f * 0.98) : round(f * 1.02)].max() for f in HIGH])
            assert PAD[row][column] == key
            at += length + int(calls.pauses[number, place])
