"""Which clients take exported runs, served runs and layers of this library, and do they give its own outputs?

Every trial runs the installed package itself on a run of the recipe ``tiny``, of bytes, whose weights are random and
large, and compares the outcome with Kinformer's: tokens and texts must be equal, numbers to 1e-5 of the largest. The
result names the packages that are not installed.

    python benchmarks/clients.py                          # about five minutes
    python benchmarks/clients.py --clients openai torch   # these alone; other rows stay as the result file has them
    python benchmarks/clients.py --resume                 # after a stop
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import kinformer
from common import RESULTS, arguments, prepare, save, show
from kinformer.lab.runs.run import save_weights
from kinformer.nn import MultiheadAttention

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

LIMIT, NEW, TEXT, NOISE, KEY = 1e-5, 24, "def __init__(self", 0.2, "secret"
RMS = {"layers.*.norm": "rms_norm", "norm": "rms_norm"}
SIZES = {"recipe": "tiny", "steps": 2, "length": 64, "batch_size": 8, "seed": 0, "device": "cpu"}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", {}),
    "rope": ("rope", {}),
    "llama": ("rope", {"set": RMS | {"layers.*.feed_forward": "swiglu"}}),
    "mixtral": ("mixtral", {"set": RMS}),
    "local": ("local", {}),
    "alibi": ("alibi", {}),
    "linear-transformer": ("linear-transformer", {}),
    "gated-deltanet": ("gated-deltanet", {}),
    "mamba2": ("mamba2", {}),
    "transformer-xl": ("transformer-xl", {}),
    "bert": ("bert", {"task": "mlm"}),
    "linformer": ("linformer", {"task": "mlm"}),
    "vit": ("vit", {"task": "vision", "length": None}),
    "convformer": ("convformer", {"task": "vision", "length": None}),
}
CAUSAL = ("gpt", "rope", "llama", "mixtral", "local", "alibi", "linear-transformer", "gated-deltanet", "mamba2")
FEW = ("llama", "gated-deltanet")
NOT_TRIED = {
    "llama_index": "LlamaIndex's OpenAILike on a served run (its releases require transformers below 5)",
    "vllm": "vLLM on a native folder",
    "x_transformers": "x-transformers' own tests (see the page training_step)",
}
"""Clients without a trial here: the module and the use."""


class Trial(NamedTuple):
    """A ``check`` of a ``client`` on each of the ``runs``; it returns how far the outcome is from Kinformer's own: the
    number of unequal tokens or texts, or the largest difference relative to the largest value."""

    client: str
    use: str
    runs: tuple[str, ...]
    check: Callable[[str], float]


# The runs and their exports, each made once.

FOLDER = Path()


@cache
def run_of(name: str) -> Path:
    """Return a run whose weights are so large that a greedy text does not repeat one token."""
    member, options = RUNS[name]
    kinformer.train(member, out=FOLDER / name, quiet=True, **SIZES | options)
    torch.manual_seed(0)
    model = kinformer.load(FOLDER / name)
    for parameter in model.parameters():
        parameter.data += NOISE * torch.randn_like(parameter)
    save_weights(FOLDER / name, model.state_dict())
    return FOLDER / name


@cache
def exported(name: str) -> Any:
    return kinformer.export(run_of(name), FOLDER / f"{name}-exported")


@cache
def ours(name: str) -> Any:
    return kinformer.load(run_of(name))


def theirs(name: str) -> Any:
    import transformers

    done = exported(name)
    return getattr(transformers, done.auto_class).from_pretrained(done.folder, trust_remote_code=True).eval()


def prompt(rows: int = 2, time: int = len(TEXT)) -> Tensor:
    text = (Path(json.__file__).read_bytes() * 2)[1000 : 1000 + rows * time]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(rows, time)


def unequal(one: Any, other: Any) -> float:
    """Return how many tokens, texts or numbers of two sequences differ."""
    one, other = (list(np.asarray(values).flatten()) for values in (one, other))
    return float(sum(a != b for a, b in zip(one, other, strict=True)))


def gap(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max() / other.double().abs().max())


# Transformers, and what stands on it.


def greedy(name: str, **options: Any) -> float:
    ids = prompt(1 if options else 2)
    mask = {"attention_mask": torch.ones_like(ids)}
    new = theirs(name).generate(ids, **mask, max_new_tokens=NEW, do_sample=False, **options)[:, ids.shape[1] :]
    return unequal(new, kinformer.generate(ours(name), ids, max_new_tokens=NEW, temperature=0))


def looked_up(name: str) -> float:
    return greedy(name, prompt_lookup_num_tokens=3)


def padded(name: str) -> float:
    ids, lengths = prompt(3), (17, 9, 4)
    mask = torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor(lengths)[:, None]
    options = {"attention_mask": mask.long(), "max_new_tokens": NEW, "do_sample": False}
    new = theirs(name).generate(ids.masked_fill(~mask, 0), **options)[:, ids.shape[1] :]
    alone = [
        kinformer.generate(ours(name), row[-length:][None], max_new_tokens=NEW, temperature=0)
        for row, length in zip(ids, lengths, strict=True)
    ]
    return unequal(new, torch.cat(alone))


def written(name: str) -> float:
    import transformers

    pipe = transformers.pipeline("text-generation", str(exported(name).folder), trust_remote_code=True, device="cpu")
    (answer,) = pipe(TEXT, max_new_tokens=NEW, do_sample=False, return_full_text=False)
    text = "".join(kinformer.stream(run_of(name), TEXT, max_new_tokens=NEW, temperature=0))
    return float(answer["generated_text"] != text)


def fine_tuned(name: str) -> float:
    """Trainer makes three steps; its saved folder has the logits of the trained model."""
    import transformers

    model, ids = theirs(name).train(), prompt(6)
    before = [weight.detach().clone() for weight in model.parameters()]
    data = [{"input_ids": row, "labels": row} for row in ids]
    place = FOLDER / f"{name}-trainer"
    settings = transformers.TrainingArguments(
        str(place), max_steps=3, per_device_train_batch_size=2, use_cpu=True, save_strategy="no", report_to=[],
        disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(model, settings, train_dataset=data)
    trainer.train()
    trainer.save_model(str(place))
    auto = getattr(transformers, exported(name).auto_class)
    again = auto.from_pretrained(place, trust_remote_code=True).eval()
    if all(map(torch.equal, before, again.parameters())):
        return float("inf")  # nothing was learnt
    with torch.no_grad():
        return gap(again(ids).logits, model.eval()(ids).logits)


def adapted(name: str) -> float:
    """PEFT's LoRA learns a step; merged into the weights it computes the same."""
    import peft

    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model, ids = peft.get_peft_model(theirs(name), config), prompt()
    optimiser = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    model(input_ids=ids, labels=ids).loss.backward()
    optimiser.step()
    with torch.no_grad():
        wanted = model.eval()(input_ids=ids).logits
        return gap(model.merge_and_unload()(ids).logits, wanted)


def filled(name: str) -> float:
    import transformers

    pipe = transformers.pipeline("fill-mask", str(exported(name).folder), trust_remote_code=True, device="cpu")
    text = f"def __init__(s{pipe.tokenizer.mask_token}lf):"
    ids = torch.tensor(pipe.tokenizer(text)["input_ids"])[None]
    with torch.no_grad():
        probabilities = ours(name)(ids)[ids == pipe.tokenizer.mask_token_id].softmax(-1)[0]
    return max(abs(one["score"] - float(probabilities[one["token"]])) for one in pipe(text, top_k=5))


def seen(name: str) -> float:
    """A picture of one channel through the pipeline, which makes it RGB, beside ``predict`` of its file."""
    import transformers
    from PIL import Image

    path = FOLDER / "picture.png"
    values = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    Image.fromarray(values).save(path)
    folder = str(exported(name).folder)
    pipe = transformers.pipeline("image-classification", folder, trust_remote_code=True, device="cpu", top_k=10)
    (answer,) = kinformer.predict(run_of(name), [path], top_k=10, threads=1, device="cpu")
    wanted = {item["class"]: item["probability"] for item in answer["classes"]}
    return max(abs(item["score"] - wanted[item["label"]]) for item in pipe(str(path)))


# PyTorch's modules around the layers.


def stands_in(mixer: str) -> float:
    """A trained ``nn.TransformerEncoder`` whose layers get this attention, on a padded batch in eval mode."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    x, padding = torch.randn(3, 9, 32), torch.arange(9) >= torch.tensor([[9], [5], [7]])
    mask = nn.Transformer.generate_square_subsequent_mask(9) if mixer == "gpt" else None
    with torch.no_grad():
        wanted = model(x, mask, padding)
        for layer in model.layers:
            layer.self_attn = MultiheadAttention.from_torch(layer.self_attn, mixer)
        return gap(model(x, mask, padding)[~padding], wanted[~padding])


def carried_over(mixer: str) -> float:
    """A whole ``nn.Transformer``, with cross-attention, and its ``state_dict`` loaded again."""
    torch.manual_seed(0)
    model = nn.Transformer(32, 4, 2, 2, 64, batch_first=True).eval()
    source, target = torch.randn(2, 9, 32), torch.randn(2, 6, 32)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        wanted = model(source, target, tgt_mask=mask)
        for layer in model.encoder.layers:
            layer.self_attn = MultiheadAttention.from_torch(layer.self_attn)
        for layer in model.decoder.layers:
            layer.self_attn = MultiheadAttention.from_torch(layer.self_attn, "gpt")
            layer.multihead_attn = MultiheadAttention.from_torch(layer.multihead_attn, mixer)
        first = gap(model(source, target, tgt_mask=mask), wanted)
        for parameter in model.parameters():
            parameter.zero_()
        model.load_state_dict(weights)
        return max(first, gap(model(source, target, tgt_mask=mask), wanted))


# Clients of a server.


@contextmanager
def served(name: str) -> Iterator[dict[str, Any]]:
    """Yield the options of a client of a server in a thread."""
    from kinformer.lab.runs.options import ServeOptions
    from kinformer.lab.serving.server import Server

    template = FOLDER / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}")
    options = ServeOptions(port=0, quiet=True, threads=1, device="cpu", api_key=KEY, chat_template=str(template))
    server = Server(run_of(name), options)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield {"base_url": f"{server.url}/v1", "api_key": KEY, "max_retries": 0}
    finally:
        server.close()
        thread.join(20)


def drawn(name: str, prompt: str) -> str:
    return "".join(kinformer.stream(run_of(name), prompt, max_new_tokens=NEW, temperature=0.8, seed=3, threads=1))


def completed(name: str) -> float:
    import openai

    asked = {"model": name, "prompt": TEXT, "max_tokens": NEW, "temperature": 0.8, "seed": 3}
    with served(name) as options:
        create = openai.OpenAI(**options).completions.create
        whole = create(**asked).choices[0].text
        parts = "".join(part.choices[0].text for part in create(**asked, stream=True))
    return unequal([whole, parts], [drawn(name, TEXT)] * 2)


def embedded(name: str) -> float:
    import openai

    texts = [TEXT, "import json"]
    with served(name) as options:
        answer = openai.OpenAI(**options).embeddings.create(model=name, input=texts)
    vectors = torch.tensor([item.embedding for item in answer.data])
    return gap(vectors, torch.from_numpy(kinformer.embed(run_of(name), texts, threads=1, device="cpu")))


def invoked(name: str) -> float:
    """LangChain's completions and chats, whole and as a stream."""
    from langchain_openai import ChatOpenAI, OpenAI

    asked = {"model": name, "max_tokens": NEW, "temperature": 0.8, "seed": 3}
    with served(name) as options:
        plain, chat = OpenAI(**asked, **options), ChatOpenAI(**asked, **options)
        texts = [plain.invoke(TEXT), "".join(plain.stream(TEXT))]
        texts += [chat.invoke(TEXT).content, "".join(part.content for part in chat.stream(TEXT))]
    return unequal(texts, [drawn(name, prompt) for prompt in (TEXT, f"user: {TEXT}\n") for _ in range(2)])


# Other engines.


def judged(name: str) -> float:
    """Log-likelihoods by the harness's model ``kinformer`` on the run, and by ``hf`` on the export."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from kinformer.harness import KinformerLM

    pairs = [(TEXT, ", name):"), (TEXT, " = None"), ("import ", "os")]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    mine = KinformerLM(run_of(name), device="cpu", quiet=True)
    other = HFLM(
        pretrained=str(exported(name).folder), trust_remote_code=True, device="cpu", dtype="float32",
        prefix_token_id=mine.prefix_token_id,
    )  # fmt: skip
    answers = [torch.tensor([one for one, _ in lm.loglikelihood(requests, disable_tqdm=True)]) for lm in (mine, other)]
    return gap(*answers)


def run_by_onnx(name: str) -> float:
    import onnxruntime

    done = kinformer.export(run_of(name), FOLDER / f"{name}-onnx", format="onnx")
    graph = json.loads((done.folder / "graph.json").read_text())
    session = onnxruntime.InferenceSession(str(done.folder / done.file), providers=["CPUExecutionProvider"])
    ids = prompt()
    sizes = {"batch": len(ids), "past": 0}
    state = [np.zeros([sizes.get(size, size) for size in leaf["shape"]], leaf["dtype"]) for leaf in graph["state"]]
    tokens, new = ids.numpy(), []
    for _ in range(NEW):
        logits, *state = session.run(None, dict(zip(graph["inputs"], [tokens, *state], strict=True)))
        tokens = logits[:, -1:].argmax(-1)
        new.append(tokens)
    return unequal(np.concatenate(new, 1), kinformer.generate(ours(name), ids, max_new_tokens=NEW, temperature=0))


def run_by_llama_cpp(name: str) -> float:
    """The bytes of llama.cpp's greedy tokens, from the file that ``examples/to_gguf.py`` writes."""
    import xllamacpp
    from to_gguf import convert

    from llama_cpp import LlamaCpp

    file, ids = FOLDER / "F32.gguf", prompt(1)
    convert(exported(name).folder, file)
    asked = {"prompt": ids[0].tolist(), "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    (choice,) = LlamaCpp(xllamacpp, file, 2 * ids.shape[1] + NEW, 1).server.handle_completions(asked)["choices"]
    new = [one for token in choice["logprobs"]["content"] for one in token["bytes"]]
    return unequal(new, kinformer.generate(ours(name), ids, max_new_tokens=NEW, temperature=0))


TRIALS = (
    Trial("transformers", "generate, greedy", CAUSAL, greedy),
    Trial("transformers", "generate, rows padded on the left", CAUSAL, padded),
    Trial("transformers", "generate with prompt lookup", (*FEW, "alibi", "mamba2"), looked_up),
    Trial("transformers", "pipeline text-generation", CAUSAL, written),
    Trial("transformers", "pipeline fill-mask", ("bert", "linformer"), filled),
    Trial("transformers", "pipeline image-classification, one channel", ("vit", "convformer"), seen),
    Trial("transformers", "Trainer, then loaded again", FEW, fine_tuned),
    Trial("peft", "LoRA of all products, merged", FEW, adapted),
    Trial("torch", "nn.TransformerEncoder, from_torch", ("bidirectional", "gpt"), stands_in),
    Trial("torch", "nn.Transformer, from_torch, and its state_dict", ("cross",), carried_over),
    Trial("openai", "completions, whole and as a stream", FEW, completed),
    Trial("openai", "embeddings", FEW, embedded),
    Trial("langchain_openai", "completions and chats, whole and as a stream", FEW, invoked),
    Trial("lm_eval", "log-likelihoods by kinformer and by hf", FEW, judged),
    Trial("onnxruntime", "a greedy text from a graph", ("linear-transformer",), run_by_onnx),
    Trial("xllamacpp", "a greedy text from a GGUF file", ("gpt", "llama"), run_by_llama_cpp),
)
CLIENTS = tuple(dict.fromkeys(trial.client for trial in TRIALS))
ORDER = [(trial.client, trial.use) for trial in TRIALS]


def version_of(client: str) -> str | None:
    try:
        return version(client.replace("_", "-"))
    except PackageNotFoundError:
        return None


def row_of(trial: Trial, name: str) -> dict[str, Any]:
    difference = trial.check(name)
    return {
        "client": trial.client,
        "version": version_of(trial.client),
        "use": trial.use,
        "run": name,
        "form": "layer" if trial.client == "torch" else "native" if exported(name).native else "with code",
        "difference": difference,
        "holds": difference <= LIMIT,
    }


def main() -> None:
    global FOLDER
    parser = arguments(__doc__)
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=CLIENTS, help="the clients to run")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the result file, and add missing ones")
    options = prepare(parser)
    path, table = options.out or RESULTS / "clients.json", []
    if path.is_file() and not options.quick:
        before = json.loads(path.read_text(encoding="utf-8"))["table"]
        kept = [row for row in before if (row["client"], row["use"]) in ORDER]  # without former trials
        table = [row for row in kept if options.resume or row["client"] not in options.clients]
    why = {name: "no trial here" if find_spec(name) else "not installed" for name in NOT_TRIED}
    not_run = {name: f"{use}: {why[name]}" for name, use in NOT_TRIED.items()}
    not_run |= {client: "not installed" for client in CLIENTS if version_of(client) is None}
    with tempfile.TemporaryDirectory() as place:
        FOLDER = Path(place)
        for trial in TRIALS:
            if trial.client not in options.clients or trial.client in not_run:
                continue
            done = {row["run"] for row in table if (row["client"], row["use"]) == (trial.client, trial.use)}
            runs = trial.runs[:1] if options.quick else trial.runs
            table += [row_of(trial, name) for name in runs if name not in done]
            table.sort(key=lambda row: ORDER.index((row["client"], row["use"])))
            save(options, "clients", {"holds": all(row["holds"] for row in table), "table": table, "not_run": not_run})
    header = ("client", "use", "run", "form", "difference", "holds")
    show("clients", header, [[row[name] for name in header] for row in table])
    print(*(f"not run: {name}, {reason}" for name, reason in not_run.items()), sep="\n")


if __name__ == "__main__":
    main()
