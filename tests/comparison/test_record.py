"""Comparisons as files: written, read, merged; what is none is refused in a sentence."""

import json
from pathlib import Path

import pytest

from kinformer.lab.comparison.record import as_json, merged, read, save
from kinformer.runtime.errors import KinformerError
from tests.comparison.conftest import comparison, entrant


def test_it_is_read_as_it_was_written(tmp_path):
    made = comparison(entrant("a", [2.0, 2.1]), entrant("b", [2.2]))
    save(made, tmp_path / "a.json")
    assert as_json(read(tmp_path / "a.json")) == json.loads(json.dumps(as_json(made)))


def test_a_comparison_of_the_first_schema_is_read():
    path = Path(__file__).parents[2] / "docs" / "comparison" / "comparison.json"
    old, read_again = json.loads(path.read_text(encoding="utf-8")), read(path)
    assert old["schema"] == 1
    for before, now in zip(old["entrants"], read_again.entrants, strict=True):
        assert [run["value"] for run in before["runs"]] == list(now.values)
        assert [point["value"] for point in before["runs"][0]["curve"]] == [
            point.validation for point in now.runs[0].curve
        ]
        assert now.facts["config"] == before["facts"]["config"] and now.runs[0].contexts[0]["test"] > 0


def test_seeds_join_and_others_get_a_name_of_their_own():
    first = comparison(entrant("a", [2.0]), entrant("b", [2.5]))
    more = comparison(entrant("a", [9.0, 2.1]), entrant("b", [2.6], lr=0.5), entrant("c", [2.2]))
    found = merged([(Path("one.json"), first), (Path("two.json"), more)])
    assert [each.name for each in found.entrants] == ["a", "b", "b (two)", "c"]
    assert found.entrants[0].values == (2.0, 2.1)  # seed 0 of the first file, seed 1 of the second


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"task": "recall"}, "two.json: its task is recall, but one.json has next-token"),
        ({"data": {"fingerprint": "sha256:2"}}, "merge comparisons of the same data"),
    ],
)
def test_unlike_comparisons_do_not_merge(other, told):
    with pytest.raises(KinformerError) as error:
        merged([(Path("one.json"), comparison()), (Path("two.json"), comparison(**other))])
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data.clear(), "is not a comparison"),
        (lambda data: data.update(schema=9), "has schema 9"),
        (lambda data: data.update(entrants=[{"name": "a"}]), "entrants.0"),
        (lambda data: data["entrants"][0]["runs"][0].update(test="good"), "'good' is not a number"),
        (lambda data: data.update(seconds={"training": "long"}), "seconds.training: 'long' is not a number"),
        (lambda data: data.update(seconds="long"), "seconds: 'long' is not a table"),
        (lambda data: data["entrants"][0].update(state_bytes={"8": []}), "state_bytes.8: [] is not a whole number"),
        (lambda data: data.update(extra=1), "'extra' is not a field"),
    ],
)
def test_what_is_no_comparison_is_told(cli, tmp_path, change, told):
    data = as_json(comparison(entrant("a", [2.0])))
    data = json.loads(json.dumps(data))
    change(data)
    (tmp_path / "a.json").write_text(json.dumps(data))
    code, _, err = cli("compare", "--merge", tmp_path / "a.json", "--out", tmp_path / "out")
    assert code == 2 and told in err and len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_values_that_no_report_can_show_are_told(cli, tmp_path):
    data = json.loads(json.dumps(as_json(comparison(entrant("a", [2.0])))))
    data["entrants"][0]["lengths"] = {"points": [{"kind": "step"}]}
    (tmp_path / "a.json").write_text(json.dumps(data))
    code, _, err = cli("compare", "--merge", tmp_path / "a.json", "--out", tmp_path / "out")
    assert code == 2 and "a.json: is damaged" in err


def test_two_files_are_merged_as_one_types_it(cli, tmp_path):
    for name, made in (("a", entrant("a", [2.0, 2.1])), ("b", entrant("b", [2.5, 2.6]))):
        save(comparison(made), tmp_path / f"{name}.json")
    out = tmp_path / "out"
    code, told, err = cli("compare", "--merge", tmp_path / "a.json", tmp_path / "b.json", "--out", out)
    assert code == 0, err
    assert [each.name for each in read(out / "comparison.json").entrants] == ["a", "b"]
    assert "a has the best test bits per byte" in told and "b" in (out / "comparison.html").read_text(encoding="utf-8")
    assert "| b | 2.5500 |" in (out / "comparison.md").read_text(encoding="utf-8")
    code, _, err = cli("compare", "--merge", tmp_path / "a.json", tmp_path / "no.json", "--out", out)
    assert code == 2 and "no.json: the file does not exist" in err
