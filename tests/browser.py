"""A browser for tests of pages."""

import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def needs_chromium(test: Any) -> Any:
    return pytest.mark.optional(pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")(test))


class Browser:
    """Headless Chromium by its debugging protocol."""

    def __init__(self, profile: Path, *options: str) -> None:
        command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        command += [f"--user-data-dir={profile}", "--disable-dev-shm-usage", "--no-first-run", *options, "about:blank"]
        ends = [*os.pipe(), *os.pipe()]
        # The protocol reads from descriptor 3 and writes to 4, which may be other files here.
        to_browser, write, read, from_browser = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)

        def moved() -> None:
            os.dup2(to_browser, 3)
            os.dup2(from_browser, 4)

        self.process = subprocess.Popen(command, preexec_fn=moved, close_fds=False, stderr=subprocess.DEVNULL)
        for end in (*ends, to_browser, from_browser):
            os.close(end)
        self.write, self.read, self.numbers, self.buffer = write, read, itertools.count(1), b""
        self.events: list[dict[str, Any]] = []
        self.session: str | None = None

    def call(self, method: str, **params: Any) -> Any:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _message(self) -> Any:
        while b"\0" not in self.buffer:
            assert select.select([self.read], [], [], 60)[0], "the browser does not answer"
            part = os.read(self.read, 2**20)
            assert part, "the browser has gone"
            self.buffer += part
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, url: str, width: int = 1400, name: str = "atlas") -> "Browser":
        """Open a page in a new tab, and wait until the object of this name says that it is ready."""
        self.session, self.events = None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=url)
        for _ in range(200):
            loaded = "location.href !== 'about:blank' && document.readyState === 'complete'"
            if self.run(f"{loaded} && typeof {name} !== 'undefined'"):
                break
            time.sleep(0.05)
        self.run(f"{name}.ready.then(() => true, () => false)")
        return self

    def run(self, code: str) -> Any:
        """Return what an expression, or what it promises, is."""
        result = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, code: str) -> None:
        """Wait until an expression is true."""
        for _ in range(200):
            if self.run(code):
                return
            time.sleep(0.05)
        raise AssertionError(f"never: {code}")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    @property
    def requests(self) -> list[str]:
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    @property
    def complaints(self) -> list[Any]:
        """Errors and warnings of the console, and exceptions."""
        logged = [e["params"]["entry"] for e in self.events if e.get("method") == "Log.entryAdded"]
        said = [e["params"] for e in self.events if e.get("method") == "Runtime.consoleAPICalled"]
        thrown = [e["params"] for e in self.events if e.get("method") == "Runtime.exceptionThrown"]
        return [entry for entry in logged + said if entry.get("level", entry.get("type")) != "info"] + thrown

    def close(self) -> None:
        self.session = None
        os.close(self.write)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.read)
