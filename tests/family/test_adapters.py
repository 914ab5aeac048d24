"""What is put in the place of an ``nn.Linear`` (LoRA's adapter, a hook, a subclass) counts on every path of a model."""

import re
from collections import defaultdict

import pytest
import torch
from torch import nn

from kinformer.family.build import configure
from kinformer.generation.session import Session
from kinformer.generation.weights import PackedLinear, can_pack, pack
from tests.members import CAUSAL, ENCODERS, SOURCE, one_layer

TIME, STEPS = 21, 5
UNSEEN = {"spalm head.gate": "there is no store"}
"""Products whose results do not reach the logits."""
DEEP = ("rwkv7", "etc", "linformer")
"""Members with products whose results reach the logits through a second layer."""
RECIPES = [(name, {}) for name in (*CAUSAL, *SOURCE)] + [
    ("mla", {"layers.*.mixer.form": "absorbed"}),
    ("mla", {"layers.*.mixer.form": "expanded"}),
    ("gpt", {"head.tied": False}),
    ("gpt", {"layers.*.mixer": {"kind": "tensorized_memory", "segment": 8, "memory": 8}}),
]
OF_ENCODERS = [(name, {}) for name in ENCODERS] + [
    ("bert", {"head.tied": False}),
    ("linformer", {"layers.*.mixer.sharing": "none"}),
    ("linformer", {"layers.*.mixer.method": "convolution"}),
]


def replace(module):
    """Let ``module`` add something unlike to each of its results."""

    def forward(self, x):
        y = kind.forward(self, x)
        return y + torch.linspace(-1, 1, y.shape[-1] + 1, dtype=y.dtype)[1:]

    kind = type(module)
    module.__class__ = type("Replaced", (kind,), {"forward": forward})
    return lambda: setattr(module, "__class__", kind)


def products(model):
    """Return the products of ``model`` under their names without the numbers of layers."""
    found = defaultdict(list)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found[re.sub(r"\d+", "*", name)].append(module)
    return found


def made(name, set):
    torch.manual_seed(0)
    config = configure(name, "tiny", set=set)
    return (config if name in DEEP else one_layer(config)).build().double().eval()


def check_all_reach(name, model, run):
    """Check that each product by itself moves what ``run`` returns."""
    plain = run()
    for path, modules in products(model).items():
        undo = [replace(module) for module in modules]
        moved = not torch.equal(run(), plain)
        for back in undo:
            back()
        assert moved == (f"{name} {path}" not in UNSEEN), path


@pytest.mark.parametrize(("name", "set"), RECIPES)
@torch.no_grad()
def test_chunks_and_steps_are_the_whole(name, set):
    model = made(name, set)
    tokens = torch.randint(model.vocab_size, (2, TIME))

    def begin():
        return model.begin(tokens[:, :7]) if name in SOURCE else None

    check_all_reach(name, model, lambda: model(tokens, begin())[0])
    for modules in products(model).values():
        for module in modules:
            replace(module)
    whole = model(tokens, begin())[0]
    state, parts = begin(), []
    for part in tokens.split([TIME - STEPS - 3, 3, *[1] * STEPS], 1):
        y, state = model(part, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-8, rtol=1e-8)
    if name in SOURCE:
        return
    session = Session(model, 2, temperature=0, room=8, recorded=True)
    session._stepping.record_at = 2
    session.feed(tokens)
    drawn = [session.step() for _ in range(STEPS)]
    last = model(torch.cat([tokens, torch.stack(drawn[:-1], 1)], 1))[0][:, -1]  # what the last token was drawn from
    torch.testing.assert_close(session._logits, last, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("name", "set"), OF_ENCODERS)
@torch.no_grad()
def test_products_of_encoders_reach_the_output(name, set):
    model = made(name, set)
    tokens = torch.randint(model.vocab_size, (2, TIME))
    check_all_reach(name, model, lambda: model(tokens))


def test_a_replaced_product_is_neither_packed_nor_read_by_the_loss():
    model = made("gpt", {"head.tied": False}).float()

    def paths():
        read = model.head.product(model.input) is not None
        return read, not can_pack(model) or isinstance(pack(model).head.output, PackedLinear)

    assert paths() == (True, True)
    replace(model.head.output)
    assert paths() == (False, not can_pack(model))
