"""Pixels as a sequence: what comes in at each position, the order of blocks, and the contract of models of them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kinformer.blocks.layer import DecoderLayer
from kinformer.core.pattern import Raster
from kinformer.heads.images import LogisticMixture
from kinformer.heads.language import LanguageModelHead
from kinformer.inputs.images import START, Pixels
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.models.decoder import Decoder
from kinformer.parts.patterns.blocks import Image2D
from kinformer.parts.positions import NoPosition
from kinformer.runtime.errors import KinformerError
from kinformer.testing import MODEL_CHECKS
from kinformer.testing.subject import ModelSubject

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "image_shift.npz")
BLOCKS = {"height": 4, "width": 2, "channels": 3, "block_height": 2, "block_width": 3}


def decoder(input: Pixels.Config, **settings: object) -> Decoder.Config:
    pattern = {
        "pattern": Image2D.Config(height=4, width=6, block_height=2, block_width=3, flange_height=1, flange_width=2)
    }
    mixer = SoftmaxAttention.Config(num_heads=2, **(pattern if input.block_height else {}))
    given = {"position": NoPosition.Config(), "head": LanguageModelHead.Config(tied=False)} | settings
    return Decoder.Config(input=input, dim=16, layers=(DecoderLayer.Config(mixer=mixer),) * 2, **given)


CASES = {
    "raster": Pixels.Config(height=3, width=2, channels=3),
    "tables": Pixels.Config(height=3, width=2, channels=3, per_channel=True, scale=True, places="sinusoid_2d"),
    "beside": Pixels.Config(height=3, width=6, places="sinusoid", concatenate=True),
    "blocks": Pixels.Config(**BLOCKS),
    "restart": Pixels.Config(**BLOCKS, restart=True, per_channel=True),
}


@pytest.mark.parametrize("check", MODEL_CHECKS)
@pytest.mark.parametrize("name", CASES)
def test_a_model_of_pixels_keeps_the_contract(name, check):
    config = decoder(CASES[name])
    MODEL_CHECKS[check](ModelSubject(config.build, vocab_size=256))


class LabelledSubject(ModelSubject):
    """A model of pixels that is told the class of every image: rows have the classes 0, 1, 2, ..."""

    def labelled(self, values):
        classes = (torch.arange(len(values)) % 3)[:, None, None].expand(*values.shape, 1)
        return torch.cat([values[..., None], classes], -1)

    def inputs(self, batch, time, seed):
        return self.labelled(super().inputs(batch, time, seed))

    def spoil(self, inputs, valid):
        return torch.where(valid[..., None], inputs, self.inputs(*inputs.shape[:2], seed=13))

    def disturb(self, inputs, since, factor):
        values = (inputs[..., 0] + 1 + int(factor)) % self.vocab_size
        return torch.cat([inputs[:, :since], self.labelled(values)[:, since:]], dim=1)


@pytest.mark.parametrize("check", MODEL_CHECKS)
def test_a_model_that_is_told_classes_keeps_the_contract(check):
    config = decoder(Pixels.Config(height=3, width=2, channels=3, classes=3))
    MODEL_CHECKS[check](LabelledSubject(config.build, vocab_size=256))


@pytest.mark.parametrize("more", [{}, {"channels": 3, "joint": True}, {"concatenate": True, "places": "sinusoid"}])
def test_the_vector_of_the_class_is_added_at_every_position(more):
    torch.manual_seed(0)
    plain, conditional = (Pixels.Config(height=3, width=2, classes=n, **more).build(8) for n in (0, 4))
    conditional.load_state_dict(plain.state_dict() | {"classes.weight": conditional.classes.weight})
    values = torch.randint(256, plain.example(2, 6).shape)
    values[:, 0] = START
    classes = torch.tensor([3, 1])[:, None].expand(-1, 6)
    numbers = values if values.dim() == 3 else values[..., None]
    places = torch.arange(6).expand(2, -1)
    found = conditional(torch.cat([numbers, classes[..., None]], -1), places)
    torch.testing.assert_close(found, plain(values, places) + conditional.classes.weight[[3, 1]][:, None])
    with pytest.raises(KinformerError, match="4 is no class, which are 0 to 3 here"):
        conditional(torch.cat([numbers, classes[..., None] * 0 + 4], -1), places)
    with pytest.raises(KinformerError, match="the class last"):
        conditional.check(values[..., :1])


def test_joint_pixels_stream_as_they_are_trained():
    torch.manual_seed(0)
    input = Pixels.Config(height=3, width=4, channels=3, joint=True)
    model = decoder(input, head=LogisticMixture.Config(mixtures=2)).build().eval()
    values = torch.randint(256, (2, 24, 3))
    values[:, 0] = START
    whole, _ = model(values)
    state, parts = None, []
    for chunk in values.split([1, 7, 12, 4], 1):
        logits, state = model(chunk, state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    changed = values.clone()
    changed[:, 9, 1] = (changed[:, 9, 1] + 100) % 256
    assert torch.equal(model(changed)[0][:, :9], whole[:, :9])
    assert not torch.equal(model(changed)[0][:, 9], whole[:, 9])


def test_shift_of_every_block_is_tensor2tensors():
    """``shift_in`` [2, 6, 8, 3] are vectors of cells, ``shift_out`` what right_shift_blockwise makes of them in blocks
    of 2 x 4."""
    config = Pixels.Config(height=6, width=8, block_height=2, block_width=4, restart=True, places="none")
    order = torch.from_numpy(config.raster.order())
    for given, expected in zip(torch.from_numpy(GOLDEN["shift_in"]), torch.from_numpy(GOLDEN["shift_out"])):
        input = config.build(3)
        with torch.no_grad():
            input.values.weight[:48] = given.flatten(0, 1)
        values = torch.cat([torch.tensor([START]), order[:-1]])[None]
        found = input(values, torch.arange(48)[None])[0]
        torch.testing.assert_close(found, expected.flatten(0, 1)[order])


def test_places_are_those_of_the_cell_that_is_predicted():
    input = Pixels.Config(height=2, width=2, channels=3).build(8)
    x = input(torch.zeros(1, 12, dtype=torch.int64), torch.arange(12)[None])[0] - input.values.weight[0]
    rows, columns, channels = input.rows.weight, input.columns.weight, input.channels.weight
    for cell in range(12):
        torch.testing.assert_close(x[cell], rows[cell // 6] + columns[cell % 6 // 3] + channels[cell % 3])
    again = input(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[12 + 7]]))[0, 0]
    torch.testing.assert_close(again - input.values.weight[0], x[7])


def test_signals_of_rows_and_columns_are_tensor2tensors():
    """Of each axis width / 4 sines and as many cosines of n / 10000^(i / (width / 4 - 1)), one axis after the other."""
    input = Pixels.Config(height=3, width=2, channels=3, places="sinusoid_2d").build(16)
    x = input(torch.zeros(1, 18, dtype=torch.int64), torch.arange(18)[None])[0] - input.values.weight[0]
    for cell in (0, 7, 17):
        rates = [10000 ** (-i / 3) for i in range(4)]
        halves = [[f(n * rate) for f in (math.sin, math.cos) for rate in rates] for n in divmod(cell, 6)]
        torch.testing.assert_close(x[cell], torch.tensor(halves[0] + halves[1]), atol=1e-5, rtol=1e-5)


def test_values_and_sines_of_the_place_stand_side_by_side():
    input = Pixels.Config(height=3, width=2, places="sinusoid", concatenate=True).build(8)
    x = input(torch.full((1, 1), 7), torch.tensor([[5]]))[0, 0]
    sines = [f(5 * 10000 ** (-i / 4)) for i in (0, 2) for f in (math.sin, math.cos)]
    torch.testing.assert_close(x, torch.cat([input.values.weight[7], torch.tensor(sines)]))


def test_tables_of_channels_follow_the_value_that_stands_there():
    input = Pixels.Config(height=1, width=2, channels=3, per_channel=True, places="none").build(4)
    x = input(torch.full((1, 6), 9), torch.arange(6)[None])[0]
    tables = input.values.weight.view(3, 256, 4)[:, 9]
    torch.testing.assert_close(x, tables[[2, 0, 1, 2, 0, 1]])


def test_blocks_are_the_cells_of_the_pattern():
    raster, pattern = Raster(4, 6, 2, 3), Image2D.Config(height=4, width=6, block_height=2, block_width=3).build()
    assert pattern.raster == raster
    assert raster.order().tolist()[:8] == [0, 1, 2, 6, 7, 8, 3, 4]
    y, x = raster.cell(np.arange(24))
    assert raster.number(y, x).tolist() == list(range(24))
    assert Raster.plain(4, 6).order().tolist() == list(range(24))


REFUSED = {
    "one channel has nothing to join": ({"joint": True}, "joint = True does nothing of one channel"),
    "half a block": ({"block_height": 2}, "belong together"),
    "blocks that do not fit": ({"block_height": 3, "block_width": 2}, "not made of whole blocks"),
    "restart without blocks": ({"restart": True}, "restart = True does nothing in raster order"),
    "beside nothing": ({"places": "none", "concatenate": True}, "does nothing without places"),
    "no size": ({"height": 0}, "height must be 1 or more"),
    "less than no class": ({"classes": -1}, "classes must be 0 or more"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_image_is_refused(name):
    changes, message = REFUSED[name]
    with pytest.raises(KinformerError, match=message):
        Pixels.Config(**{"height": 4, "width": 4} | changes)


def test_values_that_are_none_are_refused():
    model = decoder(CASES["raster"]).build()
    for values, message in (
        (torch.tensor([[257]]), "257 is no intensity"),
        (torch.tensor([[-1]]), "-1 is no intensity"),
        (torch.zeros(1, 2), "pixels must be int64"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), r"pixels must be \[batch, time\]"),
    ):
        with pytest.raises(KinformerError, match=message):
            model(values)
    with pytest.raises(KinformerError, match="cannot share a width of 6"):
        Pixels.Config(places="sinusoid_2d").build(6)
    with pytest.raises(KinformerError, match="does not read token ids|does not know"):
        decoder(Pixels.Config(channels=3, joint=True)).build()
