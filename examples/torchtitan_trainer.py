"""A run's model under torchtitan's trainer: FSDP2, its checkpoints and its optimiser; the rows are the run's.

pip install torchtitan==0.3.0
kinformer train gpt --recipe tiny --length 64 --steps 1 --out runs/begun
torchrun --nproc-per-node 2 examples/torchtitan_trainer.py runs/begun runs/trained --steps 20

It goes on from the weights of the first folder, and the second one is a run folder like any other. torchtitan asks for
a GPU; where there is none this script names it the CPU, over gloo.
"""

import argparse
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torchtitan.tools.utils as machine
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import kinformer
from kinformer.core.stack import units_of
from kinformer.lab.data import open_corpus
from kinformer.lab.runs.run import TOKENIZER, save_weights
from kinformer.lab.tasks.next_token import NextTokens
from kinformer.lab.training.settings import Settings
from kinformer.runtime.files import load_tensors


class Processor:
    """What torchtitan asks of its device module, of a CPU: no memory of its own, nothing to wait for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def set_device(self, _: torch.device) -> None:
        pass

    def get_device_name(self, _: torch.device) -> str:
        return "CPU"

    def get_device_properties(self, _: torch.device) -> Any:
        return argparse.Namespace(total_memory=1)

    def memory_stats(self, _: torch.device) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


if not torch.cuda.is_available():  # before anything of torchtitan reads these two
    machine.device_type, machine.device_module = "cpu", Processor()
if not hasattr(torch.distributed, "set_timeout"):  # as torchtitan calls what PyTorch 2.13 has under another name
    torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.configs import DebugConfig  # noqa: E402
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division  # noqa: E402
from torchtitan.protocols import BaseModel  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.protocols.state_dict_adapter import StateDictAdapter  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class Member(BaseModel):
    """The model of a run folder, with its weights; logits [batch, time, vocabulary] of tokens [batch, time]."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        run: str

        def update_from_config(self, *, config: Trainer.Config, **_: Any) -> None:
            pass

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            parameters = sum(parameter.numel() for parameter in model.parameters())
            return parameters, 6 * parameters  # a token's, without attention (Kaplan et al. 2020, section 2.1)

    def __init__(self, config: Config) -> None:
        super().__init__()
        with torch.device("cpu"):  # torchtitan builds without memory, but tied weights would part when they get some
            self.model = kinformer.load(config.run)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)[0]

    def to_empty(self, *, device: str, recurse: bool = True) -> "Member":
        return self.to(device)

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        pass

    def verify_module_protocol(self) -> None:
        pass


def parallelize(model: Member, *, parallel_dims: Any, training: TrainingConfig, parallelism: Any, **_: Any) -> Member:
    """Shard every unit of the stack, then what is left; torchtitan divides gradients by all processes' tokens."""
    if parallel_dims.tp_enabled or parallel_dims.cp_enabled or parallel_dims.dp_replicate_enabled:
        raise ValueError("Only FSDP (--parallelism.data_parallel_shard_degree) is known to this script.")
    types = [TORCH_DTYPE_MAP[name] for name in (training.mixed_precision_param, training.mixed_precision_reduce)]
    options: dict[str, Any] = {
        "mesh": parallel_dims.get_mesh(["fsdp"]),
        "mp_policy": MixedPrecisionPolicy(param_dtype=types[0], reduce_dtype=types[1]),
    }
    for unit in units_of(model.model):
        fully_shard(unit, **options)
    fully_shard(model, **options)
    disable_fsdp_gradient_division(model)
    for module in model.modules():
        if isinstance(module, FSDPModule) and machine.device_type == "cpu":
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no sum that multiplies first
    return model


class RunAdapter(StateDictAdapter):
    """Between a run's names of weights and those here, which are a submodule's."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): tensor for name, tensor in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": tensor for name, tensor in hf_state_dict.items()}


class Rows(BaseDataLoader):
    """The rows that the run's data give for every step, this process's share: tokens, and those one later."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        run: str
        seed: int = 0

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        run = kinformer.open_run(config.run)
        corpus = open_corpus(run.data["spec"], holdout=run.data["holdout"])
        batch_size = local_batch_size * dp_world_size
        self.rows = NextTokens(corpus, Settings(length=seq_len, batch_size=batch_size, seed=config.seed))
        self.place, self.step = (dp_rank, dp_world_size), 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for step in count(self.step):
            self.step = step + 1
            tokens = self.rows.batch(step, *self.place).tokens
            yield {"input": tokens[:, :-1]}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.step = state_dict["step"]


class NoTokenizer(BaseTokenizer):
    """The rows are of ids already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    decode = get_vocab_size = encode


def configured(run: str, place: Path, options: argparse.Namespace) -> Trainer.Config:
    """The trainer of a run's model: AdamW as Kinformer has it, matrices alone decay, at a constant learning rate."""
    model = kinformer.load(run)
    matrices = "|".join(f"{name}$" for name, item in model.named_parameters() if item.dim() >= 2)

    def group(pattern: str, decay: float) -> ParamGroupConfig:
        adamw = {"lr": options.lr, "betas": (0.9, 0.95), "weight_decay": decay}
        return ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=adamw)

    return Trainer.Config(
        model_spec=ModelSpec(
            name="kinformer", flavor=kinformer.open_run(run).member, model=Member.Config(run=run),
            parallelize_fn=parallelize, pipelining_fn=None, post_optimizer_build_fn=None,
            state_dict_adapter=RunAdapter,
        ),
        dump_folder=str(place), hf_assets_path="", tokenizer=NoTokenizer.Config(),
        dataloader=Rows.Config(run=run, seed=options.seed),
        optimizer=OptimizersContainer.Config(param_groups=[group(f"^model\\.({matrices})", 0.1), group(".*", 0.0)]),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=options.rows, seq_len=options.length, steps=options.steps,
            mixed_precision_param="float32", disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"), activation_checkpoint=None,
        loss=CrossEntropyLoss.Config(), metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=True, interval=options.steps, last_save_in_hf=True),
        debug=DebugConfig(seed=0, enable_structured_logging=False),
    )  # fmt: skip


def finish(run: str, written: Path, out: Path) -> None:
    """Make a run folder of the weights that torchtitan has ``written``, and of all else that the first run's says."""
    weights: dict[str, Tensor] = {}
    for path in sorted(written.glob("*.safetensors")):
        weights |= load_tensors(path)[0]
    begun = kinformer.open_run(run)
    out.mkdir(parents=True, exist_ok=True)
    if (begun.folder / TOKENIZER).is_file():
        shutil.copy(begun.folder / TOKENIZER, out)
    save_weights(out, weights)
    replace(begun, folder=out).save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("out", type=Path)
    for name, default in (("steps", 20), ("length", 64), ("rows", 4), ("seed", 0), ("lr", 1e-3)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options = parser.parse_args()
    init_logger()
    place = options.out.with_name(f"{options.out.name}-torchtitan")
    trainer = configured(options.run, place, options).build()
    trainer.train()
    trainer.close()
    if torch.distributed.get_rank() == 0:
        finish(options.run, place / "checkpoint" / f"step-{options.steps}", options.out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
