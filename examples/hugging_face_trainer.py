"""A member under ``transformers.Trainer``: the model in a module whose ``forward`` gives the loss.

pip install transformers accelerate
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

import kinformer


class ForTrainer(nn.Module):
    """``input_ids`` and ``labels`` [batch, time] -> loss and logits; labels of -100 count for nothing."""

    def __init__(self, name: str, **options) -> None:
        super().__init__()
        self.model = kinformer.build(name, **options)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits, _ = self.model(input_ids)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def rows(text: bytes, length: int = 64) -> list[dict[str, Tensor]]:
    """The text cut into rows of so many bytes."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [{"input_ids": row, "labels": row} for row in data[: len(data) // length * length].view(-1, length)]


def train(text: bytes, out: str, steps: int = 60) -> tuple[Trainer, list[float]]:
    """The trainer, and the losses that it logged."""
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=out, max_steps=steps, per_device_train_batch_size=8, learning_rate=3e-3,
        logging_steps=max(1, steps // 6), save_strategy="no", report_to="none",
        use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(ForTrainer("rope", recipe="tiny", vocab_size=256), arguments, train_dataset=rows(text))
    trainer.train()
    return trainer, [record["loss"] for record in trainer.state.log_history if "loss" in record]


if __name__ == "__main__":
    out = sys.argv[1] if len(sys.argv) > 1 else "runs/trainer"
    _, losses = train(b"It was a dark and stormy night; the rain fell in torrents.\n" * 600, out)
    print("loss:", ", ".join(f"{loss:.2f}" for loss in losses))
