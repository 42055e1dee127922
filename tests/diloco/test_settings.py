"""Settings: every bad value is an error that has the value and the fix."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
import yaml
from golden.runs import rows

from composer_replication.arguments import in_yaml
from composer_replication.settings import MAX_ROWS, DiLoCoSettings


@pytest.mark.parametrize(("arguments", "message"), [
    ({"sync_every": 100, "num_fragments": 3},
     "sync_every=100 is not divisible by num_fragments=3: use sync_every=99 or 102"),
    ({"sync_every": 2, "num_fragments": 3},
     "sync_every=2 is not divisible by num_fragments=3: use sync_every=3"),
    ({"sync_every": 0}, "sync_every=0: use an integer of at least 1"),
    ({"sync_every": None}, "sync_every=None: use an integer of at least 1"),
    ({"sync_every": 2.5}, "sync_every=2.5: use an integer of at least 1"),
    ({"sync_every": True}, "sync_every=True: use an integer of at least 1"),
    ({"sync_every": 10, "num_fragments": 2, "fragment_sync_delay": 10},
     "fragment_sync_delay=10 is not below sync_every / num_fragments = 10 / 2 = 5"),
    ({"fragment_sync_delay": -1}, "fragment_sync_delay=-1: use an integer of at least 0"),
    ({"fragment_update_alpha": 1.5}, "fragment_update_alpha=1.5: use a number between 0 and 1"),
    ({"outer_lr": -0.7}, "outer_lr=-0.7: use a number between 0 and 1000"),
    ({"outer_lr": 1e300}, "outer_lr=1e+300: use a number between 0 and 1000"),
    ({"outer_lr": float("nan")}, "outer_lr=nan: use a number between 0 and 1000"),
    ({"outer_lr": "0.7"}, "outer_lr='0.7': use a number between 0 and 1000"),
    ({"outer_momentum": 1.0},
     "outer_momentum=1.0: use a number between 0 and 1, exclusive"),
    ({"outer_nesterov": "yes"}, "outer_nesterov='yes': use true or false"),
    ({"weight_by": "words"}, "weight_by='words': use uniform or steps or samples or tokens"),
    ({"max_sync_retries": -1}, "max_sync_retries=-1: use an integer of at least 0"),
    ({"fragment_patterns": []}, "fragment_patterns=[]: give a list"),
    ({"fragment_patterns": "*"}, "fragment_patterns='*': give a list"),
    ({"fragment_patterns": ["a", "b"], "num_fragments": 3}, "leave num_fragments out"),
    ({"fragment_patterns": ["a", "b", "*"], "sync_every": 100}, "use sync_every=99 or 102"),
    ({"round_seconds": 0}, "round_seconds=0: use a number 0.001 or more, or auto"),
    ({"round_seconds": "60"}, "round_seconds='60': use a number 0.001 or more, or auto"),
    ({"round_seconds": 60, "weight_by": "uniform"}, "use weight_by=steps, samples or tokens"),
    ({"schedule": "[]"}, "schedule='[]': give a list of rows such as {outer_step: 61"),
    ({"schedule": [7]}, "schedule[0]=7: write a row with outer_step and any of sync_ev"),
    ({"schedule": [{"outer_step": 3}]}, "schedule[0]={'outer_step': 3}: write a row"),
    ({"schedule": [{"sync_every": 3}]}, "schedule[0]={'sync_every': 3}: write a row with outer_st"),
    ({"schedule": [{"outer_step": 3, "outer_lrs": 1}]},
     "schedule[0]: outer_lrs cannot change during a run: did you mean outer_lr?"),
    ({"schedule": [{"outer_step": 3, "wire_format": "int8"}]},
     "wire_format cannot change during a run: use sync_every, outer_lr, outer_momentum"),
    ({"schedule": rows((0, 0.7, 0.9))}, "schedule[0]: outer_step=0: use an integer of"),
    ({"schedule": rows((1, -0.7, 0.9))}, "schedule[0]: outer_lr=-0.7: use a number between 0"),
    ({"schedule": rows((1, 0.7, 0.9), (9, 0.7, 1))},
     "schedule[1]: outer_momentum=1: use a number between 0 and 1"),
    ({"schedule": rows((9, 0.7, 0.9), (9, 0.4, 0.9))},
     "schedule[1]: outer_step=9 does not come after 9: put the rows in ascending order"),
    ({"schedule": rows(*((n + 1, 1, 0) for n in range(MAX_ROWS + 1)))}, "has 65 rows: use at"),
    ({"num_fragments": 4, "schedule": [{"outer_step": 3, "sync_every": 30}]},
     "schedule[0]: sync_every=30 is not divisible by num_fragments=4: use sync_every=28 or 32"),
    ({"fragment_sync_delay": 9, "schedule": [{"outer_step": 3, "sync_every": 8}]},
     "8 / 1 = 8, and one fragment is in flight at a time: use at most 7"),
    ({"round_seconds": 60, "schedule": [{"outer_step": 3, "sync_every": 8}]},
     "schedule[0]: sync_every=8 with round_seconds=60: rounds are a time there"),
    ({"sync_every": 24, "num_fragments": 24, "fragment_sync_delay": 2},
     ": use at most 0, or num_fragments=8"),
])  # fmt: skip
def test_a_bad_value_is_refused_with_value_and_fix(arguments, message):
    with pytest.raises(ValueError) as caught:
        DiLoCoSettings(**arguments)
    assert message in str(caught.value)


def test_the_defaults_learn_in_short_trainings():
    settings = DiLoCoSettings()
    assert (settings.outer_lr, settings.outer_momentum, settings.outer_nesterov) == (0.7, 0.5, True)
    assert settings.sync_buffers == "mean"
    assert settings.fragment_count == 1
    assert not settings.discards_overlapped_steps


@pytest.mark.parametrize(
    ("given", "inner_steps", "warning"),
    [
        ({}, 1, ""),
        # Sixty rounds of four inner steps, then of twenty.
        ({"outer_momentum": 0.9}, 79, "=0.9 overshoots in fewer than 200 rounds, and this .* 19 "),
        ({"outer_momentum": 0.9}, 3039, "and this training has 199 at most"),
        ({"outer_momentum": 0.9}, 3040, ""),
        ({"outer_momentum": 0.9}, None, ""),
        ({"outer_momentum": 0.7, "schedule": []}, 1339, "fewer than 67 rounds, and this .* 66 "),
        ({"outer_momentum": 0.7, "schedule": []}, 1340, ""),
        ({"outer_momentum": 0.7, "schedule": [], "num_fragments": 5}, 1340, ""),
        ({"outer_momentum": 0.9, "round_seconds": "auto"}, 10, ""),
        ({"outer_momentum": 0.9, "schedule": [{"outer_step": 9, "sync_every": 1}]}, 352, ""),
        ({"outer_momentum": 0.9, "schedule": [{"outer_step": 9, "sync_every": 1}]}, 351, " 199 "),
        ({"outer_momentum": 0.9, "schedule": [{"outer_step": 9, "outer_momentum": 0.1}]}, 10, ""),
    ],
)
def test_too_much_momentum_for_a_training_is_warned_of(given, inner_steps, warning):
    said = DiLoCoSettings(sync_every=20, **given).momentum_warning(inner_steps)
    assert re.search(warning, said) and bool(said) == bool(warning)


@pytest.mark.parametrize(
    ("given", "alpha", "discards"),
    [
        ({}, 0.0, False),
        ({"fragment_sync_delay": 2}, 0.5, False),
        ({"fragment_sync_delay": 2, "fragment_update_alpha": None}, 0.5, False),
        ({"fragment_update_alpha": None}, 0.0, False),
        ({"fragment_sync_delay": 2, "fragment_update_alpha": 0}, 0.0, True),
        ({"fragment_update_alpha": 0.25}, 0.25, False),
    ],
)
def test_alpha_follows_the_delay_unless_it_is_named(given, alpha, discards):
    settings = DiLoCoSettings(**given)
    assert settings.discards_overlapped_steps == discards
    for value in (settings.fragment_update_alpha, settings.fingerprint()["fragment_update_alpha"]):
        assert value == alpha and isinstance(value, float)


def test_the_fingerprint_leaves_out_what_may_differ():
    assert {"sync_every", "sync_buffers", "wire_format"} <= DiLoCoSettings().fingerprint().keys()
    # Groups may take unequal numbers of steps then, with and without short rounds first.
    unequal = [DiLoCoSettings(weight_by="steps", sync_every=n).fingerprint() for n in (10, 100)]
    assert unequal[0] == unequal[1] and "sync_every" not in unequal[0]
    assert "max_sync_retries" not in DiLoCoSettings().fingerprint()
    one = DiLoCoSettings(sync_every=2, fragment_patterns=["a*", ["*"]])
    other = DiLoCoSettings(sync_every=2, fragment_patterns=(("a*",), "*"))
    assert one.fingerprint() == other.fingerprint()


def test_settings_are_shown_as_a_config_writes_them():
    rows = [{"outer_step": 61, "sync_every": 30}, {"outer_step": 90, "outer_lr": 1.0}]
    settings = DiLoCoSettings(sync_every=20, schedule=rows, fragment_patterns=["*blocks.0.*", "b"])
    assert str(settings) == (
        'sync_every=20, fragment_patterns=[["*blocks.0.*"], [b]], '
        "schedule=[{outer_step: 61, sync_every: 30}, {outer_step: 90, outer_lr: 1.0}]"
    )


VALUES = None, True, math.inf, -math.inf, "auto", "*a, b", 'say "no"', 0.5


@pytest.mark.parametrize("value", VALUES)
def test_a_value_in_yaml_is_read_as_it_was(value):
    assert yaml.safe_load(in_yaml({"key": [value, "7"]})) == {"key": [value, "7"]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"sync_every": 100}, [(1, 20), (61, 100)]),
        ({"sync_every": 20}, [(1, 4), (61, 20)]),
        ({"sync_every": 19}, []),  # short already
        ({"sync_every": 64, "num_fragments": 4}, [(1, 12), (241, 64)]),
        # No fragment's sync may take longer than its turn.
        (
            {"sync_every": 100, "num_fragments": 4, "fragment_sync_delay": 5},
            [(1, 24), (241, 100)],
        ),
        ({"sync_every": 100, "num_fragments": 4, "fragment_sync_delay": 24}, []),
        ({"sync_every": 64, "fragment_patterns": ["a*", "*"]}, [(1, 12), (121, 64)]),
        ({"sync_every": 100, "round_seconds": "auto"}, []),
    ],
)
def test_sixty_rounds_are_short_and_twenty_end_in_a_plain_average(given, expected):
    settings = DiLoCoSettings(**given)
    rows = [row for row in settings.schedule if "sync_every" in row]
    assert [(row["outer_step"], row["sync_every"]) for row in rows] == expected
    last = 20 * settings.fragment_count
    plain, later = (1.0, 0.0, False), (0.7, 0.5, True)
    numbers = [settings.outer_numbers_at(step) for step in (1, last, last + 1, 9999)]
    assert numbers == [plain, plain, later, later]
    # What was chosen is what it says: chosen again it is the same.
    assert DiLoCoSettings(**dataclasses.asdict(settings)) == settings


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        ({"outer_lr": 0.7}, (0.7, 0.5)),
        ({"outer_momentum": 0.5}, (0.7, 0.5)),
        ({"outer_lr": 0, "outer_momentum": 0.9}, (0, 0.9)),
        ({"schedule": []}, (0.7, 0.5)),
        ({"schedule": [{"outer_step": 9, "sync_every": 50}]}, (0.7, 0.5)),
    ],
)
def test_outer_numbers_and_schedules_that_are_given_mean_what_they_say(given, numbers):
    settings = DiLoCoSettings(**given)
    assert {settings.outer_numbers_at(step)[:2] for step in range(99)} == {numbers}
    if "schedule" in given:
        assert list(settings.schedule) == given["schedule"]
    else:
        assert settings.sync_every_at(60) == 20 and settings.sync_every_at(61) == 100
    assert DiLoCoSettings(**dataclasses.asdict(settings)) == settings


def test_equal_schedules_are_equal_however_they_are_written():
    one = DiLoCoSettings(schedule=rows((4, 1, 0)))
    (row,) = rows((4, 1.0, 0.0))
    assert one == DiLoCoSettings(schedule=(dict(reversed(row.items())),))
    assert DiLoCoSettings(schedule=[]) == DiLoCoSettings(schedule=())
    assert one.fingerprint()["schedule"] == [row]
    rates = [one.outer_numbers_at(step)[0] for step in (1, 3, 4, 5)]
    assert rates == [0.7, 0.7, 1, 1]


@pytest.mark.parametrize(("one", "other"), [
    ({"outer_lr": 1}, {"outer_lr": np.float64(1.0)}),
    ({"outer_momentum": 0}, {"outer_momentum": 0.0}),
    ({"round_seconds": 30}, {"round_seconds": 30.0}),
    ({"fragment_patterns": ["a*", "*"]}, {"fragment_patterns": (["a*"], ("*",))}),
    ({"fragment_patterns": ["a*", "*"]}, {"fragment_patterns": ["a*", "*"], "num_fragments": 2}),
], ids=str)  # fmt: skip
def test_equal_settings_are_equal_however_they_are_written(one, other):
    one, other = (DiLoCoSettings(**given) for given in (one, other))
    assert one == other
    # A group that was healed has them from a peer, and its state the same name as the peer's.
    assert json.dumps(one.fingerprint()) == json.dumps(other.fingerprint())
    assert json.loads(json.dumps(one.fingerprint())) == one.fingerprint()
    # The description of the outer optimizer has them as text.
    assert repr(one.outer_numbers_at(0)) == repr(other.outer_numbers_at(0))
