"""The contract as an executable battery, for the mixers, models and tasks of Kinformer and of any other package.

    from kinformer.testing import verify_mixer

    def test_contract():
        verify_mixer(lambda: MyMixer(dim=16), dim=16, skip={"compile": "branches on the host when it evicts"})

or with one test per check::

    @pytest.mark.parametrize("check", CHECKS)
    def test_contract(check):
        CHECKS[check](MixerSubject(lambda: MyMixer(dim=16), dim=16))

The battery runs on PyTorch's default device: under ``with torch.device("cuda"):`` on a GPU.

All mixers support first derivatives in reverse mode (``backward``, ``autograd.grad``). Higher derivatives and forward
mode (``torch.func``'s ``grad``, ``vjp``, ``jvp``, ``jacrev``, ``hessian``, ``vmap``) work where every operation
supports them, as with ``impl="reference"``. Elsewhere they raise an error, which the check ``derivatives`` requires of
your mixer too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from safetensors.torch import load, save
from torch import nn

from kinformer.core.config import Config, Kinds, from_dict, to_dict
from kinformer.core.contract import CausalMixer
from kinformer.core.encoder import EncoderMixer
from kinformer.testing import encoders, laws
from kinformer.testing.encoders import EncoderMixerSubject, EncoderModelSubject, ImageModelSubject
from kinformer.testing.subject import (
    Check,
    ContractError,
    LayerSubject,
    MixerSubject,
    ModelSubject,
    Report,
    SourceModelSubject,
    Subject,
    examine,
    named_checks,
    state_size,
    structure,
    verdict,
)

__all__ = [
    "CHECKS",
    "ENCODER_CHECKS",
    "ENCODER_MODEL_CHECKS",
    "IMAGE_MODEL_CHECKS",
    "MODEL_CHECKS",
    "TASK_CHECKS",
    "Check",
    "ContractError",
    "EncoderMixerSubject",
    "EncoderModelSubject",
    "ImageModelSubject",
    "LayerSubject",
    "MixerSubject",
    "ModelSubject",
    "Report",
    "SourceModelSubject",
    "Subject",
    "TaskSubject",
    "examine",
    "verify_config",
    "verify_encoder",
    "verify_layer",
    "verify_mixer",
    "verify_model",
    "verify_task",
]


def __getattr__(name: str) -> Any:
    """Return a name of the battery of tasks; the first use loads the lab."""
    if name not in ("TASK_CHECKS", "TaskSubject", "verify_task"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("kinformer.lab.testing"), name)


LAWS = named_checks(
    Check("causality", laws.causality),
    Check("rows", laws.rows),
    Check("partition", laws.partition, needs=("causality",)),
    Check("padding", laws.padding, needs=("rows", "partition")),
    Check("reset", laws.reset, needs=("rows", "partition")),
    Check("ragged_reset", laws.ragged_reset, needs=("padding", "reset")),
    Check("purity", laws.purity),
    Check("reserved", laws.reserved, needs=("purity",)),
)

CHECKS: dict[str, Check] = (
    named_checks(Check("structure", structure))
    | LAWS
    | named_checks(
        Check("state_size", state_size),
        Check("dtype", laws.dtype),
        Check("half_precision", laws.half_precision),
        Check("implementations", laws.implementations),
        Check("gradcheck", laws.gradcheck, needs=("partition",)),
        Check("derivatives", laws.derivatives, needs=("gradcheck", "implementations")),
        Check("compile", laws.compile_),
    )
)
"""The checks of a mixer; each takes a :class:`MixerSubject`."""

_BOTH = named_checks(
    Check("rows", encoders.rows),
    Check("padding", encoders.padding, needs=("rows",)),
    Check("both_ways", encoders.both_ways),
)

ENCODER_CHECKS: dict[str, Check] = _BOTH | named_checks(
    Check("dtype", encoders.dtype),
    Check("half_precision", encoders.half_precision),
    Check("implementations", encoders.implementations),
    Check("gradcheck", encoders.gradcheck),
    Check("derivatives", encoders.derivatives, needs=("gradcheck", "implementations")),
    Check("compile", encoders.compile_),
)
"""The checks of an encoder's mixer; each takes an :class:`EncoderMixerSubject`."""

ENCODER_MODEL_CHECKS: dict[str, Check] = _BOTH
"""The checks of an encoder; each takes an :class:`EncoderModelSubject`."""

IMAGE_MODEL_CHECKS: dict[str, Check] = named_checks(
    Check("rows", encoders.rows), Check("both_ways", encoders.both_ways), Check("dtype", encoders.dtype)
)
"""The checks of an encoder of images; each takes an :class:`ImageModelSubject`."""

MODEL_CHECKS: dict[str, Check] = LAWS
"""The checks of a model; each takes a :class:`ModelSubject`."""


def verify_mixer(
    make: Callable[[], CausalMixer],
    *,
    dim: int = 16,
    batch: int = 3,
    time: int = 23,
    skip: Mapping[str, str] | None = None,
    impls: Mapping[str, Callable[[], CausalMixer]] | None = None,
) -> Report:
    """Check the mixer that ``make()`` builds against the whole contract.

    ``dim`` is the width of its inputs. ``time`` tokens must cross its windows, its segments and the tiles of its
    kernels more than once (a declared ``retained`` lengthens ``time`` by default). ``impls`` maps names to
    makers of the same mixer by other implementations; the name ``"reference"`` is the oracle. ``skip`` maps the name of
    a check to the reason why the mixer lacks the property.

    Returns the report. Errors: the :class:`ContractError` of the first failed check, with the names of other failed
    checks.
    """
    skip = dict(skip or {})
    if not impls:
        skip.setdefault("implementations", "no other implementation is listed")
    return verdict(examine(CHECKS, MixerSubject(make, dim=dim, batch=batch, time=time, impls=impls), skip))


def verify_model(
    make: Callable[[], nn.Module],
    *,
    vocab_size: int = 256,
    batch: int = 3,
    time: int = 23,
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Check the causal model that ``make()`` builds, ``logits, state = model(tokens, state, valid=, reset=)``, against
    the laws of models; ``vocab_size`` is its number of ids. See :func:`verify_mixer`."""
    return verdict(examine(MODEL_CHECKS, ModelSubject(make, vocab_size, batch=batch, time=time), skip))


def verify_layer(
    make: Callable[[], nn.Module],
    *,
    dim: int = 16,
    batch: int = 3,
    time: int = 23,
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Check the layer that ``make()`` builds against the laws of layers; see :func:`verify_mixer`.

    The layer is called as ``y, state = layer(x, state, return_state=True, key_padding_mask=, reset=)``.
    """
    return verdict(examine(MODEL_CHECKS, LayerSubject(make, dim=dim, batch=batch, time=time), skip))


def verify_encoder(
    make: Callable[[], EncoderMixer],
    *,
    dim: int = 16,
    skip: Mapping[str, str] | None = None,
    impls: Mapping[str, Callable[[], EncoderMixer]] | None = None,
) -> Report:
    """Hold the encoder mixer that ``make()`` builds against the whole contract; see :func:`verify_mixer`."""
    skip = dict(skip or {})
    if not impls:
        skip.setdefault("implementations", "no other implementation is listed")
    return verdict(examine(ENCODER_CHECKS, EncoderMixerSubject(make, dim=dim, impls=impls), skip))


def verify_config(
    config: Config, kinds: Kinds, *, dim: int = 16, subject: Callable[[Any], Subject] | None = None
) -> None:
    """Check that ``config`` survives JSON, and that a fresh build with the weights from safetensors gives exactly the
    same outputs.

    ``subject`` returns the :class:`Subject` of a config; the default is the subject of a mixer, ``config.build(dim)``.

    Errors: :class:`ContractError` with the check ``"config"`` or ``"weights"``.
    """
    text = json.dumps(to_dict(config))
    restored = from_dict(type(config), json.loads(text), kinds)
    if restored != config:
        raise ContractError("config", f"{text} is read back as {restored!r} instead of {config!r}.")

    describe = subject or (lambda item: MixerSubject(lambda: item.build(dim), dim=dim))
    original, copy = describe(config), describe(restored)
    written = original.build()
    fresh = copy.make().double().eval()
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in written.state_dict().items()}
    fresh.load_state_dict(load(save(weights)))
    inputs = original.inputs(original.batch, original.time, seed=81)
    with torch.no_grad():
        want, _ = original.run(written, inputs, original.start(written, original.batch))
        got, _ = copy.run(fresh, inputs, copy.start(fresh, original.batch))
    if not torch.equal(got, want):
        gap = float((got - want).abs().max())
        raise ContractError("weights", f"outputs of a fresh build with the same weights differ by {gap:.3g}, not by 0.")
