"""Make the numbers of ``rwkv7_layers.npz``: two layers of RWKV-7 in flash-linear-attention 0.6.0, the second with the
values of the first, and a feed-forward, on a CPU, its kernels run by Triton's interpreter in float32. Minutes; no test
runs this.

    pip install --no-deps flash-linear-attention==0.6.0 fla-core==0.6.0 einops      # in an environment of its own
    TRITON_INTERPRET=1 python tests/golden/make_rwkv7_layers.py OUT.npz

x [2, 9, 8] and z [2, 9, 8] enter the time mixing of the first and of the second layer, whose outputs are y_first and y;
c is that of the feed-forward (12 features) for x. Weights are under first/NAME, attn/NAME (of the second) and ffn/NAME.
"""

import argparse
import sys

import numpy as np
import torch
from triton.runtime.autotuner import Autotuner

Autotuner._bench = lambda self, *arguments, config, **options: [0.0, 0.0, 0.0]  # the interpreter has no times
from fla.layers.rwkv7 import RWKV7Attention  # noqa: E402
from fla.models.rwkv7.modeling_rwkv7 import RWKV7FeedForward  # noqa: E402

BATCH, TIME, DIM, HEAD, LAYERS = 2, 9, 8, 4, 3


class Index(int):
    """A number of a loop with the method that compiled kernels call, and the interpreter's lack."""

    def to(self, kind):
        return self


def counted(*arguments):
    """Return ``range`` of such numbers."""
    return map(Index, range(*arguments))


for module in [module for name, module in sys.modules.items() if name.startswith("fla.")]:
    module.range = counted


def stirred(module, generator):
    """Return ``module`` in eval mode, all of its weights moved away from where they begin."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return module.eval()


def layer(index, generator):
    return stirred(
        RWKV7Attention(
            mode="fused_recurrent",
            hidden_size=DIM,
            head_dim=HEAD,
            decay_low_rank_dim=3,
            a_low_rank_dim=3,
            gate_low_rank_dim=5,
            v_low_rank_dim=3,
            layer_idx=index,
            num_hidden_layers=LAYERS,
        ),
        generator,
    )


def weights(module):
    return {name: value.detach().numpy() for name, value in module.state_dict().items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    first, second = (layer(index, generator) for index in (0, 1))
    ffn = RWKV7FeedForward(DIM, intermediate_size=12, layer_idx=1, num_hidden_layers=LAYERS)
    stirred(ffn, generator)
    x, z = torch.randn(2, BATCH, TIME, DIM, generator=generator)
    with torch.no_grad():
        y_first, _, _, values = first(x)
        y = second(z, v_first=values)[0]
        c = ffn(x)[0]
    arrays = {"x": x, "z": z, "y_first": y_first, "y": y, "c": c}
    arrays = {name: value.numpy() for name, value in arrays.items()}
    arrays |= {f"attn/{name}": value for name, value in weights(second).items()}
    arrays |= {f"first/{name}": value for name, value in weights(first).items()}
    arrays |= {f"ffn/{name}": value for name, value in weights(ffn).items()}
    np.savez_compressed(parser.parse_args().out, **arrays)


if __name__ == "__main__":
    main()
