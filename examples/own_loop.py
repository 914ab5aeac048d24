"""A training loop of your own: a Linear Transformer over one long text, its state carried from chunk to chunk.

A model of Kinformer is a plain ``nn.Module``; what is not usual is the state. It is handed on detached, so that
gradients end at the chunk (truncated back-propagation) while what was read before is remembered.
"""

import torch
from torch.nn.functional import cross_entropy

import kinformer
from kinformer.core.state import detach


def train(text: bytes, steps: int = 120, rows: int = 8, length: int = 64) -> tuple[torch.nn.Module, list[float]]:
    """The model, and the loss of every step in nats per byte."""
    torch.manual_seed(0)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    data = data[: len(data) // rows * rows].view(
        rows, -1
    )  # each row reads its own part of the text, from its beginning
    model = kinformer.build("linear-transformer", recipe="tiny", vocab_size=256)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state, losses = None, []
    for step in range(steps):
        start = step * length % (data.shape[1] - length - 1)
        if start < length:
            state = None  # the text begins again
        tokens, targets = data[:, start : start + length], data[:, start + 1 : start + length + 1]
        logits, state = model(tokens, state)
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        state = detach(state)
        losses.append(float(loss.detach()))
    return model, losses


if __name__ == "__main__":
    model, losses = train(b"It was a dark and stormy night; the rain fell in torrents.\n" * 600)
    print(f"nats per byte: {losses[0]:.2f} at first, {losses[-1]:.2f} in the end")
    prompt = torch.tensor([list(b"It was ")])
    new = kinformer.generate(model.eval(), prompt, max_new_tokens=60, temperature=0.5, seed=0)
    print(bytes(prompt[0].tolist() + new[0].tolist()).decode(errors="replace"))
