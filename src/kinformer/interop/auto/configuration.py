"""The config of a model of this library, as the library transformers has configs."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from kinformer.core.config import find, from_dict
from kinformer.core.stack import ModelConfig
from kinformer.interop.key_map import ConfigView


class KinformerConfig(PretrainedConfig):  # type: ignore[misc]
    """``composition`` is the config of the model as data, as a run's ``config.json`` holds it; ``member`` is what it is
    of the family. The other settings are those of transformers."""

    model_type = "kinformer"

    def __init__(self, composition: ConfigView | None = None, member: str = "", **settings: Any) -> None:
        self.composition = dict(composition or {})
        self.member = member
        tokens = self.composition.get("input", {})
        self.vocab_size = tokens.get("vocab_size")
        self.hidden_size = self.composition.get("dim")
        self.num_hidden_layers = len(self.composition.get("layers", ()))
        for derived in ("vocab_size", "hidden_size", "num_hidden_layers"):
            settings.pop(derived, None)
        classes = self.composition.get("head", {}).get("classes")
        if classes is not None and not settings.get("id2label"):
            settings["num_labels"] = classes
        settings["is_encoder_decoder"] = self.composition.get("kind") == "encoder_decoder"
        settings["tie_word_embeddings"] = False  # a tied head reads the table of the input; there is one tensor
        settings.setdefault("use_cache", True)
        self.use_cache = settings["use_cache"]
        super().__init__(**settings)

    def build(self) -> Any:
        """Return a new model of this composition."""
        return from_dict(ModelConfig, self.composition, find(), "composition").build()
