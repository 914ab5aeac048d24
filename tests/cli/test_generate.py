"""``kinformer generate``: the library's tokens, streamed as text."""

import inspect
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kinformer
from kinformer.generation.session import Session
from kinformer.lab import tasks
from kinformer.lab.cli.using import _Echo
from kinformer.lab.data import ByteTokenizer, FileTokenizer
from kinformer.lab.data.tokenizer import ByteStream
from kinformer.lab.runs.inference import check_drawing
from kinformer.lab.runs.options import GenerateOptions
from kinformer.lab.tasks.image import _Picker
from kinformer.lab.tasks.table import TASKS
from kinformer.lab.tasks.task import DRAWING
from kinformer.runtime.errors import KinformerError


def expected(model, prompt, **options):
    tokens = torch.tensor([list(prompt.encode())])
    return kinformer.generate(model, tokens, **options)


def test_the_text_is_that_of_the_library(cli, linear_run, load):
    options = {"max_new_tokens": 40, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 3}
    flags = [part for name, number in options.items() for part in (f"--{name.replace('_', '-')}", number)]
    code, out, err = cli("generate", linear_run, "--prompt", "the wind", "--no-echo", *flags, "--device", "cpu")
    tokens = expected(load(linear_run), "the wind", **options)[0]
    assert code == 0
    assert out == ByteTokenizer().decode(tokens)
    assert "8 prompt tokens in" in err and "40 new tokens" in err and "tokens/s" in err
    assert "state 4.3 KiB (4,360 bytes)" in err and err.endswith("seed 3\n")


def test_the_prompt_may_come_from_a_file_or_standard_input(cli, gpt_run, tmp_path, monkeypatch):
    path = tmp_path / "prompt.txt"
    path.write_text("naïve €", encoding="utf-8")
    flags = ["--max-new-tokens", 20, "--temperature", 0, "--device", "cpu", "--chunk", 3]
    told = cli("generate", gpt_run, "--prompt", "naïve €", *flags)[1]
    assert cli("generate", gpt_run, "--prompt-file", path, *flags)[1] == told != ""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    assert cli("generate", gpt_run, "--prompt", "-", *flags)[1] == told


def test_json_holds_samples_that_differ_and_do_not_depend_on_their_number(cli, gpt_run):
    flags = ["--prompt", "under", "--max-new-tokens", 12, "--seed", 1, "--json", "--device", "cpu"]
    three = json.loads(cli("generate", gpt_run, *flags, "--samples", 3)[1])
    one = json.loads(cli("generate", gpt_run, *flags)[1])
    assert (three["prompt_tokens"], three["seed"], len(three["samples"])) == (5, 1, 3)
    assert three["samples"][0] == one["samples"][0]
    assert len({sample["text"] for sample in three["samples"]}) == 3
    assert all(len(sample["tokens"]) == 12 and not sample["stopped"] for sample in three["samples"])
    assert three["state_bytes"] > one["state_bytes"] > 0 and one["tokens_per_second"] > 0
    out = cli("generate", gpt_run, *flags[:-3], "--samples", 2, "--device", "cpu")[1]
    assert "--- sample 1 of 2 ---" in out and one["samples"][0]["text"] in out


def test_the_prompt_stands_before_what_continues_it(cli, linear_run):
    flags = ["--prompt", "the wind", "--max-new-tokens", 12, "--seed", 1, "--device", "cpu"]
    alone, told = cli("generate", linear_run, *flags, "--no-echo"), cli("generate", linear_run, *flags)
    assert told[1] == "the wind" + alone[1] and len(alone[1]) > 6
    two = cli("generate", linear_run, *flags, "--samples", 2)[1]
    assert f"--- sample 1 of 2 ---\nthe wind{alone[1]}\n" in two
    assert cli("generate", linear_run, *flags, "--temperature", "0.8")[1] == told[1]
    code, out, err = cli("generate", linear_run, *flags, "--quiet")
    assert (code, out, err) == (0, told[1], "")


def test_a_prompt_is_absorbed_once_for_all_samples(cli, linear_run, monkeypatch):
    shapes, feed = [], Session.feed
    monkeypatch.setattr(Session, "feed", lambda self, tokens: shapes.append(tuple(tokens.shape)) or feed(self, tokens))
    assert cli("generate", linear_run, "--prompt", "the wind", "--samples", 3, "--max-new-tokens", 2)[0] == 0
    assert shapes == [(1, 8)]


def test_drafts_change_nothing_but_the_passes(cli, linear_run, gpt_run, tokenized_run):
    flags = ["generate", linear_run, "--prompt", "the wind the wind", "--max-new-tokens", 30, "--seed", 1, "--json"]
    plain = json.loads(cli(*flags, "--device", "cpu", "--samples", 2)[1])
    for draft in ("ngram", linear_run, gpt_run):
        told = json.loads(cli(*flags, "--draft", draft, "--draft-length", 3, "--device", "cpu", "--samples", 2)[1])
        assert told["samples"] == plain["samples"]
        facts = told["drafts"]
        assert facts["drawn"] >= 30 and facts["tokens_per_pass"] == facts["drawn"] / facts["passes"] >= 1
    for draft, message in {
        str(tokenized_run): "has another task or tokenizer than",
        "mtp": "the draft 'mtp' needs a model that predicts further tokens; train one with --set ahead=3",
        "nowhere": "nowhere",
    }.items():
        code, _, err = cli(*flags, "--draft", draft)
        assert code == 2 and message in err
    assert "--draft-length is 0 but must be 1 or more" in cli(*flags, "--draft-length", 0)[2]


def test_a_stop_string_ends_the_text_before_it(cli, linear_run):
    flags = ["--prompt", "under", "--max-new-tokens", 60, "--seed", 4, "--json", "--device", "cpu"]
    free = json.loads(cli("generate", linear_run, *flags)[1])["samples"][0]
    stop = next(free["text"][n : n + 2] for n in range(20, 50) if "\ufffd" not in free["text"][n : n + 2])
    told = json.loads(cli("generate", linear_run, *flags, "--stop", stop, "--stop", "never seen")[1])["samples"][0]
    assert told["stopped"] and told["text"] == free["text"][: free["text"].find(stop)]
    assert len(told["tokens"]) < 60


def test_a_terminal_does_not_obey_the_text_of_a_model(monkeypatch):
    for framed, said in ((True, "> a\\x1b[2Jb\n"), (False, "> a\x1b[2Jb\r\n")):
        terminal = io.StringIO()
        terminal.isatty = lambda framed=framed: framed
        monkeypatch.setattr(sys, "stdout", terminal)
        _Echo("> ")("a\x1b[2Jb\r\n")
        assert terminal.getvalue() == said


def test_a_token_that_ends_a_text_ends_it(cli, linear_run):
    flags = ["--prompt", "under", "--max-new-tokens", 60, "--seed", 4, "--json", "--device", "cpu"]
    free = json.loads(cli("generate", linear_run, *flags)[1])["samples"][0]
    at = next(n for n in range(20, 50) if free["tokens"][n] not in free["tokens"][:n])
    ends = f"input.eos_token=[{free['tokens'][at]}, 255]"
    told = json.loads(cli("generate", linear_run, *flags, "--set", ends)[1])["samples"][0]
    assert told == {
        "text": bytes(free["tokens"][:at]).decode(errors="replace"),
        "tokens": free["tokens"][: at + 1],
        "stopped": True,
    }


def test_the_seed_is_told_and_repeats_the_text(cli, linear_run):
    flags = ["--prompt", "sings", "--max-new-tokens", 30, "--device", "cpu"]
    _, first, err = cli("generate", linear_run, *flags)
    seed = err.split()[-1]
    assert cli("generate", linear_run, *flags, "--seed", seed)[1] == first
    assert cli("generate", linear_run, *flags)[1] != first


def test_the_default_number_of_tokens_stops_where_positions_end(cli, gpt_run, linear_run):
    flags = ["--prompt", "0123456789", "--json", "--seed", 0, "--device", "cpu"]
    assert len(json.loads(cli("generate", gpt_run, *flags)[1])["samples"][0]["tokens"]) == 119
    assert len(json.loads(cli("generate", linear_run, *flags)[1])["samples"][0]["tokens"]) == 256


def test_text_of_a_tokenizer_is_streamed_whole(cli, tokenized_run):
    flags = ["--prompt", "river €", "--max-new-tokens", 50, "--seed", 2, "--device", "cpu"]
    told = json.loads(cli("generate", tokenized_run, *flags, "--json")[1])
    sample = told["samples"][0]
    assert told["prompt_tokens"] < len("river €".encode())
    assert sample["text"] == FileTokenizer(tokenized_run / "tokenizer.json").decode(sample["tokens"])
    assert cli("generate", tokenized_run, *flags, "--no-echo")[1] == sample["text"]


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_narrow_weights_generate(cli, gpt_run, linear_run, weights):
    for folder in (gpt_run, linear_run):
        flags = ["--prompt", "tree", "--max-new-tokens", 9, "--weights", weights, "--json", "--device", "cpu"]
        code, out, err = cli("generate", folder, *flags)
        assert code == 0, err
        assert len(json.loads(out)["samples"][0]["tokens"]) == 9


def test_each_token_is_written_before_the_next_is_computed(linear_run, monkeypatch):
    from kinformer.lab.cli.main import main
    from kinformer.models.decoder import Decoder

    events = []

    class Recording(io.StringIO):
        def flush(self):
            events.append(("written", len(self.getvalue())))

    hidden = Decoder.head_inputs

    def recorded(*args, **options):
        events.append(("computed", None))
        return hidden(*args, **options)

    monkeypatch.setattr(Decoder, "head_inputs", recorded)
    monkeypatch.setattr(ByteStream, "feed", lambda self, token: chr(token))
    monkeypatch.setattr(sys, "stdout", Recording())
    flags = ["--max-new-tokens", "6", "--temperature", "0", "--no-echo", "--device", "cpu"]
    assert main(["generate", str(linear_run), "--prompt", "aaaa", *flags]) == 0
    text = sys.stdout.getvalue()
    assert len(text) == 6
    assert events[:12] == [each for n in range(6) for each in (("computed", None), ("written", n + 1))]


def test_ctrl_c_keeps_the_text_and_reports(cli, linear_run, monkeypatch):
    step, drawn = Session.step, []

    def interrupted(session):
        if len(drawn) == 5:
            raise KeyboardInterrupt
        drawn.append(step(session))
        return drawn[-1]

    monkeypatch.setattr(Session, "step", interrupted)
    options = ["--temperature", 0, "--no-echo", "--device", "cpu"]
    code, out, err = cli("generate", linear_run, "--prompt", "wind", *options)
    assert code == 130
    assert out == ByteTokenizer().decode([int(token) for token in drawn])
    assert "5 new tokens" in err


def test_a_reader_that_leaves_ends_it_quietly(linear_run):
    command = [sys.executable, "-m", "kinformer", "generate", str(linear_run), "--prompt", "wind"]
    options = ["--max-new-tokens", "100000", "--device", "cpu", "--threads", "1", "--quiet"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        told = process.stderr.read()
        assert process.wait(timeout=60) == 141
    assert told == b""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "there must be one prompt; give --prompt TEXT"),
        (["--prompt", "a", "--prompt-file", "b"], "there must be one prompt"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt-file", "no/such/file"], "no/such/file: the file does not exist; check its name"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature is -1 but must be 0 or more"),
        (["--prompt", "a", "--top-p", "2"], "--top-p is 2 but"),
        (["--prompt", "a", "--top-k", "0"], "--top-k is 0"),
        (["--prompt", "a", "--stop", ""], "a stop string is empty"),
        (["--prompt", "a", "--samples", "0"], "--samples is 0 but must be 1 or more"),
        (["--prompt", "a", "--max-new-tokens", "129"], "positions end at max_length = 128"),
        (["--prompt", "a" * 129], "positions end at max_length = 128"),
        (["--prompt", "a", "--chunk", "0"], "chunk is 0 but must be 1 or more"),
    ],
)
def test_mistakes_are_one_sentence(cli, gpt_run, arguments, told):
    code, out, err = cli("generate", gpt_run, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("kinformer: ") and told in err and err.count("\n") == 1


def test_a_run_of_an_encoder_continues_no_text(cli, make_run):
    code, out, err = cli("generate", make_run("blockbert"), "--prompt", "abc")
    assert (code, out) == (2, "")
    assert "'blockbert' for the task mlm; it reads whole texts and continues none" in err and err.count("\n") == 1


OTHERWISE = {
    "max_new_tokens": 3, "temperature": 0.5, "top_k": 2, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 1.5,
    "stop": ("x",), "samples": 2, "chunk": 7, "draft": "ngram", "draft_length": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.generation.refusal is None])
def test_every_option_of_drawing_is_read_or_refused(name):
    """What a task reads stands in the code of its page; what it does not is one sentence."""
    task = TASKS[name]
    code = Path(tasks.__file__).with_name(f"{name.replace('-', '_')}.py").read_text()
    code += inspect.getsource(_Picker) if name == "super-resolution" else ""  # it draws as image does
    code += Path(tasks.__file__).with_name("next_token.py").read_text() if name == "instruct" else ""
    assert OTHERWISE.keys() == set(DRAWING)
    for option, value in OTHERWISE.items():
        options = GenerateOptions(**{option: value})
        assert (option in task.generation.reads) == (f"options.{option}" in code or f'"{option}"' in code), option
        if option in task.generation.reads:
            check_drawing(task, options)
        else:
            with pytest.raises(KinformerError, match=rf"^{option} .+: .+; leave it out\.$"):
                check_drawing(task, options)


def test_a_translation_refuses_how_text_is_drawn(cli, make_run):
    run = make_run("vanilla")
    code, out, err = cli("generate", run, "--prompt", "a b", "--max-new-tokens", "3")
    assert (code, out) == (2, "") and "--max-new-tokens 3: a line has one translation" in err
