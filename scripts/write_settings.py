"""Write docs/settings.md from the router's settings."""

from pathlib import Path

from bidikv_server.router.reference import as_markdown

(Path(__file__).parent.parent / "docs" / "settings.md").write_text(as_markdown(), encoding="utf-8")
