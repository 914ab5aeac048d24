"""What a run attends to: exact weights of every mechanism, hidden states, buckets, spans, exits, the page and its
command."""

import json
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import kinformer
from kinformer.core.contract import Chunk
from kinformer.core.encoder import EncoderMixer, GridOnly, SequenceContext, SourceMixer
from kinformer.core.probe import NoWeights, probe, probing, weights_of
from kinformer.family.build import build
from kinformer.family.kinds import kinds
from kinformer.lab.runs.trace import _recording, mean_distance, perplexity
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.runtime.errors import KinformerError
from tests.cli.conftest import gpt_run, make_run  # noqa: F401 (fixtures)
from tests.comparison.browser import Browser
from tests.members import CAUSAL, ENCODERS

WITHOUT_WEIGHTS = {"differential", "rwkv7", "sha-rnn", "star", "tensorized", "ttt", "universal"}
"""Members with mixers that have no weights over tokens."""
TEXT = "wind sings under the tree"
PARTIAL = {"compressive", "memorizing", "linformer", "nsa"}
"""Members of which something beside the text's tokens takes a share of the softmax, or some of it is lost, or of which
the weights are those of three branches, each with a gate."""


def calls_of(name, time=21):
    """The first calls of every kind of mixer in a tiny member, with inputs of one sequence."""
    torch.manual_seed(0)
    model = build(name, "tiny", 64, {}).eval().double()
    with torch.no_grad(), _recording(model.stack) as records:
        model.hidden(torch.randint(0, 60, (1, time)))
    return {type(call.mixer): call for call in reversed(records.calls)}.values()


@pytest.mark.parametrize("name", [*CAUSAL, *ENCODERS])
def test_weights_times_values_are_what_the_heads_of_every_mixer_give(name):
    for call in calls_of(name):
        try:
            weights, values, outputs, constant, *_, implied, _ = weights_of(call.mixer, call.inputs)
        except NoWeights as reason:
            assert str(reason).endswith(".") and name in WITHOUT_WEIGHTS
            continue
        error = weights @ values + constant - outputs
        rows = slice(1, None) if name == "longformer" else slice(None)  # its global token reads values of its own
        assert error[:, rows].abs().max() < 1e-12
        sums = weights.sum(-1)
        if not implied:
            assert weights.min() >= 0 and sums.max() < (3 if name == "nsa" else 1) + 1e-9
            if name not in PARTIAL:
                assert (((sums - 1).abs() < 1e-9) | (sums == 0)).all()
        if isinstance(call.inputs[0], Chunk):
            assert not weights.triu(1).any(), "a causal mixer's output depends on a later value"


def test_every_mixer_has_weights_or_a_reason():
    for slot in ("mixer", "encoder_mixer"):
        for kind, config in kinds()[slot].items():
            mixer, shown = config().build(16).eval(), []
            try:
                shown = [weights_of(mixer, inputs_of(mixer)).weights]
            except NoWeights as reason:
                shown = ["does not show" not in str(reason)]
            assert shown[0] is not False, kind


def inputs_of(mixer):
    """A call of one sequence of 16 tokens 16 wide, over itself as its source or as an image of 4 x 4."""
    x = torch.randn(1, 16, 16)
    if isinstance(mixer, EncoderMixer):
        return x, SequenceContext(grid=(4, 4) if isinstance(mixer, GridOnly) else None)
    if isinstance(mixer, SourceMixer):
        return Chunk(x), mixer.over(x, torch.ones(1, 16, dtype=torch.bool), None, None)
    return Chunk(x), mixer.initial_state(1)


def test_a_probe_is_seen_in_its_own_thread_alone():
    v = torch.ones(1)
    with probing(values=lambda value, at: value + 1):
        assert probe("values", v) == 2 and probe("outputs", v) == 1
        with ThreadPoolExecutor(1) as other:
            assert other.submit(probe, "values", v).result() == 1
        assert torch.compile(lambda x: probe("values", x), fullgraph=True, backend="eager")(v) == 1
    assert probe("values", v) is v


@pytest.mark.parametrize("position", ["rope", "alibi", "none"])
def test_weights_are_the_softmax_by_hand(position):
    mixer = SoftmaxAttention.Config(num_heads=2, position={"kind": position}).build(16).double().eval()
    x = torch.randn(1, 11, 16, dtype=torch.float64)
    state = mixer.initial_state(1)
    weights = weights_of(mixer, (Chunk(x), state)).weights
    with torch.no_grad():
        q, k, _ = mixer.projection(x)
        index = torch.arange(11)
        q, k = mixer.position.rotate(q, k, index[None])
        scores = (q @ k.mT * 8**-0.5)[0]
        if (relative := mixer.position.relative(0, 10)) is not None:
            scores = scores + relative.bias[:, (index[:, None] - index).clamp_min(0)]
        scores = scores.masked_fill(index > index[:, None], -torch.inf)
    assert torch.allclose(weights, scores.softmax(-1), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fast_kernels_have_the_weights_of_the_reference(dtype):
    torch.manual_seed(1)
    config = SoftmaxAttention.Config(num_heads=2, position="t5", pattern={"kind": "local", "window": 7})
    fast, plain = (config.replace(impl=impl).build(16).eval().to(dtype) for impl in ("auto", "reference"))
    plain.load_state_dict(fast.state_dict())
    x = torch.randn(1, 40, 16).to(dtype)
    one, two = (weights_of(mixer, (Chunk(x), mixer.initial_state(1))).weights for mixer in (fast, plain))
    assert one.dtype == torch.float32 and torch.allclose(one, two, atol=1e-6 if dtype == torch.float32 else 1e-2)


def test_a_mixer_is_left_as_it_was():
    (call,) = calls_of("primer")
    before = call.mixer(*call.inputs[:2])[0]
    weights_of(call.mixer, call.inputs)
    assert torch.equal(before, call.mixer(*call.inputs[:2])[0])
    assert probe("values", before) is before


def test_tensors_of_a_run_and_the_chosen_layers_and_heads(gpt_run):  # noqa: F811
    traced = kinformer.trace(gpt_run, TEXT)
    assert "".join(traced.tokens) == TEXT and traced.ids.tolist() == list(TEXT.encode())
    assert [item.place for item in traced.attention] == ["layer 1", "layer 2"]
    assert traced.exits is traced.steps is traced.source is None
    model = kinformer.load(gpt_run)
    with torch.no_grad():
        hidden = model.hidden(traced.ids[None], taps=[0, 1])
    assert all(map(torch.equal, traced.hidden_states, (tap[0] for tap in hidden.taps)))
    part = kinformer.trace(gpt_run, TEXT, layers=[2], heads="2")
    assert [(item.layer, item.heads) for item in part.attention] == [(2, (2,))]
    assert torch.equal(part.attention[0].weights[0], traced.attention[1].weights[1])
    assert len(kinformer.trace(gpt_run, TEXT, max_tokens=5).tokens) == 5


def test_buckets_clusters_spans_exits_and_steps(make_run):  # noqa: F811
    buckets = kinformer.trace(make_run("reformer"), TEXT).attention
    assert all(item.buckets.shape[2] == len(TEXT) and item.buckets.min() >= 0 for item in buckets)
    weights, rounds = buckets[0].weights, buckets[0].buckets
    alike = (rounds[..., :, None] == rounds[..., None, :]).any(1)
    itself = torch.eye(len(TEXT), dtype=torch.bool)
    assert not (weights * (~alike & ~itself)).any(), "a token sees a token of another bucket"
    clusters = kinformer.trace(make_run("routing"), TEXT).attention[-1].buckets
    assert (clusters[0] == -1).all() and (clusters[-1] >= 0).all()
    spans = kinformer.trace(make_run("adaptive-span"), TEXT).attention[0]
    assert spans.spans.shape == (2,) and (spans.spans >= 0).all()
    exits = kinformer.trace(make_run("depth-adaptive"), TEXT).exits
    assert exits.shape == (len(TEXT),) and exits.min() >= 1
    halting = make_run("universal", **{"stack.halting": {"kind": "act"}})
    steps = kinformer.trace(halting, TEXT)
    assert steps.steps.shape == (len(TEXT),) and steps.steps.min() >= 1
    assert steps.attention[0].place.startswith("layer 1, step 1")


def test_a_mechanism_without_weights_says_why_and_kernel_attention_that_its_are_implied(make_run):  # noqa: F811
    plain = kinformer.trace(make_run("tensorized"), TEXT).attention[0]
    assert plain.weights is None and "core tensor" in plain.note
    kernel = kinformer.trace(make_run("linear-transformer"), TEXT).attention[0]
    assert kernel.implied and "no probabilities" in kernel.note and kernel.weights.shape == (2, 25, 25)


def test_a_translation_is_traced_over_its_source(make_run):  # noqa: F811
    folder = make_run("vanilla")
    traced = kinformer.trace(folder, TEXT, target="Wind")
    assert traced.tokens == ("[BOS]", *"Wind") and traced.source.tokens == (*TEXT, "[EOS]")
    cross = next(item for item in traced.attention if item.keys == "source")
    assert cross.place == "layer 1, source" and cross.weights.shape == (2, 5, len(TEXT) + 1)
    assert torch.allclose(cross.weights.sum(-1), torch.ones(2, 5))
    assert traced.source.attention[0].place == "encoder, layer 1"
    assert len(kinformer.trace(folder, "a b", layers=[1]).tokens) >= 1  # the run's own translation


def test_far_and_wide():
    weights = torch.zeros(2, 4, 4)
    weights[0] = torch.eye(4)
    weights[1, :, 0] = weights[1, :, 1] = 0.5
    assert mean_distance(weights).tolist() == pytest.approx([0, 1.25])
    assert perplexity(weights).tolist() == pytest.approx([1, 2])


def test_the_command_writes_a_page_or_arrays(cli, gpt_run, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    code, out, err = cli("trace", gpt_run, "a </script> text", "--layers", 1)
    page = (tmp_path / "gpt.html").read_text()
    assert code == 0 and "layer 1 (softmax): a query looks at" in out and "layer 2" not in out, err
    assert page.count("</script>") == 2 and "http" not in page.replace("http-equiv", "")
    (tmp_path / "gpt.html").write_text("a page of the user's")
    code, out, err = cli("trace", gpt_run, "another text", "--json")
    assert code == 0 and json.loads(out)["out"] is None, err
    assert (tmp_path / "gpt.html").read_text() == "a page of the user's"
    code, out, err = cli("trace", gpt_run, "--out", "t.npz", "--json", "--file", _file(tmp_path, TEXT))
    facts, arrays = json.loads(out), np.load(tmp_path / "t.npz")
    assert code == 0 and "".join(facts["text"]["tokens"]) == TEXT, err
    assert np.allclose(arrays["layer 2/weights"].sum(-1), 1, atol=1e-5)
    assert facts["text"]["attention"][0]["heads"][0]["effective_keys"] > 1


def _file(folder, text):
    path = folder / "text.txt"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give TEXT"),
        (("",), "is empty"),
        (("a", "--layers", "3"), "'3' is none of the layers 1 to 2"),
        (("a", "--heads", "x"), "'x' is none of the heads 1 to 2"),
        (("a", "--target", "b"), "task translate"),
        (("a", "--out", "t.txt"), "neither .html"),
    ],
)
def test_mistakes_are_one_sentence(cli, gpt_run, arguments, words):  # noqa: F811
    code, _, err = cli("trace", gpt_run, *arguments)
    assert code == 2 and words in err and err.count("\n") == 1


def test_a_run_that_reads_no_text_is_refused(make_run, monkeypatch):  # noqa: F811
    monkeypatch.setattr("kinformer.lab.runs.run.Run.tokenizer", None)
    with pytest.raises(KinformerError, match="reads no text to trace"):
        kinformer.trace(make_run("gpt"), TEXT)


def _complaints(browser):
    """What axe finds serious on a page; nothing where it is not installed."""
    spec = find_spec("axe_core_python")
    if spec is None or spec.origin is None:
        return []
    browser.js((Path(spec.origin).parent / "axe.min.js").read_text(encoding="utf-8") + "; 1")
    violations = browser.js(
        "axe.run(document, {resultTypes: ['violations']}).then(r => r.violations.map(v =>"
        " [v.impact, v.id, v.nodes.slice(0, 3).map(n => n.html.slice(0, 120))]))"
    )
    return [item for item in violations if item[0] in ("serious", "critical")]


def test_the_page_shows_what_the_trace_holds_on_wide_and_narrow_screens(cli, gpt_run, tmp_path):  # noqa: F811
    browser = Browser()
    try:
        path = tmp_path / "page.html"
        assert cli("trace", gpt_run, TEXT, "--out", path)[0] == 0
        weights = kinformer.trace(gpt_run, TEXT).attention[1].weights
        for width, theme in ((1366, "light"), (390, "dark")):
            browser.size(width)
            browser.prefers(theme)
            browser.open(path)
            browser.js(
                "new Promise(done => { const wait = () => "
                "document.body.dataset.ready ? done() : setTimeout(wait, 10); wait(); })"
            )
            assert browser.js("document.documentElement.scrollWidth") <= width and not browser.errors
            assert _complaints(browser) == []
        browser.js("document.querySelectorAll('.heads button')[3].click()")
        browser.js("document.querySelectorAll('#queries [role=option]')[20].click()")
        browser.press("ArrowLeft")
        assert browser.js("document.activeElement.dataset.i") == "19"
        best = int(weights[1, 19].argmax())
        expected = f"({best + 1})"
        assert expected in browser.js("document.querySelector('#details li').textContent")
        painted = browser.js(
            "[...document.querySelectorAll('#queries > span')].findIndex(span => span.style.background.includes('100'))"
        )
        assert painted == best
        assert browser.js("document.querySelectorAll('#queries > span')[20].style.background") == ""
    finally:
        browser.close()
