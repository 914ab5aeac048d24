"""DeepSeek's sparse attention: transformers' module, the paper's formulas, its limit, its contract, its memory."""

import pytest
import torch
from torch.nn.functional import kl_div

from kinformer.core.contract import Chunk
from kinformer.core.probe import weights_of
from kinformer.mixers import latent
from kinformer.mixers.latent import IndexedAttention, LatentAttention
from kinformer.parts.positions import NoPosition
from kinformer.parts.relative_positions import Alibi
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, MixerSubject

from .made import DIM, built, inputs

TIME = 13
SHARED = {"num_heads": 2, "head_dim": 6, "value_dim": 5, "rotary_dim": 4, "latent_dim": 7}
INDEXER = ("index_query", "index_key", "index_norm", "index_weights")


def config(**changes):
    return IndexedAttention.Config(**SHARED | {"topk": 5, "index_heads": 6, "index_dim": 8} | changes)


def absorb(mixer, x):
    y, state = mixer.train()(Chunk(x), mixer.initial_state(len(x), dtype=torch.float64))
    return y, state.aux


@torch.no_grad()
@pytest.mark.parametrize("topk", [5, TIME])
def test_parity_with_deepseek_v32(topk):
    theirs = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    settings = theirs.DeepseekV32Config(
        hidden_size=DIM, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=9, kv_lora_rank=7,
        qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, attn_implementation="eager", num_hidden_layers=1,
        index_topk=topk, index_n_heads=6, index_head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    module = theirs.DeepseekV32Attention(settings, 0).double().eval()
    mixer, indexer = built(config(query_latent_dim=9, topk=topk)), module.indexer
    pairs = [
        (mixer.query_down, module.q_a_proj), (mixer.query_norm, module.q_a_layernorm), (mixer.query, module.q_b_proj),
        (mixer.down, module.kv_a_proj_with_mqa), (mixer.norm, module.kv_a_layernorm), (mixer.up, module.kv_b_proj),
        (mixer.out, module.o_proj), (mixer.index_query, indexer.wq_b), (mixer.index_key, indexer.wk),
        (mixer.index_weights, indexer.weights_proj),
    ]  # fmt: skip
    for ours, other in pairs:
        ours.weight.copy_(other.weight)
    indexer.k_norm.load_state_dict(mixer.index_norm.state_dict())
    x, rotary = inputs(TIME), theirs.DeepseekV32RotaryEmbedding(settings)
    mask = torch.full((TIME, TIME), -torch.inf, dtype=torch.float64).triu(1).expand(len(x), 1, -1, -1)
    want, _ = module(x, rotary(x, torch.arange(TIME)[None]), mask)
    assert (absorb(mixer, x)[0] - want).abs().max() < 1e-6  # their angles and scores are float32
    assert want.abs().max() > 1e-2


def written_out(mixer, x):
    """The paper's equations 1 to 4, token by token, of one sequence x [time, dim]: outputs, and the costs added up."""
    time, scale = len(x), (mixer.head_dim + mixer.rotary_dim) ** -0.5
    positions, heads = torch.arange(time)[None], SHARED["num_heads"]
    latents = x if mixer.query_down is None else mixer.query_norm(mixer.query_down(x))
    q = mixer.query(latents).unflatten(-1, (heads, -1)).transpose(0, 1)
    turned = mixer.position.rotate_keys(q[None, :, :, mixer.head_dim :], positions)[0]
    q = torch.cat([q[..., : mixer.head_dim], turned], -1)
    c, shared = mixer.down(x).split([mixer.latent_dim, mixer.rotary_dim], -1)
    shared = mixer.position.rotate_keys(shared[None, None], positions)[0, 0]
    k, v = mixer.up(mixer.norm(c)).unflatten(-1, (heads, -1)).split([mixer.head_dim, mixer.value_dim], -1)
    index_q = mixer.index_query(latents.detach()).unflatten(-1, (mixer.index_heads, -1)).transpose(0, 1)
    index_q = mixer.index_position.rotate_keys(index_q[None], positions)[0]
    index_k = mixer.index_norm(mixer.index_key(x.detach()))
    index_k = mixer.index_position.rotate_keys(index_k[None, None], positions)[0, 0]
    weights = mixer.index_weights(x.detach()) / (mixer.index_heads * mixer.index_dim) ** 0.5
    outputs, cost = [], 0.0
    for t in range(time):
        scores = sum(weights[t, j] * (index_k[: t + 1] @ index_q[j, t]).relu() for j in range(mixer.index_heads))
        some = list(range(t + 1))
        if mixer.topk is not None:
            some = sorted(some, key=lambda s: (float(scores[s].detach()), s))[-mixer.topk :]
        summed, values = torch.zeros(len(some), dtype=x.dtype), []
        for h in range(heads):
            p = torch.stack([(q[h, t] @ torch.cat([k[s, h], shared[s]])) * scale for s in some]).softmax(0)
            values.append(p @ v[some, h])
            summed = summed + p.detach()
        cost = cost + kl_div(scores[some].log_softmax(0), summed / summed.sum(), reduction="sum")
        outputs.append(torch.cat(values))
    return mixer.out(torch.stack(outputs)), cost


@pytest.mark.parametrize(
    "changes",
    [{"topk": None}, {"query_latent_dim": 9}, {"index_position": NoPosition.Config(), "loss_weight": 0.5}],
    ids=["warm-up", "sparse", "an indexer without positions"],
)
def test_parity_with_the_papers_formulas(changes, monkeypatch):
    """Outputs, the indexer's cost, and all gradients; the cost reaches the indexer alone, the outputs all the rest."""
    monkeypatch.setattr(latent, "BLOCK", 4)
    mixer, x = built(config(**changes)), inputs(TIME, batch=1).requires_grad_()
    y, cost = absorb(mixer, x)
    want, full_cost = written_out(mixer, x[0])
    assert (y[0] - want).abs().max() < 1e-12
    assert abs(cost[0] - mixer.loss_weight * full_cost) < 1e-12
    names, weights = zip(*mixer.named_parameters(), strict=True)
    for ours, theirs in ((y.square().sum(), want.square().sum()), (cost.sum(), mixer.loss_weight * full_cost)):
        grads, expected = (
            torch.autograd.grad(loss, [x, *weights], retain_graph=True, materialize_grads=True)
            for loss in (ours, theirs)
        )
        for name, grad, other in zip(("x", *names), grads, expected, strict=True):
            assert (grad - other).abs().max() < 1e-10, name
    of_cost = torch.autograd.grad(cost.sum(), [x, *weights], materialize_grads=True)
    assert [name for name, grad in zip(("x", *names), of_cost, strict=True) if grad.any()] == [
        name for name in names if name.startswith(INDEXER)
    ]


@torch.no_grad()
def test_it_is_latent_attention_while_the_text_is_not_longer_than_topk():
    full = built(LatentAttention.Config(**SHARED))
    mixer, x = built(config(topk=TIME)), inputs(TIME + 1)
    mixer.load_state_dict(full.state_dict(), strict=False)
    want = full(Chunk(x), full.initial_state(2, dtype=x.dtype))[0]
    gap = (absorb(mixer, x)[0] - want).abs().amax((0, 2))
    assert gap[:TIME].max() < 1e-12
    assert gap[TIME] > 1e-5
    mixer.topk = None
    assert (absorb(mixer, x)[0] - want).abs().max() < 1e-12


@pytest.mark.parametrize("check", [check for check in CHECKS if check != "compile"])
@pytest.mark.parametrize("changes", [{"topk": 7}, {"topk": None, "query_latent_dim": 5}], ids=["sparse", "warm-up"])
def test_the_contract(monkeypatch, changes, check):
    monkeypatch.setattr(latent, "BLOCK", 5)
    CHECKS[check](MixerSubject(lambda: config(**changes).build(DIM), dim=DIM))


@pytest.mark.parametrize("topk", [4, None])
def test_the_cost_does_not_depend_on_the_cut_of_a_text_into_chunks(topk, monkeypatch):
    """Nor do its gradients, with padding and a new sequence."""
    monkeypatch.setattr(latent, "BLOCK", 5)
    mixer, x = built(config(topk=topk)).train(), inputs(20)
    valid, reset = torch.ones(2, 20, dtype=torch.bool), torch.zeros(2, 20, dtype=torch.bool)
    valid[1, 17:], reset[0, 8] = False, True
    results = []
    for sizes in ([20], [7, 1, 6, 6]):
        state = mixer.initial_state(2, dtype=x.dtype)
        for part, ok, new in zip(x.split(sizes, 1), valid.split(sizes, 1), reset.split(sizes, 1), strict=True):
            _, state = mixer(Chunk(part, ok, new), state)
        weights = [weight for name, weight in mixer.named_parameters() if name.startswith(INDEXER)]
        results.append([state.aux, *torch.autograd.grad(state.aux.sum(), weights)])
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() < 1e-10
    alone = [absorb(mixer, x[:1, :8])[1], absorb(mixer, x[:1, 8:])[1], absorb(mixer, x[1:, :17])[1]]
    assert (results[0][0] - torch.cat([alone[0] + alone[1], alone[2]])).abs().max() < 1e-10


def test_it_compiles(monkeypatch):
    monkeypatch.setattr(latent, "BLOCK", 5)
    CHECKS["compile"](MixerSubject(lambda: config().build(DIM), dim=DIM))


def test_equal_tokens_are_chosen_from_the_end():
    """Without positions, the same token everywhere: weights fall on the last topk, whole and in steps."""
    nowhere = NoPosition.Config()
    mixer = built(config(position=nowhere, index_position=nowhere, topk=3))
    x = inputs(1, batch=1).expand(1, TIME, -1).contiguous()
    read = weights_of(mixer, (Chunk(x), mixer.initial_state(1, dtype=x.dtype)))
    expected = torch.ones(TIME, TIME).tril().triu(-2)
    assert torch.equal((read.weights > 0).float(), expected.expand(2, -1, -1))
    assert (read.weights @ read.values + read.constant - read.outputs).abs().max() < 1e-12


def test_memory_between_the_passes_follows_the_chosen_pairs():
    """No tensor of [time, time], and of each block only its inputs and its choice."""
    time, sizes = 1024, []
    mixer = IndexedAttention.Config(num_heads=2, topk=8).build(DIM)
    x = torch.randn(1, time, DIM, requires_grad=True)
    assert mixer.training
    note = torch.autograd.graph.saved_tensors_hooks(lambda saved: sizes.append(saved.numel()) or saved, lambda x: x)
    with note:
        y, state = mixer(Chunk(x), mixer.initial_state(1))
    assert max(sizes) <= time * 2 * mixer.width  # of all heads' queries
    (y.sum() + state.aux.sum()).backward()
    assert x.grad.abs().sum() > 0


def test_the_state_is_one_vector_a_token_and_the_cost():
    mixer = built(config())
    _, state = mixer(Chunk(inputs(TIME)), mixer.initial_state(2, dtype=torch.float64))
    assert state.attention.memory.shape == (2, 1, TIME, 8 + 4 + 7)
    assert mixer.state_bytes(TIME, dtype=torch.float64) == TIME * 19 * 8 + 8 + 8


def test_the_warm_up_teaches_the_indexer_what_attention_reads():
    """Learning from dense weights alone, the indexer finds tokens that carry more of the attention's weight."""
    mixer, x = built(config(topk=None)), inputs(40, batch=4)
    with torch.no_grad():
        mixer.query.weight.mul_(4)  # weights that prefer some tokens
        dense = absorb(mixer, x)[0]
    learning = [weight for name, weight in mixer.named_parameters() if name.startswith(INDEXER)]
    optimizer = torch.optim.Adam(learning, 0.02)
    gaps, costs = [], []
    for steps in (0, 100):
        mixer.topk = None
        for _ in range(steps):
            cost = absorb(mixer, x)[1].sum()
            optimizer.zero_grad()
            cost.backward()
            optimizer.step()
        costs.append(float(absorb(mixer, x)[1].sum().detach()))
        mixer.topk = 8
        gaps.append(float((absorb(mixer, x)[0] - dense).square().mean().detach()))
    assert costs[1] < costs[0] / 2
    assert gaps[1] < gaps[0] / 2


def test_what_it_refuses():
    for changes in ({"position": Alibi.Config()}, {"index_position": Alibi.Config()}):
        with pytest.raises(KinformerError, match="acts by the distance of a query and a key"):
            config(**changes).build(DIM)
    with pytest.raises(KinformerError, match="topk must be 1 or more"):
        config(topk=0)
