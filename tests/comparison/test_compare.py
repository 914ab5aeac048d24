"""A comparison from the command line: what it finds, keeps, resumes, and tells of what fails."""

import json

import pytest

from kinformer.family.build import configure
from kinformer.lab.cli.main import main
from kinformer.lab.comparison import compare as comparing
from kinformer.lab.comparison import training
from kinformer.lab.comparison.options import USES, CompareOptions, planned
from kinformer.lab.comparison.plan import USUAL_LENGTH, contestants, entrants, with_length, with_tokenizer
from kinformer.lab.comparison.record import read
from kinformer.lab.comparison.words import summary
from kinformer.runtime.errors import KinformerError


def test_all_measures_are_there(report):
    one, two, _ = report["entrants"]
    assert [each["name"] for each in report["entrants"]] == ["gpt", "linear-transformer:1,gpt:1", "short"]
    for each in (one, two):
        assert abs(each["parameters"] / 30000 - 1) <= 0.05
        assert [run["seed"] for run in each["runs"]] == [0, 1] and each["error"] is None
        assert [point["step"] for point in each["runs"][0]["curve"]] == [1, 2, 3, 4]
        assert all(point["flops"] == point["step"] * each["flops_step"] for point in each["runs"][0]["curve"])
        assert [row["context"] for row in each["runs"][0]["contexts"]] == [16, 32]
        assert each["runs"][0]["contexts"][0]["positions"] and not each["runs"][1]["contexts"]
        assert len(each["sweep"]) >= 3 and each["lr"] in [trial["lr"] for trial in each["sweep"]]
        assert each["training"]["seconds"] > 0 and each["training"]["anchor"] == "gpt"
        assert {point["batch"] for point in each["generation"]["points"]} == ({1, 16} if each is two else set())
        assert {(p["kind"], p["length"]) for p in each["lengths"]["points"]} == {
            (kind, length) for kind in ("forward", "step") for length in (16, 32)
        }
        assert each["memory"]["training"] >= 0  # of this process, which has room already
    assert [row["length"] for row in one["memory"]["lengths"]] == [16, 32]
    assert [layer["mixer"]["kind"] for layer in two["facts"]["config"]["layers"]] == ["linear", "softmax"]
    assert report["baselines"]["ngram_bits_per_byte"] > 0


def test_a_member_that_fails_is_told_and_the_others_go_on(report, compared):
    failed = report["entrants"][2]
    assert failed["error"].startswith("its model: ") and "impl" in failed["error"], failed["error"]
    assert failed["runs"] == []
    assert any(told.startswith("short is out. its model: ") for told in summary(read(compared[0] / "first.json")))


def test_nothing_is_computed_twice_and_a_member_more_costs_that_member_only(compared, report, monkeypatch, cheap):
    folder, flags, _ = compared
    trained = []
    real = training.train
    monkeypatch.setattr(
        training, "train", lambda options, **more: trained.append(options.member) or real(options, **more)
    )
    members = ["gpt", "linear-transformer:1,gpt:1"]
    assert main(["compare", *members, *flags]) == 0
    assert trained == []
    again = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    assert [each["runs"] for each in again["entrants"]] == [each["runs"] for each in report["entrants"][:2]]
    assert main(["compare", *members, "alibi", *flags]) == 0
    assert set(trained) == {"alibi"}


def test_the_same_seed_gives_the_same_losses(compared, report, tmp_path, cheap):
    own = list(compared[1])
    own[own.index("--out") + 1] = str(tmp_path)
    own[own.index("--seeds") + 1] = "1"
    assert main(["compare", "gpt", *own]) == 0
    again = json.loads((tmp_path / "comparison.json").read_text(encoding="utf-8"))["entrants"][0]
    before = report["entrants"][0]
    values = [[point["validation"] for point in each["runs"][0]["curve"]] for each in (again, before)]
    assert values[0] == values[1] and again["runs"][0]["test"] == before["runs"][0]["test"]


def test_a_stopped_comparison_goes_on_where_it_was(compared, report, tmp_path, monkeypatch, cheap):
    own = list(compared[1])
    own[own.index("--out") + 1] = str(tmp_path)
    done, real = [], training.train

    def until_the_fourth(options, **more):
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(options.out)
        return real(options, **more)

    monkeypatch.setattr(training, "train", until_the_fourth)
    assert main(["compare", "gpt", *own]) == 130
    first, later = list(done), []
    monkeypatch.setattr(training, "train", lambda options, **more: later.append(options.out) or real(options, **more))
    assert main(["compare", "gpt", *own]) == 0
    assert not set(first) & set(later) and later
    again = json.loads((tmp_path / "comparison.json").read_text(encoding="utf-8"))["entrants"][0]
    assert [run["test"] for run in again["runs"]] == [run["test"] for run in report["entrants"][0]["runs"]]


def test_a_run_that_is_killed_again_and_again_is_told(tmp_path):
    cache = training.Cache(tmp_path / "cache")
    for _ in range(training.ATTEMPTS):
        training._count_attempt(cache, "k", tmp_path / "run")
    with pytest.raises(KinformerError, match="ended 3 times before its first checkpoint"):
        training._count_attempt(cache, "k", tmp_path / "run")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--steps", "5", "--tokens", "9"], "--steps and --tokens contradict"),
        (["--minutes", "0"], "--minutes is 0 but must be above 0"),
        (["--sweep", "2"], "--sweep 2: does not have a middle"),
        (["--sweep", "3", "--total-minutes", "1"], "--total-minutes 1: takes learning rates from a table"),
        (["--for", "fun"], "--for: 'fun' is not one of long, memory, recall, speed, text"),
        (["--plan", "text"], "--plan text: did you mean --for?"),
        (["--lr", "0"], "--lr is 0 but must be above 0"),
        (["--lengths", "1,x"], "--lengths 1,x: is not a list of whole numbers"),
        (["--contexts", "twice"], "--contexts twice: is not a list of lengths"),
        (["--data", "-"], "--data -: is read once"),
        (["--data", "nowhere"], "nowhere"),
        (["--task", "mlm"], "--task mlm: gpt is causal"),
        (["--recipe", "huge"], "recipe of gpt: 'huge' is unknown"),
        (["--parameters", "7"], "gpt: no width gives 7 parameters"),
    ],
)
def test_bad_options_are_one_sentence(cli, tmp_path, flags, told):
    code, _, err = cli("compare", "gpt", "--recipe", "tiny", "--length", 16, "--out", tmp_path / "out", *flags)
    assert code == 2 and told in err, err
    assert not list((tmp_path / "out").glob("*.html"))


def test_the_default_comparison_is_of_text():
    members, chosen = planned((), CompareOptions())
    assert members == USES["text"]["members"] and (chosen.for_, chosen.total_minutes) == ("text", 20.0)
    assert int(chosen.set["local:layers.*.mixer.pattern.window"]) < (chosen.length or USUAL_LENGTH)
    assert planned(("gpt",), CompareOptions()) == (("gpt",), CompareOptions(total_minutes=20.0))
    assert planned(("gpt",), CompareOptions(sweep=3))[1].total_minutes is None
    _, other = planned((), CompareOptions(steps=5, seeds=4, set={"dropout": "0"}))
    assert (other.steps, other.total_minutes, other.seeds) == (5, None, 4)
    assert other.set["dropout"] == "0" and len(other.set) == 2


@pytest.mark.parametrize("use", USES)
def test_a_use_is_ready_and_gives_way_to_what_is_asked_for(use):
    members, chosen = planned(("rope", "gla"), CompareOptions(for_=use, rounds=2))
    assert members == ("rope", "gla") and chosen.rounds == 2 and not chosen.set
    assert {key: getattr(chosen, key) for key in USES[use].keys() - {"set", "members"}} == {
        key: value for key, value in USES[use].items() if key not in ("set", "members")
    }
    assert planned(("gpt",), CompareOptions(for_=use, total_minutes=9))[1].total_minutes == 9
    usual, hybrids = USES[use]["members"], [spec for spec in USES[use]["members"] if ":" in spec]
    assert len(entrants(usual, {})) == 5 and (hybrids or use in ("speed", "memory"))
    configs = [configure(entrant.member, "tiny", 64) for entrant in entrants(usual, {})]
    assert all(config.build().max_length is None for config in configs)  # each reads the longest text


def test_members_share_a_tokenizer_that_is_trained_once(tmp_path, text_file):
    options = CompareOptions(data=str(text_file), train_tokenizer=300, out=str(tmp_path), recipe="tiny")
    chosen = entrants(["gpt", "gla"], {})
    found = with_tokenizer(chosen, options)
    (path,) = tmp_path.glob("tokenizer-*.json")
    written = path.stat().st_mtime_ns
    assert found.tokenizer == str(path) and found.train_tokenizer is None
    assert with_tokenizer(chosen, options) == found and path.stat().st_mtime_ns == written
    both = contestants(chosen, with_length(chosen, found))
    assert len({one.config.input.vocab_size for one in both} - {256}) == 1


def test_a_comparison_plans_what_training_trains(tmp_path, text_file):
    """One planner: the settings that a task has and the member's objective are in both plans."""
    from kinformer.lab.comparison.plan import planned
    from kinformer.lab.runs.create import create
    from kinformer.lab.runs.options import TrainOptions

    cases = [("gpt", {"data": str(text_file)}), ("gpt", {"task": "recall"}), ("bert", {"data": str(text_file)})]
    for number, (name, options) in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        given = TrainOptions(member=name, out=str(tmp_path / str(number)), recipe="tiny", length=64, **options)
        task, plan = planned(given)
        run, settings = create(given, "cpu", 0.0)
        assert (task, plan.config, plan.settings, plan.options) == (run.task, run.config, settings, run.options)


def test_settings_that_cannot_train_are_refused_before_anything_is_trained(cli, tmp_path, monkeypatch):
    """Every entrant is checked as a new run is: alone it is an error, beside others it is out."""
    trained = []
    monkeypatch.setattr(comparing, "training_speeds", lambda entrants, *_: trained.append([e.error for e in entrants]))
    flags = ("--recipe", "tiny", "--length", 16, "--steps", 1, "--parameters", 30_000, "--out", tmp_path / "out")
    short = ("--set", "short:position.max_length=8")
    code, _, err = cli("compare", "short=gpt", *short, *flags)
    assert code == 2 and "--length 16: this model's positions end at 8" in err and trained == []
    monkeypatch.setattr(comparing, "_steps", lambda *_: (_ for _ in ()).throw(KinformerError("planned")))
    code, _, err = cli("compare", "gpt", "short=gpt", *short, *flags)
    assert code == 2 and "short is out: its model: --length 16: this model's positions end at 8" in err, err
    assert [error is None for error in trained[0]] == [True, False]
