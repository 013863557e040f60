"""A headless Chromium, spoken to over pipes in its DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]


class Browser:
    """One page. Use it as a context."""

    def __init__(self, width=1000, height=760, dark=False):
        self.size = f"--window-size={width},{height}"
        self.dark = ["--blink-settings=preferredColorScheme=0"] if dark else []

    def __enter__(self):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self.commands = os.pipe()
        self.replies, replies = os.pipe()
        # Chromium reads file 3 and writes file 4
        script = f'exec 3<&{commands} 4>&{replies}; exec "$@"'
        command = [PROGRAM, *ARGUMENTS, self.size, *self.dark, f"--user-data-dir={self.profile.name}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(commands, replies),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(replies)
        self.number, self.rest, self.session, self.problems, self.urls = 0, b"", None, [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(20)
        os.close(self.commands)
        os.close(self.replies)
        self.profile.cleanup()

    def call(self, method, **params):
        """The result of a command."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._reply()
            if reply.get("id") == self.number:
                assert "error" not in reply, reply
                return reply["result"]

    def _reply(self):
        while b"\0" not in self.rest:
            data = os.read(self.replies, 1 << 20)
            assert data, "Chromium has ended"
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\0")
        reply = json.loads(line)
        if reply.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.problems.append(reply["params"])
        if reply.get("method") == "Network.requestWillBeSent":
            self.urls.append(reply["params"]["request"]["url"])
        return reply

    def run(self, script):
        """The value of a script, a promise awaited."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, url):
        """Go to a page."""
        self.call("Page.navigate", url=url)

    def wait(self, script, seconds=20):
        """Until a script says true."""
        deadline = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < deadline, f"never: {script}"
            time.sleep(0.05)

    def write(self, text):
        """Type into what has the focus, and press Enter."""
        self.call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
            self.call("Input.dispatchKeyEvent", type=kind, **key)

    def screenshot(self, path):
        """A picture, as PNG."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))
