"""What launched processes do in the tests of launching. They import this module, which loads little."""

from __future__ import annotations

import os
import signal

from kinformer.runtime.errors import KinformerError


def mistake() -> None:
    raise KinformerError("it is a mistake; mend it.")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang_up() -> object:
    """The handler of SIGHUP, after the launcher and this process have received one."""
    for process in (os.getppid(), os.getpid()):
        os.kill(process, signal.SIGHUP)
    return signal.getsignal(signal.SIGHUP)
