"""Small habits: chat and streamed text, lists of tasks and parts, estimates of runs, verbose output, changed rates."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kinformer
from kinformer.runtime.errors import KinformerError


def test_streamed_pieces_are_what_the_command_writes(cli, gpt_run):
    pieces = list(kinformer.stream(gpt_run, "wind ", max_new_tokens=30, seed=5, min_p=0.01))
    code, out, _ = cli(
        "generate", gpt_run, "--prompt", "wind ", "--no-echo", "--max-new-tokens", 30, "--seed", 5, "--min-p", 0.01
    )
    assert code == 0 and "".join(pieces) == out and len(pieces) > 5
    text = "".join(pieces)
    first = "".join(kinformer.stream(gpt_run, "wind ", max_new_tokens=30, seed=5, min_p=0.01, stop=text[4]))
    assert text.startswith(first) and text[4] not in first


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_p": 2.0}, "min_p is 2 but must be above 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0 but"),
        ({"samples": 2}, "in turns a single text is continued"),
        ({"max_new": 2}, "max_new_tokens"),
    ],
)
def test_wrong_options_of_a_stream_are_refused_when_it_is_called(gpt_run, options, words):
    with pytest.raises(KinformerError, match=words):
        kinformer.stream(gpt_run, "a", **options)


def test_a_chat_carries_its_text_from_line_to_line(cli, gpt_run):
    greedy = ("--temperature", 0, "--max-new-tokens", 6)
    code, out, err = cli("chat", gpt_run, *greedy, stdin=b"wind\ntree\n/new\nwind\n/quit\nno more\n")
    model, tokenizer = kinformer.load(gpt_run), kinformer.open_run(gpt_run).tokenizer
    said, texts = np.zeros(0, np.int64), []
    for line in ("wind\n", "tree\n"):
        said = np.concatenate([said, tokenizer.encode(line)])
        new = kinformer.generate(model, said[None], max_new_tokens=6, temperature=0.0)[0].tolist()
        stream, said = tokenizer.stream(), np.concatenate([said, new])
        texts.append("".join([*(stream.feed(token) for token in new), stream.finish()]))
    assert code == 0 and out == "".join(f"{text}\n" for text in (*texts, texts[0])), err


def test_a_chat_frames_lines_and_refuses_a_run_that_continues_nothing(cli, gpt_run, make_run):
    code, out, err = cli("chat", gpt_run, "--before", "A: ", "--after", r"\nB:", "--seed", 2, stdin=b"wind\n")
    assert code == 0 and out == "".join(kinformer.stream(gpt_run, "A: wind\nB:", seed=2)) + "\n", err
    facts = json.loads(cli("chat", gpt_run, "--seed", 2, "--json", stdin=b"wind\n")[1])
    assert facts == {"line": "wind", "text": "".join(kinformer.stream(gpt_run, "wind\n", seed=2))}
    assert cli("chat", make_run("bert"), stdin=b"a\n")[0] == 2


def test_a_chat_of_an_imported_model_uses_its_chat_template(cli, gpt_run, tmp_path):
    run = shutil.copytree(gpt_run, tmp_path / "run")
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
    (run / "chat_template.jinja").write_text(template)
    greedy = {"temperature": 0.0, "max_new_tokens": 6}
    code, out, err = cli("chat", run, "--temperature", 0, "--max-new-tokens", 6, stdin=b"hi\nso\n/new\nso\n")
    first = "".join(kinformer.stream(run, "<user>hi<assistant>", **greedy))
    second = "".join(kinformer.stream(run, f"<user>hi<assistant>{first}<user>so<assistant>", **greedy))
    third = "".join(kinformer.stream(run, "<user>so<assistant>", **greedy))
    assert code == 0 and out == f"{first}\n{second}\n{third}\n", err
    assert cli("chat", run, "--after", "!", "--seed", 2, stdin=b"hi\n")[1] == (
        "".join(kinformer.stream(run, "hi!", seed=2)) + "\n"
    )


def test_tasks_and_parts_are_listed_and_every_title_is_whole_in_80_columns(cli):
    listed = json.loads(cli("list", "tasks", "--json")[1])
    assert [item["name"] for item in listed] == [task.name for task in kinformer.tasks()]
    assert "next-token" in cli("list", "tasks")[1]
    parts = json.loads(cli("list", "parts", "--json")[1])
    assert {"rope", "alibi"} <= set(parts["position"]) and "pattern (" in cli("list", "parts")[1]
    table = cli("list", "--verbose")[1]
    assert max(map(len, table.splitlines())) <= 80 and "…" not in table
    short = cli("list")[1].splitlines()
    assert len(short) <= 40 and max(map(len, short)) <= 80 and short[0].startswith("state ")
    words = set(re.findall(r"[\w-]+", " ".join(short)))
    assert {member.name for member in kinformer.members()} <= words
    assert cli("list", "parts", "--by", "year")[0] == 2


def test_help_is_a_command_too(cli):
    assert cli("help") == cli("--help") and cli("help", "pack") == cli("pack", "--help")
    assert cli("help", "local")[1] == cli("show", "local")[1] != ""
    assert cli("help", "speech")[1] == cli("train", "speech-lsh", "--task", "speech", "--help")[1] != ""
    code, _, err = cli("help", "trian")
    assert code == 2 and "did you mean 'train'" in err


def test_former_names_of_options_still_work(cli, gpt_run):
    measured = [cli("evaluate", gpt_run, "--json", *options)[1] for options in (
        ("--first", 300, "--contexts", "1x"), ("--max-bytes", 300, "--lengths=1x"), ("--max_items=300", "--lengths=1x")
    )]  # fmt: skip
    facts = [json.loads(out) for out in measured]
    assert len({fact["bits_per_byte"] for fact in facts}) == 1 and facts[0]["bytes"] == 300 and facts[0]["lengths"]
    again = kinformer.evaluate(gpt_run, max_bytes=300, lengths="1x").facts
    assert again["bits_per_byte"] == pytest.approx(facts[0]["bits_per_byte"])
    with pytest.raises(KinformerError, match=r"^limit is 2 but must be at most 1"):
        kinformer.verify(gpt_run, limit=2)


def test_a_prompt_needs_no_name(cli, gpt_run, tmp_path):
    same = ("--max-new-tokens", 5, "--seed", 1, "--quiet")
    assert cli("generate", gpt_run, "wind", *same) == cli("generate", gpt_run, "--prompt", "wind", *same)
    code, _, err = cli("generate", gpt_run, "wind", "--prompt", "tree", *same)
    assert code == 2 and "there must be one prompt" in err


def test_a_training_names_its_folder(cli, text_file, tmp_path, monkeypatch):
    from kinformer.lab.runs.train import _new_folder

    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        assert sorted(map(str, pool.map(_new_folder, ["rope"] * 4))) == [
            f"runs/rope-{number}" for number in range(1, 5)
        ]
    (tmp_path / "runs" / "rope-2").rmdir()
    sizes = (
        "--data",
        text_file,
        "--recipe",
        "tiny",
        "--steps",
        1,
        "--length",
        16,
        "--batch-size",
        2,
        "--device",
        "cpu",
    )
    code, _, err = cli("train", "rope", *sizes)
    assert code == 0 and err.startswith("kinformer: the run folder is runs/rope-2\n")
    assert kinformer.open_run("runs/rope-2").member == "rope"
    assert cli("train", "rope", *sizes, "--task", "mlm")[0] == 2 and not (tmp_path / "runs" / "rope-5").exists()
    code, _, err = cli("train", "gtp")
    assert code == 2 and "did you mean 'gpt'" in err
    code, _, err = cli("train", "gpt", "--resume")
    assert code == 2 and "--out: is needed to resume a run" in err


def test_a_run_is_estimated_as_it_is(cli, gpt_run):
    facts = json.loads(cli("estimate", gpt_run, "--json")[1])
    model = kinformer.load(gpt_run)
    assert facts["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert facts["recipe"] == "tiny" and cli("estimate", gpt_run, "--recipe", "small")[0] == 2


def test_verbose_says_more_and_quiet_output_is_the_same(cli, gpt_run):
    plain, verbose = (cli("generate", gpt_run, "--prompt", "a", "--seed", 1, *extra) for extra in ((), ("--verbose",)))
    assert plain[1] == verbose[1] and "torch 2" in verbose[2] and "processor time" in verbose[2]
    assert "processor time" not in plain[2]


@pytest.mark.parametrize(("option", "value"), [("--set", "layers.0.mixer.num_heads=2e0"), ("--vocab-size", "1k")])
def test_counts_are_written_alike_everywhere(cli, option, value):
    assert cli("estimate", "gpt", "--recipe", "tiny", option, value, "--length", "1e2")[0] == 0


def test_lists_of_counts_take_k(cli, gpt_run):
    code, out, err = cli("evaluate", gpt_run, "--contexts", "16,0.032k", "--first", "0.5k", "--json")
    assert code == 0, err
    assert "32" in out


def test_a_resumed_run_may_have_a_new_rate(cli, text_file, tmp_path):
    tiny = (
        "gpt",
        "--data",
        text_file,
        "--recipe",
        "tiny",
        "--length",
        32,
        "--batch-size",
        4,
        "--out",
        tmp_path / "run",
    )
    few = ("--validation-tokens", 200, "--device", "cpu", "--set", "training.log_every=1")
    assert cli("train", *tiny, *few, "--steps", 4)[0] == 0
    code, _, err = cli("train", *tiny, *few, "--steps", 8, "--resume", "--lr", 1e-5)
    assert code == 0 and "highest learning rate is 1e-05 from here on, and was 0.001" in err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = {row["step"]: row["lr"] for row in rows if "lr" in row}
    assert rates[4] > 1e-5 >= rates[8]
    assert kinformer.open_run(tmp_path / "run").training["lr"] == 1e-5
