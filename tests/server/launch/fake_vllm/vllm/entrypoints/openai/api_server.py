"""Stands in for vLLM's API server: same command line, an engine core as a child process, health and metrics.

FAKE_VLLM_FAIL makes it die with that text while starting; FAKE_VLLM_SLOW makes it take that many
seconds to start; FAKE_VLLM_STUBBORN makes the engine core ignore SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CORE = "import signal, time\n{ignore}\nwhile True: time.sleep(3600)"
IGNORE = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--kv-transfer-config", type=json.loads)
    args, _ = parser.parse_known_args()
    print("fake engine starting", flush=True)  # noqa: T201  (its log)
    if failure := os.environ.get("FAKE_VLLM_FAIL"):
        sys.exit(failure)
    time.sleep(float(os.environ.get("FAKE_VLLM_SLOW", "0")))
    ignore = IGNORE if os.environ.get("FAKE_VLLM_STUBBORN") else ""
    subprocess.Popen([sys.executable, "-c", CORE.format(ignore=ignore)])
    ours = args.kv_transfer_config["kv_connector_extra_config"]["bidikv"]
    serve(args.host, args.port, ours)


def serve(host: str, port: int, ours: dict[str, object]) -> None:
    """Answer health and metrics."""
    index_host = f"[{host}]" if ":" in host else host
    address = f"{index_host}:{ours['index_port']}"
    metrics = ""
    if ours["role"] == "decode" and ours["readback"]:
        metrics = f'bidikv:index_info{{engine_id="fake-{port}",engine="0",address="{address}"}} 1.0\n'

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages = {
                "/health": "",
                "/metrics": metrics,
                "/v1/models": json.dumps({"object": "list", "data": []}),
            }
            page = pages.get(self.path)
            self.send_response(404 if page is None else 200)
            self.end_headers()
            self.wfile.write((page or "").encode())

        def log_message(self, *_: object) -> None:
            """Write no access log."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    Server((host, port), Handler).serve_forever()


if __name__ == "__main__":
    main()
