"""Embedded and user data: corpora, tokenizers, the order of training, the protocol of evaluation, a baseline."""

from kinformer.lab.data.buckets import IGNORED, BosEos, Buckets, Rows
from kinformer.lab.data.corpus import Corpus, open_corpus
from kinformer.lab.data.files import spool
from kinformer.lab.data.images import ImageData, Images, read_images
from kinformer.lab.data.labelled import Examples, Labelled, open_labelled
from kinformer.lab.data.ngram import NgramModel
from kinformer.lab.data.packed import first_bytes
from kinformer.lab.data.sampling import EvaluationStream, RandomWindows, Sampler, Segment, SegmentStreams, Split
from kinformer.lab.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, train_tokenizer, train_tokenizer_on

__all__ = [
    "IGNORED", "Buckets", "ByteTokenizer", "Corpus", "BosEos", "EvaluationStream", "Examples", "FileTokenizer",
    "ImageData", "Images", "Labelled", "NgramModel", "RandomWindows", "Rows", "Sampler", "Segment", "SegmentStreams",
    "Split", "Tokenizer", "first_bytes", "open_corpus", "open_labelled", "read_images", "spool",
    "train_tokenizer", "train_tokenizer_on",
]  # fmt: skip
