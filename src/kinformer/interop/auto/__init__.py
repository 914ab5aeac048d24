"""Models of this library as classes of the library transformers, for those that are none of its architectures.

Folders that ``kinformer export`` writes name these classes in their ``auto_map``; the code in the folder imports them
from here. Whoever imports this package needs no ``trust_remote_code``, as it registers them.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM

from kinformer.interop.auto.causal import KinformerForCausalLM
from kinformer.interop.auto.configuration import KinformerConfig

__all__ = ["KinformerConfig", "KinformerForCausalLM"]

AutoConfig.register(KinformerConfig.model_type, KinformerConfig, exist_ok=True)
AutoModelForCausalLM.register(KinformerConfig, KinformerForCausalLM, exist_ok=True)
