"""python -m rayrm.tune CONFIG.yaml [section.field=value ...]: find the best configuration."""

import sys

from rayrm.cli import ConfigRequest, exit_status, parse_config_request
from rayrm.config.loader import load_sweep
from rayrm.config.space import check_space


def tune(request: ConfigRequest) -> None:
    """Sweep as the command line asks and say what was best."""
    config = load_sweep(request.path, request.overrides)
    check_space(config)
    from rayrm.tuning.search import (
        sweep,  # loads torch and Ray, which a wrong configuration never needs
    )

    result = sweep(config)
    metric = config.search.metric
    counts = result.trials["status"].value_counts()
    print("trials:", ", ".join(f"{count} {status}" for status, count in counts.items()))
    shown = ["trial", "status", *config.search.space, metric, "step"]
    ordered = result.trials.sort_values(metric, ascending=config.search.mode == "min")
    print(ordered[shown].to_string(index=False))
    print(f"best: {result.sweep_dir}/best.yaml\nmodel: {result.best_model_dir}")


def main() -> int:
    """Run the command and return its exit status."""
    request = parse_config_request(
        "tune", "Find the best learning rate, centering and rank.", of_sweep=True
    )
    return exit_status(lambda: tune(request))


if __name__ == "__main__":
    sys.exit(main())
