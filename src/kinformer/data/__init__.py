"""Embedded and user data: corpora, tokenizers, the order of training, the protocol of measuring, a baseline."""

from kinformer.data.corpus import Corpus, default_cache, open_corpus
from kinformer.data.evaluation import EvaluationStream, Segment
from kinformer.data.files import spool
from kinformer.data.ngram import NgramModel
from kinformer.data.sampler import RandomWindows, Sampler, SegmentStreams
from kinformer.data.split import Split
from kinformer.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, train_tokenizer

__all__ = [
    "ByteTokenizer",
    "Corpus",
    "EvaluationStream",
    "FileTokenizer",
    "NgramModel",
    "RandomWindows",
    "Sampler",
    "Segment",
    "SegmentStreams",
    "Split",
    "Tokenizer",
    "default_cache",
    "open_corpus",
    "spool",
    "train_tokenizer",
]
