"""The 39 classes of TIMIT's phones: the table of Lee and Hon, what a transcript becomes, the error rate of a run."""

import pytest

import kinformer
from kinformer.lab.data.sound import CLASSES, folded
from kinformer.runtime.errors import KinformerError
from tests.data.test_sound import tone, write

TABLE = """iy ih eh ey ae aa aw ay ah ao oy ow uh uw ux er ax ix axr ax-h jh ch s sh z zh f th v dh b d g p t k dx q
bcl dcl gcl pcl tcl kcl m n ng em en eng nx l r w y hh hv el pau epi h#"""
PHONES = TABLE.split()


def test_sixty_one_phones_are_thirty_nine_classes():
    assert len(set(PHONES)) == 61 and set(PHONES) - {"q"} <= set(CLASSES)
    assert len({CLASSES[phone] for phone in PHONES if phone != "q"}) == 39
    assert all(CLASSES[name] == name for name in CLASSES.values())


def test_a_transcript_becomes_classes():
    said, classes = "h# sh ix hv ae dcl q JH el h#", "sil sh ih hh ae sil jh l sil"
    assert folded(said.split()) == classes.split()
    assert folded(folded(PHONES)) == folded(PHONES)
    with pytest.raises(KinformerError, match="'tsch' in a transcript is none of TIMIT's phones"):
        folded(["tsch"])


def test_the_error_rate_of_a_run_is_that_of_classes(tmp_path):
    """Two transcripts of the same classes have no errors; characters cannot be folded."""
    names = ["h# sh ix q h#", "h# zh ih h#"]
    lines = []
    for number in range(40):
        write(tmp_path / "sounds" / f"{number}.wav", tone(0.7))
        lines.append(f"{number}.wav\t{names[number % 2]}")
    (tmp_path / "sounds" / "transcripts.tsv").write_text("\n".join(lines) + "\n")
    few = {"recipe": "tiny", "steps": 1, "batch_size": 2, "threads": 1, "device": "cpu", "quiet": True}
    for units in ("labels", "characters"):
        kinformer.train("speech-lsh", data=str(tmp_path / "sounds"), units=units, out=tmp_path / units, **few)
    plain, classes = (kinformer.evaluate(tmp_path / "labels", fold=fold).facts for fold in (None, "timit39"))
    assert classes["fold"] == "timit39" and classes["symbols"] == 4 * classes["utterances"] <= plain["symbols"]
    assert classes["baselines"]["most_frequent"] == 0 <= plain["baselines"]["most_frequent"]
    assert abs(classes["bits_per_symbol"] - plain["bits_per_symbol"]) < 1e-9
    with pytest.raises(KinformerError, match="this run writes characters"):
        kinformer.evaluate(tmp_path / "characters", fold="timit39")
