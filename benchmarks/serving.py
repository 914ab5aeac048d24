"""A server under load: 64 streams at a time for ten minutes, beside one stream.

    python benchmarks/serving.py            # about twelve minutes on two cores

The server is ``kinformer serve`` in a process of its own; the clients are streams of OpenAI's client. Every client
sends one request after another: prompts of 1 to 200 bytes, 1 to 200 new tokens, a seed. Watched are the memory of the
server, tokens a second, the time to a first piece, and, for some of the requests, whether the text is what
``kinformer.generate`` makes of prompt and seed.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

import kinformer
from common import arguments, prepare, save, show

STREAMS, MINUTES, ALONE_SECONDS, CHECKED = 64, 10.0, 45.0, 16
MEMBER, DIM, LAYERS, LENGTH = "linear-transformer", 256, 4, 256
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 400


@dataclass
class Load:
    """What clients saw: tokens, seconds to a first piece, and the (prompt, tokens, seed, text) of requests."""

    tokens: int = 0
    requests: int = 0
    first: list[float] = field(default_factory=list)
    texts: list[tuple[str, int, int, str]] = field(default_factory=list)


def resident(process: subprocess.Popen[str]) -> int:
    """The bytes of memory that a process holds."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    match = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert match is not None
    return 1024 * int(match[1])


async def client_of(url: str, number: int, end: float, load: Load) -> None:
    """Send requests one after another until ``end``; the last one is awaited."""
    draw = random.Random(number)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        while time.monotonic() < end:
            start = draw.randrange(len(TEXT) - 200)
            prompt, new, seed = (
                TEXT[start : start + draw.randint(1, 200)],
                draw.randint(1, 200),
                draw.randrange(1 << 30),
            )
            begun, text = time.monotonic(), ""
            stream = await client.completions.create(
                model="run", prompt=prompt, max_tokens=new, seed=seed, temperature=0.8, stream=True
            )
            async for part in stream:
                if not text:
                    load.first.append(time.monotonic() - begun)
                text += part.choices[0].text
            load.tokens += new
            load.requests += 1
            if len(load.texts) < CHECKED:
                load.texts.append((prompt, new, seed, text))


async def loaded(
    url: str, process: subprocess.Popen[str], streams: int, seconds: float
) -> tuple[Load, list[int], float]:
    """The load of ``streams`` clients for ``seconds``; the server's memory every five seconds; the seconds taken."""
    load, begun = Load(), time.monotonic()
    tasks = [asyncio.create_task(client_of(url, number, begun + seconds, load)) for number in range(streams)]
    memory = []
    while not all(task.done() for task in tasks):
        memory.append(resident(process))
        await asyncio.wait(tasks, timeout=5)
    await asyncio.gather(*tasks)
    return load, memory, time.monotonic() - begun


def begun_server(folder: Path, threads: int) -> tuple[subprocess.Popen[str], str]:
    """A server of the run in ``folder`` and its address."""
    command = [sys.executable, "-m", "kinformer", "serve", str(folder), "--port", "0", "--device", "cpu"]
    command += ["--threads", str(threads), "--max-streams", str(STREAMS)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if match := re.search(r"http://[\d.]+:\d+", line):
            return process, match[0]
    raise SystemExit("the server did not begin")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="how long 64 streams are served")
    options = prepare(parser)
    seconds = 10.0 if options.quick else 60 * options.minutes
    streams, threads = (8 if options.quick else STREAMS), options.threads or 2
    result: dict[str, Any] = {"member": MEMBER, "dim": DIM, "layers": LAYERS, "streams": streams}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        (Path(place) / "text.txt").write_text(TEXT, encoding="utf-8")
        sizes = {"set": {"dim": DIM, "layers": LAYERS}, "length": LENGTH, "steps": 20, "batch_size": 4}
        kinformer.train(MEMBER, data=Path(place) / "text.txt", out=folder, device="cpu", threads=threads, **sizes)
        process, url = begun_server(folder, threads)
        try:
            one, _, taken_alone = asyncio.run(loaded(url, process, 1, 5 if options.quick else ALONE_SECONDS))
            load, memory, taken = asyncio.run(loaded(url, process, streams, seconds))
        finally:
            process.terminate()
            process.wait(30)
        equal = sum(
            text == "".join(kinformer.stream(folder, prompt, max_new_tokens=new, seed=seed, temperature=0.8))
            for prompt, new, seed, text in load.texts
        )
    tail = memory[len(memory) // 10 :]
    result |= {
        "seconds": taken,
        "requests": load.requests,
        "tokens_per_second": load.tokens / taken,
        "tokens_per_second_alone": one.tokens / taken_alone,
        "seconds_to_first_piece": {"median": statistics.median(load.first), "largest": max(load.first)},
        "memory_bytes": {"every_5_seconds": memory, "least": min(tail), "most": max(tail), "last": memory[-1]},
        "checked_requests": len(load.texts),
        "equal_to_generate": equal,
    }
    show(
        "serving",
        ["streams", "tokens/s", "first piece, median s"],
        [
            [1, result["tokens_per_second_alone"], statistics.median(one.first)],
            [streams, result["tokens_per_second"], result["seconds_to_first_piece"]["median"]],
        ],
    )
    print(f"memory after a tenth of the time: {min(tail):,} to {max(tail):,} bytes, last {memory[-1]:,}")
    print(f"equal to generate: {equal} of {len(load.texts)}")
    save(options, "serving", result)


if __name__ == "__main__":
    main()
