"""Additions of other packages and of the user's own program: parts, tasks and members, found by their names.

A package lists its additions in its metadata, for example in ``pyproject.toml``::

    [project.entry-points."kinformer.parts"]
    "mixer.my_mixer" = "my_package.mixers:MyMixer.Config"

    [project.entry-points."kinformer.members"]
    my-member = "my_package.member:MEMBER"

Names are read without an import; an object is imported when its name is used. Commands that show records (``kinformer
list``), and commands to which tasks add options (``train``), import all objects.

A program without a package adds an object by ``kinformer.register``. The object then counts as an entry point until
the process ends.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

KINFORMER, REGISTER = "kinformer", "kinformer.register"
"""The owners of names that no package has: Kinformer itself, and the program that registered an object."""
PARTS, TASKS, MEMBERS = "kinformer.parts", "kinformer.tasks", "kinformer.members"

T = TypeVar("T")


@dataclass(frozen=True)
class Registration:
    """An object of this program under a name; it stands among the entry points of installed packages."""

    thing: Any
    dist = None

    @property
    def value(self) -> str:
        """The name of the object in the program."""
        name: str = getattr(self.thing, "__qualname__", None) or type(self.thing).__qualname__
        return name.rpartition("<locals>.")[2]

    @property
    def module(self) -> str:
        """The owner, in the form "name version" of a package."""
        return f"{REGISTER} {self.value}"

    def load(self) -> Any:
        """Return the registered object."""
        return self.thing


Entry: TypeAlias = "EntryPoint | Registration"
_registrations: dict[tuple[str, str], Registration] = {}
"""The objects of this program by group and name. A second registration replaces the first, as in notebooks."""


@cache
def entry_points_of(group: str) -> Mapping[str, tuple[Entry, ...]]:
    """Return the entry points of each name, in all packages and this program; the caller raises for several."""
    from importlib.metadata import entry_points

    installed: dict[str, tuple[Entry, ...]] = {}
    registered = ((name, entry) for (of, name), entry in _registrations.items() if of == group)
    entries: list[tuple[str, Entry]] = [(entry.name, entry) for entry in entry_points(group=group)]
    for name, entry in (*entries, *registered):
        installed[name] = (*installed.get(name, ()), entry)
    return installed


def import_file(path: str) -> None:
    """Run the Python file that the user names, once in a process; it registers its objects.

    Worker processes import the file by its name when they unpickle one of its objects.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file() or file.suffix != ".py" or not file.stem.isidentifier():
        raise KinformerError(f"`import` {path}: is not a Python file; give the path of one, such as mixers.py.")
    sys.path.insert(0, str(file.parent))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(file.stem)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        raise KinformerError(f"`import` {path}: cannot be run ({reason}); mend it.") from error
    if Path(getattr(module, "__file__", None) or "").resolve() != file:
        raise KinformerError(f"`import` {path}: another module is called {file.stem!r}; rename the file.")


def load(entry: Entry, what: str) -> Any:
    """Return the object of an entry point; ``what`` is its name in messages ("the mixer 'my_mixer'")."""
    try:
        return entry.load()
    except KeyboardInterrupt as error:  # the user's, most likely; the package's, where it comes every time
        place = f"{what} of {_package_text(_package(entry))} was imported from {entry.value}"
        raise KeyboardInterrupt(f"interrupted while {place}.") from error
    except BaseException as error:  # whatever a stranger's module raises, it ends nothing but its own import
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise KinformerError(
            f"{what} of {_package_text(_package(entry))} cannot be imported from {entry.value} ({reason}); "
            "mend that package, or uninstall it."
        ) from error


@contextmanager
def current_folder() -> Iterator[None]:
    """Import from the current folder first, for a module that the user names."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


@cache
def warn_once(sentence: str) -> None:
    """Issue a warning once per process, however often the installed packages are looked through."""
    warnings.warn(sentence, stacklevel=2)


class Pages(MutableMapping[str, T]):
    """The named objects of several modules, the ``pages``; ``read`` imports a page and returns its objects by name.

    To look up a name, pages are imported until one of the pages has the name. The page of the same name comes first.
    """

    def __init__(self, pages: Sequence[str], read: Callable[[str], Mapping[str, T]]) -> None:
        self.pages, self._read = pages, read
        self._set: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name in self._set:
            return self._set[name]
        for page in sorted(self.pages, key=lambda page: page.rpartition(".")[2] != name):
            if name in (things := self._read(page)):
                return things[name]
        raise KeyError(name)

    def __setitem__(self, name: str, thing: T) -> None:
        self._set[name] = thing

    def __delitem__(self, name: str) -> None:
        del self._set[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*(name for page in self.pages for name in self._read(page)), *self._set]))

    def __len__(self) -> int:
        return len(list(iter(self)))


class Registry(Mapping[str, T]):
    """A table of objects by name: Kinformer's ``builtin`` objects, and the objects that other packages add by the entry
    points of ``group``.

    The name of an entry point is ``prefix`` followed by the name in this table. ``noun`` is the word for an object in
    messages. ``fits(name, installed)`` tells, when the name is looked up, whether an object is valid, and
    ``expected(name)`` describes one.
    """

    def __init__(
        self,
        noun: str,
        builtin: Mapping[str, T],
        group: str,
        *,
        fits: Callable[[str, object], bool],
        expected: Callable[[str], str],
        prefix: str = "",
    ) -> None:
        self.noun, self.builtin, self.group, self.prefix = noun, builtin, group, prefix
        self._fits, self._expected = fits, expected

    @classmethod
    def of_records(cls, record: type[T], builtin: Mapping[str, T], group: str) -> Registry[T]:
        """Return a registry of objects of the class ``record``, which have their name in the attribute ``name``."""
        return cls(
            record.__name__.lower(),
            builtin,
            group,
            fits=lambda name, installed: isinstance(installed, record) and getattr(installed, "name", None) == name,
            expected=lambda name: f"a {record.__name__} of the name {name!r}",
        )

    def added(self) -> list[str]:
        """Return the names that other packages add, sorted; a name may also be built in."""
        names = (name for name in entry_points_of(self.group) if name.startswith(self.prefix))
        return sorted(name.removeprefix(self.prefix) for name in names)

    def available(self, complain: Callable[[str], object] = warn_once) -> list[T]:
        """Return all usable objects, Kinformer's first; ``complain`` gets a sentence for each that fails to load."""
        installed = list(self.builtin.values())
        for name in self.added():
            try:
                installed.append(self[name])
            except KinformerError as error:
                complain(str(error))
        return installed

    def register(self, name: str, thing: T) -> None:
        """Add an object of this program under ``name``, until the process ends.

        Errors: ``KinformerError`` for a name of Kinformer's own, and for an object that is not valid.
        """
        if not name or not self._fits(name, thing):
            raise KinformerError(f"register: {thing!r} is not {self._expected(name)}; give one.")
        if name in self.builtin:
            raise KinformerError(f"register: the {self.noun} {name!r} is Kinformer's own; give yours another name.")
        _registrations[self.group, self.prefix + name] = Registration(thing)
        entry_points_of.cache_clear()

    def package(self, name: str) -> str | None:
        """Return the package ("name version") that adds ``name``, or None; nothing is imported."""
        entries = entry_points_of(self.group).get(self.prefix + name, ())
        return _package(entries[0]) if entries else None

    def check_package(self, name: str, package: str | None) -> None:
        """Raise if ``name`` was stored as part of ``package`` and does not come from this package any more.

        ``package`` is the result of :meth:`package` at that time ("name version"); with None nothing is checked.
        """
        if package is not None:
            require_package(
                package, f"the {self.noun} {name!r}", KINFORMER if name in self.builtin else self.package(name)
            )

    def __getitem__(self, name: str) -> T:
        entries = entry_points_of(self.group).get(self.prefix + name, ())
        if not entries:
            return self.builtin[name]
        if len(entries) > 1 or name in self.builtin:
            owners = ["Kinformer itself"] * (name in self.builtin) + [
                _package_text(_package(entry)) for entry in entries
            ]
            raise KinformerError(
                f"the {self.noun} {name!r} is in {' and in '.join(owners)}, so its name does not say which is meant; "
                f"uninstall one of the packages, or rename its {self.noun}."
            )
        installed = load(entries[0], f"the {self.noun} {name!r}")
        if not self._fits(name, installed):
            raise KinformerError(
                f"the {self.noun} {name!r} of {_package_text(_package(entries[0]))} is {installed!r}, but must be "
                f"{self._expected(name)}; correct the entry point {entries[0].value} of that package."
            )
        return installed

    def __contains__(self, name: object) -> bool:
        return name in self.builtin or name in self.added()

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self.builtin, *self.added()]))

    def __len__(self) -> int:
        return len(list(iter(self)))


def package_of(thing: object, group: str, name: str) -> str | None:
    """Return the package ("name version") whose entry point ``name`` of ``group`` leads to ``thing``, or None."""
    for entry in entry_points_of(group).get(name, ()):
        try:
            result = load(entry, repr(name))
        except KinformerError:  # reported when it is asked for by its name
            continue
        if result is thing:
            return _package(entry)
    return None


def import_extra(module: str, what: str, package: str, install: str) -> Any:
    """Return an optional ``module`` of ``package``, which ``what`` needs and which pip gets by ``install``."""
    try:
        importlib.import_module(module.partition(".")[0])  # else a submodule may come from sys.modules
        return importlib.import_module(module)
    except ImportError:
        raise KinformerError(
            f"{what} needs {package}, which is not installed; pip install {install} gets it."
        ) from None


def require_package(package: str, what: str, installed: str | None) -> None:
    """Raise if a part that was stored as part of ``package`` ("name version") does not come from this package any more.

    ``what`` names the part in messages. ``installed`` owns the name now: ``KINFORMER``, another package, or None.
    """
    name = package.partition(" ")[0]
    if installed is not None and name in (installed.partition(" ")[0], REGISTER) and installed != KINFORMER:
        return
    if name == REGISTER and installed is None:
        remedy = (
            f"which is not registered here; call kinformer.register({package.partition(' ')[2]}) first, or name the "
            "file that does by `import`."
        )
    elif installed == KINFORMER:
        remedy = "but here it is Kinformer's own; use a version of Kinformer without that name."
    elif installed is not None:
        remedy = f"but here it is part of {_package_text(installed)}; install the former, and uninstall the latter."
    elif (version := _installed(name)) is not None:
        remedy = f"but version {version} of it, which is installed, has none of that name; install another version."
    else:
        remedy = "which is not installed; install it."
    raise KinformerError(f"{what} comes from {_package_text(package)}, {remedy}")


def _package(entry: Entry) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.module


def _package_text(package: str) -> str:
    name, _, version = package.partition(" ")
    if name == REGISTER:
        return f"the registered {version}"
    return f"the package {name!r} ({version})" if version else f"the package {name!r}"


def _installed(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except (PackageNotFoundError, ValueError):
        return None
