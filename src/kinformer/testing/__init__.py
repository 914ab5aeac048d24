"""The contract as an executable battery, for Kinformer's own mixers, models and tasks and for anybody else's.

    from kinformer.testing import verify_mixer

    def test_contract():
        verify_mixer(lambda: MyMixer(dim=16), dim=16, skip={"compile": "branches on the host when it evicts"})

or with one test per check::

    @pytest.mark.parametrize("check", CHECKS)
    def test_contract(check):
        CHECKS[check](MixerSubject(lambda: MyMixer(dim=16), dim=16))

It runs on PyTorch's default device: under ``with torch.device("cuda"):`` on a GPU.

What of PyTorch's derivatives works is the same for all mixers: first ones in reverse (``backward``, ``autograd.grad``)
always; those beyond the first and forward mode (``torch.func``'s ``grad``, ``vjp``, ``jvp``, ``jacrev``, ``hessian``,
``vmap``) where every operation has them, as with ``impl="reference"``. Elsewhere they raise, and the check
``derivatives`` holds your mixer to that.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kinformer.testing.encoders import EncoderMixerSubject, EncoderModelSubject, ImageModelSubject
from kinformer.testing.subject import (
    ContractError,
    LayerSubject,
    MixerSubject,
    ModelSubject,
    SourceModelSubject,
    Subject,
)
from kinformer.testing.verify import (
    CHECKS,
    ENCODER_CHECKS,
    ENCODER_MODEL_CHECKS,
    IMAGE_MODEL_CHECKS,
    MODEL_CHECKS,
    Check,
    Report,
    examine,
    verify_config,
    verify_encoder,
    verify_layer,
    verify_mixer,
    verify_model,
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
    """Return a name of the battery of tasks, which loads the lab when it is first used."""
    if name not in ("TASK_CHECKS", "TaskSubject", "verify_task"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("kinformer.lab.testing"), name)
