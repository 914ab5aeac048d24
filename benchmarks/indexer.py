"""Does DSA's indexer choose the tokens that attention needs, and from which length on does the choice pay?

    python benchmarks/indexer.py --threads 1        # some five minutes

Choice: two layers of one head (`mqar.py`) learn associative recall, 16 pairs in rows of 64 tokens. In the warm-up
attention is dense, and the indexer learns the attention's weights by its Kullback-Leibler divergence. Then each token
reads 8 others. The result has the right answers before and after this change, and for controls: no warm-up; an indexer
without training; the last 8 tokens. It also has the share of dense attention's 8 largest weights that are among the 8
chosen tokens.

Cost: a layer of width 256 with 4 heads of 64 in float32, as `since_2025.py` has it: DSA with 64 chosen tokens, the same
layer with dense attention (``topk`` None), and softmax attention with rotary positions. A token follows 1,024, 8,192
or 65,536 others, which are random numbers in the state; and the forward of whole texts. Times are processor time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import mqar
from common import arguments, gate_equal, medians, prepare, save, show, slope
from kinformer.core.attention_state import Past
from kinformer.core.contract import CausalMixer, Chunk
from kinformer.core.model import modules_of
from kinformer.core.state import nbytes, reserve
from kinformer.family.build import configure
from kinformer.lab.tasks.answers import ScoredBatch
from kinformer.mixers.latent import IndexedAttention, _index_scores, _products
from kinformer.models.decoder import Decoder

TOPK, RATE, TOLERANCE = 8, 1e-2, 1e-4
RECIPE = mqar.Recipe(pairs=16, length=64, rows=32, steps=600, device="cpu", symbols=128)
FURTHER = 100
"""Steps after the warm-up."""
DIM, LENGTHS, WHOLE, STEPS = 256, (1024, 8192, 65_536), (1024, 4096), 16


def indexed(model: nn.Module) -> list[IndexedAttention]:
    return modules_of(model, IndexedAttention)


def choose(model: Decoder, topk: int | None) -> Decoder:
    """Let the model's layers attend to ``topk`` tokens, None: to all."""
    for mixer in indexed(model):
        mixer.topk = topk
    return model


def learn(model: Decoder, recipe: mqar.Recipe, seed: int = 0) -> float:
    """Train the model until it solves the task, or for all steps; return the share of right answers."""
    accuracy: float = mqar.learn(model, mqar.Run("dsa", RATE, seed), recipe)["accuracy"]
    return accuracy


def right(model: Decoder, recipe: mqar.Recipe) -> float:
    return mqar.accuracy(model.eval(), "test", recipe)


def built(topk: int | None, recipe: mqar.Recipe) -> Decoder:
    torch.manual_seed(0)
    return choose(mqar.build("dsa", recipe.symbols), topk)


def untrained(model: Decoder, recipe: mqar.Recipe) -> Decoder:
    """The model with the indexer's weights as they began."""
    first = {name: value for name, value in built(None, recipe).state_dict().items() if ".index_" in name}
    other = copy.deepcopy(model)
    other.load_state_dict(first, strict=False)
    return other


# What the indexer scores and what dense attention weighs, in the same layer on the same tokens.


def scored(mixer: IndexedAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """The indexer's scores and the weights of dense attention, a mean over heads: both [batch, time, time], 0 and
    -inf above the diagonal."""
    past = Past(Chunk(x), mixer.initial_state(len(x)).attention, mixer)
    x, new = mixer.remember(x, past.positions)
    (slots,), _, _ = past.remember((new,), None)
    queries, future = mixer._all_queries(x, past.positions), torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    scores = _index_scores(queries, slots[..., : mixer.index_dim]).masked_fill(future, -torch.inf)
    products = _products(queries.q, slots[..., mixer.index_dim : mixer.width])
    return scores, products.masked_fill(future[:, None], -torch.inf).softmax(-1).mean(2)


def inputs(model: Decoder, batch: ScoredBatch) -> list[Tensor]:
    """What each indexed layer reads of a batch."""
    seen: list[Tensor] = []
    hooks = [mixer.register_forward_pre_hook(lambda _, given: seen.append(given[0].x)) for mixer in indexed(model)]
    model(batch.tokens)
    for hook in hooks:
        hook.remove()
    return seen


def gate(model: Decoder, recipe: mqar.Recipe) -> float:
    """Hold the scores and the weights to the cost that the layer computes from its own in training."""
    mixer, x = indexed(choose(model.train(), None))[0], inputs(model, recipe.batch("test", 0, 2))[0].detach()
    state = mixer(Chunk(x), mixer.initial_state(len(x)))[1]
    scores, weights = scored(mixer, x)
    future = scores.isinf()
    likely = scores.log_softmax(-1).masked_fill(future, 0)
    ours = (torch.xlogy(weights, weights) - weights * likely).sum((1, 2))
    return gate_equal("the indexer's cost", ours.detach(), state.aux.detach(), TOLERANCE)


@torch.inference_mode()
def agreement(model: Decoder, recipe: mqar.Recipe) -> list[dict[str, dict[str, float]]]:
    """Of every layer, over the tokens that answer: of each order of tokens (the indexer's, the indexer's as it began,
    by place) the share of dense attention's largest weights among its first, and the weight that these hold."""
    batch, rows = recipe.batch("test", 0, 64), []
    choose(model, None)
    for number, x in enumerate(inputs(model, batch)):
        scores, weights = scored(indexed(model)[number], x)
        began, _ = scored(indexed(untrained(model, recipe))[number], x)
        places = torch.arange(scores.shape[-1]).expand_as(scores).float().masked_fill(scores.isinf(), -torch.inf)
        asked = batch.labels >= 0
        best = torch.zeros_like(weights).scatter(-1, weights.topk(TOPK).indices, 1.0)
        row = {}
        for name, order in (("indexer", scores), ("untrained", began), ("last tokens", places), ("dense", weights)):
            chosen = order.topk(TOPK).indices
            row[name] = {
                "found": float(best.gather(-1, chosen).mean(-1)[asked].mean()),
                "weight": float(weights.gather(-1, chosen).sum(-1)[asked].mean()),
            }
        rows.append(row)
    return rows


def last_tokens(model: Decoder) -> Decoder:
    """A copy whose layers choose the last tokens: an indexer of equal scores does, see ``IndexedAttention``."""
    other = copy.deepcopy(model)
    for mixer in indexed(other):
        nn.init.zeros_(mixer.index_weights.weight)
    return other


def quality(recipe: mqar.Recipe, further: int) -> dict[str, Any]:
    """Right answers of every course of training, and what the indexer chooses after the warm-up."""
    warm = built(None, recipe)
    found = {"dense, after the warm-up": learn(warm, recipe)}
    gap = gate(warm, recipe)
    for name, model in (
        ("the indexer's", warm),
        ("an untrained indexer's", untrained(warm, recipe)),
        ("the last", last_tokens(warm)),
    ):
        found[f"{name} {TOPK}"] = right(choose(model, TOPK), recipe)
    layers = agreement(warm, recipe)
    print(found, layers, flush=True)
    for name, topk in (("dense", None), (f"the indexer's {TOPK}", TOPK)):
        after = recipe._replace(steps=further)
        found[f"{name}, trained further"] = learn(choose(copy.deepcopy(warm), topk), after, seed=1)
    print(found, flush=True)
    cold = recipe._replace(steps=recipe.steps + further)
    found[f"the indexer's {TOPK} from the first step, without a warm-up"] = learn(built(TOPK, recipe), cold)
    return {"right": found, "layers": layers, "gap": gap}


# The cost of a layer.


def costed() -> dict[str, CausalMixer]:
    """The layers whose costs are measured."""
    torch.manual_seed(0)
    changes = {"layers.0.mixer.num_heads": DIM // 64}
    sizes: dict[str, tuple[str, dict[str, Any]]] = {
        "rope": ("rope", {}), "dsa, dense": ("dsa", {"layers.0.mixer.topk": None}), "dsa, 64 tokens": ("dsa", {}),
    }  # fmt: skip
    return {
        name: configure(base, "small", set=changes | more).layers[0].mixer.build(DIM).eval()
        for name, (base, more) in sizes.items()
    }


def filled(mixer: CausalMixer, length: int) -> Any:
    """A state with random numbers of ``length`` tokens: of one chunk's keys, repeated."""
    _, state = mixer(Chunk(torch.randn(1, 64, DIM)), mixer.initial_state(1))
    cache = state.attention if hasattr(state, "attention") else state
    grown = {name: getattr(cache, name).repeat(1, 1, length // 64, 1) for name in cache.slots}
    grown = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in grown.items()}
    cache = cache._replace(**grown, seen=torch.full_like(cache.seen, length))
    return state._replace(attention=cache) if hasattr(state, "attention") else cache


def absorb(mixer: CausalMixer, state: Any, tokens: Tensor) -> None:
    state = reserve(state, tokens.shape[1])
    for token in tokens.split(1, 1):
        _, state = mixer(Chunk(token), state)


def read(mixer: CausalMixer, x: Tensor) -> None:
    mixer(Chunk(x), mixer.initial_state(1))


@torch.inference_mode()
def costs(rounds: int, lengths: tuple[int, ...], whole: tuple[int, ...]) -> dict[str, Any]:
    layers, tokens = costed(), torch.randn(1, STEPS, DIM)
    of_token, of_text, stored = {}, {}, {}
    for length in lengths:
        states = {name: filled(mixer, length) for name, mixer in layers.items()}
        stored[length] = {name: nbytes(state) for name, state in states.items()}
        steps: dict[str, Callable[[], None]] = {
            name: partial(absorb, mixer, states[name], tokens) for name, mixer in layers.items()
        }
        of_token[length] = {name: taken / STEPS for name, taken in medians(steps, rounds, True).items()}
        print(length, of_token[length], flush=True)
    for length in whole:
        x = torch.randn(1, length, DIM)
        of_text[length] = medians({name: partial(read, mixer, x) for name, mixer in layers.items()}, rounds, False)
        print(length, of_text[length], flush=True)
    return {"token": of_token, "text": of_text, "bytes": stored}


def main() -> None:
    options = prepare(arguments(__doc__))
    quick = options.quick
    recipe, further = (RECIPE._replace(rows=2, steps=3), 2) if quick else (RECIPE, FURTHER)
    rounds = options.rounds or (1 if quick else 3)
    cost = costs(rounds, (128, 256), (128,)) if quick else costs(rounds, LENGTHS, WHOLE)
    rows = [[name, *(cost["token"][length][name] for length in cost["token"])] for name in costed()]
    show("one token, ms", ("layer", *map(str, cost["token"])), rows)
    lengths = list(cost["token"])
    growth = {row[0]: slope(lengths[1:], row[2:]) if len(lengths) > 2 else None for row in rows}
    result = {"recipe": recipe._asdict(), "topk": TOPK, "further": further, "cost": cost, "growth": growth}
    save(options, "indexer", result)  # the costs, in case that training is stopped
    result |= quality(recipe, further)
    show("right answers", ("training", "right"), [[name, value] for name, value in result["right"].items()])
    save(options, "indexer", result)


if __name__ == "__main__":
    main()
