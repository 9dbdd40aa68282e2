"""From configured or handed-over sources to tokenized streams, every row accounted for."""

import itertools
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rayrm.config.schema import RunConfig, Source
from rayrm.data.pipeline import PairStream, check_report, tokenize_rows
from rayrm.data.report import ROWS_A_MARK, DataReport
from rayrm.data.sources import RawRows, hand_over, list_files, open_sources, stamps_of
from rayrm.errors import DataError

logger = logging.getLogger(__name__)

TRAIN = "train"
"""Name of the training rows; evaluation sets are called ``eval`` or ``eval_<set>``."""


def eval_names(config: RunConfig, handed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the evaluation sets by name: handed-over rows, or else configured sources."""
    given = handed.get("eval", config.data.eval)
    sets = given if isinstance(given, Mapping) else {"": given}
    return {f"eval_{name}" if name else "eval": rows for name, rows in sets.items()}


def open_streams(
    config: RunConfig, handed: Mapping[str, Any], *, cpus_per_task: float
) -> dict[str, PairStream]:
    """Open the training rows and each evaluation set as lazy, tokenized streams.

    Raises:
        ConfigError: a source does not exist, or handed-over rows are of an unknown type.
    """
    raw: dict[str, RawRows] = {}
    eval_sets = eval_names(config, handed)
    if TRAIN in handed:
        raw[TRAIN] = hand_over(handed[TRAIN], label=TRAIN)
    else:
        sources = label_sources(config.data.train, taken=eval_sets)
        raw[TRAIN] = open_sources(sources, field="data.train")
    for name, rows in eval_sets.items():
        if isinstance(rows, Source):
            raw[name] = open_sources([(name, rows)], field=_field(name))
        else:
            raw[name] = hand_over(rows, label=name)
    return {
        name: tokenize_rows(rows, model=config.model, data=config.data, num_cpus=cpus_per_task)
        for name, rows in raw.items()
    }


@dataclass(frozen=True, slots=True)
class Rows:
    """All data sets of a run by name, each row of them accounted for."""

    streams: Mapping[str, PairStream]
    reports: Mapping[str, DataReport]
    stamps: Mapping[str, list[int]]
    """Size and time of change of each file, by its path."""


def read_rows(
    config: RunConfig,
    handed: Mapping[str, Any],
    *,
    cpus_per_task: float,
    rows_a_mark: int,
    hold_train: bool = False,
) -> Rows:
    """Open all data sets and read them once, to account for each row.

    Evaluation sets are read many times, and are kept tokenized in the object store; with
    ``hold_train`` the training rows are, too.

    Raises:
        ConfigError: a source does not exist, or handed-over rows are of an unknown type.
        DataError: a source cannot be read.
    """
    streams = open_streams(config, handed, cpus_per_task=cpus_per_task)
    stamps = stamps_of(file for stream in streams.values() for file in stream.files)
    logger.info("reading the rows once, to account for each")
    streams = {
        name: stream.held() if hold_train or name != TRAIN else stream
        for name, stream in streams.items()
    }
    marks = {TRAIN: rows_a_mark}
    reports = {
        name: stream.survey(rows_a_mark=marks.get(name, ROWS_A_MARK))
        for name, stream in streams.items()
    }
    return Rows(streams, reports, stamps)


def check_reports(reports: Mapping[str, DataReport], config: RunConfig, *, kept_in: str) -> None:
    """Refuse unusable data, and say what was dropped of usable data.

    Raises:
        DataError: a set has no usable pair, or a bad row is to stop the run.
    """
    for name, report in reports.items():
        check_report(report, config.data, field=_field(name))
        if report.dropped:
            counts = ", ".join(f"{n} {reason}" for reason, n in report.dropped.most_common())
            logger.warning(
                "%s: %d of %d rows dropped (%s); see %s",
                _field(name), report.dropped.total(), report.num_rows, counts, kept_in,
            )  # fmt: skip


def check_unchanged(reports: Mapping[str, DataReport], before: Mapping[str, Any]) -> None:
    """Refuse to go on with rows that are not those of the run's first start.

    Args:
        reports: the account of all rows, by name of the set.
        before: the account of each source as the first start wrote it.

    Raises:
        DataError: a source has other rows.
    """
    for name, report in reports.items():
        for label, now in report.as_dict().items():
            if before and label not in before:
                raise DataError(
                    f"{_field(name)}: this run began with the rows of {', '.join(before)}, not of "
                    f"{label}: bring those back, or give another run.name"
                )
            then = before.get(label, {})
            if then.get("fingerprint", now["fingerprint"]) != now["fingerprint"]:
                raise DataError(
                    f"{_field(name)}: {label} has changed since this run began (its "
                    f"{then['rows']} rows then are not its {now['rows']} now): bring the rows back "
                    "that it had, or give another run.name"
                )


def _field(name: str) -> str:
    return "data." + name.replace("eval_", "eval.", 1)


def may_have_changed(
    config: RunConfig, handed: Mapping[str, Any], before: Mapping[str, list[int]]
) -> bool:
    """Whether files are others than those of which ``before`` has the stamps.

    Of rows that are handed over there is no telling; the hub's are taken as they were.
    """
    if handed:
        return True
    files = [
        file
        for source in (*config.data.train, *config.data.eval.values())
        if not source.path.startswith("hub:")
        for file in list_files(source.path, label="", field="data")
    ]
    return stamps_of(files) != before


def label_sources(
    sources: Iterable[Source], taken: Collection[str] = ()
) -> list[tuple[str, Source]]:
    """Name each source by its file or folder: fit for a file's name, and like no other label."""
    labels: dict[str, Source] = {}
    for source in sources:
        stems = (part.split(".")[0] for part in reversed(source.path.split("/")))
        words = (re.sub(r"[^\w-]+", "-", stem).strip("-") for stem in stems)
        word = next(filter(None, words), "source")
        numbered = (f"{word}-{number}" for number in itertools.count(2))
        free = (label for label in itertools.chain([word], numbered) if label not in taken)
        labels[next(label for label in free if label not in labels)] = source
    return list(labels.items())
