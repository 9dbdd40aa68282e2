"""What a sweep says of itself while it goes on."""

from types import SimpleNamespace
from typing import Any

from rayrm.config.schema import SearchSection
from rayrm.tuning.progress import standing


class Trial(SimpleNamespace):
    def __str__(self) -> str:
        return self.name


def trial(name: str, status: str, **result: Any) -> Any:
    values = {"train.learning_rate": 1 / 3e4, "model.lora.r": 8}
    return Trial(name=name, status=status, last_result=result, config={"values": values})


def test_states_are_counted_and_the_best_finished_trial_is_named():
    search = SearchSection(metric="eval_loss", mode="min")
    trials = [
        trial("000-0", "TERMINATED", eval_loss=0.3, finished=True),
        trial("001-0", "TERMINATED", eval_loss=0.2, finished=True),
        trial("002-0", "TERMINATED", eval_loss=0.1),
        trial("003-0", "ERROR"),
        trial("004-0", "RUNNING", eval_loss=0.05),
    ]
    assert standing(trials, search) == (
        "2 finished, 1 stopped, 1 failed, 1 running; best: 001-0 eval_loss 0.2 "
        "(train.learning_rate=3.333e-05, model.lora.r=8)"
    )


def test_without_a_finished_trial_there_is_no_best():
    assert standing([trial("000-0", "RUNNING")], SearchSection()) == "1 running"
