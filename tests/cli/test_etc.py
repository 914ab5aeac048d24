"""ETC on the command line: trained on masked bytes and masked sentences, measured with its global input and without."""

import json

import pytest

from kinformer.lab.runs.run import open_run

OPTIONS = ("--recipe", "tiny", "--length", "42", "--batch-size", "4", "--steps", "4", "--threads", "1")
pytestmark = pytest.mark.usefixtures("cache")


def test_masked_sentences(cli, text_file, tmp_path):
    out = tmp_path / "run"
    data = ("--data", text_file, "--validation-tokens", "300", "--out", out)
    code, told, _ = cli("train", "etc", *OPTIONS, *data, "--objective", "mlm-cpc", "--json")
    assert code == 0 and json.loads(told)["steps"] == 4
    assert open_run(out).training["objective"] == "mlm-cpc"
    code, told, _ = cli("evaluate", out, "--threads", "1", "--json")
    measured = json.loads(told)
    found = measured["global_input"]
    assert code == 0 and found["bits"] == pytest.approx(measured["bits_per_masked_byte"], rel=1e-4)
    assert found["sentences"] > 8 and 0 <= found["accuracy"] <= 1 and 1 / 4 <= found["chance"] < 1 / 3
    assert len({found["bits"], found["zeroed"], found["without"]}) == 3
    code, told, _ = cli("evaluate", out, "--threads", "1")
    assert code == 0 and f"{found['zeroed']:.4f} with the vectors of the global tokens zeroed" in told
    identified = f"of {found['sentences']} masked sentences identified by their global tokens"
    assert f"{identified} (by chance: {found['chance']:.1%})" in told


def test_a_run_without_masked_sentences_says_nothing_of_them(cli, text_file, tmp_path):
    out = tmp_path / "run"
    data = ("--data", text_file, "--validation-tokens", "300", "--out", out)
    assert cli("train", "etc", *OPTIONS, *data)[0] == 0
    code, told, _ = cli("evaluate", out, "--threads", "1", "--first", "300")
    assert code == 0 and "zeroed" in told and "masked sentences" not in told


def test_a_model_without_sentences_is_refused_before_anything_is_written(cli, text_file, tmp_path):
    code, _, told = cli(
        "train", "bert", *OPTIONS, "--data", text_file, "--objective", "mlm-cpc", "--out", tmp_path / "run"
    )
    assert code == 2 and "needs an encoder with a mask token and a global token for every sentence" in told
    assert not (tmp_path / "run").exists()
