import os
import signal
import time
from typing import Any

import pytest
import ray

from rayrm.board import Board, showing, stopping_on_signals


class LocalActor:
    """A board in this process, called as Ray calls an actor."""

    def __init__(self) -> None:
        self.board = Board()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.board, name)
        return type("Method", (), {"remote": staticmethod(method)})


def test_sigterm_asks_for_an_orderly_stop_and_may_come_twice():
    actor = LocalActor()
    before = signal.getsignal(signal.SIGTERM)
    with stopping_on_signals(actor) as received:
        assert actor.board.order() == "go on"
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert actor.board.order() == "stop"
    assert received == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_ctrl_c_is_not_waited_for():
    actor = LocalActor()
    with stopping_on_signals(actor):
        os.kill(os.getpid(), signal.SIGINT)
        assert actor.board.order() == "stop"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_checkpoint_is_asked_for_once_after_so_many_minutes_without_one(
    monkeypatch: pytest.MonkeyPatch,
):
    now = 0.0
    monkeypatch.setattr("rayrm.board.time.monotonic", lambda: now)
    board = Board(save_minutes=2)
    now = 500.0  # workers took their time to load
    board.start("training", 0, 10)
    assert board.order() == "go on"
    now = 619.0
    board.saved()  # for another reason
    now = 738.0
    assert board.order() == "go on"
    now = 739.0
    assert [board.order(), board.order()] == ["save", "go on"]
    board.stop()
    assert board.order() == "stop"


def test_nothing_is_asked_for_without_a_limit(monkeypatch: pytest.MonkeyPatch):
    board = Board()
    monkeypatch.setattr("rayrm.board.time.monotonic", lambda: 1e9)
    assert board.order() == "go on"


def test_a_note_is_read_once_and_a_restart_forgets_the_line():
    board = Board()
    board.start("training", 0, 10)
    board.update({"step": 3, "loss": 0.5})
    assert board.read() == (["training"], 3, 10, {"step": 3, "loss": 0.5})
    board.start("training", 2, 10)
    assert board.read() == (["training; going on from step 2"], 2, 10, {})


class SlowBoard(Board):
    """Answers the first reading late, as on a machine with too much to do."""

    is_slow = True

    def read(self) -> Any:
        told = super().read()
        time.sleep(3 if self.is_slow else 0)
        self.is_slow = False
        return told


@pytest.mark.ray
def test_progress_is_shown_though_the_board_was_late_once(
    ray_session: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("rayrm.board._ANSWER_SECONDS", 0.5)
    board: Any = ray.remote(SlowBoard).remote()
    board.start.remote("training 5 parameters", 0, 4)
    with showing(board, waiting_for="workers"):
        time.sleep(2)
        ray.get(board.update.remote({"step": 3, "loss": 0.5}))
        time.sleep(2)
    ray.kill(board)
    shown = capsys.readouterr().err
    assert shown.count("training 5 parameters") == 1
    assert "step 3/4  loss 0.5" in shown
