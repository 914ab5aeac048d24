"""``kinformer completion bash|zsh``: a script for the shell; ``eval "$(kinformer completion bash)"`` loads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from kinformer.family.table import FAMILY
from kinformer.lab.cli.form import CommonOptions, flags, form_of, is_positional
from kinformer.lab.cli.main import COMMANDS
from kinformer.lab.cli.output import print_json
from kinformer.lab.tasks.table import tasks

_SCRIPT = """_kinformer() {{
  local words
  case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="{commands}" ;;
  esac
  [ "$COMP_CWORD" -eq 1 ] && words="{commands}"
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _kinformer kinformer
"""


_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


@dataclass(frozen=True, kw_only=True)
class Completion(CommonOptions):
    """Print a script that completes commands, members and options."""

    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional]
    """The shell that reads the script."""

    def run(self) -> int:
        """Print the completion script, or with ``--json`` the words of each command, and return 0."""
        words = completions()
        if self.json:
            print_json(words)
            return 0
        cases = "\n".join(f'    {name}) words="{" ".join(value)}" ;;' for name, value in words.items())
        script = _SCRIPT.format(cases=cases, commands=" ".join(words))
        print(_ZSH + script if self.shell == "zsh" else script, end="")
        return 0


def completions() -> dict[str, list[str]]:
    """Return the words that may follow each command: its options, and the members if the command takes a member."""
    words_by_command = {}
    for name, command in COMMANDS.items():
        hints = flags(form_of(command.options(), command.tasks))
        first = list(FAMILY) if "member" in hints else []
        words_by_command[name] = first + [f"--{flag}" for flag, hint in hints.items() if not is_positional(hint)]
    words_by_command["help"] = [*COMMANDS, *FAMILY, *(task.name for task in tasks())]
    return words_by_command
