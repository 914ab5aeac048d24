"""What kernel attention refuses: settings and parts that do nothing, or diverge, together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.core.config import check_unused
from kinformer.core.feature_map import check_normaliser
from kinformer.core.parts import Position
from kinformer.kernels.linear import IMPLS, check_triton
from kinformer.positions.none import NoPosition
from kinformer.runtime.errors import KinformerError, choose
from kinformer.runtime.words import plural

if TYPE_CHECKING:
    from kinformer.mixers.linear import LinearAttention


def check_settings(config: LinearAttention.Config) -> None:
    """Refuse settings that contradict each other, or do nothing."""
    choose(config.impl, IMPLS, "impl of linear")
    if config.normaliser == ("sum" if config.rule == "delta" else "attention"):
        raise KinformerError(
            f"normaliser = {config.normaliser!r} is not for rule = {config.rule!r}; use normaliser = 'none', or 'sum' "
            "for what rule = 'linear' sums and 'attention' for what rule = 'delta' overwrites."
        )
    if config.normaliser == "attention":
        check_unused(config, "with normaliser = 'attention'", "floor", "decay", "steps")
    if config.levels < 0 or (config.levels and (config.rule, config.normaliser) != ("linear", "none")):
        raise KinformerError(
            f"levels = {config.levels} must be 1 or more of rule = 'linear' with normaliser = 'none', or 0 for one sum."
        )
    if config.rule == "linear":
        check_unused(config, "with rule = 'linear'", "steps", "negative_eigenvalues")
    if config.normaliser == "none":
        check_unused(config, "with normaliser = 'none'", "eps", "floor")
    elif config.floor:
        check_unused(config, "with a floor", "eps")
    if config.convolution < 0 or config.convolution == 1:
        raise KinformerError(
            f"convolution must be 2 or more, or 0 for none, but is {config.convolution}: one of a single token "
            "mixes nothing."
        )
    if config.head_norm == "none":
        check_unused(config, "with head_norm = 'none'", "norm_eps")
    elif config.norm_eps is not None and not config.norm_eps > 0:
        raise KinformerError(f"norm_eps must be above 0, or None for the norm's own, but is {config.norm_eps:g}.")
    if not config.gate:
        check_unused(config, "without a gate", "gate_rank", "gate_activation", "gate_first")
    elif config.head_norm == "none":
        check_unused(config, "with head_norm = 'none'", "gate_first")
    if config.key_heads is not None and (config.key_heads < 1 or config.num_heads % config.key_heads):
        raise KinformerError(
            f"key_heads = {config.key_heads} must divide num_heads = {config.num_heads}, so that as many heads share "
            "each; use a divisor, or None for as many."
        )
    if config.steps < 1:
        raise KinformerError(f"steps must be 1 or more, but is {config.steps}: every token is written once at least.")
    if config.steps > 1 and not isinstance(config.position, NoPosition.Config):
        raise KinformerError(
            f"the position {config.position.kind!r} turns one key a token, but steps = {config.steps} writes "
            f"{plural(config.steps, 'key')}; use none, or steps = 1."
        )
    if config.steps > 1 and config.skip:
        raise KinformerError(f"skip adds one value a token, but steps = {config.steps} writes more; use skip = false.")


def check_parts(mixer: LinearAttention, columns: int) -> None:
    """Refuse parts that do not fit; ``columns``: of the state."""
    config, kind, decay = mixer.config, mixer.config.feature_map.kind, mixer.decay
    if config.levels and (config.impl == "triton" or (decay is not None and decay.by_channel)):
        raise KinformerError(
            "levels have no Triton kernel and no decay by channel; use impl = 'auto', and a decay by head, such as "
            "softplus."
        )
    if config.impl == "triton":
        check_triton("linear", mixer.features, columns)
    if config.normaliser != "none":
        check_normaliser(mixer.feature_map, kind, config.floor, ", or normaliser = 'none'")
    if mixer.feature_map.scaled and config.normaliser != "sum":
        raise KinformerError(
            f"the feature map {kind!r} is known up to a factor only, which nothing but a quotient forgets; use "
            f"normaliser = 'sum', or the feature map 'unit' or 'sum_normalised' with inner = {kind!r}."
        )
    if config.rule == "delta" and not (mixer.feature_map.bounded or config.normaliser == "attention"):
        raise KinformerError(
            f"the feature map {kind!r} gives keys of any length, with which rule = 'delta' diverges where "
            f"beta |k|^2 exceeds 2; norm them by the feature map 'unit' or 'sum_normalised' with inner = {kind!r}."
        )
    if decay is not None and decay.coupled and config.rule == "delta":
        raise KinformerError(
            "a coupled decay weighs the keys of sums, but rule = 'delta' has beta for that; set decay.coupled = "
            "false, or use rule = 'linear'."
        )
    position = type(mixer.position)
    rotates = position.rotate is not Position.rotate and position.relative is Position.relative
    if not rotates and not isinstance(mixer.position, NoPosition):
        raise KinformerError(
            f"the position {config.position.kind!r} does not act by turning queries and keys, and kernel attention "
            "has no scores of pairs that another could act on; use rope, or none and a position of the model."
        )
