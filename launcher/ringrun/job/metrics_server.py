"""The endpoint for Prometheus: HTTP on the loopback interface of the machine that runs ringrun."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Mapping, Optional

from ringcomm.errors import ConfigError

from ..watch.history import History
from ..watch.prometheus import exposition

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
READ_S = 5.0
"""Time limit of a request, in seconds."""


class MetricsServer:
    """Serves ``/metrics``, in a thread.

    Args:
        port: the port; 0 for a free one.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: Optional[ThreadingHTTPServer] = None
        self._thread: Optional[threading.Thread] = None
        self._text = b""

    def start(self) -> str:
        """Listen; returns the address of the page.

        Raises:
            ConfigError: the port is in use, or not allowed.
        """
        try:
            server = ThreadingHTTPServer(("127.0.0.1", self._port), self._handler())
        except OSError as problem:
            raise ConfigError(
                f"--metrics-port {self._port}: 127.0.0.1:{self._port} cannot be opened: {problem.strerror}. "
                "Name a port that is not in use, or 0."
            ) from None
        server.daemon_threads = True
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, name="ringrun-metrics", daemon=True)
        self._thread.start()
        return f"http://127.0.0.1:{server.server_address[1]}/metrics"

    def update(self, history: History, hosts: Mapping[int, str]) -> None:
        """Serve these numbers from now on.

        Args:
            history: the samples.
            hosts: by process, the name of its host.
        """
        self._text = exposition(history, hosts).encode("utf-8", "replace")

    def stop(self) -> None:
        """Close the port, and end the thread."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
            self._server = None

    def _handler(self) -> type:
        own = self

        class Handler(BaseHTTPRequestHandler):
            timeout = READ_S

            def do_GET(self) -> None:  # noqa: N802  the name that http.server calls
                if self.path.split("?")[0] != "/metrics":
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(own._text)))
                self.end_headers()
                self.wfile.write(own._text)

            def log_message(self, *_: object) -> None:
                """Requests are not logged: the terminal belongs to the job."""

        return Handler
