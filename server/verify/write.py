"""Writes the plan: draws operations that can be applied until the turns are used up. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Final

from bidikv_server.verify import prompts
from bidikv_server.verify.plan import (
    AnswerOf,
    Endpoint,
    Features,
    Op,
    Part,
    Script,
    Text,
    ToolResult,
    Turn,
    prompt_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST: Final = 9
"""Turns of one conversation."""
_TRIES: Final = 5
_WEIGHTS: Final = {
    Op.APPEND: 6,
    Op.EDIT_USER: 3,
    Op.EDIT_ANSWER: 3,
    Op.REWIND: 3,
    Op.REGENERATE: 2,
    Op.FORK: 2,
    Op.RETRY: 2,
    Op.TOOL_CALL: 5,
    Op.AUX: 1,
    Op.EXPIRE: 1,
    Op.JUNK: 1,
}
_COMPLETIONS_SHARE: Final = 0.2
_WHOLE_ANSWER_SHARE: Final = 0.2
_ANSWER_TOKENS: Final = (4, 12, 16, 24, 40, 96)
_ANSWER_WEIGHTS: Final = (1, 3, 4, 4, 2, 1)
_TOOL_ANSWER_TOKENS: Final = 40
_EXPIRING_SHARE: Final = 0.15
"""Of the conversations, those whose first turn expires, so that nothing of it is left."""


@dataclass(slots=True)
class _Branch:
    """A session: what it said so far, and its last turn."""

    number: int
    parent: int | None
    parts: tuple[Part, ...]
    last: Turn


def write_plan(seed: int, turns: int, features: Features) -> list[Script]:
    """Conversations with that many turns together.

    Each is decided by the seed and its own number, so a longer plan begins with the shorter one's conversations.
    """
    scripts: list[Script] = []
    while (left := turns - sum(len(script.turns) for script in scripts)) > 0:
        script = _Writer(seed, len(scripts), features).write()
        scripts.append(Script(script.number, script.turns[:left]))
    return scripts


class _Writer:
    """Writes one conversation."""

    def __init__(self, seed: int, number: int, features: Features) -> None:
        self._rng = Random(f"{seed}/{number}")  # noqa: S311  (reproducible, not secret)
        self._features = features
        self._script = Script(number)
        self._branches: list[_Branch] = []
        self._endpoint: Endpoint = "chat"
        self._tool = False

    def write(self) -> Script:
        """The whole conversation."""
        length = self._rng.randint(3, _LONGEST)
        self._open()
        while len(self._script.turns) < length:
            turn = self._next()
            if turn is None:
                break
            self._take(turn)
        return self._script

    def _open(self) -> None:
        rng, features = self._rng, self._features
        self._endpoint = (
            "completions" if features.completions and rng.random() < _COMPLETIONS_SHARE else "chat"
        )
        self._tool = self._endpoint == "chat" and features.tools and rng.random() < 0.6
        system = self._endpoint == "chat" and features.system and rng.random() < 0.5
        head: tuple[Part, ...] = (Text("system", prompts.SYSTEM),) if system else ()
        # Half of what fits, so that turns can follow.
        room = int((features.max_prompt_tokens - 300) / 2 / 1.6)
        text = prompts.user_text(rng, prompts.log_uniform(rng, 25, room) if room > 25 else 0)
        turn = self._turn(Op.OPEN, 0, (*head, Text("user", text)))
        if self._fits(turn):
            self._take(replace(turn, expires=rng.random() < _EXPIRING_SHARE))
        else:
            self._take(replace(turn, parts=(Text("user", "Hello."),), lists_tool=False))

    def _next(self) -> Turn | None:
        """A turn that can be played and fits; None if none was found."""
        for _ in range(_TRIES):
            op = self._rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
            turn = self._draw(op, self._rng.choice(self._branches))
            if turn is not None and self._fits(turn):
                return turn
        return None

    def _draw(self, op: Op, branch: _Branch) -> Turn | None:
        special: dict[Op, Callable[[_Branch], Turn | None]] = {
            Op.EDIT_USER: self._edit_user,
            Op.EDIT_ANSWER: self._edit_answer,
            Op.REWIND: self._rewind,
            Op.REGENERATE: self._regenerate,
            Op.FORK: self._fork,
            Op.RETRY: self._retry,
            Op.TOOL_CALL: self._call_tool,
            Op.AUX: self._aside,
        }
        if op in special:
            return special[op](branch)
        turn = self._turn(op, branch.number, self._continued(branch.parts))
        if op is Op.JUNK:
            return replace(turn, junk=self._rng.randrange(100))
        return replace(turn, expires=op is Op.EXPIRE)

    def _edit_user(self, branch: _Branch) -> Turn | None:
        place = self._rng.choice(_places(branch.parts, _is_user))
        old = branch.parts[place]
        if not isinstance(old, Text):
            return None
        edited = Text("user", prompts.edited(self._rng, old.text))
        head = (*branch.parts[:place], edited)
        whole = self._rng.random() < 0.7
        parts = self._continued((*head, *branch.parts[place + 1 :])) if whole else head
        return self._turn(Op.EDIT_USER, branch.number, parts)

    def _edit_answer(self, branch: _Branch) -> Turn | None:
        places = _places(branch.parts, self._is_plain_answer)
        if not places:
            return None
        place = self._rng.choice(places)
        text = prompts.passage(self._rng, prompts.log_uniform(self._rng, 5, 40))
        parts = (*branch.parts[:place], Text("assistant", text), *branch.parts[place + 1 :])
        return self._turn(Op.EDIT_ANSWER, branch.number, self._continued(parts))

    def _rewind(self, branch: _Branch) -> Turn | None:
        place = self._rng.choice(_places(branch.parts, _is_user))
        parts = (*branch.parts[:place], Text("user", self._ask()))
        return self._turn(Op.REWIND, branch.number, parts)

    def _regenerate(self, branch: _Branch) -> Turn:
        # It is a retry of the plain request, whatever came along with it.
        return replace(
            branch.last,
            index=len(self._script.turns),
            op=Op.REGENERATE,
            junk=None,
            cancel_first=False,
            expires=False,
        )

    def _fork(self, branch: _Branch) -> Turn:
        places = _places(branch.parts, _is_user)
        cut = self._rng.choice([*places[1:], len(branch.parts)])
        turn = self._turn(Op.FORK, len(self._branches), self._continued(branch.parts[:cut]))
        return replace(turn, parent=branch.number)

    def _retry(self, branch: _Branch) -> Turn:
        turn = self._turn(Op.RETRY, branch.number, self._continued(branch.parts))
        cancel = self._rng.random() < 0.5
        return replace(turn, cancel_first=cancel, stream=turn.stream or cancel)

    def _call_tool(self, branch: _Branch) -> Turn | None:
        if not self._tool or self._is_call(branch.parts[-1]):
            return None
        parts = (*branch.parts, Text("user", prompts.tool_question(self._rng)))
        turn = self._turn(Op.TOOL_CALL, branch.number, parts)
        return replace(turn, calls_tool=True, max_tokens=_TOOL_ANSWER_TOKENS)

    def _aside(self, branch: _Branch) -> Turn | None:
        if self._is_call(branch.parts[-1]):
            return None
        return self._turn(Op.AUX, branch.number, (*branch.parts, Text("user", prompts.SUMMARY)))

    def _turn(self, op: Op, branch: int, parts: tuple[Part, ...]) -> Turn:
        return Turn(
            index=len(self._script.turns),
            op=op,
            branch=branch,
            parent=self._branches[branch].parent if branch < len(self._branches) else None,
            endpoint=self._endpoint,
            parts=parts,
            max_tokens=self._rng.choices(_ANSWER_TOKENS, _ANSWER_WEIGHTS)[0],
            stream=self._rng.random() >= _WHOLE_ANSWER_SHARE,
            lists_tool=self._tool,
        )

    def _continued(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        last = parts[-1]
        if isinstance(last, AnswerOf) and self._is_call(last):
            return (*parts, ToolResult(last.turn, prompts.passage(self._rng, self._words())))
        return (*parts, Text("user", self._ask()))

    def _ask(self) -> str:
        return prompts.user_text(self._rng, self._words())

    def _words(self) -> int:
        return prompts.log_uniform(self._rng, 3, 150)

    def _is_call(self, part: Part) -> bool:
        return isinstance(part, AnswerOf) and self._script.turns[part.turn].calls_tool

    def _is_plain_answer(self, part: Part) -> bool:
        return isinstance(part, AnswerOf) and not self._is_call(part)

    def _fits(self, turn: Turn) -> bool:
        tokens = prompt_tokens(turn.parts, self._script.turns, lists_tool=turn.lists_tool)
        return tokens <= self._features.max_prompt_tokens

    def _take(self, turn: Turn) -> None:
        self._script.turns.append(turn)
        if turn.op is Op.AUX:
            return
        said = _Branch(turn.branch, turn.parent, (*turn.parts, AnswerOf(turn.index)), turn)
        if turn.branch == len(self._branches):
            self._branches.append(said)
        else:
            self._branches[turn.branch] = said


def _places(parts: tuple[Part, ...], wanted: Callable[[Part], bool]) -> list[int]:
    return [place for place, part in enumerate(parts) if wanted(part)]


def _is_user(part: Part) -> bool:
    return isinstance(part, Text) and part.role == "user"
