"""An example's comparison on real engines."""

from __future__ import annotations

from pathlib import Path

import bidikv
from bidikv.examples import fan_out


def test_a_team_compares(cluster, capsys):
    """Forks read what decode holds of their parent's turn, and every answer is what it is without readback."""
    arguments = [
        *(
            "--base-url",
            cluster.base_url,
            "--model",
            cluster.model_name,
            "--root",
            str(Path(bidikv.__file__).parent),
        ),
        *(
            "--compare",
            "--history",
            "300",
            "--agents",
            "2",
            "--rounds",
            "1",
            "--turns",
            "1",
            "--max-tokens",
            "16",
        ),
    ]
    code = fan_out.main(arguments)
    printed = capsys.readouterr().out
    assert code == 0, printed
    rows = [line.split() for line in printed.splitlines()[2:6]]
    assert [(row[0], row[-1]) for row in rows] == [
        ("planner", "new_conversation"),
        ("helper-0", "hit"),
        ("helper-1", "hit"),
        ("planner", "hit"),
    ]
    assert all(int(row[3]) > 0 for row in rows[1:])
    assert "answers with and without readback: identical" in printed
