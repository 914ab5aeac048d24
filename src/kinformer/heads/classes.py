"""Heads that predict classes, symbols of speech, actions, and one vector of a sequence."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.blocks.residual import NormConfig
from kinformer.core.contract import select_valid
from kinformer.core.parts import Input
from kinformer.core.stack import HeadConfig
from kinformer.runtime.draws import Dropout
from kinformer.runtime.errors import KinformerError, plural

Pooling = Literal["first", "mean", "max", "gated"]


class PoolingHead(nn.Module):
    """A head that begins with one vector of all positions, ``pooled``.

    ``first`` takes the first valid token ([CLS]), ``mean`` the mean of all valid ones, ``max`` each feature's largest
    value among them, ``gated`` their mean by learnt weights, with ``dropout`` on both factors of the gate.
    """

    def __init__(self, dim: int, pooling: Pooling, dropout: float = 0.0) -> None:
        super().__init__()
        self.pooling = pooling
        self.gate = GatedWeights(dim, dropout) if pooling == "gated" else None

    def pooled(self, hidden_states: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return [batch, dim] of the ``valid`` [batch, time] hidden_states [batch, time, dim]."""
        if self.gate is not None:
            return (self.gate(hidden_states, valid)[:, None] @ select_valid(hidden_states, valid))[:, 0]
        if self.pooling == "first":
            first = 0 if valid is None else valid.int().argmax(1)
            return hidden_states[torch.arange(len(hidden_states), device=hidden_states.device), first]
        if self.pooling == "max":
            # The lowest number rather than -inf, so that a row of padding alone stays finite.
            lowest = hidden_states.new_full((), torch.finfo(hidden_states.dtype).min)
            return (hidden_states if valid is None else torch.where(valid[..., None], hidden_states, lowest)).amax(1)
        if valid is None:
            return hidden_states.mean(1)
        count = valid.sum(1, keepdim=True).clamp_min(1).to(hidden_states.dtype)
        return select_valid(hidden_states, valid).sum(1) / count


class GatedWeights(nn.Module):
    """The gate hidden_states [batch, time, dim] -> weights [batch, time], which sum to 1, 0 where not ``valid``."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.content, self.gate, self.score = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, 1)
        self.dropout = Dropout(dropout) if dropout else nn.Identity()

    def forward(self, hidden_states: Tensor, valid: Tensor | None = None) -> Tensor:
        gated = self.dropout(self.content(hidden_states).tanh()) * self.dropout(self.gate(hidden_states).sigmoid())
        scores = self.score(gated)[..., 0]
        return (scores if valid is None else scores.masked_fill(~valid, torch.finfo(scores.dtype).min)).softmax(-1)


class PooledHead(PoolingHead):
    """One vector of all positions: the first, mean, largest or gated mean (Ilse et al. 2018, equations 8 and 9).

    z = sum_t a_t h_t,   a = softmax_t(w . (tanh(V h_t) * sigmoid(U h_t)))

    The head returns the vector [batch, dim] itself, for a model that another one uses.
    """

    class Config(HeadConfig):
        kind = "pooled"
        per_position = False
        pooling: Pooling = "first"

        def build(self, dim: int, input: Input) -> PooledHead:
            return PooledHead(dim, self.pooling)

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        return self.pooled(hidden_states, valid)


# Classes of full sequences or of tokens from an encoder's hidden states (Devlin et al. 2018, section 4).


class ClassificationHead(PoolingHead):
    """The head hidden_states [batch, time, dim] -> logits [batch, classes]: output(dropout(activation(dense(pooled)))).

    ``pooling`` as of :class:`PoolingHead`. ModernBERT has a ``norm`` behind the activation and no ``bias`` in dense.
    ``multi_label``: whether a sequence may have several classes, each with the probability sigmoid(logit).
    """

    class Config(HeadConfig):
        kind = "classification"
        LEAST = {"classes": 2}
        per_position = False
        classes: int
        pooling: Pooling = "first"
        activation: Literal["tanh", "gelu", "gelu_tanh", "relu"] = "tanh"
        dropout: float = 0.0
        bias: bool = True
        norm: NormConfig | None = None
        multi_label: bool = False

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(dim, config.pooling, config.dropout)
        self.activation = config.activation
        self.dense = nn.Linear(dim, dim, bias=config.bias)
        self.norm = config.norm.build(dim) if config.norm else None
        self.dropout = Dropout(config.dropout) if config.dropout else None
        self.output = nn.Linear(dim, config.classes)

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        x, name = self.dense(self.pooled(hidden_states, valid)), self.activation
        if name in ("tanh", "relu"):
            x = x.tanh() if name == "tanh" else x.relu()
        else:
            x = functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
        x = x if self.norm is None else self.norm(x)
        return self.output(x if self.dropout is None else self.dropout(x))


class LinearClassificationHead(PoolingHead):
    """The head hidden_states [batch, time, dim] -> logits [batch, classes]: output(pooled), as ViT's (Dosovitskiy et
    al. 2020). ``pooling`` as of :class:`PoolingHead`; the first token is the class token of images."""

    class Config(HeadConfig):
        kind = "linear_classification"
        LEAST = {"classes": 2}
        per_position = False
        classes: int
        pooling: Pooling = "first"

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(dim, config.pooling)
        self.output = nn.Linear(dim, config.classes)

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        return self.output(self.pooled(hidden_states, valid))


class LinearHead(nn.Module):
    """The head hidden_states [batch, time, dim] -> logits [batch, time, classes]: output(dropout(hidden_states))."""

    def __init__(self, dim: int, classes: int, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = Dropout(dropout) if dropout else None
        self.output = nn.Linear(dim, classes, bias=bias)

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        return self.output(hidden_states if self.dropout is None else self.dropout(hidden_states))


class TokenClassificationHead(LinearHead):
    """The head of classes of tokens; of whole texts in a causal model, by the logits of the last token."""

    class Config(HeadConfig):
        kind = "token_classification"
        LEAST = {"classes": 2}
        classes: int
        dropout: float = 0.0
        bias: bool = True

        def build(self, dim: int, input: Input) -> TokenClassificationHead:
            return TokenClassificationHead(dim, self.classes, self.bias, self.dropout)


class SpanHead(HeadConfig):
    """The head -> logits [batch, time, 2] of an answer's first and last token (Devlin et al. 2018, section 4.2)."""

    kind = "span"
    classes: ClassVar[int] = 2

    def build(self, dim: int, input: Input) -> LinearHead:
        return LinearHead(dim, self.classes)


class DistilledHead(nn.Module):
    """Two classifiers, of the class token and of the distillation token (Touvron et al. 2020, DeiT, section 4): in
    training both logits [batch, 2, classes], else their mean [batch, classes]."""

    class Config(HeadConfig):
        kind = "distilled"
        LEAST = {"classes": 2}
        per_position = False
        classes: int

        def check(self, dim: int, input: Input) -> None:
            if not getattr(getattr(input, "config", None), "distillation_token", False):
                raise KinformerError(
                    "the head 'distilled' reads a distillation token, which the input does not have; give `set` "
                    "input.distillation_token=true, or another head."
                )

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.output = nn.Linear(dim, config.classes)
        self.distilled = nn.Linear(dim, config.classes)

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        both = torch.stack([self.output(hidden_states[:, 0]), self.distilled(hidden_states[:, 1])], 1)
        return both if self.training else both.mean(1)


class CTCHead(LinearHead):
    """The head of connectionist temporal classification (Graves et al. 2006): a symbol, or class 0, the blank."""

    class Config(HeadConfig):
        kind = "ctc"
        LEAST = {"classes": 2}
        classes: int

        def build(self, dim: int, input: Input) -> CTCHead:
            return CTCHead(dim, self.classes)


# Actions from hidden states (Chen et al. 2021, Decision Transformer), predicted at the position of a state.

LOWEST_LOG_STD, HIGHEST_LOG_STD = -5.0, 2.0


class DiscreteActions(LinearHead):
    """The head of discrete actions: hidden_states [batch, time, dim] -> logits [batch, time, actions]."""

    class Config(HeadConfig):
        kind = "discrete_actions"
        LEAST = {"actions": 2}
        actions: int
        bias: bool = True

        def build(self, dim: int, input: Input) -> DiscreteActions:
            return DiscreteActions(dim, self.actions, self.bias)


class ContinuousActions(nn.Module):
    """The head of real actions: hidden_states [batch, time, dim] -> actions [batch, time, action_dim] in the box from
    ``low`` to ``high``, their middle + half their distance * tanh(output).

    ``gaussian``: [batch, time, 2 * action_dim], the mean, which is as above, and the logarithm of the standard
    deviation, from -5 to 2 (Zheng et al. 2022, Online Decision Transformer, section 4.1).
    """

    class Config(HeadConfig):
        kind = "continuous_actions"
        LEAST = {"action_dim": 1}
        action_dim: int
        low: tuple[float, ...] = ()
        high: tuple[float, ...] = ()
        gaussian: bool = False

        def __post_init__(self) -> None:
            if {len(self.low), len(self.high)} not in ({0}, {self.action_dim}):
                raise KinformerError(
                    f"low and high have {len(self.low)} and {plural(len(self.high), 'number')}, but an action has "
                    f"{self.action_dim}; give one for each, or none for -1 to 1."
                )
            if any(low >= high for low, high in zip(self.low, self.high, strict=True)):
                raise KinformerError(f"low = {self.low} must lie below high = {self.high}.")

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config = config
        self.output = nn.Linear(dim, config.action_dim * (2 if config.gaussian else 1))

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        y = self.output(hidden_states)
        size = self.config.action_dim
        mean = y[..., :size].tanh()
        if self.config.low:
            low, high = mean.new_tensor(self.config.low), mean.new_tensor(self.config.high)
            mean = (low + high) / 2 + (high - low) / 2 * mean
        if not self.config.gaussian:
            return mean
        # A smooth bound of log sigma, whose gradient never vanishes as a clamp's does.
        spread = (y[..., size:].tanh() + 1) / 2
        return torch.cat([mean, LOWEST_LOG_STD + (HIGHEST_LOG_STD - LOWEST_LOG_STD) * spread], dim=-1)


class PolicyAndValue(nn.Module):
    """A policy and the value of a state, from one hidden state (Mnih et al. 2016, section 4): the outputs [batch, time,
    n + 1] are the outputs of the head ``policy``, and last the expected discounted return."""

    class Config(HeadConfig):
        kind = "policy_and_value"
        policy: HeadConfig = DiscreteActions.Config(actions=2)

        def __post_init__(self) -> None:
            if not self.policy.per_position:
                raise KinformerError(
                    f"policy is the head {self.policy.kind!r}, which reads a whole sequence at once; give a head of "
                    "actions, discrete_actions or continuous_actions."
                )

        def check(self, dim: int, input: Input) -> None:
            self.policy.check(dim, input)

        def build(self, dim: int, input: Input) -> PolicyAndValue:
            return PolicyAndValue(self, dim, input)

    def __init__(self, config: Config, dim: int, input: Input) -> None:
        super().__init__()
        self.policy = config.policy.build(dim, input)
        self.value = nn.Linear(dim, 1)

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        return torch.cat([self.policy(hidden_states, input, valid), self.value(hidden_states)], dim=-1)


PARTS = {
    "CTCHead": CTCHead.Config,
    "DiscreteActionsHead": DiscreteActions.Config,
    "ContinuousActionsHead": ContinuousActions.Config,
    "PolicyAndValueHead": PolicyAndValue.Config,
    "ClassificationHead": ClassificationHead.Config,
    "LinearClassificationHead": LinearClassificationHead.Config,
    "DistilledHead": DistilledHead.Config,
    "PooledHead": PooledHead.Config,
    "TokenClassificationHead": TokenClassificationHead.Config,
    "SpanHead": SpanHead,
}
