"""The router as a process."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

from bidikv_server.router.server import create_server
from bidikv_server.router.settings import RouterSettings

PROGRAM = """
import sys
from bidikv_server.router.server import run
from bidikv_server.router.settings import RouterSettings
run(RouterSettings(prefill=("http://127.0.0.1:9",), decode=("http://127.0.0.1:9",), port=int(sys.argv[1])))
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_run_until_sigterm():
    """`run` serves until SIGTERM and then ends cleanly."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(port)], env={**os.environ}, stderr=subprocess.PIPE
    )
    with process:
        try:
            deadline_s = time.monotonic() + 30
            while True:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                        assert answer.status == 200
                    break
                except OSError:
                    assert process.poll() is None
                    assert time.monotonic() < deadline_s
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert b"Traceback" not in errors
    assert process.returncode == 0


def test_settings_reach_the_server():
    """Address, log level and grace come from the settings."""
    settings = RouterSettings(
        prefill=("http://p",), decode=("http://d",), host="::1", port=1, shutdown_grace_s=7
    )
    config = create_server(settings).config
    assert (config.host, config.port, config.timeout_graceful_shutdown) == ("::1", 1, 7)
