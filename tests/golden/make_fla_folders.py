"""Make the numbers of ``fla_folders.npz``: what flash-linear-attention 0.6.0 computes of the folders of
``tests/interop/fla_folders.py``, on a CPU, its kernels run by Triton's interpreter. Minutes; no test runs this.

    pip install --no-deps flash-linear-attention==0.6.0 fla-core==0.6.0 einops      # in an environment of its own
    TRITON_INTERPRET=1 python -m tests.golden.make_fla_folders OUT.npz [NAME ...]

Of every folder, under its name: config (config.json as bytes), shapes (of its tensors by name, as JSON bytes), logits
[2, 20, vocab] of ``token_ids()``, tokens [2, 8], the greedy ones behind the first 6, and ``grad/NAME``, the gradient of
the mean cross-entropy of each token behind those before it. The script is reconstructed from the file: it gives the
file's numbers of ``gla`` bit for bit; those of other folders were not compared.
"""

import argparse
import json
import sys

import numpy as np
import torch
import transformers
from tests.interop.fla_folders import FOLDERS, SIZES, kind_of, token_ids, weight
from triton.runtime.autotuner import Autotuner

Autotuner._bench = lambda self, *arguments, config, **options: [0.0, 0.0, 0.0]  # the interpreter has no times
import fla.layers.attn  # noqa: E402
import fla.models  # noqa: E402, F401 (registers its classes with transformers)

PROMPT, NEW = 6, 8


class Index(int):
    """A number of a loop with the method that compiled kernels call, and the interpreter's lack."""

    def to(self, kind):
        return self


def counted(*arguments):
    """Return ``range`` of such numbers."""
    return map(Index, range(*arguments))


def attend(q, k, v, causal, window_size):
    """Return softmax attention of q, k, v [batch, time, heads, head_dim] within a window of ``window_size[0]`` earlier
    tokens and the token itself; for a package that computes on a GPU alone."""
    time, before = q.shape[1], window_size[0]
    distance = torch.arange(time)[:, None] - torch.arange(time)
    seen = (distance >= 0) & ((distance <= before) if before >= 0 else True)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).transpose(1, 2)


fla.layers.attn.flash_attn_func = attend
for module in [module for name, module in sys.modules.items() if name.startswith("fla.ops.")]:
    module.range = counted


def as_bytes(value):
    return np.frombuffer(json.dumps(value, sort_keys=True).encode(), dtype=np.uint8)


def computed(name):
    """Return the arrays of the folder ``name``."""
    kind = kind_of(name)
    config = transformers.AutoConfig.for_model(kind, **SIZES | FOLDERS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {key: weight(key, value.shape) for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    model.train()
    ids = token_ids()
    logits = model(ids, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    arrays = {f"grad/{key}": parameter.grad.numpy() for key, parameter in model.named_parameters()}
    new = ids[:, :PROMPT]
    with torch.no_grad():  # greedy, without a cache
        for _ in range(NEW):
            new = torch.cat([new, model(new, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    facts = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    shapes = {key: list(one.shape) for key, one in weights.items()}
    return {
        "config": as_bytes(facts),
        "shapes": as_bytes(shapes),
        "logits": logits.detach().numpy(),
        "tokens": new[:, PROMPT:].numpy(),
        **arrays,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("names", nargs="*", default=list(FOLDERS))
    options = parser.parse_args()
    arrays = {f"{name}/{key}": array for name in options.names for key, array in computed(name).items()}
    np.savez_compressed(options.out, **arrays)


if __name__ == "__main__":
    main()
