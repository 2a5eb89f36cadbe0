"""Lets `pytest bench/bench_step.py` find the modules beside it; pytest takes the same options as the scripts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from measure import Settings  # needs the path above


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="tiny sizes and few rounds: does it run, not how fast is it")


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> Settings:
    return Settings(quick=bool(request.config.getoption("--quick")))
