"""Runs as a model of lm-evaluation-harness: beside its own model of transformers, and by its own tasks."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

import kinformer
from kinformer import harness
from kinformer.harness import KinformerLM
from kinformer.lab.runs.harness import Drawing, drawing_of
from kinformer.runtime.errors import KinformerError

EOS, CONTEXT = 188, 48  # the byte 0 of a byte-level tokenizer, which is in no text
PAIRS = [
    ("the wind sings ", "naïve"),
    ("the wind sings ", "under"),
    ("the wind sings", " under\n"),
    ("", "tree"),
    ("river tree wind naïve under river sings \t", " €"),
    ("river tree wind naïve under river sings \t", " €€ wind"),
    ("€ river sings " * 30, "tree sings"),
    ("€ river sings " * 30, "wind"),
]
TEXTS = ["wind", "", "naïve river sings under tree\n" * 9]
TASKS = {
    "choices": """
        output_type: multiple_choice
        test_split: test
        doc_to_text: "{{question}}"
        doc_to_choice: "{{choices}}"
        doc_to_target: answer
        target_delimiter: " "
        metric_list: [{metric: acc}, {metric: acc_norm}]""",
    "texts": """
        output_type: loglikelihood_rolling
        test_split: test
        doc_to_text: ""
        doc_to_target: "{{question}}"
        metric_list: [{metric: bits_per_byte}]""",
    "continued": """
        output_type: generate_until
        test_split: test
        doc_to_text: "{{question}}"
        doc_to_target: "{{choices[answer]}}"
        generation_kwargs: {until: ["s u"], max_gen_toks: 6}
        metric_list: [{metric: exact_match}]""",
}


def requests(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=item, idx=number) for number, item in enumerate(arguments)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text_file):
    """A run of bytes, one with a tokenizer and an end of texts, and an encoder."""
    folder = tmp_path_factory.mktemp("runs")
    sizes = {"recipe": "tiny", "data": text_file, "steps": 4, "length": 64, "batch_size": 4, "seed": 0, "device": "cpu"}
    kinformer.train("linear-transformer", out=folder / "bytes", **sizes)
    run = kinformer.train("gpt", out=folder / "tokens", train_tokenizer=300, set={"input.eos_token": EOS}, **sizes)
    assert run.tokenizer.decode([EOS]) == "\0"
    kinformer.train("bert", out=folder / "encoder", **sizes)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    words = ["wind", "tree", "naïve", "river", "€", "sings", "under"]
    rows = [
        {"question": " ".join(words[(row + word) % 7] for word in range(9)), "choices": words[:4], "answer": row % 4}
        for row in range(8)
    ]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, text in TASKS.items():
        lines = [f"task: own_{name}", "dataset_path: json", *(line.strip() for line in text.splitlines()[1:])]
        lines.append(f"dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {folder / 'cache'}}}")
        (folder / f"{name}.yaml").write_text("\n".join(lines), encoding="utf-8")
    return folder


def hflm(ours, folder, **options):
    """The harness's own model of the same run, as transformers loads it."""
    exported = folder.parent / f"{folder.name}-exported"
    if not exported.is_dir():
        kinformer.export(folder, exported)
    settings = {"device": "cpu", "dtype": "float32", "trust_remote_code": True, "max_length": CONTEXT, "batch_size": 3}
    prefix = None if folder.name == "tokens" else ours.prefix_token_id
    return HFLM(pretrained=str(exported), prefix_token_id=prefix, **settings | options)


@pytest.mark.parametrize("name", ["bytes", "tokens"])
def test_log_likelihoods_are_those_of_hflm(runs, name):
    ours = KinformerLM(runs / name, CONTEXT, chunk=100, quiet=True)
    theirs = hflm(ours, runs / name)
    assert ours.prefix_token_id == theirs.prefix_token_id == {"bytes": 10, "tokens": EOS}[name]
    pairs, texts = requests("loglikelihood", *PAIRS), requests("loglikelihood_rolling", *((text,) for text in TEXTS))
    for (value, greedy), (expected, theirs_greedy) in zip(
        ours.loglikelihood(pairs), theirs.loglikelihood(pairs, disable_tqdm=True), strict=True
    ):
        assert value == pytest.approx(expected, rel=1e-5) and greedy == theirs_greedy
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts, True), rel=1e-5)
    assert (ours.requests, ours.cut) == (len(PAIRS), {"bytes": 3, "tokens": 2}[name])


def test_texts_are_those_of_hflm(runs):
    ours = KinformerLM(runs / "tokens", CONTEXT, batch_size=2, quiet=True)
    options = {"until": [" s", "q"], "max_gen_toks": 12}
    prompts = [(text, options) for text in ("the wind", "€ river sings " * 30, "sings ")]
    prompts.append(("tree", {"until": "i", "max_gen_toks": 5, "do_sample": False}))
    theirs = hflm(ours, runs / "tokens").generate_until(requests("generate_until", *prompts), disable_tqdm=True)
    assert ours.generate_until(requests("generate_until", *prompts)) == theirs
    assert all(len(text) > 0 for text in theirs)


def test_a_stop_that_straddles_tokens_ends_a_text(runs):
    lm = KinformerLM(runs / "bytes", CONTEXT, quiet=True)
    (whole,) = lm.generate_until(requests("generate_until", ("the wind", {"max_gen_toks": 20})))
    stop = whole[5:8]
    (text,) = lm.generate_until(requests("generate_until", ("the wind", {"max_gen_toks": 20, "until": [stop]})))
    assert text == whole[: whole.index(stop)]


def test_draws_follow_the_seed(runs):
    lm = KinformerLM(runs / "bytes", CONTEXT, quiet=True)
    options = {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "max_gen_toks": 9, "seed": 3}
    prompts = requests("generate_until", ("wind", options), ("tree", options))
    assert lm.generate_until(prompts) == lm.generate_until(prompts)
    assert lm.generate_until(prompts) != lm.generate_until(
        requests("generate_until", *[("wind", options | {"seed": 4})] * 2)
    )


def test_options_of_generation():
    assert drawing_of({}) == Drawing(256, (), (("temperature", 0.0),))
    assert drawing_of({"until": ["", "a"], "max_new_tokens": 3, "do_sample": False, "temperature": 0.7}) == Drawing(
        3, ("a",), (("temperature", 0.0),)
    )
    assert drawing_of({"do_sample": True, "top_p": 0.5, "num_beams": 1}).sampling == (
        ("temperature", 1.0), ("top_p", 0.5),
    )  # fmt: skip
    with pytest.raises(KinformerError, match="'num_beams' is not an option of generation here"):
        drawing_of({"num_beams": 4})


def test_carried_states_read_texts_whole(runs):
    lm = KinformerLM(runs / "bytes", "carried", chunk=50, quiet=True)
    text = TEXTS[2]
    ids = torch.tensor([[lm.prefix_token_id, *text.encode()]])
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(lm.model(ids[:, :-1])[0][0], ids[0, 1:], reduction="sum")
    (value,) = lm.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
    assert value == pytest.approx(-float(losses), rel=1e-5)
    assert lm.get_model_info()["context"] == "carried"
    (windows,) = KinformerLM(runs / "bytes", quiet=True).loglikelihood_rolling(requests("", (text,)))
    assert abs(windows - value) > 1e-3


def test_results_enter_the_harness_cache(runs):
    lm, entries = KinformerLM(runs / "bytes", quiet=True), []
    lm.cache_hook.add_partial = lambda *entry: entries.append(entry)
    scores = lm.loglikelihood(requests("loglikelihood", *PAIRS[:3]))
    rolling = lm.loglikelihood_rolling(requests("loglikelihood_rolling", ("wind",)))
    options = {"max_gen_toks": 2}
    texts = lm.generate_until(requests("generate_until", ("wind", options)))
    assert {entry[1]: entry[2] for entry in entries[:3]} == dict(zip(PAIRS, scores, strict=False))
    assert entries[3:] == [
        ("loglikelihood_rolling", ("wind",), rolling[0]), ("generate_until", ("wind", options), texts[0]),
    ]  # fmt: skip


def test_evaluate_does_the_tasks_of_the_harness(runs, tasks, run_cli):
    paths = ",".join(str(tasks / f"{name}.yaml") for name in TASKS)
    facts = json.loads(run_cli("evaluate", runs / "bytes", "--harness", paths, "--first", 6, "--json"))
    assert (facts["context"], facts["limit"], facts["cut"]) == (64, 6, 0)
    choices = facts["tasks"]["own_choices"]
    assert (choices["items"], choices["fewshot"], set(choices["metrics"])) == (6, 0, {"acc", "acc_norm"})
    evaluation = kinformer.evaluate(runs / "bytes", harness=paths, first=6, quiet=True)
    assert evaluation.metrics == {name: facts[name] for name in evaluation.metrics}
    assert evaluation.metrics["own_choices/acc"] * 6 == pytest.approx(_right(runs / "bytes", tasks, 6))
    text = run_cli("evaluate", runs / "bytes", runs / "tokens", "--harness", tasks / "choices.yaml", "--fewshot", 2)
    assert "lm-evaluation-harness" in text and "contexts of 64 tokens" in text
    assert [line.split()[:2] for line in text.splitlines()][-2:] == [
        ["own_choices", "acc"],
        ["own_choices", "acc_norm"],
    ]


def _right(run, tasks, count):
    """How many of the first items of the task of choices a full forward for every choice decides rightly."""
    model, right = kinformer.load(run), 0
    for line in (tasks / "data.jsonl").read_text(encoding="utf-8").splitlines()[:count]:
        item, sums = json.loads(line), []
        for choice in item["choices"]:
            ids = torch.tensor([[*f"{item['question']} {choice}".encode()]])
            with torch.no_grad():
                logits = model(ids[:, :-1])[0].log_softmax(-1)
            sums.append(float(logits[0].gather(1, ids[0, 1:, None])[-len(f" {choice}".encode()) :].sum()))
        right += max(range(4), key=sums.__getitem__) == item["answer"]
    return right


def test_the_harness_command_knows_the_model(runs, monkeypatch, capsys):
    code = "import lm_eval, kinformer.harness as ours; from lm_eval.api.registry import get_model as get; "
    code += "assert get('kinformer') is ours.KinformerLM; print(get('dummy').__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "lm_eval.models.dummy\n"  # the harness's own models are there too
    model = get_model("kinformer")
    assert model is KinformerLM
    options = {"batch_size": 1, "max_batch_size": None, "device": "cuda:0"}
    lm = model.create_from_arg_string(f"run={runs / 'bytes'},context=32", options)
    assert (lm.length, lm.rows) == (32, 1)
    wrong = [
        ({"run": runs}, "is not a run folder"),
        ({"run": runs / "bytes", "batch_size": "x"}, "batch_size is 'x' but must"),
    ]  # fmt: skip
    for arguments, sentence in wrong:
        monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda arguments=arguments: model(**arguments))
        assert harness.main() == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["encoder", "--harness", "TASK"], "--harness: is for models of the"),
        (["bytes", "--harness", "ownn.yaml"], "--harness ownn.yaml: the file does not exist"),
        (["bytes", "--harness", "TASK", "--contexts", "9"], "--contexts: means nothing to tasks of a --harness"),
        (["bytes", "--harness", "TASK", "--fewshot", "90"], "cannot be done (ValueError: Sample larger"),
        (["bytes", "--fewshot", "2"], "--fewshot: is for tasks of a harness; give --harness TASKS too"),
        (["tokens", "--harness", "TASK", "--context", "carried"], "give --context N"),
        (["tokens", "--harness", "TASK", "--context", "5"], "leaves no room for a prompt in a context of 5"),
    ],
)
def test_mistakes_are_one_sentence(runs, tasks, cli, words, sentence):
    code, out, err = cli(
        "evaluate", runs / words[0], *(tasks / "continued.yaml" if w == "TASK" else w for w in words[1:])
    )
    assert (code, out) == (2, "") and sentence in err and err.count("\n") == 1


def test_a_missing_harness_is_one_sentence(monkeypatch):
    monkeypatch.delitem(sys.modules, "kinformer.lab.runs.harness")
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(KinformerError, match=r"pip install 'kinformer\[harness\]'"):
        import kinformer.lab.runs.harness  # noqa: F401


def test_messages_are_prompts_by_the_chat_template_of_the_run(runs, tmp_path):
    run = shutil.copytree(runs / "bytes", tmp_path / "run")
    template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    (run / "chat_template.jinja").write_text(template)
    ours = KinformerLM(run)
    told = [{"role": "user", "content": "one"}, {"role": "assistant", "content": " so "}]
    assert ours.apply_chat_template(told[:1]) == "<user>one\n<assistant>"
    assert ours.apply_chat_template(told, add_generation_prompt=False) == "<user>one\n<assistant> so"
    assert ours.chat_template(True) == template and ours.chat_template(False) == "" and ours.tokenizer_name
    with pytest.raises(KinformerError, match="lacks a chat template"):
        KinformerLM(runs / "bytes").apply_chat_template(told)
