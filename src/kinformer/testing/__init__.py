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
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save
from torch import nn

from kinformer.core.config import Config, Kinds, from_dict, to_dict
from kinformer.core.contract import CausalMixer
from kinformer.core.encoder import EncoderMixer
from kinformer.runtime.errors import KinformerError, choose
from kinformer.testing import encoders, laws
from kinformer.testing.encoders import EncoderMixerSubject, EncoderModelSubject, ImageModelSubject
from kinformer.testing.subject import (
    ContractError,
    LayerSubject,
    MixerSubject,
    ModelSubject,
    SourceModelSubject,
    Subject,
    state_size,
    structure,
)

if TYPE_CHECKING:
    from kinformer.lab.testing import TASK_CHECKS, TaskSubject, verify_task

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


def __getattr__(name: str) -> object:
    """Return a name of the battery of tasks; the first use loads the lab."""
    if name not in ("TASK_CHECKS", "TaskSubject", "verify_task"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("kinformer.lab.testing"), name)


@dataclass(frozen=True)
class Check:
    """A law under its name. ``needs`` are the checks that must pass first, without which this check does not add
    information: the check of ragged rows, for example, compares with rows alone in chunks of another length."""

    name: str
    law: Callable[[Any], None]
    needs: tuple[str, ...] = ()

    def __call__(self, subject: object) -> None:
        """Raise :class:`ContractError` when the subject breaks the law, or breaks down under it."""
        try:
            self.law(subject)
        except AssertionError as error:
            raise ContractError(self.name, str(error)) from error
        except Exception as error:
            raise ContractError(self.name, f"{type(error).__name__} was raised: {error}") from error


def named_checks(*checks: Check) -> dict[str, Check]:
    """Return checks by their names, in order."""
    return {check.name: check for check in checks}


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


@dataclass
class Report:
    """The outcome of every check: passed, failed with its error, skipped and why,
    or not run and which need was missing."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, ContractError] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    not_judged: dict[str, str] = field(default_factory=dict)


def examine(checks: Mapping[str, Check], subject: object, skip: Mapping[str, str] | None = None) -> Report:
    """Run every check in order. A check is not run if a check that it needs failed or was not run. A skipped need
    counts as met, so that a skip does not hide other checks."""
    for name, reason in (skip or {}).items():
        choose(name, checks, "skip")
        if not reason.strip():
            raise KinformerError(
                f"skip: {name!r} does not have a reason; say in a few words why the property is lacking."
            )
    report = Report(skipped=dict(skip or {}))
    for name, check in checks.items():
        if name in report.skipped:
            continue
        unmet = [need for need in check.needs if need in report.failed or need in report.not_judged]
        if unmet:
            report.not_judged[name] = unmet[0]
            continue
        try:
            check(subject)
        except ContractError as error:
            report.failed[name] = error
        else:
            report.passed.append(name)
    return report


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


def verdict(report: Report) -> Report:
    """Return a report without failures, or raise the :class:`ContractError` of the first failed check."""
    if not report.failed:
        return report
    first, *others = report.failed.values()
    if others:
        names = ", ".join(error.check for error in others)
        raise ContractError(first.check, f"{str(first).split('] ', 1)[1]} Also failed: {names}.") from first
    raise first


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
