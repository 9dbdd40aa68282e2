"""Numbers that are not finite: what a whole run does, and what it says."""

import json
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from rayrm.training.commits import complete_checkpoints
from rayrm.training.storage import RunFolder
from tests.builders import tiny_llama_folder, word_tokenizer
from tests.runs import NUM_PAIRS, config_for, rows_file, text_rows, training_lines
from tests.wandb_file import read_wandb_file

pytestmark = [pytest.mark.ray, pytest.mark.deepspeed]

BAD_ROW = 7


def config_of(folder: Path, *, bad_weight: str, value: float) -> dict[str, Any]:
    """Train a model with a bad number: in a word's embedding, or in a weight that all rows meet."""
    model = tiny_llama_folder(folder / "base", word_tokenizer())
    weights = load_file(model / "model.safetensors")
    word = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("Z")
    weights[bad_weight][word if "embed" in bad_weight else 0] = value
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    rows = text_rows(NUM_PAIRS)
    rows[BAD_ROW]["chosen"] += " Z"
    config = config_for(model, folder, "run", save_steps=1)
    config["data"]["train"] = str(rows_file(folder / "train.jsonl", rows))
    config["data"]["shuffle"] = False
    config["scaling"] = {"num_workers": 2}
    config["tracking"] = {"wandb": {"mode": "offline"}}
    return config


@pytest.mark.parametrize(
    "value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)], ids=str
)
def test_a_step_with_a_bad_number_is_left_out_and_its_rows_are_told(
    value: float, ray_session: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import rayrm

    config = config_of(tmp_path, bad_weight="model.embed_tokens.weight", value=value)
    config["model"]["lora"] = {"r": 2}  # beside which the bad number stays as it is
    run_dir = Path(rayrm.fit(config).run_dir)
    source = config["data"]["train"]
    skipped = [json.loads(line) for line in (run_dir / "skipped_steps.jsonl").open()]
    assert [line["step"] for line in skipped] == [2, 6]  # once an epoch
    for line in skipped:
        assert sorted(row["row"] for row in line["rows"]) == [4, 5, 6, 7]
        assert {row["source"] for row in line["rows"]} == {source}
    told = capsys.readouterr().err
    assert "step 2: no update, since its loss or gradient is not finite; its rows are" in told
    lines = training_lines(run_dir)
    assert [line["skipped_steps"] for line in lines] == [0, 1, 1, 1, 1, 2, 2, 2]
    assert lines[2]["loss"] != lines[6]["loss"]  # what lies between was trained
    result = json.loads((run_dir / "result.json").read_text())
    assert result["skipped_steps"] == 2
    told_of_rewards = json.loads((run_dir / "model" / "config.json").read_text())
    assert isfinite(told_of_rewards["reward_mean"])
    assert told_of_rewards["reward_std"] > 0
    (file,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    _, history = read_wandb_file(file)
    assert [row["skipped_steps"] for row in history if "loss" in row][-1] == 2


def test_trained_weights_that_are_not_finite_are_named_at_the_start(
    ray_session: None, tmp_path: Path
) -> None:
    import rayrm

    config = config_of(tmp_path, bad_weight="model.norm.weight", value=float("nan"))
    with pytest.raises(rayrm.ConfigError, match=r"^model.name_or_path: .* in model\.norm\.weight;"):
        rayrm.fit(config)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow  # test_loop has the rule without a run
def test_three_updates_in_a_row_that_are_not_finite_end_the_run(
    ray_session: None, tmp_path: Path
) -> None:
    import rayrm

    config = config_of(tmp_path, bad_weight="model.norm.weight", value=1.0)
    config["train"]["learning_rate"] = 1e30  # after one step of it the forward overflows
    with pytest.raises(rayrm.RayrmError, match=r"3 updates in a row .* the last at step 4; none"):
        rayrm.fit(config)
    run_dir = tmp_path / "run"
    assert len((run_dir / "skipped_steps.jsonl").read_text().splitlines()) == 3
    assert not (run_dir / "model").exists()
    # the run may end before Ray Train has committed the last one and deleted the oldest
    saved = complete_checkpoints(RunFolder(str(run_dir)))
    assert saved[-1].step in (3, 4)
    for checkpoint in saved:
        for file in (run_dir / "checkpoints" / checkpoint.name).glob("*.safetensors"):
            assert all(bool(weight.isfinite().all()) for weight in load_file(file).values()), file
