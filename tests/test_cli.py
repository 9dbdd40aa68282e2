import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rayrm import __version__
from rayrm.cli import ConfigRequest, exit_status, parse_config_request
from rayrm.config.reference import dotted_fields
from rayrm.errors import CheckpointError, ConfigError, DataError
from rayrm.train import train

ROOT = Path(__file__).parents[1]


def run_train(*words: str) -> subprocess.CompletedProcess[str]:
    """What the real command does; it is wrong here, so that nothing heavy starts."""
    command = [sys.executable, "-m", "rayrm.train", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "path", "overrides"),
    [
        ([], None, []),
        (["a.yaml"], "a.yaml", []),
        (["train.max_steps=-1"], None, ["train.max_steps=-1"]),
        (["a.yaml", "run.name=a", "run.seed=1"], "a.yaml", ["run.name=a", "run.seed=1"]),
    ],
)
def test_the_first_word_without_equals_sign_is_the_config(
    words: list[str], path: str | None, overrides: list[str]
):
    assert parse_config_request("train", "Train.", words) == ConfigRequest(path, overrides)


def test_a_wrong_key_exits_2_with_one_message():
    result = run_train("train.lerning_rate=1")
    assert result.returncode == 2
    assert result.stdout == ""
    first, second = result.stderr.splitlines()
    assert first.startswith("error: 1 fault in ")
    assert second == "  train.lerning_rate: unknown key; did you mean learning_rate? (override)"


@pytest.mark.parametrize("words", [["no_such.yaml"], ["foo=1", "bar"], ["--lr", "1"]])
def test_a_wrong_command_exits_2_without_traceback(words: list[str]):
    result = run_train(*words)
    assert result.returncode == 2
    assert "error: " in result.stderr
    assert "Traceback" not in result.stderr


def test_help_lists_every_field_and_the_exit_statuses(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        parse_config_request("train", "Train.", ["--help"])
    assert stop.value.code == 0
    words = capsys.readouterr().out.split()
    fields = {path for path, _ in dotted_fields() if not path.startswith("search")}
    assert fields <= set(words)
    assert {"0", "1", "2", "130", "143"} <= set(words)


def test_fields_and_version_are_printed(capsys: pytest.CaptureFixture[str]):
    for option, says in (
        ("--fields", "whole number >= 1 (default: 32)"),
        ("--version", __version__),
    ):
        with pytest.raises(SystemExit) as stop:
            parse_config_request("train", "Train.", [option])
        assert stop.value.code == 0
        assert says in capsys.readouterr().out


def raising(error: BaseException) -> Any:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigError("c"), 2), (DataError("d"), 1), (CheckpointError("e"), 1)]
)
def test_an_error_of_ours_is_one_message_on_stderr(
    error: Exception, status: int, capsys: pytest.CaptureFixture[str]
):
    assert exit_status(raising(error)) == status
    assert capsys.readouterr() == ("", f"error: {error}\n")


def test_an_interrupted_command_exits_130():
    assert exit_status(raising(KeyboardInterrupt())) == 130


def test_an_exit_with_a_status_passes_through():
    with pytest.raises(SystemExit) as stop:
        exit_status(raising(SystemExit(143)))
    assert stop.value.code == 143


def test_a_bug_of_ours_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        exit_status(raising(ZeroDivisionError()))


def test_train_fits_the_config_and_says_where_the_result_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    fitted: list[Any] = []

    def fit(config: Any) -> SimpleNamespace:
        fitted.append(config)
        return SimpleNamespace(
            metrics={"eval_accuracy": 0.75, "eval_loss": 0.5, "step": 60},
            model_dir="out/model",
            run_dir="out",
            dropped={"too_long": 3},
        )

    launch = ModuleType("rayrm.launch")
    launch.fit = fit  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "rayrm.launch", launch)
    train(ConfigRequest(None, ["run.name=mine", "train.max_steps=2"]))
    (config,) = fitted
    assert (config.run.name, config.train.max_steps) == ("mine", 2)
    assert capsys.readouterr().out.splitlines() == [
        "model: out/model",
        "run: out",
        "metrics: eval_accuracy 0.75, eval_loss 0.5",
        "dropped: too_long 3",
    ]


@pytest.mark.parametrize("words", ["--help", "--fields", "--version", "train.lerning_rate=1"])
def test_a_command_that_does_not_train_loads_nothing_heavy(words: str):
    code = (
        "import runpy, sys, atexit\n"
        "heavy = {'torch', 'ray', 'transformers', 'datasets', 'wandb'}\n"
        "atexit.register(lambda: print('heavy:', sorted(heavy & set(sys.modules))))\n"
        f"sys.argv = ['train', {words!r}]\n"
        "runpy.run_module('rayrm.train', run_name='__main__')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.endswith("heavy: []\n"), result.stdout + result.stderr


def test_the_shipped_quickstart_is_found_from_any_folder(tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = "from rayrm.config.loader import load_config; print(load_config().run.name)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.stdout == "quickstart\n", result.stderr


def test_a_signal_before_there_is_anything_to_save_ends_the_command_with_its_status():
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert exit_status(lambda: os.kill(os.getpid(), signal.SIGTERM)) == 143
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_reader_of_the_fields_may_stop_early():
    command = f"{sys.executable} -m rayrm.train --fields | head -n 1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""
