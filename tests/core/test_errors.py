"""Messages name options as whoever reads them writes them."""

import pickle

import pytest

import kinformer
from kinformer.runtime import errors
from kinformer.runtime.errors import KinformerError, as_flags, nearest, spelled


@pytest.mark.parametrize(
    ("message", "in_python", "on_the_command_line"),
    [
        ("`max_bytes` is 0", "max_bytes is 0", "--max-bytes is 0"),
        ("`a` and ``code`` and `B`", "a and ``code`` and `B`", "--a and ``code`` and `B`"),
        ("give `set` layers=4.", 'give set={"layers": 4}.', "give --set layers=4."),
        ("(`set` a.*.b=rope), or", '(set={"a.*.b": "rope"}), or', "(--set a.*.b=rope), or"),
        ("as `set` a=false `set` b=[1,2].", 'as set={"a": False, "b": [1,2]}.', "as --set a=false --set b=[1,2]."),
        ("`set` 'a={\"k\": 1}' does", 'set={"a": {"k": 1}} does', "--set 'a={\"k\": 1}' does"),
    ],
)
def test_spelling(message, in_python, on_the_command_line):
    assert spelled(message) == str(KinformerError(message)) == in_python
    with as_flags():
        assert spelled(message) == str(KinformerError(message)) == on_the_command_line
        assert f"{KinformerError(message)}" == on_the_command_line
    assert str(pickle.loads(pickle.dumps(KinformerError(message)))) == in_python


def test_python_and_the_command_line_say_the_same_in_their_own_words(cli, tmp_path):
    with pytest.raises(KinformerError, match=r"^first is 0 but must be 1 or more\.$"):
        kinformer.evaluate(tmp_path, max_bytes=0)
    assert cli("evaluate", tmp_path, "--max-bytes", 0)[2] == "kinformer: --first is 0 but must be 1 or more.\n"
    with pytest.raises(KinformerError, match=r'^set=\{"layers"'):
        raise KinformerError("`set` layers=4: is too few.")


def test_a_mark_inside_another_message_survives():
    inner = KinformerError("`lr` is -1")
    with as_flags():
        assert str(KinformerError(f"run.toml: {inner.message}")) == "run.toml: --lr is -1"


def test_a_word_that_is_too_long_to_be_near_is_compared_with_no_name(monkeypatch):
    assert nearest("temperatur", ["temperature", "n"]) == "did you mean 'temperature'?"
    compared = []
    monkeypatch.setattr(errors, "get_close_matches", lambda word, names, **_: compared.append((word, names)) or [])
    assert nearest("x" * 1000, ["model", "temperature"]) == "valid names are model, temperature."
    nearest("temperatures", ["model", "temperature"])
    assert compared == [("temperatures", ["temperature"])]
