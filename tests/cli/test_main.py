"""The command line as a whole: quick, and every mistake is one sentence."""

import gc
import io
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext

import pytest

import kinformer
from kinformer.lab.cli import main as command_line
from kinformer.lab.cli.form import overrides
from kinformer.runtime import process
from kinformer.runtime.errors import KinformerError


def in_a_process(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "kinformer", *arguments], capture_output=True, text=True, **options)


@pytest.mark.parametrize(
    "arguments", [[], ["--help"], ["--version"], ["list"], ["train", "--help"], ["show", "--help"]]
)
def test_what_computes_nothing_imports_little(arguments):
    code = (
        "import sys\n"
        "from kinformer.lab.cli.main import main\n"
        f"status = main({arguments!r})\n"
        "print(*sys.modules, file=sys.stderr)\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    imported = done.stderr.split()
    assert not {"torch", "numpy", "safetensors", "tokenizers", "transformers", "matplotlib"} & set(imported)
    assert len(imported) < 600
    assert "kinformer" in done.stdout or "linear-transformer" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["train", "gtp"], "gpt"),
        (["estimate", "performr"], "performer"),
        (["compare", "gpt", "both=rope:3,mamba3:1"], "mamba2"),
        (["bench", "locl"], "local"),
    ],
)
def test_an_unknown_member_is_refused_before_pytorch_is_imported(arguments, near):
    code = "import sys; from kinformer.lab.cli.main import main; status = main(sys.argv[1:]); "
    code += "sys.exit(9 if 'torch' in sys.modules else status)"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and near in done.stderr and done.stderr.count("\n") == 1


def test_a_command_looks_for_no_garbage_in_what_it_loads_and_a_call_leaves_that_alone(cli, monkeypatch):
    """A command's work runs with the search for garbage on; what was loaded before it is out of the search."""
    code = (
        "import gc, sys\n"
        "from kinformer.lab.cli.studying import Bench\n"
        "from kinformer.lab.cli.main import main\n"
        "sys.argv = ['kinformer', 'bench', 'gpt']\n"
        "told = lambda: print(gc.isenabled(), gc.get_freeze_count() > 100_000, file=sys.stderr)\n"
        "Bench.run = lambda options: told() or 0\n"
        "main()\n"
        "print(gc.isenabled(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.split() == ["True", "True", "True"]
    monkeypatch.setattr(gc, "freeze", lambda: pytest.fail("a caller's objects are its own"))
    assert cli("show", "gpt", "--brief")[0] == 0 and gc.isenabled()


@pytest.mark.parametrize("loaded", [False, True])
def test_nothing_stays_out_of_the_search_for_garbage_beside_triton(loaded):
    """Triton prints a page of leaks for its objects that the interpreter does not collect as it ends."""
    code = (
        "import gc, sys, types\n"
        "from kinformer.lab.cli.main import main\n"
        "sys.modules.pop('triton', None)\n"
        f"sys.modules |= {{'triton': types.ModuleType('triton')}} if {loaded} else {{}}\n"
        "sys.argv = ['kinformer', 'list', '--json']\n"
        "main()\n"
        "print(gc.get_freeze_count() == 0, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.split() == [str(loaded)]


def test_help_lists_the_commands(cli):
    for arguments in ([], ["--help"], ["-h"]):
        code, out, _ = cli(*arguments)
        assert code == 0
        assert all(f"  {name} " in out for name in command_line.COMMANDS)
    assert cli("--version")[1] == f"kinformer {kinformer.__version__}\n"


@pytest.mark.parametrize("name", command_line.COMMANDS)
def test_every_command_has_help_and_the_common_options(cli, name):
    code, out, _ = cli(name, "--help")
    assert code == 0
    assert command_line.COMMANDS[name].summary.split()[0] in out
    assert "--json" in out and ("--seed" in out or name in ("export", "pack", "verify"))  # which take none
    if name in ("train", "evaluate", "generate"):
        assert "--device" in out and "--threads" in out
    assert callable(command_line.COMMANDS[name].options().run)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["lst"], "'lst' is not a command; did you mean 'list'?"),
        (["--frob"], "'--frob' is not an option of kinformer itself"),
        (["list", "--jsn"], "list: Unrecognized options: --jsn; did you mean --json?"),
        (["list", "--seed", "x"], "list: --seed: 'x' is not a whole number, such as 16, 100k, 2M or 1e9; see"),
        (["list", "more"], "list: what: 'more' is not one of members, parts, tasks; see kinformer list --help."),
        (["show"], "show: needs MEMBER; see kinformer show --help."),
        (["show", "gtp"], "member: 'gtp' is unknown; did you mean 'gpt'? See: kinformer list."),
        (["help", "qqqqq"], "'? See: kinformer list."),
        (["show", "gpt", "--recipe", "tyny"], "recipe of gpt: 'tyny' is unknown; did you mean 'tiny'?"),
        (["show", "gpt", "--set", "layers"], "--set layers: is not path=value; write for example"),
        (["show", "gpt", "--set", "=3"], "--set =3: is not path=value"),
        (["show", "gpt", "--set", "layers.*.mixer.num_head=2"], "did you mean 'num_heads'"),
        (["show", "gpt", "--vocab-size", "0"], "--vocab-size is 0 but must be 1 or more."),
        (["evaluate"], "evaluate: needs DIR; see kinformer evaluate --help."),
        (["evaluate", "no/such/run"], "no/such/run: is not a run folder"),
        (["generate", "no/such/run", "--prompt", "a"], "no/such/run: is not a run folder"),
        (
            ["generate", "no/such/run", "--weights", "fp8", "--prompt", "a"],
            "--weights: 'fp8' is not one of bf16, fp32, int8",
        ),
    ],
)
def test_mistakes_are_one_sentence(cli, arguments, told):
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert told in err
    assert err.startswith("kinformer: ") and err.count("\n") == 1
    assert not set(err) & set("╭│╰─")


def test_verbose_tells_where_a_mistake_arose_after_its_sentence(cli):
    code, _, err = cli("evaluate", "no/such/run", "--verbose")
    versions, first, second, *_ = err.splitlines()
    assert (
        code == 2
        and versions.startswith("kinformer ")
        and first.startswith("kinformer: no/such/run: is not a run folder")
    )
    assert second.startswith("Traceback")


@pytest.mark.parametrize("arguments", [["show"], ["list", "--jsn"], ["list", "--seed", "x"]])
def test_sentences_do_not_depend_on_the_encoding(cli, arguments):
    told = {cli(*arguments)[2]}
    for encoding in ("utf-8", "ascii"):
        done = in_a_process(*arguments, env=os.environ | {"PYTHONIOENCODING": encoding}, timeout=60)
        assert done.returncode == 2
        told.add(done.stderr)
    assert len(told) == 1


def test_an_override_may_hold_equals_signs_and_json():
    assert overrides(("a.b=c=d", 'e={"kind": "local", "window": 4}')) == {
        "a.b": "c=d",
        "e": '{"kind": "local", "window": 4}',
    }
    with pytest.raises(KinformerError, match="--set x: is not path=value"):
        overrides(("a=1", "x"))


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (KinformerError("a thing is 3 but must be 4."), 2, "kinformer: a thing is 3 but must be 4.\n"),
        (KeyboardInterrupt(), 130, ""),
        (OSError(28, "No space left on device", "/x/y"), 2, "kinformer: /x/y: No space left on device; free space"),
    ],
)
def test_how_commands_end(cli, monkeypatch, error, code, told):
    from kinformer.lab.cli.family import List

    monkeypatch.setattr(List, "run", lambda options: (_ for _ in ()).throw(error))
    ended, out, err = cli("list")
    assert (ended, out) == (code, "")
    assert err.startswith(told) and (told or not err)


def test_a_reader_that_has_gone_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "kinformer", "list"], stdout=writing, stderr=subprocess.PIPE, timeout=60
    )
    os.close(writing)
    assert done.returncode == 141
    assert done.stderr == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a full device")
def test_a_full_disk_is_one_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kinformer", "list"], stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr.startswith(b"kinformer: No space left on device; ") and done.stderr.count(b"\n") == 1


def test_terminals_without_the_characters_still_work():
    done = in_a_process("list", env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}, timeout=60)
    assert done.returncode == 0 and "gpt" in done.stdout


def test_list_is_the_table_of_the_family(cli):
    code, out, _ = cli("list", "--verbose")
    header, *rows = out.splitlines()
    assert code == 0 and header.split()[0] == "member"
    assert [row.split()[0] for row in rows if row[0] != " "] == [member.name for member in kinformer.members()]
    told = json.loads(cli("list", "--json")[1])
    names = ["name", "title", "paper", "year", "axes", "causal", "growth", "departures", "exact_limit"]
    names += ["use_when", "avoid_when", "cost", "recipes"]
    assert all(list(each) == names for each in told)
    assert [each["recipes"] for each in told] == [list(member.recipes) for member in kinformer.members()]


def test_list_is_a_tree_by_what_members_have_in_common(cli):
    known = {member.name: member for member in kinformer.members()}
    told = json.loads(cli("list", "--by", "state", "--json")[1])
    assert sorted(each["name"] for group in told.values() for each in group) == sorted(known)
    assert {each["name"] for each in told["constant"]} == {n for n, m in known.items() if m.growth == "constant"}
    costs = json.loads(cli("list", "--by", "cost", "--json")[1])
    assert {each["name"] for each in costs["between the length and its square"]} > {"sparse-transformer"}
    assert sum(map(len, costs.values())) == len(known)
    axes = json.loads(cli("list", "--by", "axis", "--json")[1])
    assert {each["name"] for each in axes["kernel"]} == {n for n, m in known.items() if "kernel" in m.axes}
    assert list(years := json.loads(cli("list", "--by", "year", "--json")[1])) == sorted(years)
    out = cli("list", "--by", "causal")[1].splitlines()
    assert out[0] == f"causal ({sum(member.causal for member in known.values())})"
    assert out[1].startswith("├─ gpt ") and max(map(len, out)) <= 80
    assert len(out) == len(known) + 2


@pytest.mark.parametrize("framed", [False, True])
def test_list_fits_80_columns(monkeypatch, framed):
    class Output(io.StringIO):
        def isatty(self):
            return framed

    output = Output()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    assert command_line.main(["list", "--verbose"]) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", output.getvalue()).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert len([line for line in lines if line[:1].strip()]) == len(kinformer.members()) + 1 + framed
    assert "Transformer-XL" in output.getvalue()


def test_list_is_framed_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert command_line.main(["list", "--verbose"]) == 0
    assert "\x1b[1m" in terminal.getvalue() and "linear-transformer" in terminal.getvalue()


@pytest.mark.parametrize(("command", "fast"), [("serve", False), ("generate", True)])
def test_a_server_computes_without_products_that_keep_memory_for_every_shape(cli, tmp_path, monkeypatch, command, fast):
    asked, used = [], []
    monkeypatch.setattr(command_line, "set_up", lambda *given: asked.append(given[2]) or nullcontext())
    assert cli(command, tmp_path / "nowhere")[0] == 2
    monkeypatch.setattr(process, "_set_up", False)
    for name in ("flush_subnormals", "keep_memory", "use_fast_products"):
        monkeypatch.setattr(process, name, lambda name=name: used.append(name))
    process.begin_process(*asked)
    assert asked == [fast] and ("use_fast_products" in used) == fast
