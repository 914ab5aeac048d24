"""A headless Chromium behind its own protocol over two pipes, so that pages are tested as they are read."""

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--remote-debugging-pipe",
    "--disable-dev-shm-usage", "--disable-extensions",
)  # fmt: skip


def program() -> str:
    """The browser's path; the test is skipped where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("there is no Chromium here; apt-get install chromium gets one")
    return found


class Browser:
    """One page. ``errors`` are what its console complained of."""

    def __init__(self) -> None:
        path, self.profile = program(), tempfile.mkdtemp()
        theirs_in, self.out = os.pipe()
        self.into, theirs_out = os.pipe()
        theirs = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (theirs_in, theirs_out)]
        self.process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"],
            preexec_fn=lambda: [os.dup2(each, number) for each, number in zip(theirs, (3, 4), strict=True)],
            pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for each in theirs:
            os.close(each)
        os.close(theirs_in)
        os.close(theirs_out)
        self.reader = os.fdopen(self.into, "rb", buffering=0)
        self.number, self.buffer, self.events, self.errors = 0, b"", [], []
        self.session = None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method, **params):
        """The result of a command."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self.number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self):
        while b"\0" not in self.buffer:
            read = self.reader.read(1 << 16)
            assert read, "the browser went away"
            self.buffer += read
        line, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(line)

    def _note(self, event):
        self.events.append(event.get("method"))
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"])
        if event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(params["args"])
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"])

    def size(self, width, height=900):
        """The window."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefers(self, theme):
        """Whether the reader wants "dark" or "light"."""
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.js("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")

    def open(self, page: Path | str):
        """Load a file or an address, to the end."""
        self.events = []
        self("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while "Page.loadEventFired" not in self.events:
            self._note(self._next())

    def js(self, code):
        """What an expression, or the promise that it is, comes to."""
        found = self("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def move(self, x, y):
        """The pointer."""
        self("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key):
        """A key."""
        for kind in ("keyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, key=key)

    def close(self):
        """End it."""
        self.process.terminate()
        self.process.wait(20)
        self.reader.close()
        os.close(self.out)
        shutil.rmtree(self.profile, ignore_errors=True)
