"""A headless Chromium, driven with the DevTools protocol over a pair of pipes."""

import base64
import fcntl
import json
import os
import select
import subprocess
import tempfile
import time
from contextlib import contextmanager

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-pipe", "--hide-scrollbars",
)  # fmt: skip
TIMEOUT_S = 60


@contextmanager
def open_page(executable):
    """A page in a new browser with a profile of its own; both are gone afterwards."""
    # Helpers of the browser may still be writing when it has ended.
    folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
    with folder as profile:
        ours_in, theirs_out = map(_out_of_the_way, os.pipe())
        theirs_in, ours_out = map(_out_of_the_way, os.pipe())
        # Chromium reads commands from descriptor 3 and answers on 4.
        moved = f"exec 3<&{theirs_in} 4>&{theirs_out} {theirs_in}<&- {theirs_out}>&-"
        command = [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            ["bash", "-c", f'{moved}; exec "$@"', "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        pipe = _Pipe(ours_in, ours_out)
        try:
            yield Page(pipe)
            pipe.call("Browser.close")
        finally:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(ours_in)
            os.close(ours_out)


def _out_of_the_way(descriptor):
    """The same with a number that is neither 3 nor 4."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved


class Page:
    """One tab, which keeps what it was asked to load and what it complained about."""

    def __init__(self, pipe):
        self._pipe = pipe
        targets = pipe.call("Target.getTargets")["targetInfos"]
        target = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = pipe.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        return self._pipe.call(method, self._session, **params)

    def open(self, path):
        """Load a file, or an address, and wait until all of it is there."""
        self._pipe.events.clear()
        self.call("Page.navigate", url=path if isinstance(path, str) else path.as_uri())
        self._pipe.wait_for("Page.loadEventFired")
        time.sleep(0.1)  # for what a script might ask for once the page is there
        self.call("Page.getLayoutMetrics")

    def evaluate(self, expression):
        """The value of a JavaScript expression."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    @property
    def requested(self):
        """All addresses that were asked for."""
        sent = self._pipe.of("Network.requestWillBeSent")
        return [event["request"]["url"] for event in sent]

    @property
    def complaints(self):
        """Errors and warnings of the console, exceptions, and what the browser itself logs."""
        said = [event["entry"]["text"] for event in self._pipe.of("Log.entryAdded")]
        said += [str(event["args"]) for event in self._pipe.of("Runtime.consoleAPICalled")]
        thrown = self._pipe.of("Runtime.exceptionThrown")
        return said + [str(event["exceptionDetails"]) for event in thrown]

    def look(self, width, height=900, *, scheme="light", media="", phone=False):
        """How the page is to be shown."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1}
        self.call("Emulation.setDeviceMetricsOverride", mobile=phone, **metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def screenshot(self, path, *, whole=True):
        """Of the whole page, or of what fits the window."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, path):
        """As it would be printed."""
        printed = self.call("Page.printToPDF", printBackground=True)
        path.write_bytes(base64.b64decode(printed["data"]))


class _Pipe:
    """Messages are JSON, each ended by a zero byte."""

    def __init__(self, read_from, write_to):
        self._read_from, self._write_to = read_from, write_to
        self._number = 0
        self._rest = b""
        self._answers = {}
        self.events = []

    def of(self, method):
        return [event["params"] for event in self.events if event["method"] == method]

    def call(self, method, session=None, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write_to, json.dumps(message).encode() + b"\0")
        number = self._number
        self._read_until(lambda: number in self._answers, method)
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def wait_for(self, method):
        self._read_until(lambda: self.of(method), method)

    def _read_until(self, done, what):
        end = time.monotonic() + TIMEOUT_S
        while not done():
            ready, _, _ = select.select([self._read_from], [], [], max(0, end - time.monotonic()))
            assert ready, f"Chromium did not answer to {what} within {TIMEOUT_S} s"
            received = os.read(self._read_from, 1 << 20)
            assert received, f"Chromium ended before it answered to {what}"
            *whole, self._rest = (self._rest + received).split(b"\0")
            for message in map(json.loads, whole):
                if "id" in message:
                    self._answers[message["id"]] = message
                else:
                    self.events.append(message)
