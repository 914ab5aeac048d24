"""Shared by all pages, below their line ``# --- proof ---``: compare with the library, train on the page, draw."""

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


def equal(what, ours, theirs, tolerance=1e-10):
    """Fail where two tensors differ by ``tolerance`` or more, otherwise print by how much they differ."""
    assert ours.shape == theirs.shape, f"{what}: shape {tuple(ours.shape)} here, {tuple(theirs.shape)} in the library"
    error = (ours - theirs).abs().max().item()
    assert error < tolerance, f"{what}: the page and the library differ by {error:.1e}"
    print(f"{what}: equal to the library's within {error:.0e}")


def copy_weights(page, library, names):
    """Give ``library`` the weights of ``page``; return the names of both as {library's: page's}.

    ``names`` maps weights or modules of the library to weights or modules of the page, or to functions that make the
    library's weight of the page's ``state_dict``. Every weight of the library must get a value.
    """
    weights, complete = page.state_dict(), {}
    for there, here in names.items():
        within = [name for name in library.state_dict() if name.startswith(there + ".")]
        complete |= {name: here + name.removeprefix(there) for name in within} or {there: here}
    library.load_state_dict({t: weights[h] if isinstance(h, str) else h(weights) for t, h in complete.items()})
    return {there: here for there, here in complete.items() if isinstance(here, str)}


def compare(page, library, names, x, stream=None, **inputs):
    """Compare outputs, gradients and streamed steps of a page's layer and the library's, with equal weights.

    ``page(x)`` and ``library(x)`` map x [batch, time, dim] to the same shape, or tokens to logits. ``stream(chunk,
    state)`` returns the page's outputs and its next state, and is left out for a layer that reads whole sequences.
    ``inputs`` go to both.
    """
    names = copy_weights(page, library, names)
    leaves = [x := x.clone().requires_grad_()] if x.is_floating_point() else []
    ours, theirs = page(x, **inputs), library(x, **inputs)
    equal("outputs", ours, theirs)
    mine, yours = dict(page.named_parameters()), dict(library.named_parameters())
    shared = [(mine[here], yours[there]) for there, here in names.items() if here in mine and there in yours]
    weight = torch.randn_like(ours)
    here = torch.autograd.grad((ours * weight).sum(), [*leaves, *(pair[0] for pair in shared)], materialize_grads=True)
    there = torch.autograd.grad(
        (theirs * weight).sum(), [*leaves, *(pair[1] for pair in shared)], materialize_grads=True
    )
    equal("gradients", torch.cat([g.flatten() for g in here]), torch.cat([g.flatten() for g in there]))
    if stream is not None:
        with torch.no_grad():
            pieces, state, theirs_pieces, their_state = [], None, [], None
            for chunk in x.split([7, 1, 1, x.shape[1] - 9], 1):
                piece, state = stream(chunk, state)
                pieces.append(piece)
                piece, their_state = library(chunk, their_state, return_state=True)
                theirs_pieces.append(piece)
        equal("streamed steps", torch.cat(pieces, 1), torch.cat(theirs_pieces, 1))
        equal("streamed and whole", torch.cat(pieces, 1), ours.detach())


class Whole(nn.Module):
    """A whole model of the library, called as its layers are: tokens [batch, time] to logits [batch, time, vocab]."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, tokens, state=None, return_state=False):
        logits, state = self.inner(tokens, state or self.inner.initial_state(len(tokens)))
        return (logits, state) if return_state else logits


class Tiny(nn.Module):
    """A model of bytes with two layers of a page: [batch, time] bytes to [batch, time, 256] logits.

    ``max_length`` 0 leaves out the learned positions, for layers that know the positions themselves.
    """

    def __init__(self, layer, dim, max_length):
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.position = nn.Embedding(max_length, dim) if max_length else None
        self.layers = nn.ModuleList([layer() for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(5)])
        self.feed = nn.ModuleList(
            [nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(2)]
        )
        self.head = nn.Linear(dim, 256)

    def forward(self, tokens):
        x = self.embed(tokens)
        if self.position is not None:
            x = x + self.position.weight[: tokens.shape[1]]
        for i, layer in enumerate(self.layers):
            x = x + layer(self.norms[2 * i](x))
            x = x + self.feed[i](self.norms[2 * i + 1](x))
        return self.head(self.norms[4](x))


def train(layer, page, dim=64, length=128, steps=100, causal=True, positions=True, whole=None, objective=None):
    """Train two of the page's layers on the page's own text; returns the model.

    ``layer()`` makes a layer for [batch, time, dim]; ``page`` is the page's ``__file__``. A causal model predicts the
    next byte. Any other model predicts a tenth of the bytes, which are hidden from it. ``positions``: whether the
    model adds learned positions to its tokens. ``whole()`` makes a model of the page's own, bytes to logits, instead.
    ``objective(model, tokens, targets)`` returns the loss where it is not the cross-entropy of the next byte.
    """
    torch.manual_seed(0)
    text = torch.tensor(list(Path(page).read_bytes()))
    model = whole() if whole else Tiny(layer, dim, length if positions else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        rows = torch.stack([text[i : i + length + 1] for i in torch.randint(len(text) - length, (8,)).tolist()])
        tokens = rows[:, :-1]
        if objective:
            loss = objective(model, tokens, rows[:, 1:])
        elif causal:
            loss = F.cross_entropy(model(tokens).flatten(0, 1), rows[:, 1:].flatten())
        else:
            hidden = torch.rand(tokens.shape) < 0.1
            loss = F.cross_entropy(model(tokens.masked_fill(hidden, 0))[hidden], tokens[hidden])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() / math.log(2))
    what = "loss in bits" if objective else "bits per byte"
    print(f"this page as text: {losses[0]:.2f} {what} at first, {losses[-1]:.2f} after {steps} steps")
    return model


@torch.no_grad()
def bits_by_position(model, page, length, rows=16):
    """Return the bits [length] that a trained model needs for the bytes at each position, a mean over ``rows`` texts.

    The texts are windows of the page, so windows longer than in training show how the model extrapolates.
    """
    text = torch.tensor(list(Path(page).read_bytes()))
    starts = torch.linspace(0, len(text) - length - 1, rows).long()
    windows = torch.stack([text[i : i + length + 1] for i in starts.tolist()])
    return F.cross_entropy(model(windows[:, :-1]).mT, windows[:, 1:], reduction="none").mean(0) / math.log(2)


def prove(proof):
    """Run a page's proof in float64 from a fixed seed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    try:
        proof()
    finally:
        torch.set_default_dtype(before)


def draw_to(draw, model, file):
    """Save the picture of a page. ``draw(figure, model)`` fills an empty figure of matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    torch.manual_seed(0)
    figure = Figure(figsize=(7, 3), layout="constrained")
    draw(figure, model)
    figure.savefig(file, dpi=150)


def run(page, proof, train, draw):
    """Run a page from the command line: its proof, its training, and its picture if ``--draw`` is given."""
    parser = argparse.ArgumentParser()
    name = Path(page).with_suffix(".png").name
    parser.add_argument("--draw", nargs="?", const=name, metavar="FILE", help=f"save the picture ({name})")
    options = parser.parse_args()
    torch.set_num_threads(1)
    prove(proof)
    model = train()
    if options.draw:
        draw_to(draw, model, options.draw)
        print(f"picture: {options.draw}")
