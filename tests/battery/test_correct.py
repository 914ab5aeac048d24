"""Correct mixers and models pass every check; switching one off needs its name and a reason."""

import re

import pytest
import torch

from kinformer.core.contract import MixerConfig
from kinformer.runtime.errors import KinformerError
from kinformer.testing import (
    CHECKS,
    MODEL_CHECKS,
    ContractError,
    MixerSubject,
    ModelSubject,
    verify_config,
    verify_mixer,
    verify_model,
)

from . import broken
from .toys import DIM, Attention, Model, Recurrence, SegmentMemory


class UnfusedAttention(Attention):
    """The same mixer, written query by query."""

    def attend(self, q, k, v, visible):
        attend = super().attend
        return torch.cat([attend(q[:, [t]], k, v, visible[:, [t]]) for t in range(q.shape[1])], dim=1)


MIXERS = {
    "attention": (Attention, {"unfused": UnfusedAttention}),
    "window": (lambda: Attention(window=4), {}),
    "window of one": (lambda: Attention(window=1), {}),
    "recurrence": (Recurrence, {}),
    "segment memory": (SegmentMemory, {}),
}


@pytest.mark.parametrize(
    ("name", "check"),
    [(name, check) for name in MIXERS for check in CHECKS if check != "compile" or "window" not in name],
)
def test_correct_mixer_passes(name, check):
    """A window is attention with another mask: the compiler is shown one of the two."""
    make, impls = MIXERS[name]
    CHECKS[check](MixerSubject(make, dim=DIM, impls=impls))


@pytest.mark.parametrize("check", MODEL_CHECKS)
def test_correct_model_passes(check):
    MODEL_CHECKS[check](ModelSubject(Model, vocab_size=11))


def test_report_of_a_correct_mixer():
    report = verify_mixer(Recurrence, dim=DIM, skip={"compile": "takes a second"})
    assert report.passed == [name for name in CHECKS if name not in ("compile", "implementations")]
    assert report.skipped.keys() == {"compile", "implementations"}
    assert not report.failed
    assert not report.not_judged


def test_report_of_a_correct_model():
    assert verify_model(Model, vocab_size=11).passed == list(MODEL_CHECKS)


def test_a_skipped_check_hides_nothing_else():
    skip = {name: "not the point" for name in CHECKS if name not in ("partition", "padding")}
    with pytest.raises(ContractError, match=r"^\[padding\]"):
        verify_mixer(broken.SwitchesByChunkLength, dim=DIM, skip=skip | {"partition": "single tokens take a short cut"})


@pytest.mark.parametrize(
    ("skip", "message"),
    [({"partitions": "why not"}, "did you mean 'partition'"), ({"rows": " "}, "'rows' does not have a reason")],
)
def test_a_skip_needs_a_known_name_and_a_reason(skip, message):
    with pytest.raises(KinformerError, match=message):
        verify_mixer(Recurrence, dim=DIM, skip=skip)


def test_the_error_names_check_place_and_values():
    with pytest.raises(ContractError) as caught:
        verify_mixer(broken.SwitchesByChunkLength, dim=DIM, skip={"compile": "not the point"})
    assert caught.value.check == "partition"
    assert isinstance(caught.value, AssertionError)
    place = r"^\[partition\] chunks of 1 x 23 against one chunk, from a new state, outputs: "
    assert re.match(
        place + r"\S+ instead of \S+ at \(\d, \d+, \d\) of \(3, 23, 8\); .* at most \de-09", str(caught.value)
    )


def test_needs_name_earlier_checks():
    for table in (CHECKS, MODEL_CHECKS):
        names = list(table)
        assert all(names.index(need) < names.index(check.name) for check in table.values() for need in check.needs)


def test_a_long_window_lengthens_the_sequences():
    assert MixerSubject(lambda: Attention(window=40), dim=DIM).time > 40


class AttentionConfig(MixerConfig):
    kind = "attention"
    window: int | None = None

    def build(self, dim):
        return Attention(dim, self.window)


KINDS = {"mixer": {"attention": AttentionConfig}}


@pytest.mark.parametrize("window", [None, 4])
def test_config_and_weights_survive_a_file(window):
    verify_config(AttentionConfig(window=window), KINDS, dim=DIM)


class CreepingConfig(AttentionConfig):
    """Changes its value every time that it is made."""

    def __post_init__(self):
        object.__setattr__(self, "window", self.window + 1)


def test_config_that_reads_back_otherwise_is_rejected():
    with pytest.raises(ContractError, match=r"^\[config\]"):
        verify_config(CreepingConfig(window=4), {"mixer": {"attention": CreepingConfig}}, dim=DIM)


class UnsavedScale(Attention):
    """Draws a number at birth that no file holds."""

    def __init__(self, dim=DIM):
        super().__init__(dim)
        self.scale = torch.rand(())

    def step(self, chunk, state):
        y, end = super().step(chunk, state)
        return y * self.scale, end


def test_weights_that_a_file_does_not_hold_are_found():
    with pytest.raises(ContractError, match=r"^\[weights\]"):
        verify_config(AttentionConfig(), KINDS, dim=DIM, subject=lambda config: MixerSubject(UnsavedScale, dim=DIM))
