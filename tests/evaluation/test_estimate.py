"""The estimate against measurement: published counts, the flop counter, what autograd saves, the states themselves."""

import json
import math
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import kinformer
from kinformer.core.pattern import Band
from kinformer.core.state import nbytes
from kinformer.family.build import configure
from kinformer.family.table import MEMBERS
from kinformer.heads.classes import ClassificationHead
from kinformer.kernels.attention import TABLE
from kinformer.kernels.band import _backward, _forward, limits
from kinformer.kernels.block_sparse import explain
from kinformer.kernels.softmax import Visibility
from kinformer.lab.cli.studying import Estimate
from kinformer.lab.estimation import estimate as lengths
from kinformer.lab.estimation.estimate import OPTIMIZERS, at_length, estimate, optimizer_bytes, rules_of_thumb
from kinformer.lab.estimation.parts import loss_of, measure, measure_inference, outputs
from kinformer.lab.training.optimisers import Optimiser
from kinformer.lab.training.settings import Settings
from kinformer.runtime.compiling import unallocated
from kinformer.runtime.errors import KinformerError

BATCH, LENGTH = 2, 50
SHORT = ("gpt", "linear-transformer", "reformer", "compressive", "big-bird", "swin", "universal", "image-transformer")
"""Members whose costs are also measured below a window, a block and a segment."""
CONFIGS = {name: configure(name, "tiny") for name in MEMBERS}
CONFIGS["gpt, local window and rope"] = configure(
    "gpt", "tiny", set={"layers.*.mixer.pattern": '{"kind": "local", "window": 40}', "layers.1.mixer.position": "rope"}
)
CONFIGS["gpt, one key for all heads, dropout"] = configure(
    "gpt",
    "tiny",
    set={"layers.*.mixer.projection": "grouped", "layers.*.dropout": 0.1, "layers.*.mixer.dropout": 0.1},
)
CONFIGS["xl positions, bilinear score"] = configure(
    "gpt",
    "tiny",
    set={"position": "none", "layers.*.mixer.position": "xl", "layers.*.mixer.score": "bilinear"},
)
CONFIGS["linear-transformer, quadratic"] = configure(
    "linear-transformer", "tiny", set={"layers.*.mixer.feature_map": "quadratic", "dim": 32}
)
CONFIGS["big-bird, global input"] = configure("big-bird", "tiny-etc", set={"layers": 3})
CONFIGS |= {
    f"{name}, translating": configure(name, "tiny-translate")
    for name in ("rfa", "universal", "macaron", "depth-adaptive")
}
CONFIGS["vanilla, distances and summaries across"] = configure(
    "vanilla",
    "tiny",
    set={
        "layers.0.further_mixers": [{"kind": "cross", "position": "shaw", "num_heads": 2}],
        "layers.1.further_mixers": [{"kind": "cross_linformer", "num_heads": 2}],
    },
)
CONFIGS["mesanet"] = configure("mesanet", "tiny", set={"layers.*.mixer.iterations": 4})
CONFIGS["tensorized, memory"] = configure("tensorized", "tiny-memory")
CONFIGS |= {f"universal, {name}": configure("universal", f"tiny-{name}") for name in ("encoder", "convolution")}
CONFIGS["blockbert, classes of texts"] = configure("blockbert", "tiny").replace(
    head=ClassificationHead.Config(classes=3)
)

SHAPES = [(name, BATCH, LENGTH) for name in CONFIGS] + [(name, 1, 7) for name in SHORT]
each_shape = pytest.mark.parametrize(("name", "batch", "length"), SHAPES)


def way(config):
    """What decides how costs grow with the length."""
    mixer = config.layers[0].mixer
    return mixer.kind, mixer.pattern.kind if hasattr(mixer, "pattern") else None


NARROW = {
    (way(config), getattr(config.layers[0].mixer, "rule", None), config.stack.kind, config.protocol): name
    for name, config in reversed(CONFIGS.items())
}
"""Of all members with one kind of attention, stack and model the first: in bfloat16 these decide what is kept wide."""
NARROW_CONFIGS = [CONFIGS[name] for name in NARROW.values()]
each_narrow = pytest.mark.parametrize("config", NARROW_CONFIGS, ids=NARROW.values())


IN_TILES = {name: entry._replace(short_pairs=0, short_narrow_pairs=0) for name, entry in TABLE.items()}


@cache
def estimated(config, *, length, batch=1, precision="fp32"):
    """The estimate; that in bfloat16 follows at once where a test needs it, and does not measure float32 again."""
    if precision == "fp32" and (length, batch) == (LENGTH, BATCH) and config in NARROW_CONFIGS:
        found = estimate(config, length=length, batch=batch)
        estimated(config, length=length, batch=batch, precision="bf16-mixed")
        return found
    return estimate(config, length=length, batch=batch, precision=precision)


def step(config, batch, length, device="cpu"):
    """Loss, and the final state if there is one, of a training step of a new model."""
    with torch.device(device):
        model = config.build()
        values = model.input.example(batch, length, device)
    logits, state = outputs(model, values)
    return loss_of(model, logits, values), state, model


def saved_bytes(config, batch, length, autocast=False):
    """Bytes of the distinct storages, other than parameters, that autograd keeps for the backward of attention in
    tiles: an estimate leaves out the probabilities of short rows, at most 3 MiB a layer."""
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with (
        patch.dict(TABLE, IN_TILES),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        loss, state, model = step(config, batch, length)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in own)


@pytest.mark.parametrize(
    ("recipe", "parameters"),
    [
        ("paper", 124_439_808),
        ("paper-medium", 354_823_168),
        ("paper-large", 774_030_080),
        ("paper-xl", 1_557_611_200),
    ],
)
def test_gpt2_has_its_published_size(recipe, parameters):
    result = estimate(configure("gpt", recipe), length=1024, batch=8)
    assert result.parameters == parameters == sum(part.parameters for part in result.parts)
    assert result.memory["train"]["weights"] == 4 * parameters
    assert result.train_bytes == sum(result.memory["train"].values())


def test_gpt2_flops_are_those_of_the_textbook():
    """2 a weight and token in products, and 4 * width a pair of tokens; hidden pairs on the diagonal are computed."""
    dim, depth, batch, length, vocab = 768, 12, 8, 1024, 50257
    result = estimate(configure("gpt", "paper"), length=length, batch=batch)
    tokens = batch * length
    pairs = length * (length + 128) / 2
    forward = 2 * tokens * (12 * depth * dim**2 + vocab * dim) + 4 * batch * pairs * dim * depth
    backward = 2 * forward + 2 * batch * pairs * dim * depth
    assert result.flops_forward == pytest.approx(forward, rel=1e-9)
    assert result.flops_step == pytest.approx(forward + backward, rel=1e-9)


def test_frozen_weights_have_neither_gradients_nor_an_optimiser():
    memory = estimated(CONFIGS["hipt"], length=4).memory["train"]
    parameters = list(CONFIGS["hipt"].build().parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    assert 0 < memory["gradients"] == 4 * trained < memory["weights"] == 4 * sum(each.numel() for each in parameters)
    assert memory["optimizer"] == 8 * trained


@each_shape
def test_flops_are_those_of_the_counter(name, batch, length):
    config = CONFIGS[name]
    result = estimated(config, length=length, batch=batch)
    counter = FlopCounterMode(display=False)
    model, values = without_numbers(config, batch, length)
    with counter:
        logits = outputs(model, values)[0]
        forward = counter.get_total_flops()
        logits.sum().backward()
    assert 0 < result.flops_forward == forward
    assert result.flops_step == counter.get_total_flops()
    assert 0 < result.flops_inference == pytest.approx(inference_flops(model, values), rel=0.05)


def without_numbers(config, batch, length):
    """A model of shapes only, and values for it."""
    with unallocated():
        model = config.build()
    with torch.device("meta"):
        return model, model.input.example(batch, length)


def inference_flops(model, values):
    """Of one forward of the whole model without gradients."""
    model.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        outputs(model, values)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["transformer-xl", "compressive", "gpt", "bert"])
def test_training_computes_more_where_a_memory_is_projected_again(name):
    result = estimate(configure(name, "tiny"), length=100)
    assert (result.flops_forward > 1.1 * result.flops_inference) == (name in ("transformer-xl", "compressive"))
    assert name in ("transformer-xl", "compressive") or result.flops_forward == result.flops_inference


@pytest.mark.parametrize("classifiers", ["tied", "separate"])
def test_inference_reads_the_exits_between_the_layers(classifiers):
    """Softmax response reads the logits of both exits before the last; the learnt rule of the recipe reads none."""
    dim, vocab, tokens = 32, 256, 2 * 100
    response = configure(
        "depth-adaptive",
        "tiny",
        set={"stack.rule": '{"kind": "softmax_response", "thresholds": [2]}', "stack.classifiers": classifiers},
    )
    result = estimate(response, length=100, batch=2)
    assert result.flops_inference == inference_flops(*without_numbers(response, 2, 100))
    assert result.flops_inference - result.flops_forward == 2 * 2 * tokens * dim * vocab
    assert 3 * 2 * tokens * dim * vocab == sum(
        row.flops_inference for row in result.parts if row.part in ("head", "exit_heads")
    )
    learnt = estimate(configure("depth-adaptive", "tiny"), length=100, batch=2)
    assert learnt.flops_inference - learnt.flops_forward == 2 * 2 * tokens * dim


@pytest.mark.parametrize("name", ["transformer-xl", "compressive"])
def test_inference_on_real_tokens_costs_what_the_estimate_says(name):
    """The meta device, which has no data, against a processor."""
    config = configure(name, "tiny")
    model = config.build().eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(256, (2, 100)))
    assert estimate(config, length=100, batch=2).flops_inference == pytest.approx(counter.get_total_flops(), rel=0.05)


def test_counter_sees_the_products_inside_the_softmax_kernel():
    q, k, v = torch.randn(2, 4, 300, 8), torch.randn(2, 2, 420, 8), torch.randn(2, 2, 420, 6)
    for pattern in (Band(), Band(behind=70), Band(ahead=None)):
        call = q, k, v, None, *limits(Visibility(pattern), 300, 420), 0.3, 0.0, 0
        inner, outer = FlopCounterMode(display=False), FlopCounterMode(display=False)
        with inner:
            out, lse = _forward._init_fn(*call)
            _backward._init_fn(out, lse, out, lse, *call)
        with outer:
            torch.ops.kinformer.band_attention(*call)
            torch.ops.kinformer.band_attention_backward(out, lse, out, lse, *call)
        assert inner.get_total_flops() == outer.get_total_flops() > 0


@each_shape
def test_activations_are_what_autograd_saves(name, batch, length):
    config = CONFIGS[name]
    found = estimated(config, length=length, batch=batch).memory["train"]["activations"]
    assert found == pytest.approx(saved_bytes(config, batch, length), rel=0.15)


@each_narrow
def test_activations_under_autocast(config):
    found = estimated(config, length=LENGTH, batch=BATCH, precision="bf16-mixed").memory["train"]["activations"]
    assert found == pytest.approx(saved_bytes(config, BATCH, LENGTH, autocast=True), rel=0.15)


def bytes_of(state):
    return 0 if state is None else nbytes(state)


@pytest.mark.parametrize("member", ["gpt", "linear-transformer", "transformer-xl"])
def test_activations_under_autocast_beyond_what_is_measured(member):
    config = configure(member, "tiny", set={"position.max_length": 512} if member == "gpt" else {})
    found = estimate(config, length=480, batch=2, precision="bf16-mixed").memory["train"]["activations"]
    assert found == pytest.approx(saved_bytes(config, 2, 480, autocast=True), rel=0.15)


@each_shape
def test_state_bytes_are_exact(name, batch, length):
    config = CONFIGS[name]
    result = estimated(config, length=length, batch=batch)
    with torch.no_grad():  # as in inference
        state = step(config, batch, length)[1]
    assert result.state_bytes == bytes_of(state)
    assert result.parameters == sum(parameter.numel() for parameter in config.build().parameters())
    assert result.inference_bytes == 4 * result.parameters + result.state_bytes


@each_narrow
def test_state_bytes_in_bfloat16_are_exact(config):
    model = config.build().to(torch.bfloat16).eval()
    with torch.no_grad():
        _, state = outputs(model, model.input.example(BATCH, LENGTH))
    result = estimated(config, length=LENGTH, batch=BATCH, precision="bf16-mixed")
    assert result.state_bytes == bytes_of(state)
    assert result.inference_bytes == 2 * result.parameters + result.state_bytes


LONG = {way(config): name for name, config in reversed(CONFIGS.items())}.values()
IN_CHUNKS = ("ttt", "path", "tensorized", "tensorized, memory", "compressive", "dsa")
"""Members that work through a text in chunks or segments of at most 64 tokens."""
CONTINUED = ("gpt", "bert", "transformer-xl", "star", *IN_CHUNKS)


@pytest.mark.parametrize("name", LONG)
def test_long_lengths_are_continued_exactly(name, monkeypatch):
    """At a quarter, or an eighth, of the usual lengths, which tiles of kernels divide alike."""
    step = 64 if name in IN_CHUNKS else 128
    monkeypatch.setattr(lengths, "DIRECT", 4 * step)
    monkeypatch.setattr(lengths, "STEP", step)
    changes = {"position.max_length": 10_000} if CONFIGS[name].position.kind == "learned" else {}
    if hasattr(CONFIGS[name].layers[0].mixer, "max_length"):
        changes["layers.*.mixer.max_length"] = 10_000
    if name in ("compressive", "tensorized, memory"):  # whose segments are absorbed one by one
        changes["layers.*.mixer.segment"] = 64
    if name == "ttt":
        changes["layers.*.mixer.mini_batch"] = 64
    if CONFIGS[name].stack.kind == "stages":
        changes["stack"] = "sequential"
    config, length = configure_like(CONFIGS[name], changes), 8 * step + 36
    for function in (cache(partial(measure, config, 2)), cache(partial(measure_inference, config, 2))):
        got, want = at_length(function, length, horizon=40), function(length)
        assert name not in CONTINUED or function.cache_info().hits == 0, "it is measured as it is"
        assert {key: got.get(key, 0) for key in want} == want and all(key in want or not got[key] for key in got)


def test_what_is_no_quadratic_of_the_length_is_measured_as_it_is():
    lengths = []

    def costs(irregular):
        def measured(length):
            lengths.append(length)
            return {("forward", "x"): 3 * length**2 + length + irregular(length)}

        return measured

    for period in (3, 96, 160, 700, 3000):  # of segments, windows and blocks
        for irregular in (lambda n, period=period: n // period, lambda n, period=period: (n % period) ** 2):
            function = costs(irregular)
            assert at_length(function, 100_001, period) == function(100_001), period
    lengths.clear()
    assert at_length(costs(lambda n: 0), 100_001, 40) == costs(lambda n: 0)(100_001)
    assert len(lengths) == 6 and sorted(lengths)[-2] < 5000


def test_products_in_place_are_counted():
    a, b, total = torch.randn(3, 4, 5), torch.randn(3, 5, 6), torch.randn(3, 4, 6)
    with FlopCounterMode(display=False) as counter:
        total.baddbmm_(a, b)
    assert counter.get_total_flops() == 2 * 3 * 4 * 5 * 6


def configure_like(config, changes):
    from kinformer.core.config import override
    from kinformer.family.kinds import kinds

    return override(config, {"layers": 1, **changes}, kinds())


def test_parts_of_unlike_layers():
    config = configure("gpt", "tiny", set={"layers": 4, "layers.1.mixer": "linear", "layers.3.mixer": "linear"})
    result = estimate(config, length=64, batch=2)
    rows = {part.part: part for part in result.parts}
    assert rows["layers.0,2.mixer"].count == rows["layers.1,3.mixer"].count == 2
    assert sum(part.parameters for part in result.parts) == result.parameters
    assert result.flops_forward == sum(part.flops_forward for part in result.parts)
    first = configure("gpt", "tiny", set={"layers": 4, "layers.*.mixer": "linear"})
    linear = {part.part: part for part in estimate(first, length=64, batch=2).parts}["layers.0-3.mixer"]
    for amount in ("parameters", "flops_inference", "flops_forward", "flops_backward", "activation_bytes"):
        assert 2 * getattr(rows["layers.1,3.mixer"], amount) == getattr(linear, amount)


def test_adamw_in_8_bits_holds_two_bytes_and_two_scales_of_256_but_for_small_tensors():
    model = configure("linear-transformer", "tiny").build()
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert optimizer_bytes(model, "adamw-8bit") == sum(
        8 * size if size < 4096 else 2 * size + 8 * -(-size // 256) for size in sizes
    )


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw-8bit"])
def test_optimizer_bytes_are_those_of_the_optimizer(name):
    model = configure("linear-transformer", "tiny").build()
    optimiser = Optimiser(model, Settings(optimizer=name))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimiser.step(1e-3)
    held = sum(tensor.numel() * tensor.element_size() for _, tensor in optimiser.tensors() if tensor.numel() > 1)
    assert optimizer_bytes(model, name) == held


def test_rules_of_thumb():
    config = configure("gpt", "paper")
    rules = rules_of_thumb(config, length=1024, batch=8, optimizer_bytes=8, precision="fp32")
    assert rules.parameters == 50257 * 768 + 12 * 12 * 768**2
    assert rules.activation_bytes == 4 * 8 * 1024 * 12 * (14 * 768 + 1024 * 12)
    assert rules.train_bytes == 16 * rules.parameters + rules.activation_bytes
    narrow = rules_of_thumb(config, length=1024, batch=8, optimizer_bytes=2, precision="bf16-mixed")
    assert narrow.train_bytes == 12 * rules.parameters + rules.activation_bytes // 2
    assert math.isclose(rules.parameters, estimate(config, length=1).parameters, rel_tol=0.01)


def test_command_prints_json(capsys):
    assert Estimate(member="gpt", recipe="paper", length=1024, batch_size=8, json=True).run() == 0
    data = json.loads(capsys.readouterr().out)
    assert data["parameters"] == 124_439_808
    assert data["flops_forward"] < data["flops_step"] < 4 * data["flops_forward"]
    assert data["state_bytes"] == 8 * (12 * (2 * 1024 * 768 * 4 + 8) + 8)
    assert data["train_bytes"] > 16 * data["parameters"]
    assert data["inference_bytes"] == 4 * data["parameters"] + data["state_bytes"]
    for key in ("flops_forward", "flops_inference"):
        assert sum(part[key] for part in data["parts"]) == data[key]


def test_an_encoder_has_the_same_keys_and_no_state(capsys):
    told = []
    for member in ("gpt", "big-bird"):
        assert Estimate(member=member, recipe="tiny", length=100, json=True).run() == 0
        told.append(json.loads(capsys.readouterr().out))
    decoder, encoder = told
    assert encoder.keys() == decoder.keys() and encoder["memory"].keys() == decoder["memory"].keys()
    assert encoder["state_bytes"] == encoder["memory"]["inference_fp32"]["state"] == 0 < decoder["state_bytes"]
    assert encoder["inference_bytes"] == 4 * encoder["parameters"]


def test_long_texts_cost_what_their_pattern_says():
    """Of attention over pairs itself (4 FLOPs a pair and feature) what the executor says of the pattern."""
    length, dim = 2048, 256
    whole, sparse = (
        estimate(configure(name, "benchmark"), length=length).flops_forward for name in ("bert", "big-bird")
    )
    patterns = [layer.mixer.pattern.build().sized(length) for layer in configure("big-bird", "benchmark").layers]
    computed = sum(explain(pattern, length).computed for pattern in patterns)
    assert whole - sparse == 4 * dim * (len(patterns) * length**2 - computed)


def test_command_prints_tables(capsys):
    assert Estimate(member="linear-transformer", recipe="tiny", set={"layers": 3}).run() == 0
    text = capsys.readouterr().out
    assert "layers.0-2.feed_forward_residual" in text
    assert "FLOPs inference" in text and "FLOPs forward" in text
    assert "rules of thumb" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 4096}, "end at max_length = 128"),
        ({"length": 0}, "length is 0 but must be 1 or more"),
        ({"length": 8, "batch_size": 0}, "batch_size is 0 but must be 1 or more"),
    ],
)
def test_command_refuses(options, message):
    with pytest.raises(KinformerError, match=message):
        Estimate(member="gpt", recipe="tiny", **options).run()


def test_a_change_without_a_value_is_refused(cli):
    assert "is not path=value" in cli("estimate", "gpt", "--set", "layers")[2]


def test_a_source_beyond_its_mixer_is_refused():
    mixers = [{"kind": "cross_linformer", "num_heads": 2, "rank": 4, "max_length": 16}]
    changes = {"layers.*.further_mixers": mixers}
    with pytest.raises(KinformerError, match="a text of 17 tokens is longer than max_length = 16 of the mixer"):
        kinformer.estimate("vanilla", recipe="tiny", length=17, set=changes)


@pytest.mark.parametrize("name", ["t5", "local", "linear-transformer", "transformer-xl", "etc", "speech-lstm"])
def test_operations_grow_as_the_record_says(name):
    """Of four times the tokens: four times the operations, or many more."""
    short, long = (estimate(configure(name, "tiny"), length=length).flops_forward for length in (512, 2048))
    assert (long / short < 4.1) == (MEMBERS[name].growth_of_cost == "linear")
    assert MEMBERS[name].growth_of_cost == "linear" or long / short > 6
