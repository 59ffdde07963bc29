"""One browser for all pages of the tests; without one they are skipped, except in CI."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

__all__ = ["run"]

HERE = Path(__file__).parent
BROWSERS = ["chromium", "chromium-browser", "google-chrome", "chrome"]


def run(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Run checks of checks.mjs, each a job with name, file and check; results by name."""
    node, browser = shutil.which("node"), next(filter(None, map(shutil.which, BROWSERS)), None)
    if not (node and browser and (HERE / "node_modules").exists()):
        assert os.environ.get("CI") != "true", "CI needs node, chromium and tests/view/node_modules"
        pytest.skip("needs node, chromium and `npm install` in tests/view")
    assert node is not None
    asked = json.dumps({"executable": browser, "jobs": jobs})
    done = subprocess.run(
        [node, HERE / "drive.mjs"], input=asked, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
