"""What a mark in a page may name: results, the code, other files, publications."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from study_modules import study_modules

from composer_replication.diloco.averaging.wire_sizes import BYTES_PER_PARAMETER
from composer_replication.plan import PlannedRun
from composer_replication.settings import DiLoCoSettings

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "measured"
PACKAGE = ROOT / "composer_replication"


class Values(dict[str, Any]):
    """An object of a JSON file, whose members are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no {name!r} in {', '.join(self)}") from None


def read_results(folder: Path = RESULTS) -> dict[str, Values]:
    """Every file of results, under its name with underscores.

    Raises:
        ValueError: A file does not say which command has made it, and when.
    """
    results = {}
    for path in sorted(folder.glob("*.json")):
        values = json.loads(path.read_text(), object_hook=Values)
        missing = {"command", "date", "commit"} - values.get("measured", {}).keys()
        if missing:
            raise ValueError(f"{path.name} lacks {sorted(missing)} in 'measured'")
        results[path.stem.replace("-", "_")] = values
    return results


@cache
def code(name: str, within: str = "") -> Any:
    """The number that a line of the package or the quickstart gives a name: constant or default.

    Args:
        name: It has to have one value in these modules.
        within: A part of their paths.
    """
    number = r"(\(?[-\d.e*, ]+\)?)"
    line = re.compile(rf"^ *{name}\b(?:[^=\n]*= |: Annotated\[.*, ){number}", re.MULTILINE)
    quickstart = (ROOT / "examples" / "quickstart").glob("*.py")
    paths = (*PACKAGE.rglob("*.py"), *quickstart)
    modules = [path for path in paths if within in path.relative_to(ROOT).as_posix()]
    values = {value for path in modules for value in line.findall(path.read_text())}
    if len(values) != 1:
        raise ValueError(f"the package has {sorted(values) or 'no number'} for {name}: name one")
    return eval(values.pop(), {"__builtins__": {}})


@cache
def found(path: str, pattern: str) -> list[float | str]:
    """What the groups of a pattern match in a file of the repository, as numbers if possible.

    Args:
        path: Of the file, below the root of the repository.
        pattern: A regular expression that the file matches at one place.
    """
    matches = list(re.finditer(pattern, (ROOT / path).read_text()))
    if len(matches) != 1:
        raise ValueError(f"{path} has {pattern!r} {len(matches)} times: it has to be there once")
    texts = matches[0].groups()
    return [float(text) if re.fullmatch(r"[\d.e-]+", text) else text for text in texts]


def config(path: str, key: str) -> Any:
    """A value of a YAML file, under a key with points."""
    value = yaml.safe_load((ROOT / path).read_text())
    for part in key.split("."):
        value = value[part]
    return value


def published(url: str, *values: float) -> tuple[float, ...]:
    """Figures of others, and where they stand."""
    assert url.startswith("https://"), f"{url!r} is no address"
    return values


def chosen(*values: float | str) -> tuple[float | str, ...]:
    """Numbers that are no findings: an example's, a target's, a name's."""
    return values


@cache
def _trainings() -> list[tuple[dict[str, Any], float]]:
    """All settings of each training of the study, also those that its line lacks, and its bits."""
    with study_modules() as load:
        return [(json.loads(key), line["bits"]) for key, line in load("study").read_all().items()]


@cache
def _arms() -> dict[str, Any]:
    with study_modules() as load:
        report = load("report")
        results = report.Results(report.read_all())
        return {arm.name: results.above(arm) for arm in report.ARMS}


def arm(name: str) -> Any:
    """How far an arm of the learning study lies above its base, in percent: see ``Difference``."""
    if _arms().get(name) is None:
        raise ValueError(f"{name!r} is no arm of the study that has been trained: see arms.py")
    return _arms()[name]


@cache
def _defaults() -> tuple[Any, Any]:
    with study_modules() as load:
        return load("defaults"), load("study").read_all()


def shipped(model: str, inner: str, groups: int, without: tuple[int, ...] = ()) -> Any:
    """How far the defaults lie above data parallel in a job that they are measured in."""
    defaults, done = _defaults()
    jobs = (*defaults.AS_SHIPPED, *defaults.OUTSIDE)
    (job,) = (
        each for each in jobs if (each.model, each.inner, each.groups) == (model, inner, groups)
    )
    return defaults.above(job, done, defaults.CHOSEN, without)


@cache
def gains(name: str, of: str = "all") -> Values:
    """The gains of a candidate of the study of the warm-up, over one group alone.

    Args:
        name: Of the candidate.
        of: ``rows``, ``jobs`` or both, ``all``; ``fine-tuned``.
    """
    with study_modules() as load:
        warm = load("warm")
        rows = [*warm.ROWS]
        jobs = [job for job in warm.EVERY_JOB if not isinstance(job, warm.Row)]
        sets = {"rows": rows, "jobs": jobs, "all": rows + jobs, "fine-tuned": warm.FINE_TUNED}
        found = warm.gains_of(warm.results(), name, sets[of])
        return Values(
            count=len(found),
            below=sum(gain < 0 for gain in found),
            least=found[0],
            most=found[-1],
            median=statistics.median(found),
            worst_quarter=warm.worst_quarter(found),
        )


@cache
def warm_up_costs() -> Values:
    """By how much plain averages at first end above momentum at once, in percent of the loss.

    Of the jobs in which it is more than noise. Fine-tuning is not among them.
    """
    with study_modules() as load:
        warm = load("warm")
        costs = sorted(
            each.above_at_once.mean
            for each in warm.shipped(warm.results())
            if each.above_at_once.low > 0 and each.job not in warm.FINE_TUNED
        )
        return Values(count=len(costs), least=costs[0], most=costs[-1])


@cache
def picture() -> Values:
    """What README's picture shows: the gain of four groups, and the number of its seeds."""
    with study_modules() as load:
        its, lines = load("picture"), load("lines")
        done = lines.read(its.LINES)
        return Values(gain=its.gain_of_four(done), seeds=len(its.seeds_of(done)))


@cache
def verdict() -> Values:
    """How often what a group measures tells if its training gains by the other groups."""
    with study_modules() as load:
        found, lines, warm = load("verdict"), load("lines"), load("warm")
        every = found.all_trainings(warm.Known(lines.read(lines.WARM), lines.read_all()))
        shares = found.shares(every)
        return Values(
            count=len(every),
            not_better=sum(not training.is_better for training in every),
            bound=found.BETTER_ABOVE,
            best=100 * max(max(own) for own in shares.values()),
        )


def gap(name: str, *job: Any) -> float:
    """How far a candidate lies above data parallel in a job, as a mean over its seeds."""
    defaults, done = _defaults()
    return defaults.gaps(defaults.Job(*job), done)[name]


def equal_bytes(groups: int, name: str) -> Any:
    """How far an arm of the study of bytes lies above plain averaging with H = 30."""
    defaults, done = _defaults()
    return defaults.over_plain(done, groups, name)


def claims(**cell: Any) -> list[float]:
    """Bits per byte of a training of the learning study, of each seed that counts."""
    return _study(cell, lambda seed: seed < 100)


def tuning(**cell: Any) -> list[float]:
    """The same of the seeds on which settings were chosen."""
    return _study(cell, lambda seed: seed > 100)


def _study(cell: Mapping[str, Any], counts: Callable[[int], bool]) -> list[float]:
    fits = [each for each in _trainings() if counts(each[0]["seed"]) and _is_like(each[0], cell)]
    others = {json.dumps({**settings, "seed": 0}, sort_keys=True) for settings, _ in fits}
    if len(others) != 1:
        raise ValueError(f"{len(others)} trainings of the study are like {cell}: name one")
    return [bits for _, bits in sorted(fits, key=lambda each: each[0]["seed"])]


def _is_like(cell: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    # The same training is there again, evaluated along the run, and with Composer's rate.
    wanted = {"curve": 0, "lag": 0, **wanted}
    return all(cell.get(name, 0) == value for name, value in wanted.items())


def rows(names: str, *runs: Mapping[str, Any]) -> list[Any]:
    """Lines of the tables of benchmarks, with ``;`` between names: of each those of all runs."""
    return [run["ratios"][name] for name in names.split("; ") for run in runs]


def plan(
    n: float, step_s: float, k: int, link: float, rtt_s: float, steps: int, **settings: Any
) -> list[float]:
    """A recipe: what is given, then percent in inner steps, GB a round, hours, and those alone.

    The rounds are those of the default schedule: short ones first.
    """
    its = DiLoCoSettings(**settings)
    run = PlannedRun(
        params=n,
        step_s=step_s,
        groups=k,
        link_bits_per_s=link,
        rtt_s=rtt_s,
        settings=its,
    )
    hours = steps * step_s / 3600
    blocked_hours = _num_rounds(its, steps) * run.blocked_s / 3600
    share = hours / (hours + blocked_hours)
    given = [k, steps, step_s, link / 1e6, 1000 * rtt_s, its.sync_every, its.num_fragments]
    sent = run.bytes_per_sync * its.num_fragments / 1e9
    return [*given, its.fragment_sync_delay, 100 * share, sent, hours + blocked_hours, hours]


def sent_less(sync_every: int, steps: int) -> list[float]:
    """Both, and how many times fewer bytes than data parallel a group sends, in float32."""
    return [sync_every, steps, steps / _num_rounds(DiLoCoSettings(sync_every=sync_every), steps)]


def _num_rounds(settings: DiLoCoSettings, steps: int) -> int:
    """How many rounds so many inner steps have, the last of which may be cut off."""
    count = ended = 0
    while ended < steps:
        ended += settings.sync_every_at(count * settings.num_fragments + 1)
        count += 1
    return count


def sources() -> dict[str, Any]:
    """All names of marks."""
    study = (arm, claims, tuning, shipped, gains, warm_up_costs, picture, verdict, gap, equal_bytes)
    own = (code, found, config, published, chosen, rows, plan, sent_less, *study)
    python = (abs, len, list, max, min, sum, zip)
    names: dict[str, Any] = {function.__name__: function for function in (*own, *python)}
    names |= {"median": statistics.median, "mean": statistics.fmean, "stdev": statistics.stdev}
    names |= {"bytes_per_parameter": Values(BYTES_PER_PARAMETER)}
    return names | read_results()
