"""A member under Lightning: what a step is, and which optimiser; the rest is Lightning's.

pip install lightning
"""

import lightning
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import kinformer


class LanguageModel(lightning.LightningModule):
    """Next tokens of rows [batch, time] int64."""

    def __init__(self, name: str, lr: float = 3e-3, **options) -> None:
        super().__init__()
        self.lr, self.model = lr, kinformer.build(name, **options)
        self.losses: list[float] = []

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        logits, _ = self.model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def train(text: bytes, steps: int = 60, length: int = 64) -> LanguageModel:
    """The module after so many steps of 8 rows."""
    lightning.seed_everything(0, verbose=False)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = data[: len(data) // length * length].view(-1, length)
    module = LanguageModel("gated-deltanet", recipe="tiny", vocab_size=256)
    trainer = lightning.Trainer(
        max_steps=steps, max_epochs=-1, accelerator="auto", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(list(rows), batch_size=8, shuffle=True, drop_last=True))
    return module


if __name__ == "__main__":
    module = train(b"It was a dark and stormy night; the rain fell in torrents.\n" * 600)
    print(f"nats per byte: {module.losses[0]:.2f} at first, {module.losses[-1]:.2f} in the end")
