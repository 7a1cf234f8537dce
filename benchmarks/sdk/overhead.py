"""What our client adds to a call, and `import bidikv` to a start, against the plain openai package.

python benchmarks/sdk/overhead.py [--messages 200] [--json FILE]

Exits 1 if a figure misses its target, which other work on the machine can bring about.

Calls go through the whole client to a transport in memory that answers at once, so that nothing but the client is
measured. Plain and ours take turns call by call, so that a busy machine slows both. What ours adds is clocked inside the
call, around each method that it overrides and without what is called there: the difference of two calls that take many times
as long would be noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import openai

import bidikv

_SWING = 20
_HTTP: Any = import_module("httpx" if openai.__version__.startswith("2.") else "httpx2")
_OVERRIDDEN = ("request", "_build_request", "_process_response")
_IMPORTS = {
    "import_openai_ms": "import openai",
    "import_bidikv_ms": "import bidikv",
    "import_client_ms": "import bidikv; bidikv.OpenAI",
}
TARGETS = {"added_ms": 0.3, "import_ratio": 1.2}
"""What a figure is at most, at the default number of messages."""
TOOLS = [
    {
        "type": "function",
        "function": {"name": f"tool_{n}", "description": "d" * 200, "parameters": {"type": "object"}},
    }
    for n in range(10)
]
_HEADERS = {
    "x-bidikv-reuse": 'v=1, reason="hit", prompt=100, remote=64, local=16, computed=20',
    "x-bidikv-session": "0" * 32,
}


def answer(messages: int) -> dict[str, Any]:
    """What the model says to a history of so many messages; no two answers are alike."""
    function = {"name": "search", "arguments": f'{{"pattern" :"p{messages}"}}'}
    calls = [{"id": f"call_{messages}", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def completion(request: Any) -> dict[str, Any]:
    """The whole answer to a request."""
    choice = {
        "index": 0,
        "message": answer(len(json.loads(request.content)["messages"])),
        "finish_reason": "tool_calls",
    }
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


def client(kind: Any, **options: Any) -> Any:
    """A client that is answered at once."""
    transport = _HTTP.MockTransport(
        lambda request: _HTTP.Response(200, headers=_HEADERS, json=completion(request))
    )
    http_client = _HTTP.Client(transport=transport)
    return kind(base_url="http://router/v1", api_key="k", http_client=http_client, **options)


def history(messages: int) -> list[dict[str, Any]]:
    """An agent's history: a third of it tool calls, a third results of 400 characters."""
    told: list[dict[str, Any]] = [
        {"role": "system", "content": "s" * 2000},
        {"role": "user", "content": "u" * 300},
    ]
    while len(told) < messages:
        number = len(told)
        call = {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "search", "arguments": json.dumps({"pattern": f"p{number}", "limit": 10})},
        }
        told.append({"role": "assistant", "content": None, "tool_calls": [call]})
        told.append({"role": "tool", "tool_call_id": f"call_{number}", "content": f"{number} " * 100})
        told.append({"role": "assistant", "content": f"found {number} " * 20})
    return told[:messages]


def turn(messages: int) -> list[dict[str, Any]]:
    """What a turn adds to a history of so many messages: the answer, and its tool's result."""
    result = {"role": "tool", "tool_call_id": f"call_{messages}", "content": f"turn {messages}"}
    return [answer(messages), result]


def overhead_ms(messages: int, pairs: int) -> dict[str, float]:
    """Milliseconds of a call: plain, ours, and of ours what is our own code, wherever in the call it runs.

    A history grows by two messages a turn, as an agent's does, from a little below that length to a little above.
    """
    clock = Clock()
    plain, ours = client(Bare), client(bidikv.OpenAI)
    times: dict[str, list[float]] = {"plain": [], "ours": []}
    own: dict[str, list[float]] = {"plain": [], "ours": []}
    told: list[dict[str, Any]] = []
    for number in range(pairs):
        if len(told) < messages - _SWING or len(told) > messages + _SWING:
            told, conversation = history(messages - _SWING), bidikv.conversation()
        order = (("plain", plain), ("ours", ours)) if number % 2 else (("ours", ours), ("plain", plain))
        for name, talker in order:
            with conversation:
                clock.own_s = 0.0
                started_s = time.perf_counter()
                talker.chat.completions.create(model="m", messages=told, tools=TOOLS)
                times[name].append((time.perf_counter() - started_s) * 1000)
            own[name].append(clock.own_s * 1000)
        told += turn(len(told))
    drifts = {turn.drift.kind for turn in conversation.turns if turn.drift is not None}
    assert drifts <= {"start", "append"}, drifts  # noqa: S101 - or it is another thing that is measured
    figures = {f"{name}_ms": statistics.median(taken) for name, taken in times.items()}
    # What the clock sees of a client that adds nothing is its own.
    clock_ms = statistics.median(own["plain"])
    added = [taken - clock_ms for taken in own["ours"]]
    return {
        **figures,
        "clock_ms": clock_ms,
        "added_ms": statistics.median(added),
        "added_p90_ms": statistics.quantiles(added, n=10)[-1],
        "added_loop_ms": loop_ms(messages, pairs),
    }


class Bare(openai.OpenAI):  # type: ignore[misc]
    """The plain client, as a class that the clock can tell from it."""


class Clock:
    """Seconds of our own code in calls of `bidikv.OpenAI`: in each method that it overrides, without what it calls there.

    Attributes:
        own_s: Seconds since it was set to nothing.
    """

    def __init__(self) -> None:
        self.own_s = 0.0
        for name in _OVERRIDDEN:
            # Theirs first: ours are found through it where ours do not override.
            self._clock(openai.OpenAI, name, -1.0)
            self._clock(Bare, name, 1.0)
            self._clock(bidikv.OpenAI, name, 1.0)

    def _clock(self, kind: Any, name: str, sign: float) -> None:
        method = getattr(kind, name)

        def clocked(*args: Any, **options: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                self.own_s += sign * (time.perf_counter() - started_s)

        setattr(kind, name, clocked)


def loop_ms(messages: int, pairs: int) -> float:  # noqa: C901 - one story, told in order
    """Milliseconds of the same steps with nothing between them, so that code and data stay in the processor's caches."""
    ours, told = client(bidikv.OpenAI), history(messages - _SWING)
    theirs = {name: getattr(openai.OpenAI, name) for name in _OVERRIDDEN}
    calls: list[Any] = []
    recorded: dict[str, list[Any]] = {name: [] for name in _OVERRIDDEN}

    def called(cast_to: Any, options: Any, **more: Any) -> Any:
        calls.append(options)
        return type(ours).request(ours, cast_to, options, **more)

    def recording(name: str) -> Any:
        def record(*args: Any, **more: Any) -> Any:
            recorded[name].append(theirs[name](*args, **more))
            return recorded[name][-1]

        return record

    for name in ("_build_request", "_process_response"):
        _replace(name, recording(name))
    ours.request = called
    with bidikv.conversation():
        while len(told) <= messages + _SWING:
            ours.chat.completions.create(model="m", messages=told, tools=TOOLS)
            told = [*told, *turn(len(told))]
    response = _HTTP.Response(200, headers=_HEADERS)

    def replayed(self: Any, _: Any, options: Any, **__: Any) -> Any:
        self._build_request(options)
        return self._process_response(response=response)

    _replace("request", replayed)
    taken: list[float] = []
    while len(taken) < pairs:
        with bidikv.conversation():
            turns = zip(calls, recorded["_build_request"], recorded["_process_response"], strict=True)
            for number, (options, built, answered) in enumerate(turns):
                _replace("_build_request", lambda *_, _built=built, **__: _built)
                _replace("_process_response", lambda *_, _answered=answered, **__: _answered)
                started_s = time.perf_counter()
                type(ours).request(ours, None, options)
                if number:  # the first turn meets a long history that is new
                    taken.append((time.perf_counter() - started_s) * 1000)
    for name, method in theirs.items():
        _replace(name, method)
    return statistics.median(taken)


def _replace(name: str, method: Any) -> None:
    """Put another method in the place of the OpenAI client's."""
    setattr(openai.OpenAI, name, method)


def import_ms(runs: int) -> dict[str, float]:
    """Milliseconds that a fresh interpreter takes for each statement, its own start taken off; the least of the runs.

    The statements take turns, so that a busy machine slows all of them.
    """
    taken: dict[str, list[float]] = {name: [] for name in _IMPORTS}
    for _ in range(runs):
        for name, statement in _IMPORTS.items():
            program = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
            taken[name].append(float(done.stdout) * 1000)
    least = {name: min(times) for name, times in taken.items()}
    return {**least, "import_ratio": least["import_client_ms"] / least["import_openai_ms"]}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=200, help="length of the history")
    parser.add_argument("--calls", type=int, default=300, help="pairs of calls")
    parser.add_argument("--runs", type=int, default=7, help="fresh interpreters for each import")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    arguments = parser.parse_args()
    figures: dict[str, float] = overhead_ms(arguments.messages, arguments.calls)
    figures |= import_ms(arguments.runs)
    missed = {name for name, most in TARGETS.items() if figures[name] > most}
    for name, value in figures.items():
        verdict = (
            f"  {'MISSED' if name in missed else 'met'}: at most {TARGETS[name]}" if name in TARGETS else ""
        )
        print(f"{name:18} {value:8.3f}{verdict}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"openai": openai.__version__, **figures}, indent=2) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
