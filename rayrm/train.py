"""python -m rayrm.train [CONFIG.yaml] [section.field=value ...]: train a reward model."""

import sys

from rayrm.cli import ConfigRequest, exit_status, parse_config_request
from rayrm.config.loader import load_config


def train(request: ConfigRequest) -> None:
    """Train what the command line asks for and say where the result is."""
    config = load_config(request.path, request.overrides)
    from rayrm.launch import fit  # loads torch and Ray, which a wrong configuration never needs

    result = fit(config)
    told = {name: n for name, n in result.metrics.items() if name.endswith(("loss", "accuracy"))}
    print(f"model: {result.model_dir}\nrun: {result.run_dir}")
    print("metrics:", ", ".join(f"{name} {number:.4g}" for name, number in told.items()))
    if result.dropped:
        print("dropped:", ", ".join(f"{reason} {n}" for reason, n in result.dropped.items()))


def main() -> int:
    """Run the command and return its exit status."""
    request = parse_config_request("train", "Train a Bradley-Terry reward model on Ray.")
    return exit_status(lambda: train(request))


if __name__ == "__main__":
    sys.exit(main())
