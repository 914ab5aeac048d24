"""Embedded and user data: corpora, tokenizers, the order of training, the protocol of evaluation, a baseline."""

from kinformer.data.buckets import IGNORED, BosEos, Buckets, Rows
from kinformer.data.corpus import Corpus, open_corpus
from kinformer.data.evaluation import EvaluationStream, Segment
from kinformer.data.examples import Examples, Labelled
from kinformer.data.files import spool
from kinformer.data.images import ImageData, Images, read_images
from kinformer.data.labelled import open_labelled
from kinformer.data.ngram import NgramModel
from kinformer.data.sampler import RandomWindows, Sampler, SegmentStreams
from kinformer.data.split import Split
from kinformer.data.stored import default_cache
from kinformer.data.tokenised import first_bytes
from kinformer.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, train_tokenizer, train_tokenizer_on

__all__ = [
    "IGNORED",
    "Buckets",
    "ByteTokenizer",
    "Corpus",
    "BosEos",
    "EvaluationStream",
    "Examples",
    "FileTokenizer",
    "ImageData",
    "Images",
    "Labelled",
    "NgramModel",
    "RandomWindows",
    "Rows",
    "Sampler",
    "Segment",
    "SegmentStreams",
    "Split",
    "Tokenizer",
    "default_cache",
    "first_bytes",
    "open_corpus",
    "open_labelled",
    "read_images",
    "spool",
    "train_tokenizer",
    "train_tokenizer_on",
]
