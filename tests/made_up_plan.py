"""A planned run and constants for the tests of the plan: made up, and nobody's measurements."""

from composer_replication.diloco.averaging.wire_sizes import BYTES_PER_PARAMETER
from composer_replication.plan import PlannedRun
from composer_replication.plan_calibration import Calibration

CONSTANTS = {
    "sync_s": 0.5,
    "round_trips_per_sync": 3.0,
    "round_trips_per_mib": 0.5,
    "link_time": 1.25,
    "send_s_per_param.float32": 2e-9,
    "send_s_per_param.bfloat16": 3e-9,
    "send_s_per_param.int8": 5e-9,
    "send_s_per_param.fp4": 8e-9,
    "host_s_per_param.float32": 1e-9,
    "host_s_per_param.bfloat16": 2e-9,
    "host_s_per_param.int8": 2.5e-9,
    "host_s_per_param.fp4": 3e-9,
    "overlap_cost": 0.125,
    "ddp_link_time": 1.25,
    "ddp_s_per_param": 1e-9,
    "ddp_round_trips_per_mib": 0.25,
    "ddp_overlap": 0.5,
}


def planned(**changed):
    given = {"params": 10**9, "link_bits_per_s": 1e9, "step_s": 1.0, "groups": 2}
    return PlannedRun(**(given | changed))


def calibration(**changed):
    measured = {
        "params": [25_000_000, 25_000_000],
        "groups": [2, 2],
        "link_bits_per_s": [1e8, 1e10],
        "round_trip_s": [0.0, 0.05],
        "step_s": [0.5, 2.5],
        "num_fragments": [1, 4],
        "fragment_sync_delay": [0, 5],
        "wire_formats": list(BYTES_PER_PARAMETER),
    }
    given = {
        "constants": CONSTANTS,
        "not_told_apart": [],
        "error": {"median": 0.02, "max": 0.07, "rows": 30},
        "measured": measured,
        "date": "2026-01-02",
        "machine": "no machine",
        "command": "made up",
    }
    return Calibration(**(given | changed))
