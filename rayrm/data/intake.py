"""From configured or handed-over sources to tokenized streams, every row accounted for."""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rayrm.config.schema import RunConfig, Source
from rayrm.data.pipeline import PairStream, check_report, tokenize_rows
from rayrm.data.report import DataReport
from rayrm.data.sources import RawRows, hand_over, open_sources

logger = logging.getLogger(__name__)

TRAIN = "train"
"""Name of the training rows; evaluation sets are called ``eval`` or ``eval_<set>``."""


def eval_names(config: RunConfig, handed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the evaluation sets by name: handed-over rows, or else configured sources."""
    given = handed.get("eval", config.data.eval)
    sets = given if isinstance(given, Mapping) else {"": given}
    return {f"eval_{name}".rstrip("_"): rows for name, rows in sets.items()}


def open_streams(
    config: RunConfig, handed: Mapping[str, Any], *, cpus_per_task: float
) -> dict[str, PairStream]:
    """Open the training rows and each evaluation set as lazy, tokenized streams.

    Raises:
        ConfigError: a source does not exist, or handed-over rows are of an unknown type.
    """
    raw: dict[str, RawRows] = {}
    if TRAIN in handed:
        raw[TRAIN] = hand_over(handed[TRAIN], label=TRAIN)
    else:
        raw[TRAIN] = open_sources(_labelled(config.data.train), field="data.train")
    for name, rows in eval_names(config, handed).items():
        if isinstance(rows, Source):
            raw[name] = open_sources([(name, rows)], field=_field(name))
        else:
            raw[name] = hand_over(rows, label=name)
    return {
        name: tokenize_rows(rows, model=config.model, data=config.data, num_cpus=cpus_per_task)
        for name, rows in raw.items()
    }


def hold_eval_sets(streams: Mapping[str, PairStream]) -> dict[str, PairStream]:
    """Keep evaluation sets tokenized in the object store, since they are read many times."""
    return {
        name: stream if name == TRAIN else PairStream(stream.files, stream.dataset.materialize())
        for name, stream in streams.items()
    }


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


def _field(name: str) -> str:
    return "data." + name.replace("eval_", "eval.", 1)


def _labelled(sources: Sequence[Source]) -> list[tuple[str, Source]]:
    """Name each source by its file, made unique."""
    labels: list[tuple[str, Source]] = []
    for source in sources:
        stem = os.path.basename(source.path.rstrip("/*")).split(".")[0] or "source"
        stem = stem.replace(":", "-")
        taken = [label for label, _ in labels]
        number = sum(label == stem or label.startswith(f"{stem}-") for label in taken)
        labels.append((f"{stem}-{number + 1}" if stem in taken else stem, source))
    return labels
