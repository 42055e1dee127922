"""Trainers killed while they save: three of the twelve moments of tests/chaos/killed_saves.py.

Run: pytest tests/hosts/test_hf_killed.py. Real: everything.
"""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from chaos.killed_saves import die


@pytest.mark.parametrize(
    ("name", "both"),
    [
        ("in the model", False),
        ("before diloco.pt has its name", True),
        ("and again while it sets aside", False),
    ],
)
def test_groups_killed_in_a_save_come_back_by_themselves(name, both, tmp_path):
    assert not die("hf", name, tmp_path, both=both)
