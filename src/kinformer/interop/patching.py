"""Chosen layers of a loaded transformers model with a mixer of this library in place of their self-attention.

The mixer's state is one layer of the cache of transformers, beside the keys and values of the layers that stay.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from kinformer.core.attention_state import KeysValues
from kinformer.core.config import Config, field_types
from kinformer.core.state import State, map_tensors, nbytes, repeat_rows, select_rows, tensors
from kinformer.interop.key_map import ConfigData
from kinformer.interop.settings import Settings, rope
from kinformer.nn.modules import CausalLayer, layer, layer_config
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.progress import note

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# A cache of transformers with states.


class _Recorded(NamedTuple):
    """The last chunk and the state before it, from which the state within the chunk can be computed again."""

    layer: weakref.ref[CausalLayer]
    x: Tensor
    padding: Tensor | None
    before: State


class StateLayer(CacheLayerMixin):  # type: ignore[misc]
    """The state of a patched layer. The masks and positions of the model follow its ``length``."""

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.state: State = None
        self.length = 0
        self.unpadded = 0
        self.record_past = False
        self._recorded: _Recorded | None = None
        self._rewinds = False

    def absorb(self, layer: CausalLayer, x: Tensor, padding: Tensor | None) -> Tensor:
        """Return y [batch, time, dim] of the next chunk x; ``padding`` [batch, time] is True where x is padding."""
        before = self.state
        y, self.state = layer(x, before, return_state=True, key_padding_mask=padding)
        padded = None if padding is None else padding.any(dim=0).nonzero()
        self.length += x.shape[1]
        # How many last columns of all tokens are without padding.
        self.unpadded = x.shape[1] + (self.unpadded if padded is None or not len(padded) else -1 - int(padded[-1]))
        self.is_initialized = True
        self._rewinds = isinstance(self.state, KeysValues) and layer.mixers[0].retained is None
        # Speculative generation asks for records before the cache has this layer; its chunks have several tokens.
        records = self.record_past or (x.shape[1] > 1 and not torch.is_grad_enabled())
        self._recorded = _Recorded(weakref.ref(layer), x.detach(), padding, before) if records else None
        return y

    @property
    def nbytes(self) -> int:
        """Return the bytes that the state holds."""
        return 0 if self.state is None else nbytes(self.state)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Return whether tokens can be taken back: all tokens of exact attention, or tokens of a recorded chunk."""
        return self._rewinds or self.state is None or self._recorded is not None

    def activate_past_recording(self) -> None:
        """Make :meth:`crop` able to return before a last chunk of one token too, whatever the mixer."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens: any of exact attention, else tokens of the last chunk."""
        count, recorded, self._recorded = -tokens_to_remove, self._recorded, None
        if count < 0:
            raise KinformerError(f"crop: {tokens_to_remove} is positive; give minus the number of tokens to take back.")
        if not count or not self.length:
            return
        if count >= self.length:
            self.reset()
        elif self._rewinds and count <= self.unpadded:
            k, v, seen = self.state
            self.state = KeysValues(k[:, :, :-count], v[:, :, :-count], seen - count)  # type: ignore[call-arg]
            self._shorten(count)
        elif recorded is not None and count <= recorded.x.shape[1]:
            layer, rest = recorded.layer(), recorded.x.shape[1] - count
            assert layer is not None
            self.state = recorded.before
            self._shorten(count)
            if rest:  # absorb the other tokens of the last chunk again, after the state before it
                padding = None if recorded.padding is None else recorded.padding[:, :rest]
                self.state = layer(recorded.x[:, :rest], self.state, return_state=True, key_padding_mask=padding)[1]
        else:
            raise KinformerError(
                f"crop: the state of a patched layer cannot be rewound by {count} tokens, as it does not hold them one "
                "by one; copy the cache before them (copy.deepcopy), or begin with a new one."
            )

    def _shorten(self, count: int) -> None:
        self.length -= count
        self.unpadded = max(self.unpadded - count, 0)

    def reset(self) -> None:
        """Forget all tokens, as if the cache were new."""
        self.state, self.length, self.unpadded, self._recorded = None, 0, 0, None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows ``beam_idx``, in that order."""
        self._recorded = None
        if self.state is not None:
            self.state = select_rows(self.state, beam_idx)

    batch_select_indices = reorder_cache  # type: ignore[assignment]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self._recorded = None
        if self.state is not None:
            self.state = repeat_rows(self.state, repeats)

    def get_seq_length(self) -> int:
        """Return how many tokens were absorbed, padding included."""
        return self.length

    def get_mask_sizes(self, queries: int) -> tuple[int, int]:
        """Return the number of keys that the mask of the model's other layers has, and their offset."""
        return self.length + queries, 0

    def get_max_length(self) -> int:
        """Return -1, which means without a limit."""
        return -1

    get_max_cache_shape = get_max_length

    def offload(self) -> None:
        """Move the state to the CPU until :meth:`prefetch`."""
        if self.state is not None:
            self.device = next(tensors(self.state)).device
            self.state = map_tensors(lambda leaf: leaf.to("cpu", non_blocking=True), self.state)

    def prefetch(self) -> None:
        """Move the state back to where it was before :meth:`offload`."""
        if self.state is not None and hasattr(self, "device"):
            self.state = map_tensors(lambda leaf: leaf.to(self.device, non_blocking=True), self.state)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse keys and values, which a state does not hold."""
        self.update(key_states, value_states)

    def update(
        self, key_states: Tensor, value_states: Tensor, *rest: object, **options: object
    ) -> tuple[Tensor, Tensor]:
        """Refuse keys and values, which a state does not hold."""
        raise KinformerError(
            "this cache was filled by a patched model and holds states, not keys and values; use it with that model."
        )


def state_layer(cache: Cache, index: int) -> StateLayer:
    """Return the layer ``index`` of ``cache`` as one that holds a state; put it there if the cache is new."""
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list):
        raise KinformerError(
            f"the cache is of the type {type(cache).__name__}, which does not have layers; patched models stream "
            "through a DynamicCache, which generate() makes by itself."
        )
    while len(layers) <= index:
        layers.append((cache.layer_class_to_replicate or StateLayer)())
    old = layers[index]
    if isinstance(old, StateLayer):
        return old
    refuse_fixed_size(cache, old)
    if old.get_seq_length():
        raise KinformerError(
            f"layer {index} of the cache holds keys of the model before it was patched; begin with a new cache."
        )
    layers[index] = StateLayer()
    return layers[index]  # type: ignore[no-any-return]


def refuse_fixed_size(cache: object, layer: nn.Module) -> None:
    """Refuse ``layer`` of ``cache`` if it has a fixed size."""
    if getattr(layer, "is_compileable", False):
        raise KinformerError(
            f"the cache is of the type {type(cache).__name__}, whose layers have a fixed size; patched models stream "
            "through a DynamicCache: leave cache_implementation out."
        )


# What patching knows of the models of transformers: where their attention stands and what its weights are.
#
# GPT-2 stores q, k and v as one transposed matrix, GPT-NeoX as one matrix head by head, LLaMA and what follows it as
# three; all pair feature i of a head with i + width / 2 where positions are rotary.


PLACES = {
    "gpt2": ("h", "attn"),
    "gpt_neox": ("layers", "attention"),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), ("layers", "self_attn")),
}
"""Model type to the names of its list of layers and of the attention in each."""


@dataclass(frozen=True)
class Attention:
    """The self-attention of one layer.

    ``weights`` and ``biases`` hold q, k, v [heads * head_dim, dim] and o [dim, heads * head_dim], biases where there
    are any; ``norms`` the weights [head_dim] of q_norm and k_norm, with ``eps``. ``scale``: the factor of q beside
    head_dim ** -0.5. ``window``: how many tokens a token sees; None for all. ``dropout``: of the attention weights;
    ``output_dropout``: of the output.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    weights: Mapping[str, Tensor]
    biases: Mapping[str, Tensor]
    norms: Mapping[str, Tensor] = field(default_factory=dict)
    eps: float = 1e-6
    scale: float = 1.0
    window: int | None = None
    dropout: float = 0.0
    output_dropout: float = 0.0

    @property
    def dim(self) -> int:
        """Return the width of the model."""
        return self.weights["q"].shape[1]


def base_of(hf_model: PreTrainedModel) -> nn.Module:
    """Return the model below the head of ``hf_model``; refuse a model that cannot be patched."""
    config = getattr(hf_model, "config", None)
    kind = getattr(config, "model_type", None)
    if not isinstance(hf_model, nn.Module) or kind is None:
        raise KinformerError(
            f"hf_model is of the type {type(hf_model).__name__}, but must be a model of transformers, such as "
            "AutoModelForCausalLM.from_pretrained(...)."
        )
    if kind not in PLACES:
        raise KinformerError(f"models of the type {kind!r} cannot be patched; what can: {', '.join(PLACES)}.")
    if getattr(config, "add_cross_attention", False):
        raise KinformerError("add_cross_attention is True, but only models without cross-attention can be patched.")
    return hf_model.base_model


def layers_of(hf_model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of the model, in order."""
    return list(getattr(base_of(hf_model), PLACES[hf_model.config.model_type][0]))


def attention_name(hf_model: PreTrainedModel) -> str:
    """Return the name that the attention has in its layer."""
    return PLACES[hf_model.config.model_type][1]


def read_attention(module: Any, config: PretrainedConfig) -> Attention:
    """Return what ``module``, an attention of the model with this ``config``, is."""
    kind = config.model_type
    heads = config.num_attention_heads
    if kind == "gpt2":
        weights = _split(module.c_attn.weight.T, heads, False) | {"o": module.c_proj.weight.T}
        biases = _split(module.c_attn.bias, heads, False) | {"o": module.c_proj.bias}
        options = {"dropout": config.attn_pdrop, "output_dropout": config.resid_pdrop}
    elif kind == "gpt_neox":
        weights = _split(module.query_key_value.weight, heads, True) | {"o": module.dense.weight}
        bias = module.query_key_value.bias
        biases = {} if bias is None else _split(bias, heads, True) | {"o": module.dense.bias}
        options = {"dropout": config.attention_dropout}
    else:
        parts = {name: getattr(module, f"{name}_proj") for name in "qkvo"}
        weights = {name: part.weight for name, part in parts.items()}
        biases = {name: part.bias for name, part in parts.items() if part.bias is not None}
        norms = {name: getattr(module, name).weight for name in ("q_norm", "k_norm") if hasattr(module, name)}
        window = config.sliding_window if kind == "mistral" else getattr(module, "sliding_window", None)
        options = {"dropout": config.attention_dropout, "norms": norms, "window": window, "eps": config.rms_norm_eps}
    head_dim = weights["q"].shape[0] // heads
    kv_heads = weights["k"].shape[0] // head_dim
    return Attention(heads, kv_heads, head_dim, weights, biases, scale=module.scaling * head_dim**0.5, **options)


def _split(rows: Tensor, heads: int, by_head: bool) -> dict[str, Tensor]:
    """Return q, k and v of one matrix or bias whose rows are theirs, one after the other or head by head."""
    if not by_head:
        return dict(zip("qkv", rows.chunk(3), strict=True))
    parts = rows.unflatten(0, (heads, 3, -1)).unbind(1)
    return {name: part.flatten(0, 1) for name, part in zip("qkv", parts, strict=True)}


def rope_of(config: PretrainedConfig) -> ConfigData | None:
    """Return the rotary position of the model as the data of a config, None where positions are learned."""
    if getattr(config, "rope_parameters", None) is None:
        return None
    try:
        return rope(Settings(config.to_dict(), Path("the model")), partial=config.model_type == "gpt_neox")
    except KinformerError as error:
        remedy = 'position={"kind": "rope", "base": 10000}'
        raise KinformerError(f'{error} Give a position to use instead: {remedy} or position="none".') from None


# The module in place of a transformers model's self-attention, and the hook that hands it the model's padding.

CACHES = ("past_key_values", "cache", "layer_past")
"""The names under which models hand the cache to their attention."""
PADDING, RESET = "kinformer_padding", "kinformer_reset"


@dataclass(frozen=True)
class PatchedLayer:
    """What :func:`kinformer.interop.patch` did to one layer.

    ``layer`` is its index and ``mixer`` the kind of its mixer. ``copied`` are the projections whose weights are those
    of the model's attention, of "q", "k", "v", "o", "q_norm", "k_norm"; ``new`` the parameters that hold other weights;
    ``dropped`` the names of the attention's weights that nothing in the mixer holds.
    """

    layer: int
    mixer: str
    copied: tuple[str, ...]
    new: tuple[str, ...]
    dropped: tuple[str, ...]

    def __str__(self) -> str:
        copied, new, dropped = (", ".join(names) or "nothing" for names in (self.copied, self.new, self.dropped))
        return f"layer {self.layer}: {self.mixer}; copied: {copied}; new: {new}; dropped: {dropped}"


class PatchedAttention(nn.Module):
    """A causal layer with the interface of a transformers attention: hidden states -> (y, None).

    Without a cache it reads the full sequence; with one it streams, and its state stands in the cache.
    """

    def __init__(self, layer: CausalLayer, record: PatchedLayer, dropout: float) -> None:
        """Wrap ``layer``; ``dropout``: the rate of the dropout behind it, as in GPT-2."""
        super().__init__()
        self.layer, self.record = layer, record
        self.layer_idx = record.layer
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, *rest: object, **options: Any) -> tuple[Tensor, None]:
        """Return y [batch, time, dim] and, in place of attention weights, None."""
        padding, reset = options.get(PADDING), options.get(RESET)
        cache = _cache(options)
        if cache is None:
            y = self.layer(hidden_states, key_padding_mask=padding, reset=reset)
        else:
            y = state_layer(cache, self.layer_idx).absorb(self.layer, hidden_states, padding)
        return self.dropout(y), None


def share_padding(
    model: nn.Module, arguments: tuple[object, ...], options: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Hand the padding of a call of ``model`` to its layers, as a forward pre-hook.

    The model makes a mask of pairs from ``attention_mask`` [batch, past + time], from which padding cannot be read
    reliably; a checkpointed layer needs it again in the backward pass, so it travels with the arguments.
    """
    values: dict[str, Any] = dict(zip(inspect.signature(model.forward).parameters, arguments, strict=False)) | options
    tokens = next((values[name] for name in ("input_ids", "inputs_embeds") if values.get(name) is not None), None)
    if tokens is None:
        return arguments, options  # the model itself raises
    mask, time = values.get("attention_mask"), tokens.shape[1]
    if mask is None:
        return arguments, options | {RESET: _packed(values, tokens)}
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        cache = _cache(values)
        for layer in getattr(cache, "layers", ()):  # for them generate() makes a mask of pairs
            refuse_fixed_size(cache, layer)
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise KinformerError(
            f"attention_mask is {shape}, but a patched model takes the mask of padding, [batch, tokens] with 1 at real "
            "tokens; which pairs of tokens see each other is up to its mixers."
        )
    padding = mask[:, mask.shape[1] - time :] == 0
    return arguments, options | {PADDING: padding if bool(padding.any()) else None}


def _cache(options: Mapping[str, Any]) -> Cache | None:
    return next((options[name] for name in CACHES if options.get(name) is not None), None)


def _packed(values: dict[str, Any], tokens: Tensor) -> Tensor | None:
    """Return where packed sequences begin [batch, time], by their ``position_ids``; None for one sequence a row."""
    positions = values.get("position_ids")
    if positions is None or _cache(values) is not None:
        return None
    begins = positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1
    return begins.expand(tokens.shape[0], -1) if bool(begins.any()) else None


Layers = str | Sequence[int] | None


def patch(
    hf_model: PreTrainedModel,
    mixer: str | Config,
    layers: Layers = None,
    *,
    recipe: str = "small",
    set: Mapping[str, object] | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Replace the self-attention of ``layers`` of a transformers causal model by ``mixer``; return the model.

        model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")
        patch(model, "local", set={"pattern.window": 256})
        patch(model, "gated-deltanet", layers=[0, 2])

    hf_model: a loaded GPT-2, GPT-NeoX, LLaMA, Mistral, Qwen2 or Qwen3; it is changed in place.
    mixer: a causal name of ``kinformer.layers()``, or a config of a mixer, which is used unchanged. By name, heads,
        widths, biases, window and dropout are the model's unless ``settings`` say otherwise. So are rotary positions,
        except for mixers with their own position or decay.
    layers: their indices; "all" or None for all.
    recipe, set, settings: as of ``kinformer.layer``.

    Weights of q, k, v and o are carried over where their shapes fit; all else is new. ``patched_layers(model)`` says
    which, and so does the log. Training, ``generate`` and ``save_pretrained`` work as before; to load what was saved,
    build the model, patch it in the same way and load the state dict.

    Errors: ``KinformerError`` for other models, unknown names, settings and layers, and positions that do not exist
    here.
    """
    replacements = build_replacements(hf_model, mixer, layers, recipe=recipe, set=set, **settings)
    install(hf_model, replacements)
    for replacement in replacements.values():
        note(str(replacement.record))
    return hf_model


def patched_layers(hf_model: PreTrainedModel) -> list[PatchedLayer]:
    """Return what :func:`patch` did to every layer of ``hf_model`` that it changed, in order."""
    name = attention_name(hf_model)
    attentions = (getattr(item, name) for item in layers_of(hf_model))
    return [attention.record for attention in attentions if isinstance(attention, PatchedAttention)]


def build_replacements(
    hf_model: PreTrainedModel,
    mixer: str | Config,
    layers: Layers,
    *,
    recipe: str = "small",
    set: Mapping[str, object] | None = None,
    **settings: Any,
) -> dict[int, PatchedAttention]:
    """Return the modules to put in place of the attention of ``layers``, by the indices of the layers."""
    modules, name = layers_of(hf_model), attention_name(hf_model)
    replacements = {}
    for index in _indices(layers, len(modules)):
        module = getattr(modules[index], name)
        if isinstance(module, PatchedAttention):
            raise KinformerError(
                f"layers: layer {index} is patched already, with {module.record.mixer!r}; leave it out, or load the "
                "model again."
            )
        attention = read_attention(module, hf_model.config)
        options = settings
        if isinstance(mixer, str):
            config = layer_config(mixer, recipe=recipe, **settings)
            if config.slot != "mixer":
                raise _not_causal(mixer)
            options = _model_settings(config, attention, hf_model.config, settings) | settings
        like = attention.weights["o"]
        built = layer(mixer, attention.dim, recipe=recipe, set=set, device=like.device, dtype=like.dtype, **options)
        if not isinstance(built, CausalLayer) or built.reads_context:
            raise _not_causal(mixer)
        record = PatchedLayer(index, type(built.inner).Config.kind, *carry(built.inner, attention))  # type: ignore[attr-defined]
        replacements[index] = PatchedAttention(built, record, attention.output_dropout)
        replacements[index].train(hf_model.training)
    return replacements


def _not_causal(mixer: str | Config) -> KinformerError:
    return KinformerError(
        f"mixer: {mixer!r} is not causal, or attends to another sequence, but the model predicts the next token; "
        "choose a name of kinformer.layers() whose .causal is True."
    )


def install(hf_model: PreTrainedModel, attentions: Mapping[int, nn.Module]) -> dict[int, nn.Module]:
    """Put ``attentions`` into the layers whose indices are their keys; return the modules that stood there."""
    modules, name, base = layers_of(hf_model), attention_name(hf_model), base_of(hf_model)
    before = {index: getattr(modules[index], name) for index in attentions}
    for index, attention in attentions.items():
        setattr(modules[index], name, attention)
    if share_padding not in base._forward_pre_hooks.values():
        base.register_forward_pre_hook(share_padding, with_kwargs=True)
    return before


def _indices(layers: Layers, count: int) -> list[int]:
    """Return the indices of the chosen layers among ``count``."""
    if layers is None or layers == "all":
        return list(range(count))
    valid = isinstance(layers, Sequence) and not isinstance(layers, str)
    if not valid or not all(isinstance(item, int) and not isinstance(item, bool) for item in layers):
        raise KinformerError(f"layers is {layers!r}, but must be 'all' or a list of indices, such as [0, 2].")
    if not layers or not all(0 <= item < count for item in layers):  # type: ignore[operator]
        raise KinformerError(f"layers is {list(layers)}, but must hold one index or more, from 0 to {count - 1}.")
    return sorted({*layers})  # type: ignore[arg-type]


def _model_settings(
    config: Any, attention: Attention, model_config: PretrainedConfig, settings: Mapping[str, object]
) -> dict[str, object]:
    """Return the settings of ``config`` by which the mixer would equal the model's attention."""
    fields, biases = field_types(type(config)), attention.biases
    changes: dict[str, object] = {"num_heads": attention.num_heads, "dropout": attention.dropout}
    same_heads = settings.get("num_heads", attention.num_heads) == attention.num_heads
    if same_heads:
        changes["head_dim"] = attention.head_dim
    if getattr(config, "value_dim", None) is not None:
        changes["value_dim"] = attention.head_dim
    if "projection" in fields:
        changes["bias"] = "o" in biases
        if config.projection.kind in ("multi_head", "grouped", "normalised") and same_heads:
            changes["projection"] = _projection(attention)
    else:
        changes["bias"] = bool(biases)
    # The model's position goes into a mixer without its own position and decay.
    position = getattr(getattr(config, "position", None), "kind", None)
    if position in ("none", "rope") and getattr(config, "decay", None) is None:
        changes["position"] = "position" not in settings and rope_of(model_config) or "none"
    if attention.window is not None and getattr(getattr(config, "pattern", None), "kind", None) == "causal":
        changes["pattern"] = {"kind": "local", "window": attention.window}
    return {name: value for name, value in changes.items() if name in fields and name not in settings}


def _projection(attention: Attention) -> ConfigData:
    bias = "q" in attention.biases
    projection: ConfigData = {"kind": "multi_head", "bias": bias}
    if attention.num_kv_heads != attention.num_heads:
        projection = {"kind": "grouped", "bias": bias, "num_kv_heads": attention.num_kv_heads}
    if attention.norms:
        return {"kind": "normalised", "inner": projection, "eps": attention.eps}
    return projection


@torch.no_grad()
def carry(mixer: nn.Module, attention: Attention) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Copy the weights that fit; return the names of the copied projections, of the new parameters, and of the dropped
    projections."""
    projection = getattr(mixer, "projection", None)
    normalised: Any = projection if hasattr(projection, "q_norm") else None
    if normalised is not None:
        projection = normalised.inner
    qkv, partly = _kernel(mixer, attention) if projection is None else _softmax(projection, attention)
    copied = list(qkv)
    carried = set() if partly or not qkv else {"qkv"}
    out = getattr(mixer, "out", None)
    if isinstance(out, nn.Linear) and out.weight.shape == attention.weights["o"].shape:
        _fill(out, attention.weights["o"], attention.biases.get("o"))
        copied.append("o")
        carried.add("out")
    for name, weight in attention.norms.items() if normalised is not None else ():
        target = getattr(normalised, name).weight
        weight = weight.repeat(len(target) // len(weight)) if normalised.by_head else weight
        if target is None or target.shape != weight.shape:
            continue
        target.copy_(weight)
        copied.append(name)
        carried.add(name)
    new = (name for name, _ in mixer.named_parameters() if name.split(".")[-2:][0] not in carried)
    dropped = (name for name in (*"qkvo", *attention.norms) if name not in copied)
    named_new = (f"{name} ({partly})" if partly and name.startswith("qkv.") else name for name in new)
    return tuple(copied), tuple(named_new), tuple(dropped)


def _softmax(projection: nn.Module, attention: Attention) -> tuple[str, str]:
    """Fill ``projection.qkv``, which has the rows of q, k and v; return the copied parts and the new part."""
    qkv = getattr(projection, "qkv", None)
    rows = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    if not isinstance(qkv, nn.Linear) or tuple(qkv.weight.shape) != (rows, attention.dim):
        return "", ""
    if projection.num_kv_heads != attention.num_kv_heads:
        return "", ""
    parts = [_rows(attention, name) for name in "qkv"]
    _fill(qkv, torch.cat([weight for weight, _ in parts]), torch.cat([bias for _, bias in parts]))
    return "qkv", ""


def _kernel(mixer: Any, attention: Attention) -> tuple[str, str]:
    """Fill ``qkv`` of kernel attention, where the heads that share a key have one key each; with the delta rule its
    rows stand head by head, with the rows of beta."""
    qkv, widths = getattr(mixer, "qkv", None), getattr(mixer, "widths", None)
    heads, head_dim = attention.num_heads, attention.head_dim
    if not isinstance(qkv, nn.Linear) or widths is None or mixer.config.num_heads != heads:
        return "", ""
    copied, partly = "", ""
    delta = mixer.strengths > 0
    fitting = [width == head_dim for width in widths]
    for part, (name, fits) in enumerate(zip("qkv", fitting, strict=True)):
        if not fits:
            continue
        weight, bias = (_repeated(item, attention) for item in _rows(attention, name))
        start = sum(widths[:part])
        for target, source in ((qkv.weight, weight), (qkv.bias, bias)):
            if target is None:
                continue
            if delta:
                target.unflatten(0, (heads, -1))[:, start : start + head_dim] = source.unflatten(0, (heads, -1))
            else:
                target[heads * start : heads * (start + head_dim)] = source
        copied += name
    if delta or len(copied) < 3:
        missing = [name for name, fits in zip("qkv", fitting, strict=True) if not fits]
        partly = ", ".join([*missing, *(["beta"] if delta else [])])
    return copied, partly


def _rows(attention: Attention, name: str) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias (0 where there is none) of q, k or v."""
    weight = attention.weights[name]
    bias = attention.biases.get(name, weight.new_zeros(weight.shape[0]))
    factor = attention.scale if name == "q" else 1.0
    return weight * factor, bias * factor


def _repeated(rows: Tensor, attention: Attention) -> Tensor:
    """Return ``rows`` of k or v, where each key head is repeated for the query heads that share it."""
    heads = rows.shape[0] // attention.head_dim
    blocks = rows.unflatten(0, (heads, attention.head_dim))
    return blocks.repeat_interleave(attention.num_heads // heads, dim=0).flatten(0, 1)


def _fill(target: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    target.weight.copy_(weight)
    if target.bias is not None:
        target.bias.copy_(weight.new_zeros(weight.shape[0]) if bias is None else bias)
