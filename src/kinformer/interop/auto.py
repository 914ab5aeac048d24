"""Models of this library as classes of the library transformers, for models that none of its architectures computes.

Folders that ``kinformer export`` writes name these classes in their ``auto_map``; the code in the folder imports them
from here. ``generate``, ``Trainer`` and PEFT use them. Importing this file registers the classes, so that
``trust_remote_code`` is not needed.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import ctc_loss
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutput,
    ImageClassifierOutput,
    MaskedLMOutput,
    ModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from kinformer.core.config import find, from_dict, to_dict
from kinformer.core.contract import Chunk, left_align, select_valid
from kinformer.core.learning import AuxLoss, Regularized, gather_aux_losses
from kinformer.core.model import PROTOCOLS, CausalModel, modules_of
from kinformer.core.probe import NoWeights, weights_of_rows
from kinformer.core.stack import ModelConfig, Stack
from kinformer.core.state import State, map_tensors, nbytes, pop_aux, repeat_rows, select_rows
from kinformer.generation.generate import evaluating
from kinformer.inputs.signals import Filterbank, features_of
from kinformer.inputs.tokens import Lookup
from kinformer.interop.key_map import ConfigView
from kinformer.interop.settings import MULTI_LABEL
from kinformer.interop.writing import auto_class_of, auto_map, use_of, write_code
from kinformer.models.decoder import Decoder
from kinformer.runtime.errors import KinformerError

__all__ = [
    "CLASSES",
    "KinformerForCTC",
    "KinformerConfig",
    "KinformerForCausalLM",
    "KinformerForImageClassification",
    "KinformerForMaskedLM",
    "KinformerForQuestionAnswering",
    "KinformerForSeq2SeqLM",
    "KinformerForSequenceClassification",
    "KinformerForTokenClassification",
]


# The config, and what all models share.


class KinformerConfig(PretrainedConfig):  # type: ignore[misc]
    """The config of a model of this library.

    ``composition``: our model config as data, as in a run's ``config.json``. ``member``: the member of the family.
    ``settings``: settings of transformers.
    """

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
        if self.composition.get("head", {}).get("multi_label"):
            settings.setdefault("problem_type", MULTI_LABEL)
        settings["is_encoder_decoder"] = self.composition.get("kind") == "encoder_decoder"
        settings["tie_word_embeddings"] = False  # a tied head reads the table of the input; there is one tensor
        settings.setdefault("use_cache", True)
        self.use_cache = settings["use_cache"]
        super().__init__(**settings)

    def build(self) -> Any:
        """Return a new model of this composition."""
        return from_dict(ModelConfig, self.composition, find(), "composition").build()


O = TypeVar("O", bound=ModelOutput)
IGNORED = -100
"""The label of positions without a prediction."""


class KinformerModel(PreTrainedModel):  # type: ignore[misc]
    """A model of this library, ``model``, with the interface of transformers.

    ``use``: the purpose of the class, which ends its name, as in ``KinformerForMaskedLM``. With
    ``output_hidden_states`` a call also returns the input of the first layer and the output of every layer, the last
    after the norm, each [batch, time or patches, dim].
    """

    use: ClassVar[str]
    config_class = KinformerConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _no_split_modules: list[str] = []

    def __init__(self, config: KinformerConfig) -> None:
        super().__init__(config)
        self.model = config.build()
        use = use_of(self.model.config)
        if use != self.use:
            theirs = f"load it by {auto_class_of(use)}" if use else "transformers does not have a class for it"
            raise KinformerError(
                f"composition: its model is {PROTOCOLS[self.model.config.protocol]} with the input "
                f"{self.model.config.input.kind!r} and the head {self.model.config.head.kind!r}, which is no "
                f"{self.use}; {theirs}."
            )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise what no file held, and buffers that no file holds, as a new model of ours has them."""
        if module is self:
            with torch.device("cpu"):
                fresh = self.config.build()
            values = dict(fresh.named_parameters()) | dict(fresh.named_buffers())
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
                if not getattr(tensor, "_is_hf_initialized", False):
                    init.copy_(tensor, values[name].to(tensor.dtype))

    def save_pretrained(self, save_directory: str | os.PathLike[str], *arguments: Any, **options: Any) -> None:
        """Write the model as ``kinformer export`` does, with the code that loads it."""
        self.config.auto_map = auto_map(self.use)
        super().save_pretrained(save_directory, *arguments, **options)
        write_code(Path(save_directory), self.use)

    def _shows(self, name: str, requested: Any, refusal: str = "") -> bool:
        """Return whether a call shows the outputs ``name``: as ``requested``, or else as the config says. ``refusal``:
        the error if it does."""
        shows = bool(getattr(self.config, name) if requested is None else requested)
        if shows and refusal:
            raise KinformerError(f"{name}: {refusal}")
        return shows

    @contextmanager
    def _costs(self) -> Iterator[dict[str, Tensor]]:
        """Collect the auxiliary losses [batch] of the forward passes within the context, in training."""
        with gather_aux_losses(modules_of(self.model, AuxLoss) if self.training else ()) as costs:
            yield costs

    def _loss_of(
        self,
        logits: Tensor,
        labels: Tensor | None,
        positions: int,
        options: Mapping[str, Any],
        *costs: Mapping[str, Tensor],
    ) -> Tensor | None:
        """Return the loss of ``logits``, as transformers has it for the use of the class, with the auxiliary losses.

        A loss of transformers takes the arguments of the others, too, and ignores them.
        """
        if labels is None:
            return None
        named = {"logits": logits, "pooled_logits": logits, "labels": labels, "vocab_size": logits.shape[-1]}
        loss = self.loss_function(**named, config=self.config, **scaling(options))
        return self._with_costs(loss, labels, positions, options, *costs)

    def _with_costs(
        self, loss: Tensor, labels: Tensor, positions: int, options: Mapping[str, Any], *costs: Mapping[str, Tensor]
    ) -> Tensor:
        """Return ``loss``; in training with the auxiliary losses and penalties that a run's trainer adds.

        An auxiliary loss [batch] is a mean over the ``positions`` that were read. Of several micro-batches in a step,
        each counts by its ``labels``, as in the loss of transformers.
        """
        if not self.training:
            return loss
        further = [module.penalty() for module in modules_of(self.model, Regularized)]
        further += [cost.float().sum() / positions for some in costs for cost in some.values()]
        if not further:
            return loss
        items = options.get("num_items_in_batch")
        return loss + torch.stack(further).sum() * (1 if items is None else (labels != IGNORED).sum() / items)

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of the input, or the input of a model of images."""
        return getattr(self.model.input, "embedding", self.model.input)  # type: ignore[no-any-return]

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Refuse another table: the composition says how many ids there are."""
        raise KinformerError("the table of ids cannot be exchanged; use resize_token_embeddings for more or fewer ids.")

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Give the model ``new_num_tokens`` ids, rounded up to ``pad_to_multiple_of``; return the table of the input.

        The rows of old ids stay. The rows of new ids are the mean of the old rows; without ``mean_resizing`` they are
        drawn as in a new model.
        """
        old = self.model.vocab_size
        size = new_num_tokens or old
        if pad_to_multiple_of is not None:
            size = -(-size // pad_to_multiple_of) * pad_to_multiple_of
        if size == old:
            return self.get_input_embeddings()  # type: ignore[return-value]
        config = replace(self.model.config, input=replace(self.model.config.input, vocab_size=size))
        with torch.device("cpu"):
            model = config.build()
        old_weights, shared = self.model.state_dict(), min(old, size)
        with torch.no_grad():
            for name, weight in model.state_dict().items():
                before = old_weights[name]
                if before.shape == weight.shape:
                    weight.copy_(before)
                elif before.shape[1:] == weight.shape[1:] and (len(before), len(weight)) == (old, size):
                    weight[:shared] = before[:shared]
                    if mean_resizing:
                        weight[shared:] = before.mean(0)
                else:
                    raise KinformerError(
                        f"{name} is {list(before.shape)} and would become {list(weight.shape)}: the ids of this model "
                        "are divided into parts; train a run with another vocab_size instead."
                    )
        weight = next(self.model.parameters())
        self.model = model.to(weight.device, weight.dtype).train(self.training)
        self.config.composition, self.config.vocab_size = to_dict(config), size
        return self.get_input_embeddings()  # type: ignore[return-value]

    def _set_gradient_checkpointing(self, enable: bool = True, *arguments: Any, **options: Any) -> None:
        """Let a training step compute every layer a second time instead of storing its activations."""
        for stack in (module for module in self.modules() if isinstance(module, Stack)):
            stack.config = replace(stack.config, checkpoint=enable)
        self.gradient_checkpointing = enable

    @contextmanager
    def _vectors(self, embeds: Tensor | None, valid: Tensor | None) -> Iterator[None]:
        """Let the table of the input return ``embeds`` [batch, time, dim], whatever ids it is given."""
        table = self.get_input_embeddings()
        if embeds is None:
            yield
            return
        if not isinstance(table, Lookup):
            raise KinformerError("inputs_embeds: this model's vectors depend on more than a table; give input_ids.")
        if embeds.shape[-1] != table.embedding_dim:
            raise KinformerError(
                f"inputs_embeds is {list(embeds.shape)}, but its vectors have {table.embedding_dim} numbers."
            )
        rows = embeds if valid is None else left_align(valid).align(embeds)
        handle = table.register_forward_hook(lambda *_: rows)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def _entered(self, shows: bool, valid: Tensor | None = None) -> Iterator[Callable[[int], Tensor]]:
        """Let a call within the context keep the first layer's input. The returned function gives this input for the
        call's ``time`` tokens, [batch, time, dim]."""
        entered: list[Tensor] = []

        def keep(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            # Only the first call: a stack may use a layer more than once. No operation on it: checkpointing would save
            # its tensors in the forward pass, and miss them when it computes the layer again.
            if not entered:
                entered.append(arguments[0].x if isinstance(arguments[0], Chunk) else arguments[0])

        def restored(time: int) -> Tensor:
            x = entered[0][:, -time:]  # behind a global input
            return x if valid is None else left_align(valid).restore(x)

        stack = self.model.stack
        handle = stack.layers[stack.order[0]].register_forward_pre_hook(keep) if shows else None
        try:
            yield restored
        finally:
            if handle is not None:
                handle.remove()

    @contextmanager
    def _attended(
        self, options: Mapping[str, Any], valid: Tensor | None = None, refusal: str = ""
    ) -> Iterator[Callable[[int], tuple[Tensor, ...] | None]]:
        """Let a call within the context keep the inputs of its mixers, if it asks for attention weights. The returned
        function gives each mixer's weights [batch, heads, queries, keys] of the last ``time`` tokens (0: of all).
        ``refusal``: the error if the call asks for them."""
        calls: list[tuple[nn.Module, tuple[Any, ...]]] = []
        hooks = ExitStack()
        if self._shows("output_attentions", options.get("output_attentions"), refusal):
            for layer in self.model.stack.layers:
                mixer = getattr(layer, "mixer", layer)
                keep = mixer.register_forward_pre_hook(
                    lambda mixer, inputs, named: calls.append((mixer, (*inputs, *named.values()))), with_kwargs=True
                )
                hooks.callback(keep.remove)
        with hooks:
            yield lambda time: tuple(attention_of(*call, valid, time) for call in calls) or None


PAST = "a cache does not hold weights; give whole texts, use_cache=False."
OF_SOURCE = "a model of a source returns the last hidden states of its encoder alone; leave it out."
OF_SOUND = "a model of sound returns logits and attention weights alone; leave it out."


def attention_of(mixer: nn.Module, inputs: tuple[Any, ...], valid: Tensor | None, time: int) -> Tensor:
    """Return the probabilities [batch, heads, queries, keys] of a call of ``mixer``, in the order of the caller."""
    reason = ""
    try:
        with evaluating(mixer):
            read = weights_of_rows(mixer, inputs)
        reason = read.implied or ("" if read.keys == "text" else f"its keys are {read.keys}, not tokens")
    except NoWeights as error:
        reason = str(error).removesuffix(".")
    if reason:
        kind = getattr(getattr(mixer, "config", None), "kind", type(mixer).__name__)
        raise KinformerError(
            f"output_attentions: the mixer {kind!r} does not compute probabilities ({reason}); leave it out."
        )
    weights = read.weights[..., -time:, -time:]  # behind a global input
    if valid is not None:
        rows = left_align(valid)
        for axis in (2, 3):
            weights = rows.restore(weights.movedim(axis, 1)).movedim(1, axis)
    return weights


def valid_of(attention_mask: Tensor | None, values: Tensor) -> Tensor | None:
    """Return which positions of ``values`` [batch, time] are real, bool, by a mask [batch, tokens so far]; None if all
    are."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] < values.shape[1]:
        raise KinformerError(
            f"attention_mask is {list(attention_mask.shape)}, but must be [batch, tokens] and cover the "
            f"{values.shape[1]} of input_ids."
        )
    valid = attention_mask[:, -values.shape[1] :].bool()
    return None if bool(valid.all()) else valid


def require_ids(values: Tensor | None, options: dict[str, object], embeds: Tensor | None = None) -> Tensor:
    """Return ``values``, or ids of the shape of ``embeds`` [batch, time, dim] in their place; refuse a call with
    neither or both."""
    if options.get("inputs_embeds") is not None:
        raise KinformerError("inputs_embeds: this model reads input_ids alone; leave it out.")
    if (values is None) == (embeds is None):
        raise KinformerError("input_ids, inputs_embeds: give either the one or the other.")
    if embeds is None:
        return values  # type: ignore[return-value]
    if embeds.dim() != 3:
        raise KinformerError(f"inputs_embeds is {list(embeds.shape)}, but must be [batch, time, dim].")
    return torch.zeros(embeds.shape[:2], dtype=torch.int64, device=embeds.device)


def as_output(output: O, options: Mapping[str, object]) -> O | tuple[object, ...]:
    """Return ``output``, as a tuple where a call asks for one."""
    return output.to_tuple() if options.get("return_dict") is False else output


def scaling(options: Mapping[str, object]) -> dict[str, object]:
    """Return the option by which a trainer says how many labels there are in all micro-batches of a step."""
    return {name: options[name] for name in ("num_items_in_batch",) if name in options}


# Models that generate: their cache holds a state.

CACHES = ("cache", "past_key_values")
CACHE = next(
    one for one in CACHES if one in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)
"""What this version of transformers calls a cache: ``cache`` from 5.24 on."""

APART = 32
"""Least number of tokens between two kept states; so many waiting tokens are absorbed without the next chunk."""


class StateCache(Cache):  # type: ignore[misc]
    """The ``state`` after ``length`` tokens, padding included; None before the first.

    A cache that holds tokens is true, so that ``if past_key_values:`` finds it. A cache that ``records`` keeps at most
    two earlier states, at least ``apart`` tokens apart. :meth:`crop` returns to one of these. The tokens from there to
    the new end are ``waiting``: the next pass absorbs them with its chunk.
    """

    is_compileable = False
    is_sliding = [False]
    is_linear = [False]
    """False, so that transformers gives tokens that the state has absorbed only once."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.state: State = None
        self.length = self.waiting = 0
        self.records, self.apart = False, APART
        self._marks: list[tuple[int, State]] = []
        self._text: Any = None  # tokens [batch, time] behind the older kept state, -1 at padding

    def __bool__(self) -> bool:
        return self.length > 0

    is_initialized = property(__bool__)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Return whether an earlier state is kept, so that tokens can be taken back."""
        return bool(self._marks)

    @property
    def nbytes(self) -> int:
        """Return the bytes that the state and the kept states hold."""
        return sum(nbytes(one) for one in (self.state, *(one for _, one in self._marks)) if one is not None)

    def advance(self, state: State, tokens: int) -> None:
        """Hold ``state``, which absorbed ``tokens`` more; forget earlier states."""
        self.state, self.length, self._marks, self._text = state, self.length + tokens, [], None

    def activate_past_recording(self) -> None:
        """Keep earlier states from the next chunk on."""
        self.records = True

    def append(self, tokens: Tensor, valid: Tensor | None) -> None:
        """Add ``tokens`` [batch, time] to the waiting tokens."""
        chunk = tokens if valid is None else tokens.masked_fill(~valid, -1)
        self._text = chunk if self._text is None else torch.cat([self._text, chunk], dim=1)
        self.length, self.waiting = self.length + chunk.shape[1], self.waiting + chunk.shape[1]

    def take(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Return the first ``count`` waiting tokens and their mask. Keep the state before them if it is far enough from
        the last kept state."""
        absorbed = self.length - self.waiting
        if not self._marks or absorbed - self._marks[-1][0] >= self.apart:
            self._marks = [*self._marks[-1:], (absorbed, self.state)]
        self._text = self._text[:, self._marks[0][0] - self.length :]
        tokens = self._text[:, self._text.shape[1] - self.waiting :][:, :count]
        self.waiting -= count
        valid = tokens >= 0
        return tokens.clamp(min=0), None if bool(valid.all()) else valid

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens were absorbed, padding included."""
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1, which means without a limit."""
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of tokens that a mask covers, and their offset."""
        return self.length + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows ``beam_idx``, in that order."""
        self._change_rows(lambda part: select_rows(part, beam_idx))

    batch_select_indices = reorder_cache  # type: ignore[assignment]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self._change_rows(lambda part: repeat_rows(part, repeats))

    def _change_rows(self, change: Callable[[State], State]) -> None:
        self.state, self._text = (part if part is None else change(part) for part in (self.state, self._text))
        self._marks = [(length, part if part is None else change(part)) for length, part in self._marks]

    def reset(self) -> None:
        """Forget all tokens, as if the cache were new."""
        self.state, self.length, self.waiting, self._marks, self._text = None, 0, 0, [], None

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens, at most back to the older kept state."""
        length, absorbed = self.length + int(tokens_to_remove), self.length - self.waiting
        marks = [one for one in self._marks if one[0] <= length]
        if not tokens_to_remove:
            return
        if tokens_to_remove > 0 or not marks:
            raise KinformerError(
                "a state cannot be rewound, as it does not hold tokens one by one; copy the cache before them "
                "(copy.deepcopy), or generate without assistance."
            )
        if length < absorbed:
            (absorbed, self.state), self._marks = marks[-1], marks
        self.length, self.waiting = length, length - absorbed
        self._text = self._text[:, : length - marks[0][0]]


@dataclass
class ContinuedOutput(ModelOutput):  # type: ignore[misc]
    """The ``loss`` if there are labels, ``logits`` [batch, time, vocab], the cache as the version calls it, where they
    are requested the ``hidden_states`` and ``attentions``, and of a model of a source the encoder's hidden states
    [batch, length, dim]."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    # Never both: transformers 5.24 reads "past_key_values" as "cache", and the default None would replace the cache.
    if CACHE == "cache":
        cache: StateCache | None = None
    else:
        past_key_values: StateCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None


class ContinuingModel(KinformerModel, GenerationMixin):  # type: ignore[misc]
    """A model whose state is its cache."""

    main_input_name = "input_ids"

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: the first forward pass makes the cache."""
        return False

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, config: GenerationConfig, values: dict[str, Any], mode: GenerationMode, *arguments: Any, **options: Any
    ) -> Any:
        """Put a cache that records into ``values`` for assisted generation, of the model and of its assistant."""
        prepared = super()._prepare_cache_for_generation(config, values, mode, *arguments, **options)  # type: ignore[misc]
        if config.use_cache and (config.is_assistant or mode == GenerationMode.ASSISTED_GENERATION):
            cache = cache_in(values)
            values[CACHE] = cache = StateCache() if cache is None else cache
            cache.records = True
            if config.is_assistant:  # a crop may take back its whole draft, which it absorbed token by token
                cache.apart = APART + (config.max_new_tokens or 0)
        return prepared

    def _state_in(
        self, before: StateCache | None, cache: StateCache | None, labels: Tensor | None, alone: bool = False
    ) -> State:
        """Return the state in ``before``. A chunk with ``labels``, without a ``cache`` to fill, or ``alone`` is not
        joined with the waiting tokens, which are absorbed here. Labels do not pay for auxiliary losses so far."""
        if before is None:
            return None
        if before.waiting and (alone or cache is None or labels is not None):
            self._absorb(before, before.waiting)
        return before.state if labels is None or before.state is None else pop_aux(before.state)[1]

    def _absorb(self, cache: StateCache, count: int) -> None:
        """Absorb the first ``count`` waiting tokens of ``cache``."""
        tokens, valid = cache.take(count)
        cache.state = self.model.head_inputs(tokens, cache.state, valid=valid)[1]

    def _continued(
        self,
        tokens: Tensor,
        valid: Tensor | None,
        cache: StateCache | None,
        state: State,
        logits_to_keep: int | Tensor = 0,
        layers: list[Tensor] | None = None,
        are_ids: bool = True,
    ) -> tuple[Tensor, State]:
        """Return logits [batch, time, vocab] of ``tokens`` [batch, time] behind ``state``, zero where not ``valid``,
        and the state behind them, which ``cache``, if there is one, then holds. The outputs of all layers are added to
        ``layers``, if it is a list. A cache records tokens that ``are_ids``."""
        count = tokens.shape[1]
        needed = min(logits_to_keep or count, count) if isinstance(logits_to_keep, int) else count
        recording = cache if cache is not None and cache.records and are_ids else None
        if recording is not None:
            recording.state = state
            recording.append(tokens, valid)
            # Many tokens without logits are absorbed first, or every crop would return to the state before them.
            if layers is None and recording.waiting - needed >= APART:
                self._absorb(recording, recording.waiting - needed)
            state, (tokens, valid) = recording.state, recording.take(recording.waiting)
        if layers is None:
            inputs, state = self.model.head_inputs(tokens, state, valid=valid)
        else:
            if type(self.model).head_inputs is not Decoder.head_inputs:
                raise KinformerError("output_hidden_states: this model's layers depend on the token; leave it out.")
            inputs, state, taps = self.model.hidden(tokens, state, valid=valid, taps=range(len(self.model.stack.order)))
            layers += [*taps[:-1], inputs]
        if recording is not None:
            recording.state = state
        elif cache is not None:
            cache.advance(state, count)
        rows = slice(-needed, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(map_tensors(lambda leaf: leaf[:, rows], inputs))
        return select_valid(logits, None if valid is None else valid[:, rows]), state

    def _cache_to_fill(self, cache: StateCache | None, use_cache: bool | None) -> StateCache | None:
        """Return the cache for the state behind a chunk; None if the call wants no cache."""
        if not (use_cache if use_cache is not None else self.config.use_cache and not self.training):
            return None
        return StateCache() if cache is None else cache


def cache_in(options: Mapping[str, Any]) -> StateCache | None:
    """Return the cache that a call names, whatever the version of transformers calls it; None if there is none."""
    cache: Cache | None = options.get("cache")
    cache = options.get("past_key_values") if cache is None else cache
    if cache is None or isinstance(cache, StateCache):
        return cache
    if cache.get_seq_length():
        raise KinformerError(
            f"the cache is of the type {type(cache).__name__} and holds another model's tokens; leave it out."
        )
    return StateCache()


class KinformerForCausalLM(ContinuingModel):
    """A causal model of tokens, which generates."""

    use = "CausalLM"

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        **options: object,
    ) -> ContinuedOutput | tuple[object, ...]:
        """Return logits [batch, time, vocab] of ``input_ids`` [batch, time], which follow the tokens in the cache.

        attention_mask: [batch, tokens so far] or [batch, time]; 0 marks padding, on either side. inputs_embeds [batch,
        time, dim]: vectors in place of rows of the table of ids. labels: shifted here; -100 is ignored.
        logits_to_keep: how many last positions have logits, or which; 0 for all. The cache is ``cache`` or
        ``past_key_values``, whatever the version of transformers.
        """
        tokens, before = require_ids(input_ids, options, inputs_embeds), cache_in(options)
        cache, ids = self._cache_to_fill(before, use_cache), input_ids is not None
        valid, shows = valid_of(attention_mask, tokens), self._shows("output_hidden_states", output_hidden_states)
        state = self._state_in(before, cache, labels, not ids or shows or isinstance(logits_to_keep, Tensor))
        layers: list[Tensor] | None = [] if shows else None
        with (
            self._costs() as costs,
            self._vectors(inputs_embeds, valid),
            self._entered(shows, valid) as entered,
            self._attended(options, valid, PAST if before else "") as attended,
        ):
            logits, after = self._continued(tokens, valid, cache, state, logits_to_keep, layers, ids)
        loss = self._loss_of(logits, labels, tokens.numel(), options, costs, pop_aux(after)[0])
        caches: dict[str, Any] = {} if cache is None else {CACHE: cache}
        shown: dict[str, Any] = {
            "hidden_states": None if layers is None else (entered(tokens.shape[1]), *layers),
            "attentions": attended(tokens.shape[1]),
        }
        return as_output(ContinuedOutput(loss=loss, logits=logits, **shown, **caches), options)


class SourceReader(nn.Module):
    """The ``encoder`` of a model, with the call of transformers."""

    main_input_name = "input_ids"

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: object) -> BaseModelOutput:
        """Return hidden states [batch, length, dim] of ``input_ids`` [batch, length], zero at padding."""
        valid = valid_in(attention_mask, input_ids)
        return BaseModelOutput(last_hidden_state=self.encoder(input_ids, valid))


class KinformerForSeq2SeqLM(ContinuingModel):
    """A model that continues a source of tokens."""

    use = "Seq2SeqLM"

    def __init__(self, config: KinformerConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForMaskedLM"  # labels stand where they are predicted

    def get_encoder(self, modality: str | None = None) -> SourceReader:
        """Return the encoder of the source."""
        return SourceReader(self.model.encoder)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return the ids that the decoder reads to predict ``labels`` [batch, time]: the begin id, then all but the
        last label."""
        begin = self.config.decoder_start_token_id
        if begin is None:
            raise KinformerError("decoder_start_token_id is None, so that no target begins; set it in the config.")
        before = torch.cat([torch.full_like(labels[:, :1], begin), labels[:, :-1]], dim=1)
        return before.masked_fill(before == IGNORED, begin)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        **options: Any,
    ) -> ContinuedOutput | tuple[object, ...]:
        """Return logits [batch, time, vocab] of ``decoder_input_ids`` [batch, time], which follow the ids in the cache.

        A cache holds everything that the decoder reads of the source. Without a cache the source is ``input_ids``
        [batch, length], or the outputs of the encoder, ``encoder_outputs``. attention_mask, of the source, and
        decoder_attention_mask: 0 marks padding. labels [batch, time]: the ids to predict; they give
        ``decoder_input_ids`` where the call leaves them out; -100 is ignored.
        """
        if decoder_input_ids is None and labels is not None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if decoder_input_ids is None:
            raise KinformerError("decoder_input_ids: is missing; give what was written so far, or labels.")
        self._shows("output_hidden_states", options.get("output_hidden_states"), OF_SOURCE)
        before, hidden = cache_in(options), None
        cache = self._cache_to_fill(before, options.get("use_cache"))
        with self._costs() as costs, self._attended(options, refusal=OF_SOURCE):
            state = self._state_in(before, cache, labels)
            if state is None:
                if encoder_outputs is None:
                    encoder_outputs = self.get_encoder()(require_ids(input_ids, options), attention_mask)
                source: Tensor = encoder_outputs[0]
                hidden, valid = source, valid_in(attention_mask, source[..., 0])
                state = self.model.initial_state(len(source), device=source.device, source=source, source_valid=valid)
            valid = valid_of(decoder_attention_mask, decoder_input_ids)
            logits, state = self._continued(decoder_input_ids, valid, cache, state)
        loss = self._loss_of(logits, labels, decoder_input_ids.numel(), options, costs, pop_aux(state)[0])
        caches: dict[str, Any] = {} if cache is None else {CACHE: cache}
        return as_output(ContinuedOutput(loss=loss, logits=logits, encoder_last_hidden_state=hidden, **caches), options)


def valid_in(attention_mask: Tensor | None, values: Tensor) -> Tensor | None:
    """Return which ``values`` [batch, length] are real; None without a mask."""
    if attention_mask is not None and attention_mask.shape != values.shape:
        raise KinformerError(
            f"attention_mask is {list(attention_mask.shape)}, but must have the shape of the input, "
            f"{list(values.shape)}."
        )
    return None if attention_mask is None else attention_mask.bool()


# Models that read whole texts and images.


class TextEncoder(KinformerModel):
    """An encoder of full texts; ``output``: the class of the outputs."""

    main_input_name = "input_ids"
    output: Callable[..., ModelOutput]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **options: Any,
    ) -> ModelOutput | tuple[object, ...]:
        """Return the logits of ``input_ids`` [batch, time], zero at padding, or of texts.

        attention_mask: 0 marks padding, on either side. global_attention_mask: 1 marks tokens that all others see;
        without one the first are global that the model makes so. ``sentences`` [batch, time]: the sentence of each
        token, for models with a global input. inputs_embeds [batch, time, dim]: vectors in place of rows of the table
        of ids. labels: -100 is ignored.
        """
        tokens = require_ids(input_ids, options, inputs_embeds)
        further = {"kinds": global_attention_mask, "sentences": options.get("sentences"), "types": token_type_ids}
        if token_type_ids is not None and not self.model.config.input.types:
            if bool(token_type_ids.any()):
                raise KinformerError("token_type_ids: this model does not have types of tokens; leave them out.")
            del further["types"]
        marks = {name: one.long() for name, one in further.items() if one is not None}
        valid, shows = valid_of(attention_mask, tokens), self._shows("output_hidden_states", output_hidden_states)
        with (
            self._costs() as costs,
            self._vectors(inputs_embeds, valid),
            self._entered(shows, valid) as entered,
            self._attended(options, valid) as attended,
        ):
            taps = range(len(self.model.stack.order)) if shows else ()
            encoded = self.model.hidden(tokens, valid=valid, **marks, taps=taps)
            logits = self.model.logits(encoded.long_input, valid)
            logits = select_valid(logits, valid) if logits.dim() == 3 else logits
            states = (entered(tokens.shape[1]), *encoded.tapped[:-1], encoded.long_input) if shows else None
        loss = self._loss_of(logits, labels, tokens.numel(), options, costs)
        weights = attended(tokens.shape[1])
        return as_output(self.output(loss=loss, logits=logits, hidden_states=states, attentions=weights), options)


class KinformerForMaskedLM(TextEncoder):
    """An encoder that predicts the tokens behind masks."""

    use, output = "MaskedLM", MaskedLMOutput


class KinformerForSequenceClassification(TextEncoder):
    """An encoder that predicts the class of a text."""

    use, output = "SequenceClassification", SequenceClassifierOutput


class KinformerForTokenClassification(TextEncoder):
    """An encoder that predicts the class of every token."""

    use, output = "TokenClassification", TokenClassifierOutput


class KinformerForQuestionAnswering(TextEncoder):
    """An encoder that finds the answer to a question in a text: its first and its last token."""

    use = "QuestionAnswering"

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **options: Any,
    ) -> ModelOutput | tuple[object, ...]:
        """Return the logits [batch, time] of both ends of the answer; inputs as of other encoders of texts.

        start_positions, end_positions: the places of the answer [batch] int64.
        """
        if start_positions is not None and end_positions is not None:
            options["labels"] = torch.stack([start_positions, end_positions], -1)
        return super().forward(input_ids, attention_mask, token_type_ids, **options)

    @staticmethod
    def output(logits: Tensor, **others: Any) -> ModelOutput:
        """Return the outputs of ``logits`` [batch, time, 2]."""
        start, end = logits.unbind(-1)
        return QuestionAnsweringModelOutput(start_logits=start, end_logits=end, **others)

    def _loss_of(
        self, logits: Tensor, labels: Tensor | None, positions: int, options: Mapping[str, Any], *costs: Any
    ) -> Tensor | None:
        if labels is None:
            return None
        loss = self.loss_function(*logits.unbind(-1), *labels.unbind(-1), **scaling(options))
        return self._with_costs(loss, labels, positions, options, *costs)


class KinformerForImageClassification(KinformerModel):
    """An encoder that predicts the class of an image."""

    use = "ImageClassification"
    main_input_name = "pixel_values"

    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **options: object,
    ) -> ImageClassifierOutput | tuple[object, ...]:
        """Return the logits [batch, classes] of ``pixel_values`` [batch, channels, height, width], from 0 to 1 or
        uint8; the model normalises them itself. Of several classifiers logits and losses are means. A model of one
        channel reads the mean of three, since pipelines make every image RGB."""
        if pixel_values is None:
            raise KinformerError("pixel_values: is missing; give images [batch, channels, height, width].")
        if self.model.config.input.channels == 1 and pixel_values.shape[1] == 3:
            dtype = pixel_values.dtype
            pixel_values = pixel_values.float().mean(1, keepdim=True).to(dtype)
        shows = self._shows("output_hidden_states", output_hidden_states)
        with self._costs() as costs, self._entered(shows) as entered, self._attended(options) as attended:
            encoded = self.model.hidden(pixel_values, taps=range(len(self.model.stack.order)) if shows else ())
            logits, patches = self.model.logits(encoded.long_input), self.model.input.length(pixel_values)
        states = (entered(patches), *encoded.tapped[:-1], encoded.long_input) if shows else None
        heads, loss = logits.unbind(1) if logits.dim() == 3 else (logits,), None
        if labels is not None:
            scale = scaling(options)
            losses = [
                self.loss_function(labels=labels, pooled_logits=head, config=self.config, **scale) for head in heads
            ]
            loss = self._with_costs(torch.stack(losses).mean(), labels, len(pixel_values) * patches, options, costs)
        logits = logits.mean(1) if logits.dim() == 3 else logits
        shown = {"hidden_states": states, "attentions": attended(0)}
        return as_output(ImageClassifierOutput(loss=loss, logits=logits, **shown), options)


# Models of sound.

BLANK = 0


class KinformerForCTC(KinformerModel):
    """A model that tells a symbol or none at every position of sound; ``config.sampling_rate`` samples are a second."""

    use = "CTC"
    main_input_name = "input_values"

    def forward(
        self,
        input_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> CausalLMOutput | tuple[object, ...]:
        """Return the logits [batch, positions, classes] of sound ``input_values`` [batch, samples] from -1 to 1, zero
        behind the end of a row.

        attention_mask [batch, samples]: 0 marks padding behind a row. labels [batch, n]: the classes of transcripts,
        padded with -100. The loss is the mean over symbols, as in a run.
        """
        if input_values is None or input_values.dim() != 2:
            raise KinformerError("input_values: give sound as floats [batch, samples] from -1 to 1.")
        self._shows("output_hidden_states", options.get("output_hidden_states"), OF_SOUND)
        frames, valid = self._positions(input_values, attention_mask)
        with self._costs() as costs, self._attended(options) as attended:
            outputs = self.model(frames, valid=valid)
        logits, state = (outputs, None) if isinstance(outputs, Tensor) else outputs
        loss = None
        if labels is not None:
            precise, padding = logits.float().log_softmax(-1).transpose(0, 1), labels == IGNORED
            targets, counts = labels.masked_fill(padding, BLANK), (~padding).sum(1)
            # A transcript with too few positions has a loss of 0.
            nats = ctc_loss(precise, targets, valid.sum(1), counts, BLANK, reduction="none", zero_infinity=True).sum()
            count = options.get("num_items_in_batch")
            loss = nats / ((labels >= 0).sum().clamp(min=1) if count is None else count)
            absorbed = {} if state is None else pop_aux(state)[0]
            loss = self._with_costs(loss, labels, valid.numel(), options, costs, absorbed)
        logits = select_valid(logits, valid)
        return as_output(CausalLMOutput(loss=loss, logits=logits, attentions=attended(0)), options)

    def _positions(self, sound: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return positions [batch, time, width, mels] of ``sound`` [batch, samples] and which are real."""
        real = valid_in(attention_mask, sound)
        lengths = [sound.shape[1]] * len(sound) if real is None else real.sum(1).tolist()
        config = self.model.config
        bank, causal = Filterbank(self.config.sampling_rate, config.input.mels), config.protocol is CausalModel
        width, stride = config.input.width, config.input.stride
        rows = [
            features_of(row[: int(length)].float().cpu(), bank, width, stride, causal)
            for row, length in zip(sound, lengths, strict=True)
        ]
        time = torch.arange(max(map(len, rows)))
        valid = time < torch.tensor([len(row) for row in rows])[:, None]
        return pad_sequence(rows, batch_first=True).to(sound.device), valid.to(sound.device)


CLASSES = (
    KinformerForCausalLM,
    KinformerForSeq2SeqLM,
    KinformerForMaskedLM,
    KinformerForSequenceClassification,
    KinformerForTokenClassification,
    KinformerForQuestionAnswering,
    KinformerForImageClassification,
    KinformerForCTC,
)
transformers.AutoConfig.register(KinformerConfig.model_type, KinformerConfig, exist_ok=True)
for _class in CLASSES:
    getattr(transformers, auto_class_of(_class.use)).register(KinformerConfig, _class, exist_ok=True)
