"""A sweep: trials that are runs, stopped ones and failed ones told, the best ready to use."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import ray.data

from rayrm.config.loader import load_config, load_sweep
from rayrm.config.schema import SearchSection
from rayrm.errors import ConfigError
from rayrm.tuning.answer import best_row, judge
from rayrm.tuning.search import sweep
from tests.runs import NUM_PAIRS, rows_file, text_rows
from tests.wandb_file import read_wandb_file, read_wandb_group


def sweep_config(base_model: Path, folder: Path, **search: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    rows = rows_file(folder / "rows.jsonl")
    held_out = rows_file(folder / "held_out.jsonl", text_rows(6))
    return {
        "run": {"name": "sweep", "output_dir": str(folder)},
        "model": {"name_or_path": str(base_model), "dtype": "float32", "lora": {"r": 4}},
        "data": {"train": str(rows), "eval": str(held_out), "max_length": 256},
        "train": {"batch_size": 4, "max_steps": 6, "eval_steps": 2, "logging_steps": 2},
        "tracking": {"wandb": None},
        "search": {
            "num_samples": 3,
            "metric": "eval_loss",
            "mode": "min",
            "space": {
                "train.learning_rate": {"type": "log_uniform", "low": 1e-4, "high": 1e-2},
                "model.lora.r": {"type": "choice", "values": [2, 4]},
            },
            **search,
        },
    }


def rows_of(*values: tuple[int, float]) -> list[dict[str, Any]]:
    return [{"number": number, "eval_accuracy": value} for number, value in values]


def test_repeats_are_judged_by_their_mean_with_its_standard_error() -> None:
    search = SearchSection(metric="eval_accuracy", repeats=2)
    best, other = judge(rows_of((0, 0.9), (0, 0.5), (1, 0.8), (1, 0.76)), search)
    assert (best["number"], other["number"]) == (1, 0)
    assert best["eval_accuracy"] == pytest.approx(0.78)
    assert best["standard_error"] == pytest.approx(0.02)


def test_a_metric_that_is_no_number_never_wins() -> None:
    search = SearchSection(metric="eval_accuracy")
    judged = judge(rows_of((0, float("nan")), (1, 0.4)), search)
    assert [one["number"] for one in judged] == [1]


def test_less_is_better_where_the_mode_says_so() -> None:
    search = SearchSection(metric="eval_accuracy", mode="min")
    assert judge(rows_of((0, 0.9), (1, 0.4)), search)[0]["number"] == 1


def test_the_model_of_the_best_repeat_is_taken_and_one_without_a_number_is_not() -> None:
    search = SearchSection(metric="eval_accuracy", repeats=3)
    none = {"number": 0, "eval_accuracy": None}
    rows = rows_of((0, 0.5), (0, float("nan")), (0, 0.7))
    assert best_row([none, *rows], search) == rows[2]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("search.metric=eval_nothing", "search.metric: evaluation gives no 'eval_nothing'"),
        ("data.eval=null", "search.metric: there is no eval_loss without data.eval"),
        ("train.eval_steps=null", "search.scheduler: asha compares trials while they train"),
        ("search.scheduler=pbt", "search.space.model.lora.r: pbt changes values while it trains"),
    ],
)
def test_a_sweep_that_cannot_decide_is_refused_before_the_start(
    change: str, told: str, base_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=told):
        sweep(sweep_config(base_model, tmp_path), [change])
    assert not (tmp_path / "sweep").exists()


def tune_command(config: dict[str, Any], folder: Path) -> list[str]:
    file = folder / "sweep.yaml"
    file.write_text(json.dumps(config))  # which is YAML, too
    return [sys.executable, "-m", "rayrm.tune", str(file)]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.timeout(600)
def test_a_sweep_leaves_a_table_the_best_model_and_a_configuration_that_trains_it(
    base_model: Path, tmp_path: Path
) -> None:
    config = sweep_config(base_model, tmp_path) | {"tracking": {"wandb": {"mode": "offline"}}}
    command = tune_command(config, tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "failed" not in done.stdout
    assert "Configuration for experiment" not in done.stdout
    folder = tmp_path / "sweep"
    answer = json.loads((folder / "sweep.json").read_text())
    assert [row["trial"] for row in answer["trials"]] == ["000-0", "001-0", "002-0"]
    assert {row["status"] for row in answer["trials"]} <= {"finished", "stopped"}
    for row in answer["trials"]:
        (file,) = Path(row["run_dir"]).glob("wandb/offline-run-*/run-*.wandb")
        assert read_wandb_group(file) == "sweep"
        _, history = read_wandb_file(file)
        steps = [line["step"] for line in history]
        assert steps == sorted(steps)
        assert steps[-1] == row["step"]
    finished = [row for row in answer["trials"] if row["status"] == "finished"]
    best = min(finished, key=lambda row: row["eval_loss"])
    assert answer["best"]["trial"] == best["trial"]
    assert (folder / "model" / "adapter_config.json").is_file()
    assert str(folder / "trials") not in (folder / "model" / "adapter_config.json").read_text()
    lora = load_config(folder / "best.yaml").model.lora
    assert lora is not None
    assert lora.r == best["model.lora.r"]
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "is finished already" in again.stderr
    command = [sys.executable, "-m", "rayrm.train", str(folder / "best.yaml")]
    trained = subprocess.run(
        [*command, f"run.output_dir={tmp_path}"], capture_output=True, text=True, check=False
    )
    assert trained.returncode == 0, trained.stderr[-3000:]
    result = json.loads((tmp_path / "best" / "result.json").read_text())
    assert result["metrics"]["eval_loss"] == pytest.approx(best["eval_loss"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.timeout(600)
def test_a_sweep_whose_driver_is_killed_goes_on_with_the_trials_that_are_left(
    base_model: Path, tmp_path: Path
) -> None:
    command = tune_command(sweep_config(base_model, tmp_path, scheduler="none"), tmp_path)
    first = tmp_path / "sweep" / "trials" / "000-0" / "result.json"
    log = (tmp_path / "log").open("w")
    driver = psutil.Popen(command, stdout=log, stderr=log)
    try:
        while not first.is_file():
            assert driver.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.2)
        time.sleep(3)  # the next one is starting
    finally:
        driver.kill()
        driver.wait()
    before = first.stat()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trials: 3 finished" in done.stdout
    assert first.stat().st_mtime_ns == before.st_mtime_ns
    answer = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [row["trial"] for row in answer["trials"]] == ["000-0", "001-0", "002-0"]
    assert [row["step"] for row in answer["trials"]] == [6, 6, 6]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.timeout(600)
def test_a_population_has_the_worse_trial_go_on_from_the_better_one(
    base_model: Path, tmp_path: Path, ray_session: None
) -> None:
    rates = {"type": "grid", "values": [1e-8, 1e-2]}
    config = sweep_config(
        base_model,
        tmp_path,
        scheduler="pbt",
        num_samples=2,
        space={"train.learning_rate": rates},
    )
    trials = sweep(config, ["train.max_steps=12"]).trials.to_dict("records")
    assert [trial["status"] for trial in trials] == ["finished", "finished"]
    assert [trial["step"] for trial in trials] == [12, 12]
    branches = [Path(trial["run_dir"]) for trial in trials if "-from-" in trial["run_dir"]]
    assert branches
    for branch in branches:
        ((trial, donor, step),) = re.findall(r"^(.*)-from-(.*)-at-(\d+)$", branch.name)
        assert {trial, donor} == {"000-0", "001-0"}
        own = [json.loads(line) for line in (branch / "metrics.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in own if "loss" in line]
        assert steps == [2, 4, 6, 8, 10, 12]  # those before the branch are the other trial's
        assert int(step) < 12
    folder = tmp_path / "sweep"
    assert (folder / "model" / "adapter_config.json").is_file()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.timeout(600)
def test_two_sweeps_at_once_share_a_ray_read_their_rows_once_and_leave_nothing_held(
    base_model: Path, tmp_path: Path, ray_session: None
) -> None:
    read = tmp_path / "read"

    def noted(row: dict[str, Any]) -> dict[str, Any]:
        with read.open("a") as file:
            file.write("a row\n")
        return row

    @ray.remote(num_cpus=0)
    def swept(config: dict[str, Any], datasets: dict[str, Any]) -> list[dict[str, Any]]:
        return sweep(config, datasets=datasets).trials.to_dict("records")

    rates = {"type": "grid", "values": [1e-3, 1e30]}  # the weights of the second are not finite
    configs = [
        sweep_config(base_model, folder, scheduler="none", space={"train.learning_rate": rates})
        for folder in (tmp_path / "one", tmp_path / "two")
    ]
    rows = ray.data.from_items(text_rows(NUM_PAIRS)).map(noted)
    ended = ray.get([swept.remote(configs[0], {"train": rows}), swept.remote(configs[1], {})])
    for trials in ended:
        assert [trial["status"] for trial in trials] == ["finished", "failed"]
        assert "not finite" in trials[1]["error"]
    assert len(read.read_text().splitlines()) == NUM_PAIRS
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} <= {"REMOVED"}


def test_a_shipped_sweep_searches_rate_centering_and_rank() -> None:
    config = load_sweep(Path(__file__).parents[2] / "configs" / "sweep.yaml")
    assert list(config.search.space) == [
        "train.learning_rate",
        "loss.center_rewards_coefficient",
        "model.lora.r",
    ]
