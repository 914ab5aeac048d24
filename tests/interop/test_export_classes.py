"""Models that are no architecture of transformers, in its classes: the bits of the run, losses, training, LoRA."""

import inspect
import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import BertForQuestionAnswering, GPT2LMHeadModel

import kinformer
from kinformer.core.config import to_dict
from kinformer.family.build import configure
from kinformer.generation.beam import Search, beam_search
from kinformer.interop import auto
from kinformer.interop.auto import CACHE
from kinformer.lab.cli.main import main
from kinformer.lab.data import ByteTokenizer
from kinformer.lab.runs.run import open_run
from kinformer.runtime.errors import KinformerError
from tests.interop.encoders import assert_close
from tests.interop.test_encoder_decoders import Pair as EncoderDecoderPair
from tests.interop.test_export import assert_same_weights, modules_cache, save_run  # noqa: F401 (a fixture)
from tests.interop.test_export_encoders import saved_run, texts

CLASSES = {"head": {"kind": "classification", "classes": 3}}
OF_TOKENS = {"head": {"kind": "token_classification", "classes": 4}}
TWO_HEADS = {"head": {"kind": "distilled", "classes": 5}, "input.distillation_token": True}
LINEAR = {
    "layers.*.mixer": configure("linear-transformer", "tiny", 256).layers[0].mixer,
    "encoder.layers.*.mixer": configure("linformer", "tiny", 256).layers[0].mixer,
}
PRE = {"layers.*.residual": "pre", "encoder.layers.*.residual": "pre", "norm": "layer_norm", "head.bias": True}
MODELS = {
    "linformer": ("linformer", {}, "MaskedLM"),
    "sinkhorn": ("sinkhorn", {}, "MaskedLM"),
    "star": ("star", {}, "MaskedLM"),
    "blockbert": ("blockbert", {"input.types": 2}, "MaskedLM"),
    "etc": ("etc", {}, "MaskedLM"),
    "linformer of classes": ("linformer", CLASSES, "SequenceClassification"),
    "etc of classes": ("etc", CLASSES, "SequenceClassification"),
    "star of classes of tokens": ("star", OF_TOKENS, "TokenClassification"),
    "convformer": ("convformer", {}, "ImageClassification"),
    "hipt": ("hipt", {}, "ImageClassification"),
    "deit of two classifiers": ("deit", TWO_HEADS | {"layers.*.norm": "rms_norm"}, "ImageClassification"),
    "gated-deltanet": ("gated-deltanet", {}, "CausalLM"),
    "linear translator": ("vanilla", LINEAR, "Seq2SeqLM"),
    "translator with norms before": ("vanilla", PRE, "Seq2SeqLM"),
}
ONE_OF_EACH = (
    "linformer", "etc of classes", "star of classes of tokens", "hipt", "gated-deltanet", "linear translator",
)  # fmt: skip


class Pair:
    """A run, its export, and both models; ``values`` are inputs of ours, ``inputs`` those of transformers' classes."""

    def __init__(self, folder, name):
        member, changes, self.use = MODELS[name]
        self.run = saved_run(member, folder / "run", **changes)
        self.done = kinformer.export(self.run, folder / "exported")
        self.ours, self.theirs = kinformer.load(self.run), self.loaded()

    def loaded(self, folder=None, **options):
        auto = getattr(transformers, f"AutoModelFor{self.use}")
        return auto.from_pretrained(folder or self.done.folder, trust_remote_code=True, **options).eval()

    def inputs(self):
        generator = torch.Generator().manual_seed(1)
        if self.use == "ImageClassification":
            return {"pixel_values": torch.rand(3, 3, *self.ours.config.input.size, generator=generator)}
        tokens, valid = texts()
        size = self.ours.config.input.vocab_size
        inputs = {"input_ids": tokens.clamp(max=size - 1), "attention_mask": valid.long()}
        if self.use == "Seq2SeqLM":
            inputs["decoder_input_ids"] = torch.randint(256, (3, 6), generator=generator)
        return inputs

    def labels(self):
        generator = torch.Generator().manual_seed(2)
        if self.use in ("ImageClassification", "SequenceClassification"):
            return torch.randint(3, (3,), generator=generator)
        if self.use == "Seq2SeqLM":
            return torch.randint(256, (3, 6), generator=generator).index_fill(1, torch.tensor(5), -100)
        mask = self.inputs()["attention_mask"].bool()
        return torch.randint(4, mask.shape, generator=generator).masked_fill(~mask, -100)

    @torch.no_grad()
    def wanted(self):
        """Our logits."""
        inputs = self.inputs()
        if self.use == "ImageClassification":
            return self.ours(inputs["pixel_values"])
        valid = inputs["attention_mask"].bool()
        if self.use == "Seq2SeqLM":
            return self.ours(inputs["decoder_input_ids"], self.ours.begin(inputs["input_ids"], valid))[0]
        logits = self.ours(inputs["input_ids"], valid=valid)
        return logits[0] if self.use == "CausalLM" else logits


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Pairs by their names, each made once."""
    made = {}

    def pair(name):
        if name not in made:
            made[name] = Pair(tmp_path_factory.mktemp("pair"), name)
        return made[name]

    return pair


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_are_the_runs_bits_and_importing_gives_them_back(name, pairs, tmp_path):
    pair = pairs(name)
    assert (pair.done.native, pair.done.auto_class) == (False, f"AutoModelFor{pair.use}") and pair.done.reason
    assert torch.equal(pair.theirs(**pair.inputs()).logits, pair.wanted())
    kinformer.import_checkpoint(pair.done.folder, tmp_path / "again")
    assert_same_weights(pair.run, tmp_path / "again")
    one, other = (open_run(folder) for folder in (pair.run, tmp_path / "again"))
    assert to_dict(one.config) == to_dict(other.config) and one.member == other.member


def test_a_new_process_needs_trust_alone(pairs, tmp_path):
    """Nothing of ours is imported before transformers reads the folders."""
    writer = pairs("gated-deltanet")
    code = [
        f"""
import sys, torch, transformers
print('kinformer' in sys.modules)
folder = {str(writer.done.folder)!r}
try:
    transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
except ValueError as error:
    print("trust_remote_code" in str(error))
model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
print(type(model).__module__.startswith("transformers_modules"))
inputs = transformers.AutoTokenizer.from_pretrained(folder)("It was ", return_tensors="pt")
print(*model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, 7:].tolist())
"""
    ]
    for name in ONE_OF_EACH:
        pair = pairs(name)
        torch.save(pair.inputs(), tmp_path / f"{pair.use}.pt")
        code += [
            f"auto, inputs = transformers.AutoModelFor{pair.use}, torch.load({str(tmp_path / f'{pair.use}.pt')!r})",
            f"model = auto.from_pretrained({str(pair.done.folder)!r}, trust_remote_code=True).eval()",
            "print(model(**inputs).logits.sum(dtype=torch.float64).item())",
        ]
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sums = [pairs(name).wanted().sum(dtype=torch.float64).item() for name in ONE_OF_EACH]
    prompt = torch.from_numpy(ByteTokenizer().encode("It was "))[None]
    new = kinformer.generate(writer.ours, prompt, max_new_tokens=8, temperature=0)[0].tolist()
    assert done.stdout.split() == ["False", "True", "True", *map(str, new), *map(str, sums)]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_padded_rows_are_as_they_are_alone(name, pairs):
    pair, inputs = pairs(name), pairs(name).inputs()
    together = pair.theirs(**inputs).logits
    for row in range(3):
        alone = {key: one[row : row + 1] for key, one in inputs.items()}
        if "attention_mask" in alone:
            real = alone["attention_mask"][0].bool()
            alone |= {"input_ids": alone["input_ids"][:, real], "attention_mask": None}
        got = pair.theirs(**alone).logits[0]
        assert_close(got, together[row, : len(got)], 1e-5)


def loss_of(pair, logits, labels):
    """The mean cross-entropy; a causal model predicts the next label."""
    if pair.use == "CausalLM":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_loss_is_the_cross_entropy_of_the_labels_where_they_stand(name, pairs):
    pair, labels = pairs(name), pairs(name).labels()
    output = pair.theirs(**pair.inputs(), labels=labels)
    assert_close(output.loss, loss_of(pair, output.logits, labels), 1e-6)
    output.loss.backward()
    trained = [one for one in pair.theirs.parameters() if one.requires_grad]
    assert sum(one.grad is not None for one in trained) > 0.9 * len(trained)
    pair.theirs.zero_grad()
    assert pair.theirs(**pair.inputs(), return_dict=False)[0].shape == output.logits.shape


def test_labels_of_a_translator_say_what_it_reads(pairs):
    pair, labels = pairs("linear translator"), pairs("linear translator").labels()
    inputs = pair.inputs()
    read = torch.cat([torch.full((3, 1), 256), labels[:, :-1].clamp(min=0)], dim=1)
    with torch.no_grad():
        want = pair.theirs(**inputs | {"decoder_input_ids": read}, labels=labels)
        del inputs["decoder_input_ids"]
        assert torch.equal(pair.theirs(**inputs, labels=labels).loss, want.loss)


def test_two_classifiers_learn_together(pairs):
    pair, labels = pairs("deit of two classifiers"), pairs("deit of two classifiers").labels()
    output = pair.theirs.train()(**pair.inputs(), labels=labels)
    both = pair.theirs.model(pair.inputs()["pixel_values"])
    want = sum(torch.nn.functional.cross_entropy(both[:, head], labels) for head in (0, 1)) / 2
    assert_close(output.loss, want, 1e-6)
    assert output.logits.shape == (3, 5)
    pair.theirs.eval()


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_trainer_takes_a_step_and_what_it_saves_is_loaded(name, pairs, tmp_path):
    pair = pairs(name)
    model, inputs = pair.loaded(), pair.inputs() | {"labels": pair.labels()}
    rows = [{key: one[row] for key, one in inputs.items()} for row in range(3)]
    options = {"max_steps": 1, "learning_rate": 1e-2, "per_device_train_batch_size": 3, "use_cpu": True}
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
    arguments = transformers.TrainingArguments(str(tmp_path / "trainer"), **options, **quiet)
    before = {key: one.clone() for key, one in model.state_dict().items()}
    done = transformers.Trainer(model, arguments, train_dataset=rows).train()
    assert done.global_step == 1 and torch.isfinite(torch.tensor(done.training_loss))
    after = model.eval().state_dict()
    assert any(not torch.equal(before[key], after[key]) for key in before)
    model.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        again = pair.loaded(tmp_path / "saved")
        assert torch.equal(again(**pair.inputs()).logits, model(**pair.inputs()).logits)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_saved_again_the_bytes_are_equal(name, pairs, tmp_path):
    pair = pairs(name)
    for target, source in {"once": pair.done.folder, "twice": tmp_path / "once"}.items():
        pair.loaded(source).save_pretrained(tmp_path / target)
    files = ["config.json", "model.safetensors", "modeling_kinformer.py"]
    files += ["generation_config.json"] if pair.use == "Seq2SeqLM" else []
    for file in files:
        assert (tmp_path / "once" / file).read_bytes() == (tmp_path / "twice" / file).read_bytes()
    kinformer.import_checkpoint(tmp_path / "twice", tmp_path / "again")
    assert_same_weights(pair.run, tmp_path / "again")


TASKS = {
    "MaskedLM": None,
    "SequenceClassification": "SEQ_CLS",
    "TokenClassification": "TOKEN_CLS",
    "ImageClassification": None,
    "CausalLM": "CAUSAL_LM",
    "Seq2SeqLM": "SEQ_2_SEQ_LM",
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_low_rank_updates_of_peft_reach_every_product_that_they_wrap(name, pairs):
    peft = pytest.importorskip("peft")
    pair = pairs(name)
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type=TASKS[pair.use], init_lora_weights=False)
    model = peft.get_peft_model(pair.loaded(), config)
    inputs = pair.inputs()
    assert not torch.equal(model(**inputs).logits, pair.wanted())
    model(**inputs, labels=pair.labels()).loss.backward()
    updates = {key: one for key, one in model.named_parameters() if "lora_" in key and one.requires_grad}
    assert updates and all(one.grad is not None for one in updates.values()), [
        key for key, one in updates.items() if one.grad is None
    ]
    if pair.use == "Seq2SeqLM":
        del inputs["decoder_input_ids"]
        assert model.generate(**inputs, max_new_tokens=3, do_sample=False).shape == (3, 4)


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """A translator that counts down from the source's first token, when it has learned a little of that."""
    folder = tmp_path_factory.mktemp("translator")
    torch.manual_seed(1)
    config = configure("vanilla", "tiny", None, LINEAR | {"head.bias": True})
    model = config.build()
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(40):
        source = torch.randint(1, 9, (16, 3))
        target = source[:, :1] - torch.arange(10)
        labels = target.masked_fill(target == 0, 257).masked_fill(target < 0, -100)
        read = torch.cat([torch.full((16, 1), 256), target.clamp(min=0)[:, :-1]], dim=1)
        logits, _ = model(read, model.begin(source))
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimiser.step()
    run = save_run("vanilla", folder / "run", config, model)
    done = kinformer.export(run, folder / "exported")
    return transformers.AutoModelForSeq2SeqLM.from_pretrained(done.folder, trust_remote_code=True).eval(), model.eval()


@pytest.mark.parametrize("help_", ["prompt_lookup_num_tokens", "assistant_model"])
def test_a_translator_writes_the_same_with_assistance(help_, translator):
    """Transformers drafts for one row."""
    theirs, source = translator[0], torch.tensor([[8, 3, 1]])
    plain = theirs.generate(source, max_new_tokens=12, do_sample=False)
    options = {help_: 2 if help_ == "prompt_lookup_num_tokens" else theirs}
    assert torch.equal(theirs.generate(source, max_new_tokens=12, do_sample=False, **options), plain)


@pytest.mark.parametrize("beam", [1, 3])
def test_greedy_and_beams_write_what_our_search_writes(beam, translator):
    """Scores are sums of logarithms on both sides, and the search ends with the third that has ended."""
    theirs, ours = translator
    source = torch.tensor([[8, 3, 1], [2, 7, 0], [5, 0, 0], [0, 0, 9]])
    valid = torch.arange(3) < torch.tensor([[3], [2], [1], [3]])
    best = beam_search(ours, ours.begin(source, valid), Search(256, 257, beam, 0.0), [20] * 4).best
    options = {"attention_mask": valid.long(), "num_beams": beam, "do_sample": False, "max_new_tokens": 21}
    options |= {"length_penalty": 0.0, "early_stopping": True} if beam > 1 else {}
    written = theirs.generate(source, **options)
    rows = [row[1 : row.index(257)] for row in written.tolist()]
    assert rows == [hypothesis.tokens for hypothesis in best] and len({*map(len, rows)}) > 2
    assert torch.equal(theirs.generate(source, **options, use_cache=False), written)


def test_a_translator_of_text_is_prepared_as_its_run_is(translator):
    theirs, ours = translator
    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs.name_or_path)
    batch = tokenizer(["two and", "a"], padding=True, return_tensors="pt")
    assert batch["input_ids"].tolist() == [[*b"two and", 257], [*b"a", 257, *[256] * 6]]
    settings = theirs.generation_config
    assert (settings.decoder_start_token_id, settings.eos_token_id, settings.suppress_tokens) == (256, 257, [256])
    assert theirs.generate(**batch, max_new_tokens=4).shape[0] == 2


@pytest.mark.parametrize("name", ["t5 1.1", "bart"])
@torch.no_grad()
def test_what_came_in_from_transformers_leaves_with_code_and_writes_the_same(name, tmp_path):
    """Only Marian leaves natively; T5 and BART are members of this library's classes."""
    came = EncoderDecoderPair(name, tmp_path)
    done = kinformer.export(came.done.run.folder, tmp_path / "out")
    assert not done.native and done.auto_class == "AutoModelForSeq2SeqLM"
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(done.folder, trust_remote_code=True).eval()
    inputs = {"input_ids": came.source, "attention_mask": came.valid.long()}
    assert_close(model(**inputs, decoder_input_ids=came.target).logits, came.logits(), 1e-5)
    greedy = {"max_new_tokens": 8, "do_sample": False, "suppress_tokens": [model.config.decoder_start_token_id]}
    assert torch.equal(model.generate(**inputs, **greedy), came.theirs.generate(**inputs, **greedy))


@torch.no_grad()
def test_types_sentences_and_global_tokens(pairs):
    """A mask of global tokens, types, and the sentences of a global input reach the model under our names."""
    tokens, _ = texts((24, 24))
    numbers = torch.arange(24).expand(2, -1) // 5
    etc, blocks = pairs("etc"), pairs("blockbert")
    for pair, theirs, ours in (
        (etc, {"sentences": numbers, "token_type_ids": 0 * tokens}, {"sentences": numbers}),
        (blocks, {"global_attention_mask": (tokens == 257).int()}, {"kinds": (tokens == 257).long()}),
        (blocks, {"token_type_ids": numbers % 2}, {"types": numbers % 2}),
    ):
        got = pair.theirs(tokens, **theirs).logits
        assert torch.equal(got, pair.ours(tokens, **ours)) and not torch.equal(got, pair.ours(tokens))
    with pytest.raises(KinformerError, match="does not have types of tokens; leave them out"):
        etc.theirs(tokens, token_type_ids=0 * tokens + 1)


def test_classes_keep_their_names_out_and_in(tmp_path):
    run = saved_run("linformer", tmp_path / "run", ["cat", "dog", "newt"], **CLASSES)
    done = kinformer.export(run, tmp_path / "exported")
    auto = transformers.AutoModelForSequenceClassification
    assert auto.from_pretrained(done.folder, trust_remote_code=True).config.id2label == {0: "cat", 1: "dog", 2: "newt"}
    kinformer.import_checkpoint(done.folder, tmp_path / "again")
    assert open_run(tmp_path / "again").data["identity"]["classes"] == ["cat", "dog", "newt"]


def test_images_are_prepared_as_the_run_reads_them(pairs):
    pair = pairs("convformer")
    facts = json.loads((pair.done.folder / "preprocessor_config.json").read_text())
    assert (facts["do_rescale"], facts["do_normalize"], facts["rescale_factor"]) == (True, False, 1 / 255)
    assert list(facts["size"].values()) == list(pair.ours.config.input.size)
    pixels = torch.randint(256, (1, 3, *pair.ours.config.input.size), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(pair.theirs(pixel_values=pixels.float() / 255).logits, pair.ours(pixels))


@pytest.mark.parametrize("name", ["linformer", "convformer", "linear translator"])
def test_the_command_says_what_it_will_be_and_writes_a_card(name, pairs, tmp_path, capsys):
    pair, out = pairs(name), tmp_path / "book"
    assert main(["export", str(pair.run), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert f"load it with AutoModelFor{pair.use} and trust_remote_code=True" in printed.err
    card = (out / "README.md").read_text()
    assert f'AutoModelFor{pair.use}.from_pretrained("book", trust_remote_code=True)' in card
    assert {"MaskedLM": "fill-mask", "ImageClassification": "image-cl", "Seq2SeqLM": "translation"}[pair.use] in card


def test_a_class_of_another_use_refuses_the_folder(pairs):
    config = auto.KinformerConfig.from_pretrained(pairs("linformer").done.folder)
    with pytest.raises(KinformerError, match="no CausalLM; load it by AutoModelForMaskedLM"):
        auto.KinformerForCausalLM(config)
    for one in auto.CLASSES:
        assert one.__name__ == f"KinformerFor{one.use}" and {"labels", "start_positions"} & {
            *inspect.signature(one.forward).parameters
        }


@pytest.mark.parametrize(("member", "use"), {"decision": "steps"}.items())
def test_what_transformers_has_no_class_for_is_refused(member, use, tmp_path):
    run = saved_run(member, tmp_path / "run")
    with pytest.raises(KinformerError, match=f"with the input '{use}' and the head .*only as an architecture"):
        kinformer.export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


REFUSED = {
    "vectors of another width": ("linformer", {"inputs_embeds": torch.zeros(1, 2, 16)}, "its vectors have 32 numbers"),
    "ids and vectors": (
        "linformer",
        {"inputs_embeds": torch.zeros(1, 2, 32), "input_ids": torch.zeros(1, 2, dtype=torch.int64)},
        "give either",
    ),
    "weights": (
        "linformer",
        {"input_ids": torch.zeros(1, 2, dtype=torch.int64), "output_attentions": True},
        "the mixer 'linformer' does not compute probabilities .its keys are summaries, not tokens.",
    ),
    "weights over a source": (
        "linear translator",
        {key: torch.zeros(1, 2, dtype=torch.int64) for key in ("input_ids", "decoder_input_ids")}
        | {"output_attentions": True},
        "output_attentions: a model of a source returns the last hidden states of its encoder alone",
    ),
    "layers over a source": (
        "linear translator",
        {key: torch.zeros(1, 2, dtype=torch.int64) for key in ("input_ids", "decoder_input_ids")}
        | {"output_hidden_states": True},
        "output_hidden_states: a model of a source returns",
    ),
    "no images": ("hipt", {}, "pixel_values: is missing"),
    "no target": ("linear translator", {"input_ids": torch.zeros(1, 3, dtype=torch.int64)}, "decoder_input_ids: is"),
    "a mask of another length": (
        "linear translator",
        {key: torch.zeros(1, size, dtype=torch.int64) for key, size in
         {"input_ids": 3, "attention_mask": 2, "decoder_input_ids": 1}.items()},
        r"must have the shape of the input, \[1, 3\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "inputs", "message"), REFUSED.values(), ids=REFUSED)
def test_calls_that_cannot_be_are_one_sentence(name, inputs, message, pairs):
    with pytest.raises(KinformerError, match=message):
        pairs(name).theirs(**inputs)


class AsOurs:
    """A model of transformers with eager attention, and the same model in our class for other compositions."""

    def __init__(self, theirs, folder, use):
        theirs.eval().save_pretrained(folder / "theirs")
        run = kinformer.import_checkpoint(folder / "theirs", folder / "run").run
        self.theirs, config = theirs, auto.KinformerConfig(to_dict(run.config), run.member)
        self.ours = getattr(auto, f"KinformerFor{use}")(config).eval()
        self.ours.model.load_state_dict(kinformer.load(run.folder).state_dict())


ATTENDED = {
    "gpt2": ("CausalLM", GPT2LMHeadModel, {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 30}),
    "bert": (
        "QuestionAnswering", BertForQuestionAnswering,
        {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 24},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENDED)
@torch.no_grad()
def test_attention_weights_are_those_of_transformers(name, tmp_path):
    use, model, sizes = ATTENDED[name]
    torch.manual_seed(0)
    config = model.config_class(vocab_size=61, attn_implementation="eager", initializer_range=0.3, **sizes)
    pair = AsOurs(model(config), tmp_path, use)
    valid = torch.arange(9) < torch.tensor([9, 5])[:, None]
    inputs = {"input_ids": torch.randint(1, 61, (2, 9)), "attention_mask": valid.long(), "output_attentions": True}
    ours, theirs = (one(**inputs).attentions for one in (pair.ours, pair.theirs))
    both = valid[:, None, :, None] & valid[:, None, None]
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other.masked_fill(~both, 0), 1e-5)
    assert pair.ours(input_ids=inputs["input_ids"]).attentions is None
    if use == "CausalLM":
        left = {"input_ids": inputs["input_ids"].flip(1), "attention_mask": valid.flip(1).long()}
        moved = pair.ours(**left, output_attentions=True).attentions[0]
        alone = pair.ours(left["input_ids"][1:, 4:], output_attentions=True).attentions[0]
        assert_close(moved[1:, :, 4:, 4:], alone, 1e-5)
        written = {"max_new_tokens": 2, "output_attentions": True, "return_dict_in_generate": True, "do_sample": False}
        prompt = inputs["input_ids"][:1]
        assert len(pair.ours.generate(prompt, **written, use_cache=False).attentions) == 2
        with pytest.raises(KinformerError, match="a cache does not hold weights; give whole texts, use_cache=False"):
            pair.ours.generate(prompt, **written)


def test_weights_of_a_recurrence_are_refused(pairs):
    pair = pairs("gated-deltanet")
    with pytest.raises(
        KinformerError, match="the mixer 'linear' does not compute probabilities .implied by kernel attention"
    ):
        pair.theirs(**pair.inputs(), output_attentions=True)


WITH_IDS = ("linformer", "etc of classes", "gated-deltanet")


@pytest.mark.parametrize("name", WITH_IDS)
@torch.no_grad()
def test_hidden_states_are_what_the_layers_return(name, pairs):
    pair = pairs(name)
    inputs = pair.inputs()
    outputs = pair.theirs(**inputs, output_hidden_states=True)
    assert torch.equal(outputs.logits, pair.wanted())
    assert pair.theirs(**inputs).hidden_states is None
    layers, valid = len(pair.ours.stack.order), inputs["attention_mask"].bool()
    assert [tuple(states.shape) for states in outputs.hidden_states] == [(*valid.shape, pair.ours.config.dim)] * (
        layers + 1
    )
    hidden = pair.ours.hidden(inputs["input_ids"], valid=valid, taps=(0,))
    assert torch.equal(outputs.hidden_states[-1], hidden[0]) and torch.equal(outputs.hidden_states[1], hidden[-1][0])
    first = inputs["input_ids"][:1, :1]  # the vector of one token, which padding does not move
    alone = pair.theirs(input_ids=first, output_hidden_states=True).hidden_states[0]
    row = pair.theirs(input_ids=inputs["input_ids"][:1], output_hidden_states=True).hidden_states[0]
    assert torch.allclose(row[:, :1], alone, atol=1e-6)


@pytest.mark.parametrize("name", ["convformer", "hipt", "deit of two classifiers"])
@torch.no_grad()
def test_hidden_states_of_images_are_what_the_layers_return(name, pairs):
    pair = pairs(name)
    images = pair.inputs()["pixel_values"]
    outputs = pair.theirs(images, output_hidden_states=True)
    first, *layers = outputs.hidden_states
    assert torch.equal(outputs.logits, pair.theirs(images).logits) and pair.theirs(images).hidden_states is None
    count = len(pair.ours.stack.order)
    assert len(layers) == count and first.shape[1] == pair.ours.input.length(images)
    hidden = pair.ours.hidden(images, taps=range(count))
    assert all(map(torch.equal, layers, (*hidden.tapped[:-1], hidden.long_input)))
    calls = []
    handle = pair.ours.stack.layers[0].register_forward_pre_hook(lambda module, inputs: calls.append(inputs[0]))
    pair.ours(images)
    handle.remove()
    assert torch.equal(first, calls[0][:, -first.shape[1] :])


@pytest.mark.parametrize("name", WITH_IDS)
def test_vectors_in_place_of_ids_give_the_same_logits_and_have_gradients(name, pairs):
    pair = pairs(name)
    inputs = pair.inputs()
    embeds = pair.theirs.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    logits = pair.theirs(inputs_embeds=embeds, attention_mask=inputs["attention_mask"]).logits
    assert torch.equal(logits, pair.wanted())
    (gradient,) = torch.autograd.grad(logits.square().sum(), embeds)
    valid = inputs["attention_mask"].bool()
    assert gradient[valid].any() and not gradient[~valid].any()


@torch.no_grad()
def test_generation_begins_with_vectors(pairs):
    pair = pairs("gated-deltanet")
    prompt = pair.inputs()["input_ids"][:1, :5]
    wanted = pair.theirs.generate(prompt, max_new_tokens=6, do_sample=False)[:, 5:]
    embeds = pair.theirs.get_input_embeddings()(prompt)
    assert torch.equal(pair.theirs.generate(inputs_embeds=embeds, max_new_tokens=6, do_sample=False), wanted)
    cache = pair.theirs(prompt).past_key_values or pair.theirs(prompt).cache
    assert cache and cache.get_seq_length() == 5 and not type(cache)()


def test_more_ids_keep_the_old_ones(pairs, tmp_path):
    pair = pairs("gated-deltanet")
    model, inputs = pair.loaded(), pair.inputs()
    before = model(**inputs).logits
    table = model.resize_token_embeddings(260, pad_to_multiple_of=8)
    assert table.num_embeddings == model.config.vocab_size == 264
    after = model(**inputs).logits
    assert after.shape[-1] == 264 and torch.allclose(after[..., :256], before, atol=1e-6)
    model(torch.tensor([[263]]))
    model.save_pretrained(tmp_path)
    assert torch.equal(pair.loaded(tmp_path)(**inputs).logits, after)
    assert model.resize_token_embeddings(256) is model.get_input_embeddings()
    assert torch.equal(model(**inputs).logits, before)


def test_checkpointing_gives_equal_gradients(pairs):
    pair = pairs("gated-deltanet")
    model = pair.loaded().train()
    inputs = pair.inputs() | {"labels": pair.labels()}

    def gradients():
        torch.manual_seed(0)
        model.zero_grad()
        model(**inputs).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain = gradients()
    model.activation_checkpointing_enable() if hasattr(model, "activation_checkpointing_enable") else (
        model.gradient_checkpointing_enable()
    )
    assert model.gradient_checkpointing and model.model.stack.config.checkpoint
    assert all(map(torch.equal, plain, gradients()))


def test_a_pipeline_reads_images_for_a_model_of_one_channel(tmp_path):
    image = pytest.importorskip("PIL.Image")
    run = saved_run("convformer", tmp_path / "run", **{"input.channels": 1, "head.classes": 4})
    done = kinformer.export(run, tmp_path / "exported")
    pipe = transformers.pipeline("image-classification", model=str(done.folder), trust_remote_code=True, device="cpu")
    answers = pipe(image.effect_noise((40, 30), 80))
    assert len(answers) == 4


def test_a_pipeline_reads_colours_for_a_native_model_of_one_channel(tmp_path):
    """It has three channels there, whose mean it reads, with the normalisation of one."""
    image = pytest.importorskip("PIL.Image")
    one = {"input.channels": 1, "input.mean": [0.3], "input.std": [0.4], "head.classes": 4}
    run = saved_run("vit", tmp_path / "run", **one)
    done = kinformer.export(run, tmp_path / "exported")
    assert done.native
    answers = transformers.pipeline("image-classification", model=str(done.folder), device="cpu", top_k=4)(
        image.effect_noise((32, 32), 80)
    )
    assert len(answers) == 4
    pixels, model = torch.rand(2, 3, 32, 32), transformers.AutoModelForImageClassification.from_pretrained(done.folder)
    with torch.no_grad():
        theirs = model.eval()(pixel_values=(pixels - 0.3) / 0.4).logits
        assert_close(theirs, kinformer.load(run)(pixels.mean(1, keepdim=True)), 1e-5)
        kinformer.import_checkpoint(done.folder, tmp_path / "again")
        assert_close(kinformer.load(tmp_path / "again")(pixels), theirs, 1e-5)


SWIGLU = {
    "layers.*.feed_forward": {"kind": "swiglu", "hidden_dim": 64},
    "layers.*.norm": {"kind": "rms_norm"}, "norm": {"kind": "rms_norm"},
    "layers.*.mixer.bias": False, "layers.*.mixer.projection.bias": False,
}  # fmt: skip


@pytest.mark.parametrize(("member", "architecture", "changes"), [("gpt", "GPT2", {}), ("rope", "Llama", SWIGLU)])
def test_a_causal_classifier_is_an_architecture_of_transformers(member, architecture, changes, tmp_path):
    """The class of a padded text is read at its last token, there as here."""
    table = tmp_path / "letters.tsv"
    table.write_text("".join(f"{'ab'[row % 2]}\t{'xy'[row % 2] * 5} {row}\n" for row in range(60)))
    sizes = {"steps": 2, "batch_size": 4, "length": 32, "validation_tokens": 64, "threads": 1}
    kinformer.train(
        member, task="classify", recipe="tiny", data=table, out=tmp_path / "run", set=changes, quiet=True, **sizes
    )
    done = kinformer.export(tmp_path / "run", tmp_path / "exported")
    assert done.native and done.model_class == f"{architecture}ForSequenceClassification"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(done.folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(done.folder)
    assert model.config.id2label == {0: "a", 1: "b"} and tokenizer.pad_token == "[PAD]"
    items = ["xxx", "yy 3 yy yyyyyy", "xx"]
    with torch.no_grad():
        theirs = model(**tokenizer(items, return_tensors="pt", padding=True)).logits.softmax(-1)
    ours = [row["classes"][0] for row in kinformer.predict(tmp_path / "run", items)]
    assert [row["class"] for row in ours] == ["ab"[index] for index in theirs.argmax(-1).tolist()]
    assert torch.allclose(theirs.max(-1).values, torch.tensor([row["probability"] for row in ours]), atol=1e-5)


def test_a_causal_classifier_of_no_architecture_is_refused_in_a_sentence(tmp_path):
    run = saved_run(
        "gated-deltanet", tmp_path / "run", head={"kind": "token_classification", "classes": 2, "bias": False}
    )
    with pytest.raises(KinformerError, match="the head 'token_classification', which is exported only as an architect"):
        kinformer.export(run, tmp_path / "exported")


ASSISTED = {"alibi": {"layers.*.norm": "rms_norm"}, "gated-deltanet": {}}
"""Members with exact attention and with a recurrence, and changes with which neither is an architecture."""


@pytest.fixture(scope="module")
def writers(tmp_path_factory):
    """Models by their members, with weights so large that they do not write one token for ever. ``noise`` is added to
    the weights of an assistant, whose drafts are then partly right."""
    made = {}

    def writer(member, noise=0.0):
        if (member, noise) not in made:
            torch.manual_seed(0)
            config = configure(member, "tiny", 256, ASSISTED[member])
            model = config.build()
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(torch.randn_like(weight), alpha=0.2)
                for weight in model.parameters():
                    weight.add_(torch.randn_like(weight), alpha=noise)
            folder = tmp_path_factory.mktemp("writer")
            done = kinformer.export(save_run(member, folder / "run", config, model), folder / "exported")
            auto = transformers.AutoModelForCausalLM
            made[member, noise] = auto.from_pretrained(done.folder, trust_remote_code=True).eval()
            made[member, noise].generation_config.assistant_confidence_threshold = 0
        return made[member, noise]

    return writer


@pytest.mark.parametrize("member", ASSISTED)
@torch.no_grad()
def test_assisted_generation_writes_what_greedy_generation_writes(member, writers, monkeypatch):
    model, assistant = writers(member), writers(member, noise=0.03)
    prompt = torch.randint(256, (1, 45), generator=torch.Generator().manual_seed(3))
    options = {"max_new_tokens": 70, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(prompt, **options)
    passes, inputs_of = [], model.model.head_inputs

    def head_inputs(tokens, *arguments, **values):
        passes.append(tokens.shape[1])
        return inputs_of(tokens, *arguments, **values)

    monkeypatch.setattr(model.model, "head_inputs", head_inputs)
    for name, help_ in {"lookup": {"prompt_lookup_num_tokens": 3}, "model": {"assistant_model": assistant}}.items():
        passes.clear()
        written = model.generate(prompt, **options, **help_)
        assert torch.equal(written.sequences, plain.sequences), name
        cache = written[CACHE]
        assert cache.is_croppable and len(cache._marks) <= 2 and cache._text.shape[1] <= 100, name
        assert max(passes) <= 31 + 21 and len(passes) < 70 < 44 + 70 < sum(passes), name
    shown = model.generate(prompt, **options, prompt_lookup_num_tokens=3, output_hidden_states=True)
    assert torch.equal(shown.sequences, plain.sequences)
    cache = plain[CACHE]
    assert not (cache.records or cache.is_croppable or cache._marks) and cache._text is None
    cache.crop(0)
    with pytest.raises(KinformerError, match="a state cannot be rewound"):
        cache.crop(-1)
