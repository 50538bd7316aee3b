"""What tests of the config share."""

from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a config to cfg.yaml in the current folder."""
    monkeypatch.chdir(tmp_path)

    def write_config(text: str) -> Path:
        path = Path("cfg.yaml")
        path.write_text(text)
        return path

    return write_config
