"""A headless Chromium, spoken to through pipes: no port, no driver, no package."""

import base64
import json
import os
import select
import shutil
import signal
import time

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


def find_browser():
    """Where it is: what CHROMIUM says, or on the PATH; None if it is not there."""
    names = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


class Browser:
    """One page, with what its console said.

    Attributes:
        complaints: errors and warnings of the page, and requests that it made and lost.
    """

    def __init__(self, profile, *, timeout_s=60.0):
        read, self._to = os.pipe()
        self._from, write = os.pipe()
        self._timeout_s = timeout_s
        self._rest = b""
        self._number = 0
        self._session = None
        self.complaints = []
        path = find_browser()
        null = os.open(os.devnull, os.O_RDWR)
        # 3 and 4 are where it listens and answers; high numbers first, so that none is overwritten.
        ends = [os.dup2(fd, fd + 100, inheritable=True) for fd in (read, write, null)]
        self._pid = os.posix_spawn(
            path,
            [path, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            os.environ,
            file_actions=[
                *((os.POSIX_SPAWN_DUP2, ends[2], fd) for fd in (0, 1, 2)),
                (os.POSIX_SPAWN_DUP2, ends[0], 3),
                (os.POSIX_SPAWN_DUP2, ends[1], 4),
            ],
            setpgroup=0,
        )
        for fd in (read, write, null, *ends):
            os.close(fd)

    def __enter__(self):
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        os.close(self._to)
        os.close(self._from)
        deadline = time.monotonic() + 5
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.killpg(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            time.sleep(0.02)

    def call(self, method, **parameters):
        """What the browser answers; what it says meanwhile is looked at for complaints."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self):
        deadline = time.monotonic() + self._timeout_s
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            received = os.read(self._from, 2**20)
            if not received:
                raise RuntimeError("the browser ended")
            self._rest += received
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        if message.get("method") in (
            "Runtime.exceptionThrown",
            "Runtime.consoleAPICalled",
            "Log.entryAdded",
            "Network.loadingFailed",
        ):
            self.complaints.append(message["params"])
        return message

    def open(self, path, *, width, height=900, dark=False, media="screen"):
        """Show a file at a width in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + self._timeout_s
        while self.value("document.readyState + location.protocol") != "completefile:":
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} does not load")
            time.sleep(0.02)

    def value(self, expression):
        """A JavaScript expression's value."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def move_to(self, x, y):
        """The mouse, in CSS pixels of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key):
        """A key with a name: "ArrowLeft", "Tab", "Home"."""
        codes = {"Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "Escape": 27}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
            )

    def screenshot(self, path, **options):
        """The whole page, as PNG."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True, **options)
        path.write_bytes(base64.b64decode(answer["data"]))
