"""Export: folders that transformers loads compute what the run computes, and importing one gives the run's bits."""

import json
import shutil
import sys

import pytest
import torch

import kinformer
from kinformer.family.build import configure, storable
from kinformer.interop.checkpoint import ARCHITECTURES
from kinformer.interop.writing import Native, native_form
from kinformer.lab.cli.main import main
from kinformer.lab.data import ByteTokenizer
from kinformer.lab.runs.exporting import size_in_bytes
from kinformer.lab.runs.run import Run, open_run, save_weights
from kinformer.lab.tasks.table import task_of
from kinformer.runtime.errors import KinformerError
from tests.interop.decoders import Pair, assert_close
from tests.interop.peers import GRANITES, tokens
from tests.interop.test_decoders import IMPORTED

LEFT_WITH_CODE = ("smollm3", "olmo2", "olmo3", "glm4_moe", "kimi_linear", *GRANITES)
NATIVE = {name: pair for name, pair in IMPORTED.items() if pair[0] not in LEFT_WITH_CODE}
NATIVE |= {"gpt2": ("gpt2", {"scale_attn_by_inverse_layer_idx": False, "attn_implementation": "sdpa"})}
RMS = {"layers.*.norm": {"kind": "rms_norm"}, "norm": {"kind": "rms_norm"}}
PLAIN = RMS | {"layers.*.feed_forward": {"kind": "swiglu"}}
REMOTE = ("gated-deltanet", "linear-transformer", "retnet", "local", "transformer-xl", "universal", "calm")


def save_run(member, folder, config, model, **more):
    """Save ``model`` as a run of the recipe tiny; ``more``: what else the run's file says."""
    folder.mkdir()
    save_weights(folder, model.state_dict())
    task = task_of(config)
    data = {"spec": task.data.default, "holdout": None, "identity": {}}
    settings = {"task": task, "options": task.Options(), "data": data, "training": {}} | more
    Run(folder=folder, member=member, recipe="tiny", config=config, **settings).save()
    return folder


def saved_run(member, folder, **changes):
    """A run of the recipe tiny with random weights and bytes as tokens."""
    torch.manual_seed(0)
    config = configure(member, "tiny", 256, changes)
    return save_run(member, folder, config, config.build())


def loaded(folder, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@torch.no_grad()
def assert_same_model(theirs, ours):
    """Equal logits, and equal greedy tokens."""
    ids = tokens()
    assert_close(ours(ids)[0], theirs(ids).logits)
    prompt = tokens(6)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
    generated = theirs.generate(prompt, **options)
    assert torch.equal(generated[:, 6:], kinformer.generate(ours, prompt, max_new_tokens=8, temperature=0))


def assert_same_weights(one, other):
    one, other = (kinformer.load(folder).state_dict() for folder in (one, other))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(autouse=True)
def modules_cache(tmp_path, monkeypatch):
    """A folder of its own for the code that transformers copies."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize("name", NATIVE)
def test_an_architecture_of_transformers_leaves_as_it_came(name, tmp_path):
    kind, changes = NATIVE[name]
    pair = Pair(kind, tmp_path, **changes)
    done = kinformer.export(pair.out, tmp_path / "exported")
    assert done.native and not list(done.folder.glob("*.py"))
    kinformer.import_checkpoint(done.folder, tmp_path / "again")
    assert_same_weights(pair.out, tmp_path / "again")
    eager = {"attn_implementation": "eager"} if kind == "gemma2" else {}
    theirs = loaded(done.folder, **eager)
    assert type(theirs) in (type(pair.theirs), *pair.theirs.__class__.__mro__) or kind in (
        "mistral",
        "phi3",
        "qwen3_next",
    )
    assert_same_model(theirs, pair.ours)


def test_which_architectures_are_imported_alone():
    assert {kind for kind, one in ARCHITECTURES.items() if not one.exported} == {
        *("modernbert", "t5", "mt5", "umt5", "bart", "mbart", *LEFT_WITH_CODE[:-1]),
        *("gated_deltanet", "comba", "delta_net", "mesa_net", "gla", "retnet", "path_attn", "ttt"),
    }


@pytest.mark.parametrize(
    ("member", "changes", "kind"), [("gpt", {}, "gpt2"), ("rope", {}, "gpt_neox"), ("mla", PLAIN, "deepseek_v2")]
)
def test_members_that_are_architectures(member, changes, kind, tmp_path):
    run = saved_run(member, tmp_path / "run", **changes)
    done = kinformer.export(run, tmp_path / "exported")
    assert (done.native, done.model_type) == (True, kind)
    assert_same_model(loaded(done.folder), kinformer.load(run))


def test_gpt2_has_the_length_that_llama_cpp_reads():
    config = native_form(configure("gpt", "tiny", 256)).config
    assert config["n_ctx"] == config["n_positions"]


COMPOSED = {
    "mixtral as in its paper": ("mixtral", "paper", {}, "mixtral"),
    "mla as in its paper": ("mla", "paper", {}, "deepseek_v2"),
    "mla of DeepSeek-V3": ("mla", "experts", RMS | {"layers.0.feed_forward": {"kind": "swiglu"}}, "deepseek_v3"),
    "mla without experts": ("mla", "tiny", PLAIN, "deepseek_v2"),
    "rope with widths that follow": ("rope", "tiny", PLAIN, "llama"),
}


@pytest.mark.parametrize(("member", "recipe", "changes", "kind"), COMPOSED.values(), ids=COMPOSED)
def test_compositions_that_are_architectures(member, recipe, changes, kind):
    form = native_form(configure(member, recipe, 256, changes))
    assert isinstance(form, Native) and form.model_type == kind


@pytest.mark.parametrize("member", REMOTE)
def test_other_members_leave_with_code(member, tmp_path):
    run = saved_run(member, tmp_path / "run")
    done = kinformer.export(run, tmp_path / "exported")
    assert not done.native and done.reason
    theirs, ours = loaded(done.folder, trust_remote_code=True), kinformer.load(run)
    assert_same_model(theirs, ours)
    kinformer.import_checkpoint(done.folder, tmp_path / "again")
    assert_same_weights(run, tmp_path / "again")
    assert open_run(tmp_path / "again").member == member


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The folder of a gated DeltaNet, whose code is remote."""
    folder = tmp_path_factory.mktemp("exported")
    run = saved_run("gated-deltanet", folder / "run")
    return kinformer.export(run, folder / "exported").folder


@pytest.fixture(scope="module")
def model(exported):
    import kinformer.interop.auto  # noqa: F401 (registers the classes)

    return loaded(exported)


@torch.no_grad()
def test_padding_beams_and_continued_caches(model):
    ids = tokens(7)
    options = {"max_new_tokens": 6, "do_sample": False}
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[0, :3], mask[0, :3] = 0, 0
    alone = model.generate(ids[:1, 3:], **options)
    assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:1, 7:], alone[:, 4:])
    beams = [model.generate(ids, num_beams=3, use_cache=use_cache, **options) for use_cache in (True, False)]
    assert torch.equal(*beams)
    first = model.generate(ids, return_dict_in_generate=True, **options)
    name = next(name for name in ("cache", "past_key_values") if name in first)
    assert first[name] and not type(first[name])()  # so that `if past_key_values:` means what it says
    again = model.generate(first.sequences, **{name: first[name]}, **options)
    assert torch.equal(again, model.generate(ids, max_new_tokens=12, do_sample=False))


def test_loss_and_gradients_are_those_of_shifted_labels(model):
    ids = tokens()
    labels = ids.masked_fill(ids < 9, -100)
    output = model(ids, labels=labels, use_cache=False)
    want = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert_close(output.loss, want)
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()


def test_saved_again_the_bytes_are_equal(exported, tmp_path):
    for name in ("once", "twice"):
        source = exported if name == "once" else tmp_path / "once"
        loaded(source, trust_remote_code=True).save_pretrained(tmp_path / name)
    for file in ("model.safetensors", "config.json", "modeling_kinformer.py"):
        assert (tmp_path / "once" / file).read_bytes() == (tmp_path / "twice" / file).read_bytes()


def test_bytes_are_the_tokens_of_a_run_of_bytes(exported):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported)
    text = "It was\n\t the  »best« of times, \N{PILE OF POO}\x00\x7f."
    assert tokenizer(text)["input_ids"] == ByteTokenizer().encode(text).tolist()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_files_and_ids_travel(tmp_path):
    from tests.interop.peers import byte_tokenizer

    pair = Pair("llama", tmp_path, vocab_size=256)
    byte_tokenizer(pair.folder)
    kinformer.import_checkpoint(pair.folder, tmp_path / "with")
    done = kinformer.export(tmp_path / "with", tmp_path / "exported")
    assert (done.folder / "tokenizer.json").read_bytes() == (pair.folder / "tokenizer.json").read_bytes()
    config = json.loads((done.folder / "config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [None] * 3


def test_half_precision_and_several_files(exported, tmp_path):
    run = exported.parent / "run"
    done = kinformer.export(run, tmp_path / "small", dtype="bfloat16", max_shard_size="16KB")
    assert done.shards > 2 and (done.folder / "model.safetensors.index.json").is_file()
    theirs = loaded(done.folder, trust_remote_code=True)
    assert theirs.dtype == torch.bfloat16
    ours = kinformer.load(run).bfloat16()
    assert torch.equal(theirs(tokens()).logits, ours(tokens())[0])


def test_the_command_says_what_it_will_be_and_writes_a_card(exported, tmp_path, capsys):
    out = tmp_path / "book"
    assert main(["export", str(exported.parent / "run"), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "remote code of kinformer, as no architecture" in printed.err and "'linear'" in printed.err
    assert printed.out.startswith(f"{out}: kinformer, ")
    card = (out / "README.md").read_text()
    assert "Gated DeltaNet" in card and "`stdlib`" in card and "trust_remote_code=True" in card
    assert main(["export", str(exported.parent / "run"), "--out", str(tmp_path / "json"), "--json", "--quiet"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["native"] is False and printed.err == ""


REFUSED = {
    "no run": (["/nowhere"], "is not a run folder"),
    "type": (["RUN", "--dtype", "int8"], "'int8' is not one of"),
    "size": (["RUN", "--max-shard-size", "tiny"], "--max-shard-size tiny: is not a size"),
    "full": (["RUN", "--out", "FULL"], "is not empty; give a new folder"),
    "file": (["RUN", "--out", "FILE"], "is a file"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_mistakes_are_one_sentence(arguments, message, exported, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    places = {"RUN": exported.parent / "run", "FULL": tmp_path / "full", "FILE": tmp_path / "file"}
    arguments = [str(places.get(one, one)) for one in arguments]
    if "--out" not in arguments:
        arguments += ["--out", str(tmp_path / "new")]
    assert main(["export", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert [path.name for path in tmp_path.glob("full/*")] == ["mine.txt"] and (tmp_path / "file").read_text() == "mine"
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".partial")]


def test_weights_beyond_half_precision_are_refused(tmp_path):
    run = saved_run("gpt", tmp_path / "run")
    weights = kinformer.load(run).state_dict()
    save_weights(run, weights | {"position.table": weights["position.table"] + 1e6})
    with pytest.raises(KinformerError, match="transformer.wpe.weight has values beyond its range"):
        kinformer.export(run, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_spoiled_compositions_are_refused(exported, tmp_path):
    for number, change in enumerate(({"composition": 3}, {"composition": {}}, {"member": "nobody"}, {"member": None})):
        folder = shutil.copytree(exported, tmp_path / f"spoiled-{number}")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(KinformerError):
            kinformer.import_checkpoint(folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_why_a_model_is_no_architecture():
    for member, reason in {"macaron": "does not have layers.0.kind = 'macaron'", "alibi": "the nearest"}.items():
        assert reason in native_form(configure(member, "tiny"))
    assert storable(configure("gpt", "tiny"))


def test_sizes():
    assert [size_in_bytes(size) for size in ("5GB", "64 KiB", "1.5M", 7)] == [5 * 10**9, 2**16, 1_500_000, 7]
