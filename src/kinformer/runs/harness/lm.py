"""A run as the model ``kinformer`` of EleutherAI's lm-evaluation-harness (Gao et al. 2021).

What it means is the harness's: context and continuation are tokenised together, trailing blanks of a context belong to
the continuation, an empty context is the prefix token, of what is too long the end counts, a text without a context is
scored in windows. What is its own is the way there: see ``evaluation.continuations``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kinformer.core.model import CausalModel
from kinformer.data.tokenizer import prompt_ids
from kinformer.evaluation.bits import CHUNK
from kinformer.evaluation.continuations import Continuation, ContinuationScorer, Score
from kinformer.generation.stops import ends_of_text
from kinformer.runs.continuing import require_continuing
from kinformer.runs.harness.texts import Prompt, continued, drawing_of
from kinformer.runs.options import Machine
from kinformer.runs.run import Run, open_run
from kinformer.runtime.errors import KinformerError, require
from kinformer.tasks.shared.lengths import tell_untrained
from kinformer.tasks.shared.options import NextTokenEvaluationOptions
from kinformer.tasks.shared.text import CARRIED, check_positions, main_windows

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as error:
    raise KinformerError(
        "the harness needs the package 'lm_eval', which is not installed; run pip install 'kinformer[harness]'."
    ) from error

AUTO = "auto"
INSTEAD = "kinformer evaluate without the harness"
"""What runs that look things up are measured with."""


@register_model("kinformer")
class KinformerLM(TemplateLM):  # type: ignore[misc]
    """A run of next-token, as ``--model kinformer --model_args run=FOLDER`` names it.

    run: its folder.
    context: how many tokens the model reads at most, or "carried": all, and a rolling text whole, with its state
        carried. If not given, as the run was trained: carried after training by segments, else the training length.
    chunk: tokens that are computed at a time; changes no result.
    batch_size: the most contexts that are absorbed at a time, and texts that are continued; "auto" for what ``chunk``
        allows. ``max_batch_size`` bounds "auto".
    device: "auto", and "cuda" where there is none, is the GPU if there is one, else the CPU.
    set: overrides of the config that leave the weights as they are, from Python alone.
    quiet: no bars.
    """

    def __init__(
        self,
        run: str | Path,
        context: str | int | None = None,
        chunk: int = CHUNK,
        batch_size: str | int | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        set: Mapping[str, object] | None = None,
        quiet: bool = False,
    ) -> None:
        super().__init__()
        opened = open_run(run)
        require_continuing(opened, INSTEAD)
        self.run, self.quiet = opened, quiet
        self.rows = max_batch_size
        self.generator: torch.Generator | None = None
        """What texts are drawn with; None is PyTorch's global generator, which the harness's own command seeds."""
        if batch_size is not None and batch_size != AUTO:
            self.rows = whole_number("batch_size", batch_size)
        self.chunk = whole_number("chunk", chunk)
        self._device = _device(device)
        self.model = opened.model(set).to(self._device)
        self.length = _length(opened, self.model, context)
        tokenizer = opened.tokenizer
        assert tokenizer is not None
        self.tokenizer_of_run = tokenizer
        self.requests = self.cut = 0
        """How many requests with a context there were, and of how many the end alone was read."""
        self._encoded = lru_cache(maxsize=64)(lambda text: prompt_ids(tokenizer, text).tolist())

    @property
    def eot_token_id(self) -> int:
        """Return the id that ends a text; of a run that knows none, what stands before one."""
        return next(iter(ends_of_text(self.model)), self._newline)

    @property
    def _newline(self) -> int:
        """The last id of a new line, behind which a text may begin."""
        return int(self._encoded("\n")[-1])

    @property
    def prefix_token_id(self) -> int:
        """Return the id that stands for an empty context: BOS where prompts begin with it, else the end of a text."""
        return next(iter(self.tokenizer_of_run.prefix), self.eot_token_id)

    @property
    def tokenizer_name(self) -> str:
        """Return what identifies the run's tokenizer in caches of requests."""
        return self.tokenizer_of_run.fingerprint

    def get_model_info(self) -> dict[str, object]:
        """Return what the harness writes beside its results."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        context = CARRIED if self.length is None else self.length
        about: dict[str, object] = {"run": str(self.run.folder), "member": self.run.member, "context": context}
        return about | {"prefix_token_id": self.prefix_token_id, "model_num_parameters": parameters}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: object) -> list[int]:
        """Return the ids of ``string`` as a prompt: behind BOS where the run's prompts begin with it."""
        return list(self._encoded(string))

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation in nats, and whether it is what greedy decoding gives."""
        encoded = [self._encode(*request.args) for request in requests]
        arguments = [request.args for request in requests]
        return self._loglikelihood_tokens(
            [(pair, *ids) for pair, ids in zip(arguments, encoded, strict=True)], disable_tqdm=disable_tqdm
        )

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text in nats: in the harness's windows, or with the state carried."""
        windows = [(number, part) for number, request in enumerate(requests) for part in self._windows(*request.args)]
        totals = [0.0] * len(requests)

        def add(index: int, score: Score) -> None:
            totals[windows[index][0]] += score.log_likelihood

        self._score([Continuation(tuple(a), tuple(b)) for _, (a, b) in windows], add, disable_tqdm)
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return what continues each context, until a stop string appears, which is left out."""
        prompts = [
            Prompt(self._encoded(context) or [self.prefix_token_id], options)
            for context, options in (request.args for request in requests)
        ]
        self._note_cuts(len(prompt.tokens) + drawing_of(prompt.options).max_new_tokens for prompt in prompts)
        texts = [""] * len(prompts)
        with self._bar("generate_until", len(prompts), disable_tqdm) as bar:
            for number, text in continued(
                self.model, self.tokenizer_of_run, prompts, self.length, self.rows, self.generator
            ):
                texts[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
                bar.update()
        return texts

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, Sequence[int], Sequence[int]]],
        disable_tqdm: bool = False,
        **options: object,
    ) -> list[tuple[float, bool]]:
        self._note_cuts(len(a) + len(b) - 1 for _, a, b in requests)
        results = [(0.0, True)] * len(requests)

        def note(index: int, score: Score) -> None:
            results[index] = (score.log_likelihood, score.greedy)
            if requests[index][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[index][0], results[index])

        self._score([Continuation(tuple(a), tuple(b)) for _, a, b in requests], note, disable_tqdm)
        return results

    def _score(self, continuations: list[Continuation], note: Callable[[int, Score], None], disable_tqdm: bool) -> None:
        scorer = ContinuationScorer(self.model, self.length, chunk=self.chunk, rows=self.rows)
        with self._bar("loglikelihood", len(continuations), disable_tqdm) as bar:
            for index, score in scorer.scores(continuations):
                note(index, score)
                bar.update()

    def _encode(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of both, tokenised together; before a continuation alone stands the prefix token."""
        if context:
            return self._encode_pair(context, continuation)  # type: ignore[no-any-return]
        ids, prefix = self.tok_encode(continuation), self.prefix_token_id
        return (ids[:1], ids[1:]) if ids[:1] == [prefix] else ([prefix], ids)

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """Return the windows of a text: the tokens to predict, each once, and what stands before them."""
        ids = self.tok_encode(text)
        if self.length is None:
            return [([self.prefix_token_id], ids)]
        windows = get_rolling_token_windows(
            token_list=ids, prefix_token=self.prefix_token_id, max_seq_len=self.length, context_len=1
        )
        return [make_disjoint_window(window) for window in windows]

    def _note_cuts(self, lengths: Iterable[int]) -> None:
        for tokens in lengths:
            self.requests += 1
            self.cut += self.length is not None and tokens > self.length

    def _bar(self, what: str, total: int, disabled: bool) -> tqdm:
        return tqdm(total=total, desc=f"Running {what} requests", disable=True if disabled or self.quiet else None)


def whole_number(name: str, value: str | int) -> int:
    """Return ``value`` of the model's argument ``name``, which may be text, as a whole number of 1 or more."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise KinformerError(f"`{name}` is {value!r} but must be a whole number of 1 or more.") from None
    require(name, number, 1)
    return number


def _device(name: str | None) -> torch.device:
    """Return the device that is meant; the harness's command names cuda:0 where nobody names one."""
    name = AUTO if name is None or (name.startswith("cuda") and not torch.cuda.is_available()) else name
    return Machine(device=name).usable_device()


def _length(run: Run, model: CausalModel, context: str | int | None) -> int | None:
    """Return how many tokens the model reads at most, None if the state is carried however many there are."""
    options = NextTokenEvaluationOptions(context=None if context is None else str(context))
    windows = main_windows(run, model, options)
    check_positions(model, windows)
    tell_untrained(run, 0 if windows is None else windows.context)
    return None if windows is None else windows.context
