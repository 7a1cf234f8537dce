"""Waiting for an engine to have nothing to do."""

import contextlib
import http.server
import socket
import threading

import pytest

from bidikv_server.launch.idle import StillBusyError, requests_in, wait_idle


def page(running, waiting=0):
    return (
        "# TYPE vllm:num_requests_running gauge\n"
        f'vllm:num_requests_running{{engine="0",model_name="m {{}}"}} {float(running)}\n'
        f'vllm:num_requests_running{{engine="1",model_name="m"}} 0.0 1700000000\n'
        f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {float(waiting)}\n'
        'vllm:num_requests_waiting_by_reason{engine="0"} 7.0\n'
    )


def test_requests_are_summed():
    """Over ranks, running and waiting, and no other metric."""
    assert requests_in(page(2, 3)) == 5
    assert requests_in("") == 0


class Time:
    """A clock that moves when somebody sleeps."""

    def __init__(self, *answers):
        self.now_s, self.answers = 0.0, list(answers)

    def ask(self, _url):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    def sleep(self, duration_s):
        self.now_s += duration_s

    def wait(self, **times):
        wait_idle("http://e", **times, ask=self.ask, clock=lambda: self.now_s, sleep=self.sleep)
        return self.now_s


@pytest.mark.parametrize(
    ("answers", "waited_s"),
    [
        ([page(0)], 5.0),
        ([page(1)] * 9 + [page(0)], 9.0),
        ([page(0)] * 4 + [page(1)] * 4 + [page(0)], 8.0),
        ([page(1)] * 2 + [None], 2.0),
        ([TimeoutError()] * 7 + [page(0)], 7.0),
    ],
)
def test_it_ends_when_idle_or_gone(answers, waited_s):
    """Not before routers had time to notice; an engine that is silent counts as busy, one that is gone as idle."""
    assert Time(*answers).wait(settle_s=5.0, timeout_s=60.0) == waited_s


@pytest.mark.parametrize(("answer", "left"), [(page(3), "3 requests"), (TimeoutError(), "an unknown number")])
def test_it_gives_up(answer, left):
    """And says how many requests are cut."""
    with pytest.raises(StillBusyError, match=f"{left}.* still run on http://e after 10 s"):
        Time(answer).wait(settle_s=5.0, timeout_s=10.0)


class Metrics(http.server.BaseHTTPRequestHandler):
    """An idle engine."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(page(0).encode())

    def log_message(self, *_args):
        pass


def test_over_http():
    """A real engine's page is read; nothing at that port is an engine that has gone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        wait_idle(f"http://127.0.0.1:{free.getsockname()[1]}", settle_s=60.0, timeout_s=60.0)
    with http.server.HTTPServer(("127.0.0.1", 0), Metrics) as server, contextlib.ExitStack() as stack:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        wait_idle(f"http://127.0.0.1:{server.server_port}/", settle_s=0.0, timeout_s=5.0)
