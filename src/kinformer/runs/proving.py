"""Verification of causal models: a run and its export, a folder of transformers and its import, a user's module."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.core.model import CausalModel
from kinformer.family.build import model_config
from kinformer.interop import read_checkpoint
from kinformer.interop.checkpoint import OURS
from kinformer.interop.proof import LIMIT, Verdict, beside, judge
from kinformer.interop.routes import DECODERS
from kinformer.interop.subjects import Plain, Theirs
from kinformer.interop.writing import form_of
from kinformer.runs.config_file import CONFIG
from kinformer.runs.exporting import export
from kinformer.runs.options import require_proof
from kinformer.runs.run import open_run
from kinformer.runtime.draws import private_numbers
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.fields import require_path
from kinformer.runtime.files import read_json
from kinformer.runtime.plugins import current_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Proof:
    """What was verified (``subject``, a ``kind`` of thing), and the verdicts: on its laws, and beside transformers."""

    subject: str
    kind: str
    laws: tuple[Verdict, ...]
    beside: tuple[Verdict, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Return whether no law is broken."""
        return all(one.holds is not False for one in (*self.laws, *self.beside))

    @property
    def facts(self) -> dict[str, object]:
        """The verdicts as data that JSON can hold."""
        tables = {name: [asdict(one) | {"badge": one.badge} for one in getattr(self, name)] for name in TABLES}
        facts = {"subject": self.subject, "kind": self.kind, "holds": self.holds, "notes": list(self.notes)}
        return facts | tables


TABLES = ("laws", "beside")


def verify(subject: str | Path, *, trust_remote_code: bool = False, length: int = 24, limit: float = LIMIT) -> Proof:
    """Hold ``subject`` to the laws of causal models; the public form is :func:`kinformer.verify`."""
    require_path("subject", subject)
    require_proof(length, limit)
    text = str(subject)
    if not Path(text).exists() and ":" in text:
        return Proof(text, "module", tuple(judge(Plain(_object(text)), length, limit)))
    config = read_json(Path(text) / CONFIG) if (Path(text) / CONFIG).exists() else None
    if isinstance(config, dict) and "model_type" in config:
        return _folder_proof(Path(text), config, trust_remote_code, length, limit)
    return _run_proof(Path(text), length, limit)


def _run_proof(folder: Path, length: int, limit: float) -> Proof:
    """Return the proof of a run: its laws, and its export beside it."""
    run = open_run(folder)
    if run.config.protocol is not CausalModel or not hasattr(run.config.input, "vocab_size"):
        raise KinformerError(f"{folder}: is a run whose model does not continue tokens; only such can be verified.")
    ours = Plain(run.model())
    laws = tuple(judge(ours, length, limit))
    form = form_of(run.config)
    names = form.native.tensors if form.native else _prefixed
    with tempfile.TemporaryDirectory() as place, _quiet():
        export(folder, Path(place) / "exported")
        theirs = Theirs(_loaded(Path(place) / "exported", True))
        verdicts = tuple(beside(ours, theirs, names, limit))
    return Proof(str(folder), f"run, exported as {form.model_type}", laws, verdicts)


def _folder_proof(folder: Path, config: Mapping[str, object], trust: bool, length: int, limit: float) -> Proof:
    """Return the proof of a folder of transformers: its laws there, and what is imported beside it."""
    kind = str(config["model_type"])
    with _quiet():
        loaded = _loaded(folder, trust)
    if not getattr(loaded.config.get_text_config(), "vocab_size", None):
        raise KinformerError(f"{folder / CONFIG}: has no vocab_size; give a folder with a causal language model.")
    theirs = Theirs(loaded)
    laws = tuple(judge(theirs, length, limit))
    if kind not in (*DECODERS, OURS):
        note = f"the model_type {kind!r} is not imported as a decoder, so nothing is compared beside it."
        return Proof(str(folder), kind, laws, notes=(note,))
    imported = read_checkpoint(folder)
    with private_numbers(0):  # the stored weights replace the random ones
        model = model_config(imported.model, f"{folder}: model").build()
    model.load_state_dict(dict(imported.weights))
    names: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = _prefixed
    if kind != OURS:
        names = lambda weights: DECODERS[kind].write(weights, imported.model)  # noqa: E731
    return Proof(str(folder), kind, laws, tuple(beside(Plain(model), theirs, names, limit)))


def _prefixed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": one for name, one in weights.items()}


def _loaded(folder: Path, trust: bool) -> PreTrainedModel:
    """Return the causal model of transformers in ``folder``, in float32."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise KinformerError(
            f"verify needs transformers ({error}); get it with: pip install 'kinformer[transformers]'."
        ) from error
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=trust, dtype=torch.float32, use_safetensors=True, local_files_only=True
        )
    except Exception as error:
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            reason, remedy = "it needs its own code", "add `trust_remote_code` if you have read it"
        else:
            remedy = "give a folder with a causal language model in safetensors"
        raise KinformerError(f"{folder}: transformers cannot load it ({reason[:200].rstrip('.')}); {remedy}.") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from drawing progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _object(name: str) -> object:
    """Return the object ``module:object``, called without arguments where it is a class or a function."""
    module, _, attribute = name.partition(":")
    try:
        with current_folder():
            value = getattr(importlib.import_module(module), attribute)
            return value() if isinstance(value, type) or type(value).__name__ == "function" else value
    except Exception as error:
        raise KinformerError(
            f"{name}: is no folder, and no object that can be imported ({type(error).__name__}: {error}); give a run, "
            "a folder of transformers, or module:object of a causal model."
        ) from None
