"""Beside llama.cpp on a CPU: how long does a token take, in 32, 16 and 8 bits, alone and in a batch of 8, and a prompt?

    small    8 layers, dim 256, 4 heads of 64, feed-forward 704, vocabulary 4,096
    base     12 layers, dim 768, 12 heads of 64, feed-forward 2,048, vocabulary 32,000: of LLaMA's form, random weights

The model is exported and written as GGUF in F32, BF16 and Q8_0 (``examples/to_gguf.py``). Both continue the same
prompts greedily, in F32 with equal tokens, or nothing is timed. Times are processor time, in turns.

    python benchmarks/llama_cpp.py --threads 1
    python benchmarks/llama_cpp.py --threads 1 --long    # after 1k, 8k and 64k tokens, beside members of constant state

It needs the packages gguf and xllamacpp (extra peers), whose wheels contain llama.cpp.
"""

from __future__ import annotations

import copy
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from common import arguments, peer, prepare, save, show
from kinformer.family.build import configure
from kinformer.generation import weights
from kinformer.generation.session import Session
from kinformer.generation.weights import NarrowWeight, PackedLinear, as_weights, pack
from kinformer.interop.writing import form_of, settings_of, write_model

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

SHAPES = {"small": (8, 256, 4, 704, 4096), "base": (12, 768, 12, 2048, 32000), "long": (2, 128, 2, 352, 4096)}
FORMS = {"fp32": "F32", "bf16": "BF16", "int8": "Q8_0"}
PROMPT, FEW, BATCH, LONG = 8, 8, 8, 512
"""Tokens of a prompt, tokens whose time is taken off, rows of a batch, tokens of a long prompt."""
CONTEXTS = (1024, 8192, 65536)
ROWS = (16, 64, 96, 128, 192)
"""Rows of a product, in C and by PyTorch."""


def llama(shape: str, member: str = "rope") -> nn.Module:
    layers, dim, heads, hidden, vocab = SHAPES[shape]
    every = {"norm.kind": "rms_norm", "feed_forward.kind": "swiglu", "feed_forward.hidden_dim": hidden}
    every |= {"feed_forward.bias": False, "mixer.num_heads": heads}
    every |= {"mixer.bias": False, "mixer.projection.bias": False} if member == "rope" else {}
    changes = {"dim": dim, "layers": layers, "norm.kind": "rms_norm", "head.tied": False}
    changes |= {f"layers.*.{path}": value for path, value in every.items()}
    torch.manual_seed(0)
    return configure(member, "small", vocab, changes).build().eval()


def write_gguf(model: Any, length: int, place: Path) -> dict[str, Path]:
    """Export ``model`` and write it in every form; its tokens are called t0, t1, ..."""
    from to_gguf import convert

    folder = place / "exported"
    folder.mkdir()
    form = form_of(model.config, length)
    assert form.model_type == "llama", form.reason
    write_model(folder, form, settings_of(form, model.config, "rope", "float32"), model.state_dict(), 1 << 40)
    names = {("\u0100" if number == 0 else f"t{number}"): number for number in range(model.vocab_size)}
    bpe = {"type": "BPE", "vocab": names, "merges": []}
    rest = {"pre_tokenizer": {"type": "ByteLevel"}, "post_processor": None, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps({"model": bpe} | rest))
    files = {name: place / f"{theirs}.gguf" for name, theirs in FORMS.items()}
    for name, file in files.items():
        convert(folder, file, FORMS[name])
    return files


class LlamaCpp:
    """llama.cpp's server within this process."""

    def __init__(self, library: Any, file: Path, length: int, rows: int) -> None:
        params = library.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = str(file), length * rows, rows
        params.n_batch = params.n_ubatch = LONG
        if file.stem == "F32":  # otherwise keys and values are kept in float16
            params.cache_type_k = params.cache_type_v = library.ggml_type.GGML_TYPE_F32
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
        params.verbosity, params.warmup, params.n_gpu_layers = 0, False, 0
        self.server = library.Server(params)

    def draw(self, prompts: Sequence[Sequence[int]], count: int, cached: bool = False) -> list[list[int]]:
        """The next ``count`` tokens of every prompt."""
        asked: Any = [list(prompt) for prompt in prompts] if len(prompts) > 1 else list(prompts[0])
        request = {"prompt": asked, "max_tokens": count, "temperature": 0, "top_k": 1, "ignore_eos": True}
        answer = self.server.handle_completions(request | {"cache_prompt": cached})
        if not isinstance(answer, dict) or "choices" not in answer:
            raise SystemExit(f"llama.cpp: {answer}")
        texts = [choice["text"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]
        return [[int(number or 0) for number in re.findall("t([0-9]+)|\0", text)] for text in texts]


def draw(model: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    session = Session(model, len(prompts), temperature=0, room=512)
    session.feed(torch.tensor(prompts))
    return torch.stack([session.step() for _ in range(count)], dim=1).tolist()


def used(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return (time.process_time() - begun) * 1000


def in_turns(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(rounds + 1):
        for name, way in ways.items():
            milliseconds = way()
            if index:
                taken[name].append(milliseconds)
    return {name: round(statistics.median(values), 3) for name, values in taken.items()}


def measure(library: Any, shape: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    model, length = llama(shape), PROMPT + LONG + 2 * FEW + tokens
    rng = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, model.vocab_size, (BATCH, PROMPT), generator=rng).tolist()
    text = torch.randint(1, model.vocab_size, (1, LONG), generator=rng).tolist()
    with tempfile.TemporaryDirectory() as folder:
        files = write_gguf(model, 1024, Path(folder))
        theirs = {name: LlamaCpp(library, file, length, BATCH) for name, file in files.items()}
    narrow = {name: as_weights(copy.deepcopy(model), name) for name in FORMS}
    rows: list[dict[str, Any]] = []
    for case, asked in (("a token", prompts[:1]), (f"a step of {BATCH} rows", prompts)):
        ours = {name: pack(each) for name, each in narrow.items()}
        ways: dict[str, Callable[[], float]] = {}
        for name, other in theirs.items():
            mine, equal = draw(ours[name], asked, tokens), other.draw(asked, tokens)
            same = sum(a == b for x, y in zip(mine, equal, strict=True) for a, b in zip(x, y, strict=True))
            if name == "fp32" and same < len(asked) * tokens:
                raise SystemExit(f"{shape}: {same} of {len(asked) * tokens} tokens are equal; not timed.")

            def drawing(way: Callable[[int], object]) -> float:
                return (used(lambda: way(FEW + tokens)) - used(lambda: way(FEW))) / tokens

            theirs_way, our_way = partial(other.draw, asked), partial(draw, ours[name], asked)
            ways |= {f"llama.cpp {FORMS[name]}": partial(drawing, theirs_way), name: partial(drawing, our_way)}
        rows += compare(shape, case, in_turns(ways, rounds))
    ways = {}
    for name, other in theirs.items():
        ways[f"llama.cpp {FORMS[name]}"] = lambda other=other: used(lambda: other.draw(text, 1))
        ways[name] = lambda name=name: used(lambda: draw(narrow[name], text, 1))
    return rows + compare(shape, f"a prompt of {LONG}", in_turns(ways, rounds))


def measure_products(shape: str, rounds: int) -> list[dict[str, Any]]:
    """Microseconds of a product of some rows in C, and by PyTorch with the weights unpacked for it."""
    _, dim, _, hidden, _ = SHAPES[shape]
    weight, results = torch.randn(2 * hidden, dim), []
    for name in FORMS:
        narrow = None if name == "fp32" else NarrowWeight.of(weight, 8 if name == "int8" else 16)
        product = PackedLinear(nn.Linear(dim, 2 * hidden, bias=False)) if narrow is None else narrow.product
        for rows in ROWS:
            x = torch.randn(rows, dim).to(torch.float32 if narrow is None else torch.bfloat16)

            def work(few: int, product: Callable[[Tensor], Tensor] = product, x: Tensor = x) -> float:
                with torch.inference_mode(), patch.object(weights, "FEW", few):
                    return used(lambda: product(x)) * 1000

            taken = in_turns({"us": partial(work, rows), "pytorch_us": partial(work, 0)}, rounds)
            results.append({"shape": shape, "weights": name, "rows": rows} | taken)
            print(*results[-1].values(), flush=True)
    return results


def draw_steps(session: Session, count: int) -> None:
    for _ in range(count):
        session.step()


def compare(shape: str, case: str, taken: dict[str, float]) -> list[dict[str, Any]]:
    rows = []
    for name, theirs in FORMS.items():
        other = taken[f"llama.cpp {theirs}"]
        facts = {"shape": shape, "case": case, "weights": name, "ms": taken[name], "llama_cpp_ms": other}
        rows.append(facts | {"ratio": round(taken[name] / other, 2)})
        print(*rows[-1].values(), flush=True)
    return rows


def measure_long(library: Any, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Milliseconds of a token after contexts that one sequence reads one after the other."""
    contexts, tokens = CONTEXTS[: 1 if quick else None], 16
    text = torch.randint(1, SHAPES["long"][-1], (contexts[-1],), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        files = write_gguf(llama("long"), contexts[-1] + 1024, Path(folder))
        other = LlamaCpp(library, files["fp32"], contexts[-1] + 1024, 1)
    sessions = {
        member: Session(pack(llama("long", member)), 1, temperature=0, room=1024)
        for member in ("gated-deltanet", "linear-transformer")
    }
    rows, read = [], 0
    for context in contexts:
        prompt = text[:context].tolist()
        other.draw([prompt], 1, cached=True)

        def of_llama(prompt: list[int] = prompt) -> float:
            most = used(lambda: other.draw([prompt], FEW + tokens, cached=True))
            return (most - used(lambda: other.draw([prompt], FEW, cached=True))) / tokens

        ways = {"llama.cpp F32": of_llama}
        for member, session in sessions.items():
            session.feed(text[None, read:context])
            draw_steps(session, FEW)
            ways[member] = lambda session=session: used(lambda: draw_steps(session, tokens)) / tokens
        rows.append({"context": context} | in_turns(ways, rounds))
        read = context
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--long", action="store_true", help="tokens after long contexts instead")
    parser.add_argument("--shapes", nargs="+", default=["small", "base"], choices=["small", "base"])
    options = prepare(parser)
    library, _ = peer("xllamacpp"), peer("gguf")
    if library is None or _ is None:
        raise SystemExit(1)
    rounds = options.rounds or (1 if options.quick else 7)
    facts = {"llama.cpp": library.get_system_info(), "unit": "ms of processor time"}
    if options.long:
        rows = measure_long(library, rounds, options.quick)
        show("a token after a context, ms", list(rows[0]), [list(row.values()) for row in rows])
        save(options, "llama_cpp_long", facts | {"rows": rows})
        return
    counts = {"small": 8, "base": 4} if options.quick else {"small": 32, "base": 12}
    products = [row for shape in options.shapes for row in measure_products(shape, rounds)]
    rows = [row for shape in options.shapes for row in measure(library, shape, counts[shape], rounds)]
    show("beside llama.cpp, ms", list(rows[0]), [list(row.values()) for row in rows])
    save(options, "llama_cpp", facts | {"rows": rows, "products": products})


if __name__ == "__main__":
    main()
