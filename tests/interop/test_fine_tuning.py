"""Fine-tuning on conversations: an imported folder, low-rank updates, exports, and the rows beside transformers."""

import io
import json
import shutil
import sys

import pytest
import torch

import kinformer
from kinformer.lab.cli.main import main
from kinformer.lab.runs.rows import plan_of
from kinformer.lab.runs.run import open_run
from kinformer.lab.tasks.instruct import CHATML, InstructRows, open_conversations
from kinformer.lab.tasks.options import InstructOptions
from kinformer.lab.tasks.task import Source
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import load_tensors
from tests.interop.test_export import saved_run

transformers = pytest.importorskip("transformers")
pytest.importorskip("jinja2")
from kinformer.lab.serving.fields import ChatTemplate  # noqa: E402

PLAIN = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% if m['role'] == 'assistant' "
    "%}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
COLOURS = ["red", "blue", "green", "white"]
ROWS = [
    [("system", "Be brief."), ("user", f"Colour {number} \u00e9?"), ("assistant", f"It is {COLOURS[number % 4]}."),
     ("user", "Thanks!"), ("assistant", "You are welcome.")]
    for number in range(24)
]  # fmt: skip


def conversation(row):
    return [{"role": role, "content": content} for role, content in row]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small LLaMA as transformers writes it, its chat template, and a file of conversations beside it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    place = tmp_path_factory.mktemp("tuning")
    lines = [json.dumps({"messages": conversation(row)}) for row in ROWS]
    (place / "messages.jsonl").write_text("\n".join(lines) + "\n\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=PLAIN
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(fast), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(place / "llama")
    fast.save_pretrained(place / "llama")
    kinformer.import_checkpoint(place / "llama", place / "base")
    return place


@pytest.fixture(scope="module")
def tuned(folder):
    """A run of low-rank updates of the imported one, without a named member or task."""
    settings = {"steps": 12, "lr": 2e-2, "length": 128, "lora": 2, "validate_every": 6, "schedule": "constant"}
    return kinformer.train(init=folder / "base", data=folder / "messages.jsonl", out=folder / "tuned", **settings)


def test_answers_are_the_tokens_that_transformers_marks(folder):
    fast = transformers.AutoTokenizer.from_pretrained(folder / "llama")
    run = open_run(folder / "base")
    for row in ROWS[:3]:
        encoded = fast.apply_chat_template(
            conversation(row), chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
        )
        for source in (MARKED, PLAIN):
            text, spans = ChatTemplate(source, (), run.prompts["special_tokens"]).answers(conversation(row))
            ids, starts = run.tokenizer.places(text)
            mask = [any(begin <= start < end for begin, end in spans) for start in starts.tolist()]
            assert ids.tolist() == encoded["input_ids"] and mask == list(map(bool, encoded["assistant_masks"]))


def test_only_answers_are_learnt(folder, tuned):
    plan = plan_of(tuned, Settings(batch_size=4, length=128))
    batch = InstructRows(plan).batch(0, 0, 1)
    for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
        answer = labels[labels >= 0]
        assert tuned.tokenizer.decode(answer).count("</s>") == 2 and "user" not in tuned.tokenizer.decode(answer)
        assert torch.equal(tokens[1:][labels[:-1] >= 0][: len(answer) - 1], answer[:-1])
    halves = [InstructRows(plan).batch(0, rank, 2).tokens for rank in (0, 1)]
    assert torch.equal(torch.cat(halves), batch.tokens)


def test_low_rank_updates_train_nothing_else(folder, tuned):
    assert (tuned.task.name, tuned.member) == ("instruct", "rope")
    before, after = (load_tensors(place / "model.safetensors")[0] for place in (folder / "base", tuned.folder))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        change = after[name].double() - weight.double()
        if weight.ndim == 2 and "layers" in name:
            singular = torch.linalg.svdvals(change)
            assert singular[0] > 0 and (singular[2:] < 1e-4 * singular[0]).all(), name
        else:
            assert not change.any(), name


def test_a_resumed_run_of_updates_ends_like_an_undisturbed_one(folder, tuned, tmp_path):
    settings = {"lr": 2e-2, "length": 128, "lora": 2, "validate_every": 6, "schedule": "constant", "warmup": 1}
    data = {"init": folder / "base", "data": folder / "messages.jsonl"}
    whole = kinformer.train(out=tmp_path / "whole", steps=4, **data, **settings)
    kinformer.train(out=tmp_path / "parts", steps=2, **data, **settings)
    parts = kinformer.train(out=tmp_path / "parts", steps=4, resume=True)
    for one, other in zip(
        kinformer.load(whole.folder).parameters(), kinformer.load(parts.folder).parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_evaluation_stands_beside_the_base(tuned):
    done = kinformer.evaluate(tuned.folder)
    assert done.metrics["answer_bits_per_byte"] < done.baselines["before"]
    assert "with which it began, has" in str(done.text)


def test_chat_uses_the_template_that_the_run_keeps(folder, tuned, capsys, monkeypatch):
    assert tuned.chat_template.read_text() == PLAIN
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Colour 1?\n")))
    assert main(["chat", str(tuned.folder), "--max-new-tokens", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["line"] == "Colour 1?"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_exports_are_merged_or_an_adapter(folder, tuned, tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    kinformer.export(tuned.folder, tmp_path / "merged")
    kinformer.export(tuned.folder, tmp_path / "adapter", adapter=True)
    tokens = torch.randint(300, (2, 9))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert torch.allclose(merged(tokens).logits, kinformer.load(tuned.folder)(tokens)[0], atol=1e-5)
        assert torch.allclose(merged(tokens).logits, adapted(tokens).logits, atol=1e-5)
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "`base`, fine-tuned by low-rank updates (LoRA, rank 2)" in card and "Data: `messages.jsonl`" in card
    assert str(folder) not in card and "Departures" not in card and "steps 12" in card
    use = 'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "adapter")'
    assert use in (tmp_path / "adapter" / "README.md").read_text() and use not in card
    with pytest.raises(KinformerError, match="adapter: .* was not trained with lora"):
        kinformer.export(folder / "base", tmp_path / "none", adapter=True)
    place = shutil.copytree(tuned.folder, tmp_path / "moved") / "config.json"
    config = json.loads(place.read_text())
    config["data"]["init"] = str(saved_run("gpt", tmp_path / "other"))
    place.write_text(json.dumps({name: value for name, value in config.items() if name != "checksum"}))
    with pytest.raises(KinformerError, match="other: belongs to another model"):
        kinformer.export(tmp_path / "moved", tmp_path / "none", adapter=True)


def test_cut_and_left_out_rows_are_counted(folder, tmp_path, capsys):
    line = f"train --init {folder / 'base'} --data {folder / 'messages.jsonl'} --out {tmp_path / 'run'} --steps 1"
    assert main(f"{line} --length 24 --batch-size 2".split()) == 0
    error = capsys.readouterr().err
    assert "20 conversations to train on" in error and "20 of more than 24 tokens lose their end" in error
    assert main(f"{line.replace('/run', '/short')} --length 4".split()) == 2
    assert "--length 4: no answer of the train split begins within it; give more." in capsys.readouterr().err


def test_prompts_and_completions_need_no_template(tmp_path, text_file):
    rows = [{"prompt": f"{number} + 1 = ", "completion": f"{number + 1}\n"} for number in range(20)]
    data = tmp_path / "sums.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    sizes = {"recipe": "tiny", "steps": 2, "length": 96, "batch_size": 2, "data": data}
    run = kinformer.train("gpt", out=tmp_path / "run", tokenizer="bytes", **sizes)
    assert run.task.name == "instruct" and run.chat_template is None
    rows = plan_of(run, Settings()).data.splits["train"]
    assert bytes(rows[0].ids[rows[0].answer].tolist()).endswith(b"\n")
    run = kinformer.train("gpt", out=tmp_path / "chatml", chat_template="chatml", **sizes)
    assert run.chat_template.read_text() == CHATML
    assert ChatTemplate(run.chat_template).end == "<|im_end|>"


USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
WRONG = {
    "fields": ({"text": "a"}, r"line 1: is not a conversation \(text\); each line must be"),
    "content": ({"messages": [{"role": "user", "content": 3}]}, "line 1: is not a conversation"),
    "order": ({"messages": [USER, USER, ANSWER]}, "message 2 is by 'user' where 'assistant' belongs"),
    "first": ({"messages": [ANSWER]}, "message 1 is by 'assistant' where 'user' belongs"),
    "role": ({"messages": [USER, {"role": "tool", "content": ""}]}, "message 2 has the role 'tool'"),
    "no answer": ({"messages": [USER, ANSWER, USER]}, "line 1: does not end with an answer of the assistant"),
    "empty": ({"messages": [USER, {"role": "assistant", "content": " "}]}, "does not end with an answer"),
    "no template": ({"messages": [USER, ANSWER]}, "a new run has none; give chat_template FILE.jinja, or"),
    "few": ({"prompt": "a", "completion": "b"}, "has 1 conversation, and 2 are held out; give more"),
}


@pytest.mark.parametrize(("row", "message"), WRONG.values(), ids=WRONG)
def test_mistakes_in_conversations_are_one_sentence(row, message, tmp_path):
    from kinformer.lab.data import ByteTokenizer

    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    source = Source(str(tmp_path / "rows.jsonl"), None, ByteTokenizer())
    with pytest.raises(KinformerError, match=message):
        open_conversations(source, InstructOptions())
    with pytest.raises(KinformerError, match="holdout is 1e.308"):  # as a run's config may say
        open_conversations(source._replace(holdout=1e308), InstructOptions())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "train: needs MEMBER, or --init RUN"),
        (["rope", "--lora", "4"], "--lora 4: updates the weights of another run; give --init RUN too"),
        (["--init", "BASE", "--lora", "0"], "--lora is 0 but must be 1 or more"),
        (["--init", "BASE", "--lora", "1000000"], "--lora 1000000: an update of rank"),
    ],
)
def test_mistakes_of_training_are_one_sentence(arguments, message, folder, tmp_path, capsys):
    arguments = [str(folder / "base") if one == "BASE" else one for one in arguments]
    data = ["--data", str(folder / "messages.jsonl"), "--out", str(tmp_path / "run")]
    assert main(["train", *arguments, *data]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_template_that_rewrites_earlier_answers_needs_its_tags():
    forgets = "{% for m in messages %}{{ m['content'] if loop.last else m['role'] }}{% endfor %}"
    with pytest.raises(KinformerError, match="writes the text before message 2 otherwise .* endgeneration"):
        ChatTemplate(forgets).answers(conversation(ROWS[0][1:]))
