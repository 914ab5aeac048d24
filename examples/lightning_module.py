"""A member under Lightning: what a step is, and which optimiser; the rest is Lightning's.

pip install lightning
python examples/lightning_module.py
python examples/lightning_module.py --processes 2        # FSDP2: each process has half of every layer's weights
"""

import argparse

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import kinformer


class LanguageModel(lightning.LightningModule):
    """Next tokens of rows [batch, time] int64."""

    def __init__(self, name: str, lr: float = 3e-3, **options) -> None:
        super().__init__()
        self.lr, self.model = lr, kinformer.build(name, **options)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Shard every layer, and what is left, where Lightning's strategy has a mesh of processes."""
        if self.device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.stack.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        logits, _ = self.model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def train(text: bytes, steps: int = 60, length: int = 64, processes: int = 1) -> LanguageModel:
    """The module after so many steps of 8 rows, in every process."""
    lightning.seed_everything(0, verbose=False)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = data[: len(data) // length * length].view(-1, length)
    module = LanguageModel("gated-deltanet", recipe="tiny", vocab_size=256)
    strategy = ModelParallelStrategy() if processes > 1 else "auto"
    trainer = lightning.Trainer(
        max_steps=steps, max_epochs=-1, accelerator="auto", devices=processes, strategy=strategy, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(list(rows), batch_size=8, shuffle=True, drop_last=True))
    return module


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    text = b"It was a dark and stormy night; the rain fell in torrents.\n" * 600
    module = train(text, options.steps, processes=options.processes)
    print(f"nats per byte: {module.losses[0]:.2f} at first, {module.losses[-1]:.2f} in the end")
