"""Groups killed while they save: in three of the moments of `killed_saves.py`.

Run: pytest tests/chaos/test_killed_saves.py. Real: everything.
"""

import pytest
from chaos.killed_saves import MOMENTS, die

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_there_are_twelve_moments_for_each_host():
    assert {host: len(moments) for host, moments in MOMENTS.items()} == {
        "hf": 12,
        "composer": 12,
        "plain": 12,
    }


@pytest.mark.parametrize(
    ("name", "both"),
    [("after latest is removed", True), ("and again while it sets aside", False)],
)
def test_composer_s_groups_come_back_by_themselves_and_train_no_sample_twice(name, both, tmp_path):
    assert not die("composer", name, tmp_path, both=both)


def test_the_groups_of_a_plain_loop_come_back(tmp_path):
    assert not die("plain", "at 50%", tmp_path, both=True)
