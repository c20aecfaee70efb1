"""Chromium without a window, driven by its DevTools protocol over a pipe."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from waiting import LIMIT

NAMES = ("chromium", "chromium-browser", "google-chrome")
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
)  # fmt: skip


def find_chromium() -> str | None:
    """The path of a browser, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """A browser with one page. `events` are what it has reported, `errors` the bad ones."""

    def __init__(self, binary: str, profile: Path) -> None:
        # Chromium reads commands at descriptor 3, and writes to 4.
        pipes = 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1'
        command = ["sh", "-c", pipes, "sh", binary, *FLAGS, f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._out, self._in = self.process.stdin, self.process.stdout.fileno()
        self._numbers, self._rest = itertools.count(1), b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Run a command of the protocol; returns its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        deadline = time.monotonic() + LIMIT
        while (found := self._read(deadline)).get("id") != number:
            self.events.append(found)
        assert "error" not in found, (method, found["error"])
        return dict(found["result"])

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        whole, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(whole))

    @property
    def errors(self) -> list[str]:
        """Exceptions and errors of the console, those of the network included."""
        found = []
        for event in self.events:
            method, params = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
                found.append(json.dumps(params["args"]))
        return found

    def bodies(self, path: str) -> list[Any]:
        """The bodies that the page has sent there."""
        sent = [
            event["params"]["request"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        return [json.loads(one["postData"]) for one in sent if one["url"].endswith(path)]

    def open(self, url: str) -> None:
        """Show a page, and drop what was reported before."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, waited for if it is a promise."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, (expression, result["exceptionDetails"])
        return result["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Wait until an expression is true; returns its value."""
        deadline = time.monotonic() + LIMIT
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, (
                expression,
                self.evaluate("document.body.innerText"),
            )
            time.sleep(0.02)
        return value

    def write(self, selector: str, text: str) -> None:
        """Replace what is in a field, as typing does."""
        self.evaluate(f"document.querySelector({selector!r}).select()")
        self.evaluate(f"document.querySelector({selector!r}).focus()")
        if text:
            self.call("Input.insertText", text=text)
        else:
            self.evaluate("document.execCommand('delete')")

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press a key."""
        params = dict(key=key, code=key, windowsVirtualKeyCode=KEYS[key], modifiers=modifiers)
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **params, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **params)

    def click(self, selector: str) -> None:
        """Click the middle of what is shown."""
        x, y = self.evaluate(
            f"(() => {{ const box = document.querySelector({selector!r}).getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def look(self, width: int = 1200, height: int = 800, scheme: str = "light") -> None:
        """Set the size of the window, and the colours that the reader prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        """Write what is shown as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def end(self) -> None:
        """End the browser and its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def browsing(binary: str, profile: Path) -> Iterator[Chromium]:
    """A browser for the time of the block."""
    browser = Chromium(binary, profile)
    try:
        yield browser
    finally:
        browser.end()
