"""The commands of the pages, in ```bash blocks: each is run by a test, or says that none runs it.

A block that no test runs begins with ``MARK`` and the reason. ``RUN_BY`` names the test of every
other one. Tests get their block from ``block``, so they run what the page says.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
MARK = "# Not run in our tests: "

OWN_JOB = "tests/integration/test_own_job.py"
OWN_COMMAND = "tests/integration/test_own_command.py"
SCRIPTS = "tests/training/test_example_scripts.py"
COMMANDS = "tests/test_page_commands.py"

LAUNCH = f"{OWN_COMMAND}::test_a_launch_of_a_script_is_a_run_like_that_of_a_config"
MAKE = f"{COMMANDS}::test_make_train_trains_two_groups"

RUN_BY = {
    ("README.md", "make train"): MAKE,
    ("README.md", "composer-replication launch"): LAUNCH,
    ("docs/checkpoints.md", "composer-replication export"): (
        f"{COMMANDS}::test_an_export_is_the_global_weights"
    ),
    ("docs/composer-job.md", "export COMPOSER_REPLICATION_TOKEN"): (
        f"{OWN_JOB}::test_both_groups_train_with_the_coordinators_settings_and_end_equal"
    ),
    ("docs/composer-job.md", "export COMPOSER_REPLICATION_COORDINATOR"): (
        f"{OWN_JOB}::test_both_groups_train_with_the_coordinators_settings_and_end_equal"
    ),
    ("docs/composer-job.md", "composer-replication launch"): LAUNCH,
    ("docs/composer-job.md", "curl"): f"{OWN_JOB}::test_a_setting_is_changed_by_the_pages_line",
    ("docs/doctor.md", "composer-replication doctor"): (
        f"{COMMANDS}::test_the_doctor_examines_the_machine_and_a_config"
    ),
    ("docs/examples.md", "python examples/switch.py"): (
        f"{SCRIPTS}::test_composer_hands_over_to_diloco_and_back"
    ),
    ("docs/examples.md", "torchft_lighthouse"): (
        f"{SCRIPTS}::test_a_plain_loop_in_two_groups_ends_on_one_model"
    ),
    ("docs/examples.md", "composer-replication launch examples/image_classifier.yaml"): (
        "tests/training/test_examples.py::test_an_image_classifier_of_torchvision_with_batch_norm"
    ),
    ("docs/learning.md", "python spikes/009-learning/report.py"): (
        f"{COMMANDS}::test_the_report_of_the_study_writes_the_page"
    ),
    ("docs/llm-foundry.md", "composer-replication launch"): (
        "tests/llmfoundry/test_own_command.py::test_llmfoundrys_own_command_with_its_own_yaml"
    ),
    ("docs/outer-loop.md", "composer-replication simulate"): (
        "tests/test_cli.py::test_a_simulation_leaves_the_same_files_as_a_launch"
    ),
    ("docs/own-command.md", "composer-replication launch"): LAUNCH,
    ("docs/own-command.md", "composer-replication chaos"): (
        f"{OWN_COMMAND}::test_a_script_under_faults_loses_nothing"
    ),
    ("docs/plan.md", "composer-replication plan"): (
        "tests/test_plan_command.py::test_the_page_shows_what_the_command_prints"
    ),
    ("docs/quickstart.md", "make train"): MAKE,
    ("docs/security.md", "(umask 077; openssl"): (
        f"{COMMANDS}::test_a_coordinator_takes_the_token_of_the_file"
    ),
    ("docs/security.md", "composer-replication certificates run-tls"): (
        f"{COMMANDS}::test_a_coordinator_answers_with_the_certificate_of_the_run"
    ),
    ("docs/security.md", "composer-replication certificates group-1-tls"): (
        f"{COMMANDS}::test_a_coordinator_answers_with_the_certificate_of_the_run"
    ),
}
"""The test that runs a block, by its page and how its first line begins."""


def fenced(page: Path, language: str) -> list[str]:
    """The blocks of a page in one language, in their order; indented ones without the indent."""
    every = re.findall(
        r"^( *)```(.*)\n((?:.*\n)*?)\1```$", page.read_text(), re.MULTILINE
    )  # of all languages: the end of one block must not count as the beginning of another
    return [
        re.sub(f"^{indent}", "", text, flags=re.MULTILINE)
        for indent, its_language, text in every
        if its_language == language
    ]


def block(page: str, start: str) -> str:
    """The commands of a block that a test runs.

    Args:
        page: Path of the page in the repository.
        start: How its first line begins. With the page it has to be a key of ``RUN_BY``.
    """
    assert (page, start) in RUN_BY, f"write into RUN_BY which test runs {start!r} of {page}"
    found = [text for text in fenced(ROOT / page, "bash") if text.startswith(start)]
    assert len(found) == 1, f"{page} has {len(found)} blocks that begin with {start!r}"
    return found[0]
