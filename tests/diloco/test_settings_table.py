"""The table of settings. Run: pytest tests/diloco/test_settings_table.py."""

import dataclasses

import pytest

from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.diloco.settings_table import settings_table

NAMES = [field.name for field in dataclasses.fields(DiLoCoSettings)]


@pytest.mark.parametrize("width", [10, 40, 78, 100, 158, 500])
def test_every_setting_is_there_once_and_no_line_is_too_wide(width):
    lines = settings_table(DiLoCoSettings(), width)
    words = " ".join(lines).split()
    assert sorted(word for word in words if word in NAMES) == sorted(NAMES)
    assert len(words) == 2 * len(NAMES), "a name and a value each"
    if width >= 40:
        assert max(map(len, lines)) <= width
    assert len(lines) == {10: 19, 40: 19, 78: 10, 100: 7, 158: 4, 500: 1}[width]


def test_the_values_are_those_of_the_settings():
    settings = DiLoCoSettings(sync_every=24, outer_lr=1e-05, error_feedback=False)
    cells = " ".join(settings_table(settings, 80)).split()
    values = dict(zip(cells[::2], cells[1::2], strict=True))
    assert {name: values[name] for name in ("sync_every", "outer_lr")} == {
        "sync_every": "24",
        "outer_lr": "1e-05",
    }
    assert (values["error_feedback"], values["outer_schedule"]) == ("false", "-")


def test_lists_stand_below_in_lines_of_their_own():
    patterns = [f"*blocks.{i}.*" for i in range(23)] + [["*wte*", "*"]]
    schedule = [[1, 0.7, 0.9], [100, 0.35, 0.9]]
    settings = DiLoCoSettings(sync_every=24, fragment_patterns=patterns, outer_schedule=schedule)
    lines = settings_table(settings, 60)
    start = next(i for i, line in enumerate(lines) if line.startswith("fragment_patterns"))
    below = lines[start:]
    assert below[-1] == "outer_schedule  [[1, 0.7, 0.9], [100, 0.35, 0.9]]"
    text = " ".join(line.strip() for line in below[:-1])
    assert text.startswith("fragment_patterns  [*blocks.0.*, *blocks.1.*")
    assert text.endswith("*blocks.22.*, [*wte*, *]]")
    assert max(map(len, lines)) <= 60
