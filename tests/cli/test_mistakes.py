"""Wrong command lines of every command but train: one sentence, exit code 2, and every file is as it was before."""

import os
import shlex
import shutil

import pytest

DAMAGED = {
    "halved": ("config.json", lambda whole: whole[: len(whole) // 2]),
    "emptied": ("config.json", lambda whole: b""),
    "listed": ("config.json", lambda whole: b"[]"),
    "nulled": ("config.json", lambda whole: b"null"),
    "binary": ("config.json", lambda whole: bytes(range(256))),
    "cut": ("model.safetensors", lambda whole: whole[:-20]),
    "blank": ("model.safetensors", lambda whole: b""),
    "noise": ("model.safetensors", lambda whole: bytes(range(255, -1, -1)) * 20),
}
"""Runs of gpt by their names here: which file is damaged, and how."""

FILES = {
    "file": b"x",
    "nothing.txt": b"",
    "short.txt": b"ab",
    "book.txt": b"the wind and the rain\n" * 200,
    "bytes.bin": bytes(range(256)) * 20,
    "utf16.txt": ("a text\n" * 300).encode("utf-16"),
    "table.parquet": b"PAR1" + b"\0" * 3000 + b"PAR1",
    "paper.pdf": b"%PDF-1.4\n" + b"abc\n" * 900,
    "open.csv": b'text,label\n"a,b\n',
    "wrong.jsonl": b'{"text": "a"}\n{"text": 3}\n',
    "open.toml": b"a = [",
    "list.json": b"[1, 2]",
}


@pytest.fixture(scope="session")
def place(tmp_path_factory, make_run):
    """A folder with runs (gpt, linear, calm, bert, vanilla), damaged ones, and files of all kinds."""
    folder = tmp_path_factory.mktemp("mistakes")
    for run, member in (("gpt", "gpt"), ("lin", "linear-transformer"), ("exits", "calm"), ("mask", "bert")):
        shutil.copytree(make_run(member), folder / run)
    shutil.copytree(make_run("vanilla"), folder / "pairs")
    for name, (file, change) in DAMAGED.items():
        path = shutil.copytree(folder / "gpt", folder / name) / file
        path.write_bytes(change(path.read_bytes()))
    shutil.copytree(folder / "gpt", folder / "weightless").joinpath("model.safetensors").unlink()
    shutil.copytree(folder / "gpt", folder / "mixed").joinpath("model.safetensors").write_bytes(
        (folder / "lin" / "model.safetensors").read_bytes()
    )
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "empty").mkdir()
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    os.mkfifo(folder / "pipe.jsonl")
    return folder


def files_of(folder):
    return {
        path.relative_to(folder): path.lstat().st_mtime_ns
        for path in folder.rglob("*")
        if not path.is_dir() and path.name != ".lock"
    }


RUNS = [
    ("nope", "nope: is not a run folder (it has no config.json)"),
    ("''", "is empty; give the path of a file or folder"),
    ("file", "file: is not a run folder"),
    ("empty", "empty: is not a run folder"),
    ("loop", "loop: is not a run folder"),
    ("pipe", "pipe: is not a run folder"),
    ("halved", "halved/config.json: is not readable JSON"),
    ("emptied", "emptied/config.json: is not readable JSON"),
    ("listed", "listed/config.json: is not the config of a run; restore it from a copy"),
    ("nulled", "nulled/config.json: is not the config of a run"),
    ("binary", "binary/config.json: is not readable JSON"),
]
WEIGHTS = [
    ("cut", "cut/model.safetensors: is truncated or damaged"),
    ("blank", "blank/model.safetensors: is truncated or damaged"),
    ("noise", "noise/model.safetensors: is truncated or damaged"),
    ("weightless", "weightless/model.safetensors: the file does not exist"),
    ("mixed", "mixed/model.safetensors: belongs to another model (it lacks"),
]
READERS = {
    "evaluate {}": RUNS + WEIGHTS,
    "generate {} --prompt a": RUNS + WEIGHTS,
    "embed {} book.txt": RUNS + WEIGHTS,
    "predict {} book.txt": RUNS,
    "index {} --datastore store": RUNS + WEIGHTS,
    "calibrate {}": RUNS,
    "show ./{}": RUNS[6:],
    "draw ./{}": RUNS[2:5] + RUNS[6:] + WEIGHTS,
}
LARGE = "1e30"
MISTAKES = [
    ("evaluate gpt --threads 1e9", "--threads is 1e+09 but must be at most 1,024."),
    (f"evaluate gpt --threads {LARGE}", "--threads is 1e+30 but must be"),
    (f"evaluate gpt --first {LARGE}", "--first is 1e+30 but must be below 2^63."),
    (f"evaluate gpt --seed {LARGE}", "--seed is 1e+30 but must be below 2^63."),
    ("evaluate gpt --contexts 0x", "--contexts 0x: is not a list of whole numbers"),
    ("evaluate gpt --contexts ²", "--contexts ²: is not a list of whole numbers"),
    (f"evaluate gpt --contexts {'9' * 5000}", "is not a list of whole numbers"),
    ("evaluate gpt --context ²", "--context ²: is neither a number of tokens nor 'carried'; give --context 512"),
    ("evaluate gpt --data ''", "--data is empty but must be a path"),
    ("evaluate gpt --data -", "standard input is empty; pipe in text or bytes."),
    ("evaluate gpt --data empty", "empty does not hold a regular file"),
    ("evaluate gpt --data nothing.txt", "nothing.txt is empty"),
    ("evaluate gpt --data table.parquet", "is a Parquet table"),
    ("evaluate gpt --data paper.pdf", "is a PDF"),
    ("evaluate gpt --data utf16.txt", "is UTF-16 text"),
    ("evaluate gpt --data pipe", "is neither a regular file nor a folder"),
    ("evaluate gpt --datastore ''", "--datastore is empty but must be a path"),
    ("evaluate lin --datastore gpt", "gpt: is not a datastore"),
    ("evaluate lin --datastore nope --sizes ²", "--sizes ²"),
    ("evaluate gpt --set layers.*.mixer.position.scaling=yarn", "is not a field of the position 'none'; it has none."),
    ("evaluate gpt --set kind=encoder", "layers, which must be given."),
    (f"evaluate gpt --set layers.*.mixer.pattern.window={LARGE}", "is not a field"),
    ("evaluate gpt --split tset", "did you mean 'test'?"),
    ("evaluate gpt --plot x.gif --contexts 1x", "ends in .png or .svg"),
    ("evaluate gpt --config open.toml", "is not TOML"),
    ("evaluate gpt --config", "--config: needs a value; see kinformer evaluate --help."),
    ("evaluate gpt mask", "is a run of the task mlm, unlike gpt"),
    ("evaluate mask --recl", "is for models of the next token"),
    ("generate gpt --prompt-file ''", "--prompt-file is empty but must be a path"),
    ("generate gpt --prompt-file pipe", "pipe: is not a regular file; give a file."),
    ("generate gpt --prompt-file empty", "empty: is a folder; give a file."),
    ("generate gpt --prompt-file paper.pdf", "paper.pdf: is a PDF"),
    ("generate gpt --prompt-file table.parquet", "table.parquet: is a Parquet table"),
    ("generate gpt --prompt a --samples 99999999999", "--samples is 1e+11 but must be at most 10,000."),
    (f"generate gpt --prompt a --max-new-tokens {LARGE}", "--max-new-tokens is 1e+30 but must be below 2^63."),
    ("generate gpt --prompt a --temperature nan", "--temperature is nan but must be a finite number."),
    ("generate gpt --prompt a --top-p 0", "--top-p is 0 but must be above 0 and at most 1."),
    ("generate gpt --prompt a --beam 3", "is for models of the translation"),
    ("generate mask --prompt a", "reads whole texts and continues none"),
    ("generate gpt --prompt a --set layers.7.dropout=0", "'7' is not an item of a list of 2"),
    ("show nope/there", "nope/there: is not a run folder, and no member has such a name"),
    ("show ''", "is empty; give the path of a file or folder"),
    (f"show gpt --vocab-size {LARGE}", "--vocab-size is 1e+30 but must be below 2^63."),
    (f"show gpt --set dim={'9' * 30}", "--set dim: dim is 1e+30 but must be below 2^63."),
    ("show gpt --recipe tyny", "did you mean"),
    ("show gpt --set layers=1e99", "is not a list"),
    ("show gpt --set layers.*.mixer.pattern=lokal", "did you mean 'local'?"),
    ("show gpt lin", "Unrecognized options: lin"),
    ("estimate nope/there", "nope/there: is not a run folder, and no member has such a name"),
    ("estimate gtp", "did you mean 'gpt'?"),
    (f"estimate gpt --length {LARGE}", "--length is 1e+30 but must be below 2^63."),
    (f"estimate gpt --batch-size {LARGE}", "--batch-size is 1e+30 but must be below 2^63."),
    (f"estimate gpt --vocab-size {LARGE}", "--vocab-size is 1e+30 but must be below 2^63."),
    ("estimate gpt --length nan", "'nan' is not a whole number"),
    ("estimate gpt --batch-size 0", "--batch-size is 0 but must be 1 or more."),
    ("estimate gpt --precision fp16", "'fp16' is not one of"),
    ("estimate vit --vocab-size 9", "reads no ids; leave it out"),
    ("estimate gpt --set dim=abc", "'abc' is not a whole number"),
    ("estimate bert --length 99999", "end at max_length = 512"),
    ("estimate gpt --steps 3", "Unrecognized options: --steps"),
    ("estimate mamba", "mamba2 is nearest here"),
    ("list --by nope", "'nope' is not one of axis, causal"),
    ("list --by", "list: --by: needs a value; see kinformer list --help."),
    ("list --seed -1", "--seed is -1"),
    ("list gpt", "'gpt' is not one of members, parts, tasks"),
    ("list --config nope.toml", "the file does not exist"),
    ("list --config empty", "is a folder"),
    ("list --config bytes.bin", "is not TOML"),
    ("list --set x=1", "Unrecognized options"),
    ("draw nope", "did you mean 'rope' or 'none'?"),
    ("draw nope/there", "nope/there: is not a run folder"),
    ("draw local --length 999999999", "--length is 1e+09 but must be at most 65,536."),
    ("draw local --image-width 1e9", "--image-width is 1e+09 but must be at most 1,024."),
    (f"draw local --set window={'9' * 30}", "window is 1e+30 but must be below 2^63."),
    ("draw local --out ''", "--out is empty"),
    ("draw local --out file/x.png", "file/x.png: could not be written"),
    ("draw gpt --image ''", "--image is empty"),
    ("draw gpt --image file", "--image is for the task vision"),
    ("draw gpt --exits", "no token of this run leaves early"),
    ('draw \'{"kind": "local"\'', "is not JSON"),
    ("predict gpt book.txt", "use kinformer generate"),
    ("predict mask ''", "is empty; give the path of a file or folder"),
    ("predict mask pipe", "is neither a regular file nor a folder; pipe it in and give - instead"),
    ("predict mask paper.pdf", "is a PDF"),
    ("predict mask table.parquet", "is a Parquet table"),
    ("predict mask empty", "does not hold a regular file"),
    ("predict mask nothing.txt", "is empty; give one item at least"),
    ("predict mask bytes.bin", "bytes.bin, line "),
    ("predict mask open.csv", "is not a row of CSV"),
    ("predict mask wrong.jsonl", "wrong.jsonl, line "),
    ("predict mask book.txt --out x.pdf", "ends in none of .jsonl, .csv, .tsv"),
    ("predict mask book.txt --out ''", "--out is empty"),
    ("predict mask book.txt --top-k 0", "--top-k is 0"),
    ("embed gpt ''", "is empty; give the path of a file or folder"),
    ("embed gpt nope", "nope does not exist"),
    ("embed gpt pipe", "is neither a regular file nor a folder"),
    ("embed gpt paper.pdf", "is a PDF"),
    ("embed gpt bytes.bin", "bytes.bin, line "),
    ("embed gpt -", "standard input: is empty"),
    ("embed gpt book.txt --out x.txt", "ends in neither .npz nor .jsonl"),
    ("embed gpt book.txt --out nowhere/x.npz", "--out nowhere/x.npz: cannot be written"),
    ("embed gpt book.txt --pooling max", "'max' is not one of first, last, mean"),
    (f"embed gpt book.txt --batch-size {LARGE}", "--batch-size is 1e+30"),
    ("embed pairs book.txt", "of the task translate, which makes no vectors"),
    ("index lin", "needs --datastore FOLDER"),
    ("index lin --datastore ''", "--datastore is empty"),
    ("index lin --datastore store --data paper.pdf", "is a PDF"),
    ("index lin --datastore store --data nothing.txt", "is empty"),
    ("index lin --datastore store --overlap 1", "--overlap is 1"),
    ("index lin --datastore store --context ²", "--context ²: is neither"),
    ("index lin --datastore store --lists 3", "add --approximate"),
    ("index lin --datastore store --split tset", "did you mean 'test'"),
    ("index lin --datastore file", "file"),
    ("index lin --datastore gpt", "gpt"),
    ("index gpt --datastore store --context carried", "give --context N"),
    ("index gpt --datastore store --context 99999", "positions"),
    ("import nope --out made", "nope"),
    ("import '' --out made", "is empty; give the path of a file or folder"),
    ("import empty --out made", "config.json"),
    ("import gpt --out made", "gpt"),
    ("import gpt --out ''", "--out is empty"),
    ("import book.txt --out made", "book.txt"),
    ("import halved --out made", "halved/config.json"),
    ("import listed --out made", "listed/config.json"),
    ("import binary --out made", "binary/config.json"),
    ("import pipe --out made", "pipe"),
    ("import gpt", "needs --out DIR"),
    ("calibrate exits --thresholds 1e6", "--thresholds is 1e+06 but must be at most 10,000."),
    ("calibrate exits --search 1e9", "--search is 1e+09 but must be at most 1,000,000."),
    (f"calibrate exits --prompts {LARGE}", "--prompts is 1e+30 but must be below 2^63."),
    ("calibrate exits --risk nan", "--risk is nan but must be above 0"),
    ("calibrate exits --confidence 1", "must be above 0 and below 1"),
    ("calibrate exits --data paper.pdf", "is a PDF"),
    ("calibrate exits --data nothing.txt", "is empty"),
    ("calibrate exits --split tset", "did you mean 'test'"),
    ("calibrate exits --bound x", "is not one of bentkus, hoeffding"),
    ("calibrate exits --tolerance 0.1", "is for --search"),
    ("calibrate exits --search 3 --risk 0.1", "leave it or --search out"),
    ("calibrate gpt", "no token leaves early; give one of calm"),
    ("bench nope", "'nope' is unknown"),
    ("bench gpt --lengths 0", "is not a list of whole numbers"),
    ("bench gpt --lengths ²", "is not a list of whole numbers"),
    (f"bench gpt --batch-size {LARGE}", "--batch-size is 1e+30"),
    ("bench gpt --recipe tiny --lengths 99999999999", "there is not enough memory"),
    ("bench gpt --rounds 0", "--rounds is 0"),
    ("bench gpt --work fly", "'fly' is unknown"),
    ("bench gpt --work ''", "'' is unknown"),
    ("bench gpt --recipe nope", "'nope' is unknown"),
    ("bench gpt --set nope=1", "is not a field"),
    ("bench gpt --set dim=nan", "is not a whole number"),
    ("bench gpt --device tpu", "cannot be used here"),
    ("compare gtp", "did you mean 'gpt'"),
    ("compare gpt --steps 3 --tokens 4", "contradict; give one"),
    (f"compare gpt --steps {LARGE}", "--steps is 1e+30 but must be below 2^63."),
    ("compare gpt --parameters 1e18", "--parameters is 1e+18 but must be at most 1,000,000,000,000."),
    ("compare gpt --minutes nan", "--minutes is nan"),
    ("compare gpt --lr 0", "--lr is 0"),
    ("compare gpt --contexts 0x", "--contexts 0x: is not a list of lengths"),
    ("compare gpt --lengths ²", "is not a list of whole numbers"),
    ("compare gpt --sweep 2", "does not have a middle"),
    ("compare gpt --data -", "is read once"),
    ("compare gpt --data ''", "--data is empty"),
    ("compare gpt --data nope --steps 2", "nope does not exist"),
    (
        "train gpt --data digits --steps 2 --out made",
        "--data digits: is no file, but the data of the task image or vision or ",
    ),
    ("compare gpt --data paper.pdf --steps 2", "is a PDF"),
    ("compare gpt --data short.txt --steps 2 --recipe tiny", "holds 1 token"),
    ("compare gpt --data book.txt --steps 2 --parameters 3", "no width gives 3 parameters"),
    ("compare gpt --tokenizer '' --data book.txt", "--tokenizer is empty"),
    ("compare gpt --task recall --first 100 --steps 2", "--first 100: recall makes its own rows"),
    ("compare gpt --task recall --contexts 2x --steps 2", "--contexts 2x: recall is measured at no other"),
    ("train gpt --data loop --steps 2 --out made", "loop does not exist"),
    ("pack loop --out made", "loop does not exist"),
    ("embed gpt loop --out made.npz", "loop"),
    ("train gpt --data pipe.jsonl --out made", "pipe.jsonl is neither a regular file nor a folder"),
    ("compare --merge list.json list.json", "list.json"),
    ("compare --merge nope.json", "nope.json"),
    ("train gpt --average 3 --checkpoint-every 0 --out made", "--checkpoint-every 0 makes only the last"),
]
LINES = [(line.format(run), message) for line, runs in READERS.items() for run, message in runs] + MISTAKES


@pytest.mark.parametrize(("line", "message"), LINES, ids=[line[:60] for line, _ in LINES])
def test_a_mistake_is_one_sentence_and_loses_nothing(cli, place, monkeypatch, recwarn, line, message):
    monkeypatch.chdir(place)
    before = files_of(place)
    code, out, err = cli(*shlex.split(line), stdin=b"")
    assert (code, out) == (2, ""), err
    assert err.startswith("kinformer: ") and err.count("\n") == 1 and err.rstrip()[-1] in ".?"
    assert message in err and not recwarn.list
    assert files_of(place) == before
