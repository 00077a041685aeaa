"""Drives Chromium by its DevTools protocol, through pipes: no package and no port is needed."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Hidden scroll bars, as on phones; the sandbox needs rights that containers lack, and the pages are our own.
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")
COMMANDS, ANSWERS = 3, 4  # the descriptors that the browser reads and writes


def browser_path() -> str | None:
    """The first of `NAMES` on the path; None if no browser is installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """A page of a running browser.

    Attributes:
        failed: requests without an answer of success, "404 ADDRESS", since the last `open`.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = os.fdopen(answers, "rb", closefd=False)
        self._waiting = b""
        self._count = 0
        self._session = ""
        self._addresses: dict[str, str] = {}
        self.failed: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")
        self._call("Page.setLifecycleEventsEnabled", enabled=True)
        self._call("Network.enable")

    def show_as(self, width: int, height: int, *, phone: bool, dark: bool = False) -> None:
        """Sets the size of the screen in pixels of CSS; as a phone, the viewport of a page's head counts."""
        scale = 2 if phone else 1
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone)
        self._call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        """Loads the page at `address` and what it loads, until it has asked for nothing more for half a second."""
        self.failed.clear()
        loader = self._call("Page.navigate", url=address)["loaderId"]
        is_idle = False
        while not is_idle:
            params = self._read().get("params", {})
            is_idle = params.get("name") == "networkIdle" and params.get("loaderId") == loader

    def value(self, script: str) -> Any:
        """Value of the JavaScript expression `script`, as JSON holds it; a promise is waited for."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def picture(self, *, quality: int) -> bytes:
        """The screen, as WebP of `quality` up to 100."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="webp", quality=quality)["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._count:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        """Takes the next message, and notes what it says of requests."""
        while b"\0" not in self._waiting:
            if not (more := os.read(self._answers.fileno(), 1 << 20)):
                raise RuntimeError("the browser has ended")
            self._waiting += more
        text, _, self._waiting = self._waiting.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self._addresses[params["requestId"]] = params["request"]["url"]
            case "Network.responseReceived" if params["response"]["status"] >= 400:
                self.failed.append(f"{params['response']['status']} {params['response']['url']}")
            case "Network.loadingFailed" if not params.get("canceled"):
                self.failed.append(f"{params['errorText']} {self._addresses.get(params['requestId'])}")
        return message


@contextmanager
def tab(browser: str) -> Iterator[Tab]:
    """Starts the `browser` without a window, and ends it."""
    to_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The shell gives the pipes the numbers that the browser expects.
        script = f'exec "$0" "$@" {COMMANDS}<&{to_browser} {ANSWERS}>&{from_browser}'
        command = ["bash", "-c", script, browser, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        running = subprocess.Popen(command, pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Tab(commands, answers)
        finally:
            running.terminate()
            running.wait()
            os.close(commands)
            os.close(answers)
