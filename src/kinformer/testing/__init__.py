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
    """Return a name of the battery of tasks; the first use loads the lab."""
    if name not in ("TASK_CHECKS", "TaskSubject", "verify_task"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("kinformer.lab.testing"), name)
