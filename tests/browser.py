"""A headless Chromium: takes pictures of pages, and says what they log, ask for and measure."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import struct
import subprocess
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--enable-logging=stderr", "--v=0", "--proxy-bypass-list=<-loopback>",
)  # fmt: skip

_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')

# The browser's own: its clock, its updates, its account.
_OWN = re.compile(r"^(?:https?://)?[\w.-]*\.(?:google|googleapis)\.com(?:[:/]|$)")


@dataclass(frozen=True)
class Visit:
    """What the browser said and asked for while it had a page open."""

    dom: str
    console: tuple[str, ...]
    requests: tuple[str, ...]


class Browser:
    """Every visit is by a new profile; whatever is asked for goes to a proxy that notes and refuses it."""

    def __init__(self, executable: str, folder: Path, proxy: int, asked: list[str]) -> None:
        self._executable = executable
        self._folder = folder
        self._proxy = proxy
        self._asked = asked
        self._visits = 0

    def visit(self, page: str, *flags: str) -> Visit:
        self._visits += 1
        folder = self._folder / str(self._visits)
        folder.mkdir()
        file = folder / "page.html"
        file.write_text(page, encoding="utf-8")
        self._asked.clear()
        done = subprocess.run(
            [
                self._executable,
                *_FLAGS,
                f"--user-data-dir={folder / 'profile'}",
                f"--proxy-server=127.0.0.1:{self._proxy}",
                *(flags or ("--dump-dom",)),
                file.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        console = tuple(line for line in done.stderr.splitlines() if "CONSOLE" in line)
        return Visit(done.stdout, console, tuple(url for url in self._asked if not _OWN.match(url)))

    def picture(self, page: str, width: int, height: int, *flags: str) -> bytes:
        """A PNG of the top of ``page``."""
        file = self._folder / f"{self._visits}.png"
        self.visit(page, f"--screenshot={file}", f"--window-size={width},{height}", *flags)
        return file.read_bytes()

    def measure(self, page: str, width: int, expression: str, *flags: str) -> Any:
        """The value of a JavaScript expression in ``page``, laid out ``width`` pixels wide.

        The page stands in a frame, because a window has a least width, without its policy, which
        forbids scripts.
        """
        script = f"<script>parent.postMessage(JSON.stringify({expression}), '*')</script>"
        inner = _POLICY.sub("", page).replace("</main>", f"</main>{script}")
        frame = json.dumps(inner).replace("</", "<\\/")
        outer = (
            "<!DOCTYPE html><title></title><body><script>onmessage = e => { document.title = e.data };"
            f"const f = document.createElement('iframe'); f.style.border = 0; f.width = {width};"
            f"f.height = 3000; f.srcdoc = {frame}; document.body.append(f)</script>"
        )
        dom = self.visit(outer, "--dump-dom", "--virtual-time-budget=5000", *flags).dom
        found = re.search("<title>(.*?)</title>", dom)
        assert found is not None
        return json.loads(found[1])


@contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """A browser; without one the test is skipped, and fails where CI is true."""
    executable = next(
        (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
    )
    if executable is None:
        if os.environ.get("CI") == "true":
            pytest.fail("Chromium is not installed")
        pytest.skip("Chromium is not installed")
    asked: list[str] = []

    class Proxy(http.server.BaseHTTPRequestHandler):
        def refuse(self) -> None:
            asked.append(self.path)
            self.send_error(403)

        do_GET = do_POST = do_CONNECT = refuse

        def log_message(self, format: str, *args: object) -> None:
            """Requests are noted, not printed."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield Browser(executable, folder, server.server_port, asked)
        finally:
            server.shutdown()


def pixels(png: bytes) -> list[list[tuple[int, int, int]]]:
    """The rows of an 8-bit RGB or RGBA PNG without interlacing, as browsers write them (RFC 2083)."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, depth, colour = struct.unpack(">IIBB", png[16:26])
    assert depth == 8
    channels = {2: 3, 6: 4}[colour]
    data, position = b"", 8
    while position < len(png):
        (size,) = struct.unpack(">I", png[position : position + 4])
        if png[position + 4 : position + 8] == b"IDAT":
            data += png[position + 8 : position + 8 + size]
        position += size + 12
    raw = zlib.decompress(data)
    stride = width * channels
    before = bytearray(stride)
    rows = []
    for y in range(height):
        kind, line = raw[y * (stride + 1)], bytearray(raw[y * (stride + 1) + 1 : (y + 1) * (stride + 1)])
        _unfilter(kind, line, before, channels)
        rows.append([(line[i], line[i + 1], line[i + 2]) for i in range(0, stride, channels)])
        before = line
    return rows


def _unfilter(kind: int, line: bytearray, before: Sequence[int], channels: int) -> None:
    for i in range(len(line)):
        left = line[i - channels] if i >= channels else 0
        up = before[i]
        corner = before[i - channels] if i >= channels else 0
        if kind == 1:
            guess = left
        elif kind == 2:
            guess = up
        elif kind == 3:
            guess = (left + up) // 2
        elif kind == 4:
            estimate = left + up - corner
            guess = min((left, up, corner), key=lambda v: (abs(estimate - v), (left, up, corner).index(v)))
        else:
            return
        line[i] = (line[i] + guess) & 255
