"""Compressed memories: limits, the paper's equations, what each compression gives, and who learns from what."""

import pytest
import torch
from torch.nn import functional

import kinformer
from kinformer.core.contract import Chunk
from kinformer.core.state import detach, nbytes, pop_aux
from kinformer.generation.weights import pack
from kinformer.mixers.compressive import Compressive, Convolution, DilatedConvolution, Expansion, MostUsed, Pool
from kinformer.mixers.memory import SegmentMemory
from kinformer.parts.positions import sinusoids
from kinformer.parts.projections import Convolved
from kinformer.runtime.errors import KinformerError
from tests.mixers.made import DIM, built, inputs

MEAN = Pool.Config(rate=1)


def ran(mixer, x):
    return mixer(Chunk(x), mixer.initial_state(len(x), dtype=x.dtype))


def with_gradients(mixer):
    """Outputs, and gradients by the inputs and by the weights that segment memory has too."""
    x = inputs(29).requires_grad_()
    y, _ = ran(mixer, x)
    own = [p for name, p in mixer.named_parameters() if not name.startswith(("compression.", "expansion."))]
    return [y, *torch.autograd.grad((y * inputs(29, seed=5)).sum(), [x, *own])]


@pytest.mark.parametrize(("memory", "compressed", "compression"), [(6, 0, Convolution.Config(rate=2)), (6, 8, MEAN)])
def test_nothing_compressed_is_segment_memory(memory, compressed, compression):
    """No compressed memory; or one that keeps what it gets, which is a longer memory."""
    config = Compressive.Config(num_heads=2, segment=6, memory=memory, compressed=compressed, compression=compression)
    mixer = built(config)
    weights = {name: value for name, value in mixer.state_dict().items() if not name.startswith("compression.")}
    plain = SegmentMemory.Config(num_heads=2, segment=6, memory=memory + compressed).build(DIM).double()
    plain.load_state_dict(weights)
    for got, want in zip(with_gradients(mixer), with_gradients(plain), strict=True):
        assert (got - want).abs().max() < 1e-11
    shorter = config.replace(compressed=max(0, compressed - 1), memory=memory if compressed else memory - 2).build(DIM)
    shorter = shorter.double()
    shorter.load_state_dict(mixer.state_dict())
    assert (ran(shorter, inputs(29))[0] - ran(mixer, inputs(29))[0]).abs().max() > 1e-4


def plainly(mixer, x):
    """The paper's algorithm, segment after segment, with dense scores: outputs and the cost of the compressions."""
    config, heads, width = mixer.config, 2, DIM // 2
    biases = mixer.position.biases
    memory, compressed, found = x[:, :0], x[:, :0], []
    cost = x.new_zeros(len(x))

    def projected(tokens):
        return mixer.projection.qkv(tokens).view(len(x), -1, 3, heads, width).unbind(2)

    def content(q, k, v):
        weights = (torch.einsum("bihd,bjhd->bhij", q, k) / width**0.5).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", weights, v)

    for own in x.split(config.segment, dim=1):
        whole = torch.cat([compressed.detach(), memory.detach(), own], dim=1)
        q, k, v = projected(whole)
        distance = torch.arange(whole.shape[1])[-own.shape[1] :, None] - torch.arange(whole.shape[1])
        rows = mixer.position.projection(sinusoids(distance.clamp_min(0).flatten(), DIM, 10000.0))
        rows = rows.view(*distance.shape, heads, width)
        scores = torch.einsum("bihd,bjhd->bhij", q[:, -own.shape[1] :] + biases.content, k)
        scores = scores + torch.einsum("bihd,ijhd->bhij", q[:, -own.shape[1] :] + biases.position, rows)
        weights = (scores / width**0.5).masked_fill(distance < 0, -torch.inf).softmax(-1)
        found.append(mixer.out(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)))
        if own.shape[1] < config.segment:
            break
        memory = torch.cat([memory, own], dim=1).detach()
        falling = max(0, memory.shape[1] - config.memory)
        old, memory = memory[:, :falling], memory[:, falling:]
        if falling:
            new = mixer.compression(old, None)
            q, k, v = (part.detach() for part in projected(own))
            _, old_k, old_v = (part.detach() for part in projected(old))
            query, key, value = mixer.projection.qkv.weight.detach().chunk(3)
            new_k, new_v = ((new @ w.T).view(len(x), -1, heads, width) for w in (key, value))
            lost = content(q, new_k, new_v) - content(q, old_k, old_v)
            cost = cost + config.segment * lost.square().mean(dim=(1, 2, 3))
            compressed = torch.cat([compressed, new.detach()], dim=1)[:, -config.compressed :]
    return torch.cat(found, dim=1), cost


@pytest.mark.parametrize(("segment", "memory", "compressed"), [(6, 6, 4), (6, 2, 3), (4, 6, 5), (4, 0, 2)])
def test_values_costs_and_gradients_are_those_of_the_paper(segment, memory, compressed):
    mixer = built(
        Compressive.Config(
            num_heads=2, segment=segment, memory=memory, compressed=compressed, compression=Convolution.Config(rate=2)
        )
    )
    results = []
    for how in (plainly, ran):
        x = inputs(29).requires_grad_()
        y, end = how(mixer, x)
        cost = end if how is plainly else end.aux
        loss = (y * inputs(29, seed=5)).sum() + (cost * torch.tensor([1.0, 0.3])).sum()
        results.append([y, cost, *torch.autograd.grad(loss, [x, *mixer.parameters()])])
    for want, got in zip(*results, strict=True):
        assert (got - want).abs().max() < 1e-10 * max(1, want.abs().max())
    assert (results[0][1] > 1e-6).all()


def gradients(loss, mixer):
    """By name; None where there is no path."""
    named = dict(mixer.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True, retain_graph=True)
    return dict(zip(named, found, strict=True))


LEARNED = {
    "convolution, attention": {"compression": Convolution.Config(rate=2)},
    "convolution, auto-encoding": {"compression": Convolution.Config(rate=2), "loss": "auto-encoding"},
    "dilated, attention": {"compression": DilatedConvolution.Config(rate=2)},
    "dilated, auto-encoding": {"compression": DilatedConvolution.Config(rate=2, depth=3), "loss": "auto-encoding"},
}


@pytest.mark.parametrize("name", LEARNED)
def test_costs_teach_the_compression_and_nothing_else_does(name):
    mixer = built(Compressive.Config(num_heads=2, segment=6, memory=6, compressed=4, **LEARNED[name]))
    x = inputs(29).requires_grad_()
    y, state = ran(mixer, x)
    of_task, of_costs = gradients(y.square().sum(), mixer), gradients(state.aux.sum(), mixer)
    for parameter in of_task:
        learned = parameter.startswith(("compression.", "expansion."))
        assert (of_task[parameter] is None) == learned, parameter
        assert (of_costs[parameter] is None) != learned, parameter
        assert (of_costs if learned else of_task)[parameter].abs().max() > 1e-8
    assert torch.autograd.grad(state.aux.sum(), x, allow_unused=True)[0] is None


def test_auto_encoding_is_the_mean_square_of_what_is_lost():
    config = Compressive.Config(
        num_heads=2, segment=6, memory=6, compressed=4, compression=Convolution.Config(rate=3), loss="auto-encoding"
    )
    mixer = built(config.replace(loss_weight=0.5))
    x = inputs(18)
    assert isinstance(mixer.expansion, Expansion)
    want = torch.zeros(2, dtype=torch.float64)
    for old in (x[:, :6], x[:, 6:12]):
        kept = functional.conv1d(old.mT, mixer.compression.product.weight.view(DIM, 3, DIM).mT, stride=3).mT
        kept = kept + mixer.compression.product.bias
        wide = functional.conv_transpose1d(kept.mT, mixer.expansion.weight.view(3, DIM, DIM).permute(2, 1, 0), stride=3)
        rebuilt = wide.mT + mixer.expansion.bias.view(3, DIM).repeat(2, 1)
        want += 0.5 * 6 * (old - rebuilt).square().mean(dim=(1, 2))
    assert (ran(mixer, x)[1].aux - want).abs().max() < 1e-12


def test_every_weight_goes_on_learning():
    """Training with the side costs freezes nothing: after each of some steps every weight moves."""
    model = kinformer.build("compressive", recipe="tiny", vocab_size=23)
    optimiser, state = torch.optim.SGD(model.parameters(), lr=0.1), None
    for step in range(6):
        tokens = torch.randint(23, (2, 17), generator=torch.Generator().manual_seed(step))
        logits, state = model(tokens[:, :-1], state)
        costs, state = pop_aux(state)
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        (loss + costs["compression"].sum()).backward()
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad
            assert parameter.grad is not None, name
            if step > 1 or "compression" not in name:
                assert parameter.grad.abs().max() > 0, name
        optimiser.step()
        state = detach(state)
    assert (costs["compression"] > 0).all()


def test_costs_accumulate_and_survive_a_reset():
    mixer = built(Compressive.Config(num_heads=2, segment=4, memory=4, compressed=2, compression=MEAN.replace(rate=2)))
    assert not ran(mixer, inputs(20))[1].aux.any()  # nothing to learn
    mixer = built(
        Compressive.Config(num_heads=2, segment=4, memory=4, compressed=2, compression=Convolution.Config(rate=2))
    )
    x, reset = inputs(20), torch.zeros(2, 20, dtype=torch.bool)
    reset[:, 11] = True
    _, state = mixer(Chunk(x, None, reset), mixer.initial_state(2, dtype=x.dtype))
    parts = [ran(mixer, part)[1].aux for part in (x[:, :11], x[:, 11:])]
    assert (state.aux - sum(parts)).abs().max() < 1e-12
    assert all((part > 0).all() for part in parts)


def test_pools_and_convolutions_are_those_of_torch():
    old = inputs(12)
    for rate in (1, 2, 3, 6):
        mean, most = (Pool.Config(rate=rate, take=take).build(DIM)(old, None) for take in ("mean", "max"))
        assert (mean.mT - functional.avg_pool1d(old.mT, rate)).abs().max() < 1e-14
        assert torch.equal(most.mT, functional.max_pool1d(old.mT, rate))
        convolution = Convolution.Config(rate=rate).build(DIM).double()
        kernel = convolution.product.weight.view(DIM, rate, DIM).mT
        want = functional.conv1d(old.mT, kernel, convolution.product.bias, stride=rate)
        assert (convolution(old, None).mT - want).abs().max() < 1e-13
    dilated = DilatedConvolution.Config(rate=3, depth=3).build(DIM).double()
    x = old.mT
    for level, product in enumerate(dilated.dilated):
        kernel, apart = product.weight.view(DIM, 3, DIM).mT, 2**level
        x = functional.conv1d(x, kernel, product.bias, padding=apart, dilation=apart).relu()
    want = functional.conv1d(x, dilated.product.weight.view(DIM, 3, DIM).mT, dilated.product.bias, stride=3)
    assert (dilated(old, None).mT - want).abs().max() < 1e-13


def test_most_used_keeps_order_and_lets_the_older_of_equals_go():
    old, keep = inputs(8, batch=1), MostUsed.Config(rate=4).build(DIM)
    for usage, kept in {
        (0.1, 0.9, 0.2, 0.3, 0.1, 0.8, 0.0, 0.2): [1, 5],
        (0.8, 0.1, 0.2, 0.3, 0.1, 0.9, 0.0, 0.2): [0, 5],
        (0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5): [6, 7],
        (0.5, 0.1, 0.5, 0.1, 0.5, 0.1, 0.1, 0.1): [2, 4],
    }.items():
        assert torch.equal(keep(old, torch.tensor([usage])), old[:, kept])


def test_usage_is_what_queries_before_the_boundary_looked_at():
    """Means over heads and over all queries that could see a memory, until it falls out."""
    mixer = built(
        Compressive.Config(num_heads=2, segment=4, memory=4, compressed=2, compression=MostUsed.Config(rate=2))
    )
    x, total = inputs(8), torch.zeros(2, 8, dtype=torch.float64)
    for stop in (4, 8):  # no memory was compressed before the second boundary: plain segment memory
        own = torch.arange(stop - 4, stop)
        q, k, _ = mixer.projection(x[:, :stop])
        q, rows = q + mixer.position.biases.content[:, None], mixer.position.relative(0, stop - 1)
        distance = own[:, None] - torch.arange(stop)
        asked = q[:, :, own] + rows.shift
        scores = q[:, :, own] @ k.mT + torch.einsum("bhid,hijd->bhij", asked, rows.keys[:, distance.clamp_min(0)])
        scores = scores * mixer.scale
        total[:, :stop] += scores.masked_fill(distance < 0, -torch.inf).softmax(-1).mean(1).sum(1)
    state = mixer.initial_state(2, dtype=x.dtype)
    for part in x.split([3, 4, 1], dim=1):
        _, state = mixer(Chunk(part), state)
    assert (state.usage[:, 0, :, 0] - total[:, 1:]).abs().max() < 1e-12
    ranked = (total[:, :4] / torch.tensor([8.0, 7.0, 6.0, 5.0])).topk(2).indices.sort().values
    want = x.gather(1, ranked[..., None].expand(-1, -1, DIM))
    assert torch.equal(state.compressed[:, 0], want)


def test_costs_nothing_without_gradients_and_keeps_projections():
    mixer = built(
        Compressive.Config(num_heads=2, segment=4, memory=4, compressed=3, compression=Convolution.Config(rate=2))
    )
    _, with_graph = ran(mixer, inputs(22))
    with torch.no_grad():
        want, without = ran(mixer, inputs(22))
        assert not without.aux.any()
        assert (with_graph.k.shape[2], without.k.shape[2], without.compressed_k.shape[2]) == (0, 7, 3)
        want, _ = mixer(Chunk(inputs(9, seed=4)), without)
        got, after = mixer(Chunk(inputs(9, seed=4)), with_graph)
        assert (got - want).abs().max() < 1e-12
        assert after.k.shape[2] == 7


def test_state_is_bounded_and_tokens_one_by_one_agree():
    mixer = built(
        Compressive.Config(num_heads=2, segment=4, memory=4, compressed=3, compression=Convolution.Config(rate=2))
    )
    x, sizes = inputs(120), []
    with torch.no_grad():
        want, _ = ran(mixer, x)
        state = mixer.initial_state(2, dtype=x.dtype)
        for index in range(120):
            y, state = mixer(Chunk(x[:, index : index + 1]), state)
            assert (y[:, 0] - want[:, index]).abs().max() < 1e-11
            sizes.append(nbytes(state))
    assert set(sizes[mixer.retained :]) == {2 * mixer.state_bytes(10**6, dtype=torch.float64)}


def test_generates_with_packed_weights():
    model, tokens = kinformer.build("compressive", recipe="tiny", vocab_size=23).eval(), torch.randint(23, (2, 60))
    with torch.no_grad():
        assert torch.allclose(pack(model)(tokens)[0], model(tokens)[0], atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compressed": -1}, "compressed must be 0 or more"),
        ({"segment": 6}, "segment = 6 is not a multiple of the compression's rate of 4, .* use 8"),
        ({"memory": 129}, "memory = 129 is not a multiple"),
    ],
)
def test_refuses_sizes_that_mean_nothing(options, message):
    with pytest.raises(KinformerError, match=message):
        Compressive.Config(**options)


def test_refuses_rates_below_one_and_projections_with_a_context():
    with pytest.raises(KinformerError, match="rate must be 1"):
        Pool.Config(rate=0)
    with pytest.raises(KinformerError, match="depth must be 1"):
        DilatedConvolution.Config(depth=0)
    with pytest.raises(KinformerError, match="looks at earlier tokens"):
        Compressive.Config(projection=Convolved.Config()).build(DIM)
