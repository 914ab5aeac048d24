"""The laws of the house, read off the syntax trees: who may import whom, what the text may not hold."""

import ast
import gc
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.part import files_for

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "kinformer"
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if os.environ.get("KINFORMER_PART", "") in str(path)]
"""All modules, or the modules of the part that ``make check`` examines."""

LIBRARY = (
    "runtime",
    "core",
    "kernels",
    "parts",
    "mixers",
    "blocks",
    "stacks",
    "inputs",
    "heads",
    "models",
    "adaptive",
    "generation",
    "family",
    "nn",
    "testing",
)
"""The rooms of the library, in order: a file imports from its own room and from the rooms before it."""
MODELS = {"kernels", "parts", "mixers", "inputs", "stacks", "blocks", "heads", "models", "adaptive"}
LAZY = {"__init__.py", "__main__.py", "harness.py", "testing/__init__.py"}
"""Files whose functions may import the lab: the package's own names, and the battery of tasks."""


def over(paths: Iterable[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Make a law of one file one test over all ``paths``, whose failure names each file that breaks the law."""

    def over_paths(law: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            broken = {}
            for path in paths:
                try:
                    law(path)
                except AssertionError as error:
                    broken[str(path.relative_to(PACKAGE))] = str(error)
            assert not broken, "\n".join(f"{name}: {error}" for name, error in broken.items())

        test.__doc__ = law.__doc__
        return test

    return over_paths


each_module = over(MODULES)


@cache
def tree_of(path: Path) -> ast.Module:
    """The tree of a file, which stays until the session ends and is not searched for garbage."""
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    finally:
        gc.freeze()
        gc.enable()


@cache
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a tree, found once for all laws."""
    return list(ast.walk(tree))


def module_name(path: Path) -> str:
    names = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def imports_of(tree: ast.Module, package: str) -> Iterator[str]:
    """Dotted names of all that a module imports, at any depth; a name taken from a module counts with it."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def own_imports(path: Path) -> list[list[str]]:
    """What a module imports from the package, as parts below it: [["core", "state", "fork"], ...]."""
    package = ".".join(("kinformer", *path.relative_to(PACKAGE).parent.parts))
    return [name.split(".")[1:] for name in imports_of(tree_of(path), package) if name.split(".")[0] == "kinformer"]


def test_imports_are_seen_at_any_depth_and_in_any_form():
    source = """
import kinformer.core.state as states
from kinformer.kernels import softmax
def late():
    from ..mixers.linear import LinearAttention
    from . import chunked
"""
    assert set(imports_of(ast.parse(source), "kinformer.models")) == {
        "kinformer.core.state",
        "kinformer.kernels.softmax",
        "kinformer.mixers.linear.LinearAttention",
        "kinformer.models.chunked",
    }


@each_module
def test_import_law(path):
    """The library imports neither ``lab`` nor ``interop``, ``interop`` not ``lab``; the library's rooms are in
    order."""
    name = path.relative_to(PACKAGE).as_posix()
    if name in LAZY:
        return
    room = name.split("/")[0]
    assert room in (*LIBRARY, "interop", "lab"), f"{room} has no place in the order of this test"
    allowed = LIBRARY[: LIBRARY.index(room) + 1] if room in LIBRARY else LIBRARY
    if room != "lab":
        foreign = {parts[0] for parts in own_imports(path) if parts and parts[0] not in (room, "__version__")}
        assert foreign <= set(allowed)


def test_no_files_import_one_another_in_a_circle():
    """Imports inside functions and for types count, too: what both sides need is a subject, and has its own file."""
    names = {tuple(module_name(path).split(".")[1:]): path for path in MODULES}
    imports = {
        name: {next((parts[:n] for n in range(len(parts), 0, -1) if parts[:n] in names), name) for parts in found}
        for name, path in names.items()
        if path.relative_to(PACKAGE).as_posix() not in LAZY
        for found in [list(map(tuple, own_imports(path)))]
    }
    graph = {".".join(name): {".".join(one) for one in found - {name}} for name, found in imports.items()}
    TopologicalSorter(graph).prepare()  # raises a CycleError, which names the files


def test_a_part_has_the_tests_that_are_named_like_it_or_import_it():
    names = [path.relative_to(ROOT / "tests").as_posix() for path in files_for("mixers/linear")]
    assert {"kernels/test_linear.py", "mixers/test_kernel_attention.py"} <= set(names) and len(names) < 10
    assert "family/test_performer.py" in [
        path.relative_to(ROOT / "tests").as_posix() for path in files_for("parts/feature_maps")
    ]


def test_building_gpt_loads_few_files():
    """A reader who follows one decoder opens these files; the number may only fall."""
    code = (
        "import sys, torch, kinformer; kinformer.build('gpt', recipe='tiny')(torch.zeros(1, 4, dtype=torch.int64));"
        "print(sum(name.split('.')[0] == 'kinformer' and bool(getattr(module, '__file__', None))"
        " for name, module in sys.modules.items()))"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= LOADED_BY_GPT


LOADED_BY_GPT = 64


@each_module
def test_no_wildcard_imports(path):
    assert not any(name.endswith(".*") for name in imports_of(tree_of(path), "kinformer"))


@over(sorted((PACKAGE / "mixers").glob("*.py")))
def test_a_mixer_never_imports_another_mixer(path):
    others = {parts[1] for parts in own_imports(path) if parts[0] == "mixers" and len(parts) > 1}
    assert others <= {path.stem} or path.name == "__init__.py"


@over(sorted((PACKAGE / "kernels").glob("*/*.py")))
def test_reference_and_kernels_are_strangers(path):
    """A reference stands in ``reference.py`` or in the package's ``__init__``; kernels import neither."""
    folder = path.parent
    imported = {parts[2] for parts in own_imports(path) if parts[:2] == ["kernels", folder.name] and len(parts) > 2}
    if path.stem == "reference":
        assert not imported & {"chunked", "triton"}
    elif path.stem in ("chunked", "triton"):
        assert imported <= {file.stem for file in folder.glob("*.py")} - {"reference"}
    elif path.stem != "__init__":
        assert "reference" not in imported


@each_module
def test_triton_is_imported_by_its_kernels_alone(path):
    imported = {name.split(".")[0] for name in imports_of(tree_of(path), module_name(path))}
    assert ("triton" in imported) == (path.name == "triton.py")


@each_module
def test_powers_and_quotients_are_not_of_sizes(path):
    """While PyTorch traces a model, sizes are tensors, and these float32 (``core.contract.width_of``)."""
    if path.relative_to(PACKAGE).parts[0] not in MODELS:
        return
    for node in nodes_of(tree_of(path)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.Div):
            sizes = [side for side in (node.left, node.right) if re.search(r"\.shape\[[^\]]*\]$", ast.unparse(side))]
            assert not sizes, f"line {node.lineno}: {ast.unparse(node)}"


ACCELERATORS = (
    "generation/native.py",
    "generation/recording.py",
    "kernels/attention/backends.py",
    "kernels/attention/cached.py",
    "kernels/block_sparse/scores.py",
    "parts/projections.py",
    "runtime/process.py",
)
"""What a plain way could replace, as long as a benchmark shows what it is worth."""


@pytest.mark.parametrize("name", ACCELERATORS)
def test_an_accelerator_names_the_result_that_keeps_it(name):
    text = (PACKAGE / name).read_text(encoding="utf-8")
    scripts, results = re.findall(r"``(benchmarks/\w+\.py)``", text), re.findall(r"``(\w+\.json)``", text)
    assert scripts and results and "delete" in text.lower(), f"{name}: which result keeps it, and when is it deleted?"
    assert all((ROOT / script).is_file() for script in scripts), scripts
    assert all((ROOT / "benchmarks" / "results" / result).is_file() for result in results), results


def test_benchmarks_import_names_that_exist():
    scripts = {path.stem: path for path in (ROOT / "benchmarks").glob("*.py")}
    for path in scripts.values():
        nodes = nodes_of(tree_of(path))
        tried = {id(inner) for node in nodes if isinstance(node, ast.Try) for inner in ast.walk(node)}
        for node in (node for node in nodes if id(node) not in tried):  # what is tried may be that of an older version
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module in scripts:
                names = names_of(scripts[module])
            elif module.partition(".")[0] == "kinformer":
                folder = PACKAGE.parent / module.replace(".", "/")
                source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
                assert source.is_file(), f"{path.name}: there is no module {module}"
                names = names_of(source)
                names |= {file.stem for file in folder.glob("*")}
            else:
                continue
            missing = {alias.name for alias in node.names} - names
            assert not missing, f"{path.name}: {module} has no {missing}"


def names_of(path):
    """The names that a module binds at its top; of a package also those that it imports when they are asked for."""
    bound = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
        else:
            bound |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            bound |= {text.value for text in ast.walk(node) if isinstance(text, ast.Constant)}
    return bound


FLAG = re.compile(r"(?<![\w-])--[a-z]")
COMMAND = re.compile(r"kinformer (?:[a-z]+)\b[^.;,)]*")
STYLE = {"lab/comparison/report.py"}


def texts_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the text of every string but docstrings; what an f-string puts in is a bare X."""
    inner = {id(part) for node in nodes_of(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes_of(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node):
            inner.add(id(node.body[0].value))  # type: ignore[attr-defined]
    for node in nodes_of(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.lineno, node.value


@each_module
def test_messages_mark_options_instead_of_writing_flags(path):
    """``runtime.errors.spelled`` writes them as Python or the command line does; commands to type are exempt."""
    name = path.relative_to(PACKAGE).as_posix()
    if name.startswith("lab/cli/") or name in STYLE:
        return
    written = {line: text for line, text in texts_of(tree_of(path)) if FLAG.search(COMMAND.sub("", text))}
    assert not written, 'mark options with backticks, as in "`max_bytes` is 0"'


SHORTEST_DOCSTRING = 28
"""Characters below which a docstring says nothing that the name does not say."""
FRAGMENT = re.compile(r"(Of|As|Such|By|Those) ")


def docstrings_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The place and the text of every docstring of a module."""
    for node in nodes_of(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text is not None:
                place = "the module" if isinstance(node, ast.Module) else f"{node.name}, line {node.lineno}"
                yield place, text


def is_fragment(docstring: str) -> bool:
    return len(docstring) < SHORTEST_DOCSTRING or FRAGMENT.match(docstring) is not None


COUNTS = {"len", "sum", "int"}
"""Functions whose results, printed with a noun, are numbers of things."""
PLURAL_NOUN = re.compile(r" (?!(?:is|has|was|does|as|its|of|times)\b)[a-z]+[^s\W]s\b(?![/-])")


def counted(tree: ast.AST) -> Iterator[ast.JoinedStr]:
    """F-strings that write a number of things and a plural after it, also where the number is 1."""
    for node in nodes_of(tree):
        if isinstance(node, ast.JoinedStr):
            for number, text in zip(node.values, node.values[1:]):
                if (
                    isinstance(number, ast.FormattedValue)
                    and isinstance(number.value, ast.Call)
                    and isinstance(number.value.func, ast.Name)
                    and number.value.func.id in COUNTS
                    and isinstance(text, ast.Constant)
                    and PLURAL_NOUN.match(text.value)
                ):
                    yield node


def test_counts_with_a_plural_are_seen():
    seen = ["{len(a)} steps", "{sum(a):,} tokens of it", "{int(n)} rows"]
    unseen = ["{plural(len(a), 'step')}", "{len(a)} is", "{len(a)} steps/s", "{name} steps", "{len(a)} of them"]
    for text in seen + unseen:
        assert bool(list(counted(ast.parse(f'f"{text}"')))) == (text in seen), text


@each_module
def test_a_count_and_its_noun_are_written_by_plural(path):
    found = [ast.unparse(node) for node in counted(tree_of(path))]
    assert not found, f"write runtime.words.plural(count, noun): {found}"


@pytest.mark.parametrize(
    "docstring", ["By length.", "Of the rows that go through a chunk at one position.", "As JSON."]
)
def test_fragments_are_seen(docstring):
    assert is_fragment(docstring)


@each_module
def test_docstrings_are_sentences(path):
    fragments = {place: text for place, text in docstrings_of(tree_of(path)) if is_fragment(text)}
    assert not fragments, 'write a sentence, subject or verb first: "Return ...", "The mask of ..."'


ORDINARY = {
    "FileNotFoundError", "PackageNotFoundError",  # Python's
    "Figure", "figure", "figures",  # pictures; the field of a comparison's file
}  # fmt: skip
"""Identifiers that hold a retired word in its ordinary meaning."""
COMPONENTS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
QUOTED = re.compile(r"``([a-z_]+)``")


@cache
def retired_words() -> list[list[str]]:
    """The words of the glossary's table that are retired, by their components."""
    table = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("## Retired words")[2]
    return [word.split("_") for word in re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)]


def names_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Identifiers that a module writes, and the names that its docstrings quote, with their lines."""
    for node in nodes_of(tree):
        names = [getattr(node, field, None) for field in ("id", "arg", "attr", "name", "asname")]
        yield from ((getattr(node, "lineno", 0), name) for name in names if isinstance(name, str))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            yield from ((getattr(node, "lineno", 1), name) for name in QUOTED.findall(text))


@cache
def holds_retired_word(name: str) -> bool:
    parts = [part.lower() for part in COMPONENTS.findall(name)]
    runs = {tuple(parts[i : i + n]) for n in (1, 2, 3) for i in range(len(parts))}
    return name not in ORDINARY and any(tuple(word) in runs for word in retired_words())


@each_module
def test_no_name_holds_a_retired_word(path):
    assert len(retired_words()) > 15
    wrong = {f"{name} in line {line}" for line, name in names_in(tree_of(path)) if holds_retired_word(name)}
    assert not wrong, f"{path.name}: see the glossary's table of retired words"


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def requires(module: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip(f"{module} is not written yet")


@pytest.mark.parametrize(
    "code", ["import kinformer", "import kinformer; assert kinformer.members()", "import kinformer.lab.cli.main"]
)
def test_no_torch_before_it_is_needed(code):
    if "members" in code:
        requires("kinformer.family.table")
    if "cli" in code:
        requires("kinformer.lab.cli.main")
    done = run_python(f"{code}\nimport sys\nprint('torch' in sys.modules)")
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


MACHINE_PATHS = tuple(f"/{folder}/" for folder in ("work", "home", "root"))


def test_text_holds_no_paths_of_a_machine():
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run([git, "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = []
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if not path.is_file() or b"\0" in (data := path.read_bytes()):
            continue
        found += [f"{name}: {word}" for word in MACHINE_PATHS if word.encode() in data]
    assert not found
