"""Prompts of imported models: they begin with BOS, continue behind their text, and return to transformers unchanged."""

import json

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import kinformer
from kinformer.lab.data.tokenizer import prompt_ids
from kinformer.lab.runs.run import open_run
from kinformer.runtime.errors import KinformerError
from tests.interop.peers import blank_tokenizer, new_model

NEW = 12
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"


def folder_of(place, kind="llama", begins=True, **settings):
    """Save a random model of transformers with a tokenizer of blanks; bytes and special tokens are hardly drawn."""
    place.mkdir()
    size = blank_tokenizer(place, begins, **settings).get_vocab_size()
    model = new_model(kind, vocab_size=size, max_position_embeddings=128, bos_token_id=1, eos_token_id=2)
    with torch.no_grad():
        model.get_output_embeddings().weight[:259] *= 0.01
    model.save_pretrained(place)
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    place = tmp_path_factory.mktemp("llama")
    folder_of(place / "theirs", chat_template=TEMPLATE)
    kinformer.import_checkpoint(place / "theirs", place / "run")
    return place


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma"])
def test_a_prompt_begins_and_continues_as_in_transformers(kind, tmp_path):
    from transformers import AutoTokenizer

    model, tokenizer = folder_of(tmp_path / "theirs", kind), AutoTokenizer.from_pretrained(tmp_path / "theirs")
    run = kinformer.import_checkpoint(tmp_path / "theirs", tmp_path / "run").run
    assert run.prompts["prefix"] == [1]
    blanks = 0
    for prompt in ("hello there", "the", "<s>the", "dog"):
        ids = tokenizer(prompt, add_special_tokens=not prompt.startswith("<s>"), return_tensors="pt")["input_ids"]
        with torch.no_grad():
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)[0]
        right = tokenizer.decode(whole).removesuffix("</s>")[len(tokenizer.decode(ids[0])) :]
        assert "".join(kinformer.stream(tmp_path / "run", prompt, max_new_tokens=NEW, temperature=0)) == right
        blanks += right.startswith(" ")
    assert blanks or kind == "gemma"  # whose tied table draws the last letter again


@pytest.mark.parametrize(
    ("begins", "settings", "prefix"),
    [
        (True, {}, [1]),
        (True, {"add_bos_token": True}, [1]),
        (False, {}, None),
        (False, {"add_bos_token": False}, None),
        (False, {"add_bos_token": True}, [1]),  # as transformers 4 reads it
        (False, {"add_bos_token": True, "bos_token": None}, None),
        (False, {"add_bos_token": True, "bos_token": {"content": "</s>"}}, [2]),
    ],
)
def test_what_begins_a_prompt_is_read_of_the_tokenizer(begins, settings, prefix, tmp_path):
    from transformers import AutoTokenizer

    folder_of(tmp_path / "theirs", begins=begins, **settings)
    run = kinformer.import_checkpoint(tmp_path / "theirs", tmp_path / "run").run
    assert run.prompts.get("prefix") == prefix and open_run(run.folder).prompts == run.prompts
    kinformer.export(run.folder, tmp_path / "out")
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported("dog")["input_ids"] == prompt_ids(run.tokenizer, "dog").tolist()


def test_processors_of_other_forms_are_read(tmp_path):
    run = tmp_path / "theirs"
    folder_of(run)
    data = json.loads((run / "tokenizer.json").read_text())
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    roberta = {"type": "RobertaProcessing", "cls": ["<s>", 1], "sep": ["</s>", 2], "trim_offsets": True}
    roberta["add_prefix_space"] = False
    for number, (processor, note) in enumerate(
        [({"type": "Sequence", "processors": [level, data["post_processor"]]}, False), (roberta, True)]
    ):
        (run / "tokenizer.json").write_text(json.dumps(data | {"post_processor": processor}))
        done = kinformer.import_checkpoint(run, tmp_path / str(number))
        assert done.run.prompts["prefix"] == [1] and any("ends every text" in one for one in done.notes) == note
    (run / "tokenizer.json").write_text(json.dumps(data | {"post_processor": {"type": "TemplateProcessing"}}))
    with pytest.raises(KinformerError, match="is damaged"):
        kinformer.import_checkpoint(run, tmp_path / "damaged")


def test_a_run_without_the_record_has_no_prefix(llama, tmp_path):
    """A folder of an earlier version says nothing of prompts."""
    from dataclasses import replace
    from shutil import copytree

    copytree(llama / "run", tmp_path / "old")
    replace(open_run(tmp_path / "old"), prompts={}).save()
    old = open_run(tmp_path / "old")
    assert "prompts" not in json.loads((tmp_path / "old" / "config.json").read_text())
    assert prompt_ids(old.tokenizer, "dog").tolist() == old.tokenizer.encode("dog").tolist()


def test_windows_begin_with_the_prefix(llama, tmp_path):
    text, context = "the dog and the cat went over the hill.\n" * 9, 16
    (tmp_path / "text.txt").write_text(text)
    evaluation = kinformer.evaluate(
        llama / "run", data=tmp_path / "text.txt", context=str(context), split="train", holdout=0.5
    )
    run, model = open_run(llama / "run"), kinformer.load(llama / "run")
    from kinformer.lab.data import open_corpus

    split = open_corpus(str(tmp_path / "text.txt"), tokenizer=run.tokenizer, holdout=0.5).splits["train"]
    ids, nats = np.array(split.tokens(0, len(split))), 0.0
    for start in range(0, len(ids) - 1, context - 1):
        window = torch.tensor([1, *ids[start : start + context].tolist()])[None]
        with torch.no_grad():
            logits = model(window[:, :-1])[0]
        nats += float(cross_entropy(logits[0, 1:].double(), window[0, 2:], reduction="sum"))
    expected = (nats / np.log(2) + np.log2(split.vocab_size)) / split.bytes
    assert evaluation.metrics["bits_per_byte"] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(KinformerError, match="context is 1 but must be at least 2"):
        kinformer.evaluate(llama / "run", data=tmp_path / "text.txt", context="1")


def test_an_export_has_the_tokens_and_templates_of_the_folder(tmp_path):
    from transformers import AutoConfig, AutoTokenizer

    further = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "{{ tools }}"}]
    folder_of(tmp_path / "theirs", chat_template=further)
    kinformer.import_checkpoint(tmp_path / "theirs", tmp_path / "run")
    assert open_run(tmp_path / "run").chat_template.read_text() == TEMPLATE
    kinformer.export(tmp_path / "run", tmp_path / "out")
    kinformer.import_checkpoint(tmp_path / "out", tmp_path / "again")
    kinformer.export(tmp_path / "again", tmp_path / "back")
    before = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    for name in ("out", "back"):
        after = AutoTokenizer.from_pretrained(tmp_path / name)
        assert after.special_tokens_map == before.special_tokens_map
        assert after.chat_template == before.chat_template
        config = AutoConfig.from_pretrained(tmp_path / name)
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)


def test_training_keeps_how_the_model_is_prompted(llama, tmp_path):
    (tmp_path / "text.txt").write_text("the dog and the cat went over the hill.\n" * 40)
    run = kinformer.train(
        open_run(llama / "run").member,
        init=llama / "run", data=tmp_path / "text.txt", out=tmp_path / "tuned", steps=1, length=16, batch_size=2,
        quiet=True, device="cpu",
    )  # fmt: skip
    assert run.prompts == open_run(llama / "run").prompts and run.chat_template.read_text() == TEMPLATE
    assert open_run(run.folder).tokenizer.prefix == (1,)


@pytest.mark.parametrize(
    ("prompts", "reason"),
    [
        ({"prefix": ["a"]}, "prompts.prefix is .'a'., not a list of whole numbers"),
        ({"prefix": [1.5]}, "not a list of whole numbers"),
        ({"special_tokens": {"bos_token": 5}}, "prompts.special_tokens is .'bos_token': 5., not a table of texts"),
    ],
)
def test_a_damaged_record_is_refused(llama, prompts, reason, tmp_path):
    data = json.loads((llama / "run" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(data | {"prompts": prompts}))
    with pytest.raises(KinformerError, match=reason):
        open_run(tmp_path)


@pytest.mark.parametrize("templates", [7, [{"name": "../evil", "template": ""}], [{"name": "x"}]])
def test_damaged_templates_are_refused(templates, tmp_path):
    folder_of(tmp_path / "theirs", chat_template=templates)
    with pytest.raises(KinformerError, match="must be a text or a list of named templates"):
        kinformer.import_checkpoint(tmp_path / "theirs", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_log_likelihoods_are_those_of_hflm(llama):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from kinformer.harness import KinformerLM

    def requests(kind, *arguments):
        return [Instance(request_type=kind, doc={}, arguments=item, idx=place) for place, item in enumerate(arguments)]

    ours = KinformerLM(llama / "run", 32, quiet=True)
    theirs = HFLM(pretrained=str(llama / "theirs"), device="cpu", dtype="float32", max_length=32, batch_size=2)
    assert ours.prefix_token_id == theirs.prefix_token_id == 1
    pairs = [("the dog", " went over"), ("", "the cat"), ("<s>the dog", " went"), ("a dog " * 20, "went")]
    for (value, _), (expected, _) in zip(
        ours.loglikelihood(requests("loglikelihood", *pairs)),
        theirs.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True),
        strict=True,
    ):
        assert value == pytest.approx(expected, rel=1e-5)
    texts = requests("loglikelihood_rolling", ("the dog",), ("the dog went over the hill.\n" * 4,))
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts, True), rel=1e-5)
    prompts = requests("generate_until", *((text, {"until": [], "max_gen_toks": 8}) for text in ("the", "dog", "cat")))
    without = [text.removeprefix(" ") for text in ours.generate_until(prompts)]  # as the harness's own model decodes
    assert without == theirs.generate_until(prompts, disable_tqdm=True)


@pytest.fixture(scope="module")
def server(llama):
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    from tests.serving.test_http import serving

    with serving(llama / "run") as running:
        yield running


def post(server, path, **fields):
    from tests.serving.test_http import post

    return post(server, {"model": server.name, "temperature": 0, "max_tokens": 8, **fields}, path)


def test_a_server_answers_behind_the_prefix(llama, server):
    text = "".join(kinformer.stream(llama / "run", "the", max_new_tokens=8, temperature=0))
    status, answer = post(server, "/v1/completions", prompt="the", logprobs=10)
    (choice,) = answer["choices"]
    assert status == 200 and choice["text"] == text and text.startswith(" ")
    assert "".join(choice["logprobs"]["tokens"]) == text
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [10] * 8
    assert answer["usage"]["prompt_tokens"] == 1 + len(open_run(llama / "run").tokenizer.encode("the"))
    ids = [1, *open_run(llama / "run").tokenizer.encode("the").tolist()]
    assert post(server, "/v1/completions", prompt=ids)[1]["choices"][0]["text"] == text


def test_scores_of_a_prompt_stand_at_its_letters(server):
    _, answer = post(server, "/v1/completions", prompt="the dog", logprobs=0, echo=True, max_tokens=0)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "the dog" and logprobs["tokens"][0] == "<s>" and logprobs["text_offset"][:2] == [0, 0]
    words = zip(logprobs["tokens"][1:], logprobs["text_offset"][1:], strict=True)
    assert all(" the dog"[place + (place > 0) :].startswith(word) or place == 3 for word, place in words)


def test_a_chat_is_rendered_by_the_template_of_the_folder(llama, server):
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "the dog"}]
    ids = AutoTokenizer.from_pretrained(llama / "theirs").apply_chat_template(messages, return_dict=True)["input_ids"]
    assert ids[0] == 1 != ids[1]
    status, answer = post(server, "/v1/chat/completions", messages=messages)
    expected = post(server, "/v1/completions", prompt=ids)[1]["choices"][0]["text"]
    assert (status, answer["choices"][0]["message"]["content"]) == (200, expected)
    assert answer["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("text", ["{{ 1 / 0 }}", "{{ 'a' * 9999999999 }}", "{{ raise_exception('not so') }}"])
def test_a_template_that_fails_is_a_mistake_of_the_request(llama, text, tmp_path):
    from tests.serving.test_http import serving

    (tmp_path / "chat.jinja").write_text(text)
    with serving(llama / "run", chat_template=str(tmp_path / "chat.jinja")) as running:
        status, answer = post(running, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    assert status == 400 and "the chat template refuses these messages" in answer["error"]["message"]
