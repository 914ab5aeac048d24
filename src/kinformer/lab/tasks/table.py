"""The one table of tasks, each a record. The trainer, the command line and the Python functions read it.

A record names its functions as ``"page:function"``, where a page is a module beside this file (``task.py``). Processes
that train together get a run, and so the record of its task, as a pickle: a lambda in it would break them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from kinformer.core.model import PROTOCOLS, CausalModel, SourceModel, WholeModel
from kinformer.lab.control import options as acting
from kinformer.lab.tables import PredictionTable
from kinformer.lab.tasks import options
from kinformer.lab.tasks.task import (
    NOTHING_DRAWN,
    OF_TEXTS,
    DataNeeds,
    EvaluationNeeds,
    Generation,
    Models,
    Prediction,
    Task,
)
from kinformer.lab.training import logging as metric
from kinformer.runtime import plugins
from kinformer.runtime.errors import KinformerError, choose, marked, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from kinformer.core.stack import ModelConfig


def refuse(names: str, why: str) -> dict[str, str]:
    """Return the options ``names``, each refused for the reason ``why``."""
    return dict.fromkeys(names.split(), why)


def implement(page: str, functions: str) -> dict[str, Any]:
    """Return functions of ``page`` for methods of a record: "check", or "measure=evaluate" for another name."""
    pairs = (item.partition("=") for item in functions.split())
    return {method: f"{page}:{name or method}" for method, _, name in pairs}


def needs_of(default: str, refused: str, why: str) -> DataNeeds:
    """Return the needs of a task with the ``default`` data, for which the options ``refused`` mean nothing."""
    return DataNeeds(default=default, refused=refuse(refused, why))


def described(source: Any, options: Any, cache: Any = None) -> Any:
    """Return the data that the ``options`` of a task describe."""
    return options.data


def environment(source: Any, options: Any, cache: Any = None) -> Any:
    """Return the data of the environment that ``options`` name."""
    return acting.open_environment(options, "env" in source.by_user)


READS_WHOLE_TEXTS = "it reads whole texts and continues none; give a run of next-token."
NO_CLASSES = "it tells no classes yet; train it on for the task vision, with `init`."
NO_SEED = EvaluationNeeds(refused={"seed": NOTHING_DRAWN})
OF_TEXT, MADE = "tokenizer train_tokenizer text_field", "data holdout tokenizer train_tokenizer"
"""The options that mean nothing to data other than text, and to data that a task makes."""
OF_IMAGES = needs_of("digits", OF_TEXT, "is for text, not for images; leave it out.")
OF_PATCHES = EvaluationNeeds(
    refused={**NO_SEED.refused, "chunk": "is for tokens, and images are computed some at a time; leave it out."}
)
ONE_EPISODE = Generation(
    prompt=None, reads=(), unread="one episode is played, and `action_temperature` says how actions are drawn"
)

CLASSIFY = Task(
    name="classify",
    title="classification",
    description=(
        "Learns to tell the classes of examples: a folder with a folder per class, or a table, .csv, .tsv or "
        ".jsonl. Measured by accuracy, beside the most frequent class and, with scikit-learn, character n-grams."
    ),
    models=Models(protocols=(WholeModel, CausalModel), inputs=("tokens",), made_for={"head": "classification"}),
    data=DataNeeds(
        missing="the task needs labelled examples; give `data` FOLDER, FILE.csv, FILE.tsv or FILE.jsonl.",
        tokenized=True,
        columns=True,
    ),
    evaluation=EvaluationNeeds(refused={"first": "is for text, not for examples; leave it out.", **NO_SEED.refused}),
    generation=Generation(refusal=READS_WHOLE_TEXTS),
    prediction=Prediction(reads=("top_k", *OF_TEXTS)),
    metrics=(metric.ACCURACY, metric.BITS_PER_LABEL),
    objectives={"classification": "classify:Classification"},
    settings={"batch_size": 32},
    in_minutes={"set": dict.fromkeys(("dropout", "layers.*.dropout"), 0.1)},
    rivals={"guessing": "the most frequent class", "character_ngrams": "character n-grams with logistic regression"},
    advice="give more `minutes`, `steps` or examples, or begin with a pretrained run by `init`",
    use="kinformer predict {} FILE",
    Options=options.ClassifyOptions,
    EvaluationOptions=PredictionTable,
    embed="texts:embed_texts",
    **implement(
        "classify",
        "default_vocabulary vocab_size row_lengths fit check tell predict open=open_examples texts=texts_of "
        "data_module=training_rows measure=evaluate",
    ),
)
MPP = Task(
    name="mpp",
    title="colours of masked patches",
    description=(
        "An encoder of images learns without labels, as BERT does of text (masked patch prediction of ViT): half "
        "of an image's patches are corrupted, most by a mask, and it predicts the mean colour of each. The task "
        "vision begins with the run by `init`; mae is the later form. Measured in bits per colour, beside "
        "counting colours."
    ),
    models=Models(protocols=(WholeModel,), inputs=("patches",)),
    data=OF_IMAGES,
    evaluation=OF_PATCHES,
    generation=Generation(refusal=NO_CLASSES),
    prediction=Prediction(refusal=NO_CLASSES),
    metrics=(metric.Metric("bits_per_colour", "bits per colour of a corrupted patch"), metric.ACCURACY),
    objectives={"patch-colours": "mae:PatchColours"},
    rivals={"counted": "counting colours"},
    advice="give more `minutes`, `steps` or images",
    Options=options.MppOptions,
    length="vision:length_of",
    **implement("images", "open=open_images embed=embed_pictures"),
    **implement(
        "mae",
        "suits=suits_colours fit=fitted_to_colours check=check_colours data_module=MppRows measure=evaluate_colours",
    ),
)
RECORDS = (
    Task(
        name="next-token",
        title="next token",
        description=(
            "Learns to predict every token of a text from those before it, and continues texts. Measured in bits per "
            "byte of held-out text, with a 5-gram model as the baseline."
        ),
        models=Models(protocols=(CausalModel,), inputs=("tokens",)),
        data=DataNeeds(default="stdlib", tokenized=True, running_text=True),
        evaluation=NO_SEED,
        generation=Generation(),
        prediction=Prediction(refusal="it continues texts; use kinformer generate, or kinformer embed for vectors."),
        metrics=(metric.BITS_PER_BYTE,),
        objectives={
            "next-token": "next_token:token_loss",
            "deep-supervision": "next_token:DeepSupervision",
            "exits": "next_token:ExitLosses",
            "multi-token": "next_token:MultiToken",
        },
        rivals={"ngram_bits_per_byte": "a 5-gram model"},
        advice="give more `minutes` or `steps`, or a longer text",
        use='kinformer generate {} "It was "',
        Options=options.NextTokenOptions,
        EvaluationOptions=options.NextTokenEvaluationOptions,
        **implement("texts", "open=open_text embed=embed_texts"),
        vocab_size=attrgetter("tokenizer.vocab_size"),
        **implement("next_token", "check data_module=training_rows generate=continue_text"),
        **implement("next_token_evaluation", "evaluate samples=TextSamples"),
    ),
    Task(
        name="instruct",
        title="answers to instructions",
        description=(
            "Learns to answer as in conversations, JSON lines of messages, or of a prompt and a completion. The chat "
            "template of the run that it begins with writes each conversation, and only the tokens of the answers are "
            "learnt. Measured in bits per byte of held-out answers, beside the run that it began with."
        ),
        models=Models(protocols=(CausalModel,), inputs=("tokens",)),
        data=DataNeeds(
            missing="the task needs conversations; give `data` FILE.jsonl.",
            tokenized=True,
            lines=(("messages",), ("prompt", "completion")),
            refused=refuse(
                "train_tokenizer text_field", "is for running text; conversations are read with the run's tokenizer."
            ),
        ),
        evaluation=NO_SEED,
        generation=Generation(),
        prediction=Prediction(refusal="it answers messages; use kinformer chat, generate or serve."),
        metrics=(metric.ANSWER_BITS,),
        settings={"lr": 2e-4, "weight_decay": 0.0},
        objectives={"answers": "answers:AnswersLoss"},
        use="kinformer chat {}",
        Options=options.InstructOptions,
        generate="next_token:continue_text",
        embed="texts:embed_texts",
        vocab_size=attrgetter("vocab_size"),
        **implement("instruct", "check tell open=open_conversations data_module=InstructRows measure=evaluate"),
    ),
    Task(
        name="recall",
        title="recall",
        description=(
            "Learns to tell which value stood behind a key (multi-query associative recall, Arora et al. 2023). "
            "Measured by accuracy over all queries and by the number of pairs; of k pairs, guessing one of the values "
            "is right in 1/k."
        ),
        models=Models(protocols=(CausalModel,), inputs=("tokens",)),
        data=needs_of("recall", MADE, "recall makes its own rows of symbols; leave it out."),
        evaluation=EvaluationNeeds(
            refused=refuse("data first", "recall makes its own rows; leave it out, or give `rows` and `at_pairs`.")
        ),
        generation=Generation(reads=(), unread="a key has one answer, the most probable"),
        prediction=Prediction(reads=("text_field", "label_field", "format")),
        metrics=(metric.ACCURACY, metric.BITS_PER_LABEL),
        objectives={"recall": "recall:RecallLoss"},
        in_minutes={
            "recipe": "tiny",
            "batch_size": 64,
            "lr": 1e-2,
            "set": {"dim": 64, "initialisation.scheme": "framework"},
        },
        rivals={"guessing": "guessing a value of the row"},
        advice="keys are found only after some hundred steps: give more `minutes` or `steps`, or fewer `pairs`",
        Options=options.RecallOptions,
        EvaluationOptions=options.RecallEvaluationOptions,
        open=described,
        vocab_size=attrgetter("symbols"),
        **implement("recall", "row_lengths check generate predict data_module=RecallData measure=evaluate"),
    ),
    Task(
        name="algorithm",
        title="algorithm",
        description=(
            "Learns an algorithm on digits (copy, reverse, addition, parity) from problems of lengths drawn from a "
            "range. Measured by the share of right tokens of answers and of solved problems, by length, up to four "
            "times the longest of training."
        ),
        models=Models(protocols=(CausalModel,), inputs=("tokens",)),
        data=needs_of("algorithm", MADE, "an algorithm makes its own problems; leave it out."),
        evaluation=EvaluationNeeds(
            refused=refuse("data first", "an algorithm makes its own problems; give `problems` and `at_digits`.")
        ),
        generation=Generation(reads=(), unread="a problem has one answer, the most probable"),
        prediction=Prediction(reads=("text_field", "label_field", "format")),
        metrics=(metric.ACCURACY, metric.SEQUENCE_ACCURACY, metric.BITS_PER_LABEL),
        objectives={"answers": "algorithm:AlgorithmLoss"},
        rivals={"most_frequent_token": "the most frequent token"},
        advice="give more `minutes` or `steps`, fewer `digits`, or `lr` 0.003",
        Options=options.AlgorithmOptions,
        EvaluationOptions=options.AlgorithmEvaluationOptions,
        open=described,
        **implement("algorithm", "vocab_size check generate predict data_module=AlgorithmModule measure=evaluate"),
    ),
    Task(
        name="image",
        title="image",
        description=(
            "Learns to draw images value by value (IDX files, .npz, a folder of pictures, or 1,797 handwritten "
            "digits). Measured in bits per dimension, every value scored, beside counts by place and by known "
            "neighbours; generate writes a PNG, `complete` the rest of occluded images."
        ),
        models=Models(protocols=(CausalModel,), inputs=("pixels",), from_tokens=True),
        data=OF_IMAGES,
        evaluation=NO_SEED,
        generation=Generation(
            prompt=None,
            temperature=1.0,
            reads=("temperature", "top_k", "top_p", "min_p", "samples", "chunk"),
            unread="an image has a size, and ends with its last pixel",
        ),
        prediction=Prediction(refusal="it draws images; use kinformer generate."),
        metrics=(metric.BITS_PER_DIM,),
        objectives={"pixels": "image:PixelLoss"},
        rivals={"histogram": "counting at every place", "neighbours": "counting by four neighbours"},
        advice="give more `minutes` or `steps`, or a larger `recipe`",
        use="kinformer generate {} --out drawn.png",
        Options=options.ImageOptions,
        EvaluationOptions=options.ImageEvaluationOptions,
        GenerationOptions=options.ImageGenerationOptions,
        **implement("images", "open=open_images check_generation=check_png"),
        **implement(
            "image",
            "fit requested length check vocab_size=values_of data_module=ImageRows measure=evaluate generate=draw",
        ),
    ),
    Task(
        name="trajectories",
        title="trajectories",
        description=(
            "Learns from episodes (an .npz of observations, actions, rewards and episode_ends, a folder of such files, "
            "minari:NAME, or random walks in key-to-door or shortest-path) which action followed a return to go and a "
            "state. Measured by held-out actions, and in an environment (`env`) by the return for every target return, "
            "beside cloned behaviour and the best of the data."
        ),
        models=Models(protocols=(CausalModel,), made_for={"input": "steps"}),
        data=needs_of("key-to-door", OF_TEXT, "is for text, not for trajectories; leave it out."),
        evaluation=EvaluationNeeds(refused={"first": "is for text, not for trajectories; leave it out."}),
        generation=ONE_EPISODE,
        prediction=Prediction(reads=("top_k", "batch_size")),
        metrics=(metric.BITS_PER_ACTION, metric.ACCURACY),
        objectives={"actions": "trajectories:ActionLoss"},
        in_minutes={"length": 60},
        rivals={"most_frequent_action": "the most frequent action", "cloning": "cloned behaviour"},
        advice="give more `minutes`, `steps` or episodes, or ask for a return that the data reaches",
        Options=acting.TrajectoryOptions,
        EvaluationOptions=acting.TrajectoryEvaluationOptions,
        GenerationOptions=acting.TrajectoryGenerationOptions,
        **implement(
            "trajectories",
            "predict names=names_data open=open_episodes fit=fitted check=check_plan "
            "data_module=training_rows measure=evaluate generate=play",
        ),
    ),
    Task(
        name="control",
        title="control",
        description=(
            "Acts in an environment (`env`: t-maze, poc-memory, masked-cartpole, or gymnasium's) and learns from its "
            "rewards by proximal policy optimisation, with the model's state carried from step to step. Measured by "
            "the mean return of new episodes, beside random actions."
        ),
        models=Models(protocols=(CausalModel,), made_for={"input": "observations"}),
        data=DataNeeds(
            default="control",
            refused=refuse(MADE, "control learns by acting in `env`; leave it out.")
            | {
                "devices": "control acts in one process; leave it out.",
                "validation_tokens": "control is validated by acting; leave it out.",
            },
        ),
        evaluation=EvaluationNeeds(
            refused=refuse(
                "data split first chunk", "control acts in new episodes; leave it out, or give `env` and `episodes`."
            )
        ),
        generation=ONE_EPISODE,
        prediction=Prediction(),
        metrics=(metric.RETURN,),
        objectives={"policy": "control:policy_loss"},
        settings={"length": 32, "batch_size": 32, "lr": 3e-4},
        # The value's squared errors of returns of some hundreds would outweigh the policy in weights that both share.
        in_minutes={
            "recipe": "tiny",
            "batch_size": 16,
            "lr": 3e-3,
            "ema": 0.0,
            "entropy_weight": 0.0,
            "value_weight": 0.01,
        },
        rivals={"random": "random actions"},
        advice="give more `minutes` or `steps`, or another `lr`",
        Options=acting.ControlOptions,
        EvaluationOptions=acting.ControlEvaluationOptions,
        GenerationOptions=acting.ControlGenerationOptions,
        open=environment,
        **implement(
            "control",
            "predict fit=fitted check=check_plan data_module=training_rows measure=evaluate generate=play_episode",
        ),
    ),
    Task(
        name="mlm",
        title="masked language modelling",
        description=(
            "Learns to predict masked tokens of a text from all others. Measured in bits per masked byte (with a "
            "tokenizer, per masked token) and accuracy, with counts of tokens and of pairs of tokens as baselines."
        ),
        models=Models(protocols=(WholeModel,), inputs=("tokens",), made_for={"head": "masked_language"}),
        data=DataNeeds(default="stdlib", tokenized=True, running_text=True),
        generation=Generation(refusal=READS_WHOLE_TEXTS),
        prediction=Prediction(reads=("top_k", *OF_TEXTS)),
        metrics=(metric.bits_per_masked("byte"), metric.ACCURACY),
        objectives={"masked-language": "mlm:MaskedLanguage", "mlm-cpc": "mlm:MaskedLanguageCpc"},
        rivals={"unigram_bits": "the frequency of tokens", "bigram_bits": "the frequency of pairs of tokens"},
        advice="give more `minutes` or `steps`, or a longer text",
        use="kinformer predict {} FILE",
        Options=options.MlmOptions,
        EvaluationOptions=PredictionTable,
        PredictionOptions=options.MaskPredictionOptions,
        **implement("texts", "open=open_text embed=embed_texts"),
        **implement("mlm", "vocab_size fit check predict data_module=training_rows measure=evaluate"),
    ),
    CLASSIFY,
    CLASSIFY.derive(
        name="listops",
        title="ListOps",
        description=(
            "Learns what nested lists compute (Nangia and Bowman 2018), as long as in the Long Range Arena. Measured "
            "by accuracy; a tenth to a sixth is right by guessing."
        ),
        data=needs_of("listops", f"{MADE} text_field", "ListOps brings its own data and symbols; leave it out."),
        evaluation=EvaluationNeeds(
            refused={**CLASSIFY.evaluation.refused, "data": "ListOps brings its own data; leave it out."}
        ),
        settings={},
        in_minutes={},
        rivals={"guessing": "the most frequent class"},
        advice="give more `minutes` or `steps`, more `examples`, and a `length` that cuts no expression",
        use="",
        Options=options.ListOpsOptions,
    ),
    Task(
        name="speech",
        title="speech",
        description=(
            "Learns to write speech down: a folder of WAV or FLAC files with transcripts in a table or in their "
            "names, or telephone tones. Measured by the error rate, by character, label or word, with empty "
            "transcripts as the baseline. Encoders hear whole utterances; causal members write while sound comes."
        ),
        models=Models(
            protocols=(WholeModel, CausalModel), inputs=("frames",), from_tokens=True, made_for={"head": "ctc"}
        ),
        data=needs_of("dtmf", OF_TEXT, "is for text; the symbols of speech come from its transcripts."),
        evaluation=EvaluationNeeds(refused={"first": "is for text, not for sound; leave it out.", **NO_SEED.refused}),
        generation=Generation(prompt=None, reads=(), unread="sound has one transcript, the most probable"),
        prediction=Prediction(reads=("skip_bad",)),
        metrics=(metric.ERROR_RATE, metric.BITS_PER_SYMBOL),
        objectives={"ctc": "speech:CTC"},
        rivals={"empty": "empty transcripts", "most_frequent": "the most frequent transcript"},
        advice="give more `minutes` or `steps`, or more recordings",
        use="kinformer predict {} FOLDER",
        Options=options.SpeechOptions,
        EvaluationOptions=options.SpeechEvaluationOptions,
        GenerationOptions=options.SpeechGenerationOptions,
        PredictionOptions=options.SpeechPredictionOptions,
        **implement(
            "speech",
            "fit row_lengths check predict embed open=open_clips data_module=SpeechRows measure=evaluate "
            "generate=transcribe",
        ),
    ),
    Task(
        name="vision",
        title="image classification",
        description=(
            "Learns to tell the classes of images: IDX files, an .npz archive, or a folder with a folder of pictures "
            "per class. Measured by accuracy; the baseline always predicts the most frequent class. generate tells the "
            "most probable classes of pictures."
        ),
        models=Models(protocols=(WholeModel,), inputs=("patches", "tiles"), from_tokens=True),
        data=OF_IMAGES,
        evaluation=OF_PATCHES,
        generation=Generation(
            prompt=None, temperature=1.0, reads=("samples",), unread="nothing is drawn where images are classified"
        ),
        prediction=Prediction(reads=("top_k", "batch_size", "skip_bad")),
        metrics=(metric.ACCURACY, metric.BITS_PER_LABEL),
        objectives={"classification": "vision:class_loss"},
        rivals={"guessing": "the most frequent class"},
        advice="give more `minutes` or `steps`, a larger `batch_size`, or `recipe` tiny for few images",
        use="kinformer predict {} FOLDER",
        Options=options.VisionOptions,
        EvaluationOptions=PredictionTable,
        GenerationOptions=options.VisionGenerationOptions,
        embed="images:embed_pictures",
        **implement(
            "vision",
            "predict open=open_classes fit=fitted length=length_of check=check_images "
            "data_module=ImageRows measure=evaluate generate=classify",
        ),
    ),
    Task(
        name="dino",
        title="self-distillation of images",
        description=(
            "An encoder of images learns without labels (DINO): from a small view of an image, a student predicts the "
            "output of a teacher, the running mean of its weights, for a large view. `level` chooses the encoder of a "
            "pyramid (hipt) that learns; the next one, and the task vision, begin with the run by `init`. Where images "
            "have labels, evaluate predicts the class from the nearest training images."
        ),
        models=Models(protocols=(WholeModel,), inputs=("patches", "tiles")),
        data=replace(
            OF_IMAGES,
            refused={
                **OF_IMAGES.refused,
                "validation_tokens": "self-distillation is validated by a fixed number of images; leave it out.",
            },
        ),
        evaluation=OF_PATCHES,
        generation=Generation(refusal=NO_CLASSES),
        prediction=Prediction(refusal=NO_CLASSES),
        metrics=(metric.ACCURACY,),
        objectives={"self-distillation": "dino:self_distillation"},
        settings={"validate_every": 0},
        in_minutes={"ema": 0.0},
        rivals={"guessing": "the most frequent class"},
        advice="give more `minutes`, `steps` or images",
        Options=options.DinoOptions,
        EvaluationOptions=options.DinoEvaluationOptions,
        length="vision:length_of",
        **implement("images", "open=open_images embed=embed_pictures"),
        **implement("dino", "fit check data_module=DinoRows measure=evaluate"),
    ),
    MPP.derive(
        name="mae",
        title="masked patches of images",
        description=(
            "An encoder of images learns without labels (MAE): it reads a quarter of an image's patches, and a small "
            "decoder, its head, predicts the pixels of the others. The task vision begins with the run by `init`. "
            "Measured by the squared error of masked patches; generate completes images and writes a PNG."
        ),
        generation=Generation(
            prompt=None, temperature=1.0, reads=("samples",), unread="nothing is drawn where patches are predicted"
        ),
        metrics=(metric.Metric("masked_error", "mean squared error of masked patches"),),
        objectives={"masked-patches": "mae:MaskedPatches"},
        rivals={"mean": "the mean pixel"},
        use="kinformer generate {} --out completed.png",
        Options=options.MaeOptions,
        GenerationOptions=options.MaeGenerationOptions,
        check_generation="images:check_png",
        **implement(
            "mae",
            "suits=suits_masks fit=fitted_to_masks check=check_masks data_module=MaeRows measure=evaluate "
            "generate=complete",
        ),
    ),
    MPP,
    Task(
        name="translate",
        title="translation",
        description=(
            "Learns to translate lines from pairs of lines: two aligned files, a folder of such files, a .tsv or a "
            ".jsonl. "
            "Measured by BLEU and chrF of its translations (sacrebleu), with the untranslated source as the baseline."
        ),
        models=Models(protocols=(SourceModel,), inputs=("tokens",)),
        data=DataNeeds(
            default="number-words",
            tokenized=True,
            refused={"text_field": "is for running text; name the sides of JSON lines with `source` and `target`."},
        ),
        evaluation=NO_SEED,
        generation=Generation(
            prompt="lines", reads=(), unread="a line has one translation, the most probable that beam search finds"
        ),
        prediction=Prediction(reads=OF_TEXTS),
        metrics=(metric.BITS_PER_BYTE, metric.BLEU, metric.CHRF),
        objectives={"translation": "translate:TranslationLoss", "exits": "translate:TranslationExits"},
        settings={"schedule": "inverse-sqrt", "average": 5},
        in_minutes={
            "schedule": "cosine",
            "average": 0,
            # At the learning rates of short runs, a post-norm encoder soon gives every source the same vectors.
            "set": dict.fromkeys(("layers.*.residual", "encoder.layers.*.residual"), "pre")
            | dict.fromkeys(("norm", "encoder.norm"), "layer_norm"),
        },
        rivals={
            "copy_bleu": "the untranslated source",
            "shuffled_bleu": "its own translations of other lines",
            "targets_counted": "a 5-gram model of the translations, without their sources",
        },
        advice="give more `minutes` or `steps`, or more pairs",
        use="kinformer predict {} FILE",
        Options=options.TranslateOptions,
        EvaluationOptions=options.TranslateEvaluationOptions,
        GenerationOptions=options.Decoding,
        PredictionOptions=options.BeamOptions,
        **implement(
            "translate",
            "default_vocabulary vocab_size row_lengths check_generation open=open_parallel "
            "texts=texts_of_both check=check_pairs data_module=training_rows measure=evaluate "
            "generate=translate_lines samples=PairSamples predict=predict_lines",
        ),
    ),
    Task(
        name="super-resolution",
        title="super-resolution of images",
        description=(
            "Learns to enlarge images: an encoder reads an image made smaller, the mean of every block of pixels, and "
            "a decoder draws the image value by value (IDX files, .npz, a folder of pictures, or 1,797 handwritten "
            "digits). Measured in bits per dimension, beside counts by the small image and the known neighbours; "
            "generate writes a PNG."
        ),
        models=Models(protocols=(SourceModel,), inputs=("pixels",), from_tokens=True),
        data=OF_IMAGES,
        evaluation=NO_SEED,
        generation=Generation(
            prompt=None,
            temperature=1.0,
            reads=("temperature", "top_k", "top_p", "min_p", "samples"),
            unread="an image has a size, and ends with its last pixel",
        ),
        prediction=Prediction(refusal="it enlarges images; use kinformer generate."),
        metrics=(metric.BITS_PER_DIM,),
        objectives={"pixels": "super_resolution:EnlargingLoss"},
        rivals={"source": "counting by the small image", "neighbours": "counting by four neighbours"},
        advice="give more `minutes` or `steps`, or a larger `recipe`",
        use="kinformer generate {} --out enlarged.png",
        Options=options.SuperResolutionOptions,
        GenerationOptions=options.SuperResolutionGenerationOptions,
        vocab_size="image:values_of",
        check_generation="images:check_png",
        **implement(
            "super_resolution",
            "requested length open=open_blocks fit=enlarging_changes check=check_enlarging "
            "data_module=EnlargingRows measure=evaluate generate=enlarge",
        ),
    ),
)
TASKS: dict[str, Task] = {task.name: task for task in RECORDS}

OptionKind = Literal["Options", "EvaluationOptions", "GenerationOptions", "PredictionOptions"]
"""Which of a task's own options: for training, measuring, generating or predicting."""

ALL = plugins.Registry.of_records(Task, TASKS, plugins.TASKS)
"""Kinformer's own tasks, and the tasks of other packages, which are imported when they are looked up."""


def tasks(complain: Callable[[str], object] = plugins.warn_once) -> list[Task]:
    """Return the records of all tasks, Kinformer's own first, in the order of the table.
    ``complain`` gets a sentence for every task of another package that cannot be imported, which is left out."""
    return ALL.available(complain)


def task(name: str, package: str | None = None) -> Task:
    """Return the record called ``name``; an unknown name is an error that lists the nearest.
    ``package`` ("name version", as ``ALL.package(name)`` returns it) is the package of a stored run's task; the error
    for a missing package names it."""
    ALL.check_package(name, package)
    return ALL[choose(name, ALL, "task")]


def task_for(wanted: str | None, config: ModelConfig, member: str) -> Task:
    """Return the task to train a member on: the one called ``wanted``, or the first for models like it."""
    if wanted is None:
        return _first([item for item in tasks() if item.takes(config)], member)
    task_ = task(wanted)
    if not task_.takes(config):
        fitting = ", ".join(item.name for item in tasks() if item.suits(config))
        reads = "" if config.input.kind == "tokens" else f" that reads {config.input.kind}"
        what = f"{PROTOCOLS.get(config.protocol, config.protocol.__name__)}{reads}"
        raise KinformerError(
            f"`task` {wanted}: {member} is {what}, whose tasks are {fitting or 'none here'}; choose one, or another "
            "member."
        )
    return task_


def task_of(config: ModelConfig) -> Task:
    """Return the task that an unchanged model of ``config`` was made for."""
    records = tasks()
    fitting = [item for item in records if item.fits(config)]
    return _first(fitting or [item for item in records if item.takes(config)], config.kind)


def _first(fitting: list[Task], name: str) -> Task:
    if not fitting:
        raise KinformerError(f"no task takes {name}; the tasks are {', '.join(ALL)}.")
    return fitting[0]


def refuse_options(refused: Mapping[str, str], options: DataclassInstance) -> None:
    """Refuse the ``refused`` general options, each with its reason, where ``options`` (a dataclass) sets them."""
    for option in fields(options):
        value = getattr(options, option.name)
        if option.name in refused and value != option.default:
            raise KinformerError(f"{marked(option.name)} {value}: {refused[option.name]}")


def option_names(kind: OptionKind) -> dict[str, Task]:
    """Return the names of all tasks' own options of one kind, each with its first task."""
    return {option.name: item for item in reversed(tasks()) for option in fields(getattr(item, kind))}


def options_for(task_: Task, kind: OptionKind, values: Mapping[str, object], folder: str | None = None) -> Any:
    """Return the task's own options of one kind from ``values`` by name; refuse an option of another task.
    ``folder`` is the run folder that a message names; without one the message names the task."""
    options, owners = getattr(task_, kind), option_names(kind)
    for name, value in values.items():
        if name in {option.name for option in fields(options)}:
            continue
        if name not in owners:
            raise KinformerError(f"{name!r} is not an option of the task {task_.name}; {nearest(name, owners)}")
        shown = "" if isinstance(value, bool) or folder is not None else f" {value}"
        owner = f"the task {owners[name].name}" if folder is None else f"models of the {owners[name].title}"
        raise KinformerError(f"{marked(name)}{shown}: is for {owner}, not for {folder or task_.name}; leave it out.")
    return options(**values)
