"""Models of this library as classes of the library transformers, for those that are none of its architectures.

Folders that ``kinformer export`` writes name these classes in their ``auto_map``; the code in the folder imports them
from here. Whoever imports this package needs no ``trust_remote_code``, as it registers them.
"""

from __future__ import annotations

import transformers

from kinformer.interop.auto.causal import KinformerForCausalLM
from kinformer.interop.auto.configuration import KinformerConfig
from kinformer.interop.auto.ctc import KinformerForCTC
from kinformer.interop.auto.seq2seq import KinformerForSeq2SeqLM
from kinformer.interop.auto.whole import (
    KinformerForImageClassification,
    KinformerForMaskedLM,
    KinformerForSequenceClassification,
    KinformerForTokenClassification,
)
from kinformer.interop.native import auto_class_of

CLASSES = (
    KinformerForCausalLM,
    KinformerForSeq2SeqLM,
    KinformerForMaskedLM,
    KinformerForSequenceClassification,
    KinformerForTokenClassification,
    KinformerForImageClassification,
    KinformerForCTC,
)
__all__ = [
    "CLASSES",
    "KinformerForCTC",
    "KinformerConfig",
    "KinformerForCausalLM",
    "KinformerForImageClassification",
    "KinformerForMaskedLM",
    "KinformerForSeq2SeqLM",
    "KinformerForSequenceClassification",
    "KinformerForTokenClassification",
]

transformers.AutoConfig.register(KinformerConfig.model_type, KinformerConfig, exist_ok=True)
for _class in CLASSES:
    getattr(transformers, auto_class_of(_class.use)).register(KinformerConfig, _class, exist_ok=True)
