"""Any number of workers, a killed worker, and a caller inside Ray: the same training."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders import tiny_bert_folder, tiny_jamba_folder, word_tokenizer
from tests.runs import NUM_PAIRS, config_for, text_rows, training_lines

pytestmark = [pytest.mark.ray, pytest.mark.deepspeed]


@pytest.mark.parametrize(
    ("make_model", "reason"),
    [
        pytest.param(
            tiny_bert_folder,
            "BertForSequenceClassification attends in both",
            id="bert",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            tiny_jamba_folder,
            "JambaForSequenceClassification carries a",
            id="jamba",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_model_that_cannot_share_prompts_trains_in_padded_rows_and_that_is_told(
    make_model: Callable[..., Path],
    reason: str,
    ray_session: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import rayrm

    folder = make_model(tmp_path / "base", word_tokenizer())
    result = rayrm.fit(config_for(folder, tmp_path, "padded"), datasets={"train": text_rows(5)})
    told = capsys.readouterr().err
    assert f"padded rows ({reason}" in told
    assert "\nnew weights, drawn from run.seed: " in told
    lines = training_lines(result.run_dir)
    assert [line["shared_prompt_share"] for line in lines] == [0.0] * 4
    assert len({line["loss"] for line in lines}) == 4
    with pytest.raises(rayrm.errors.ConfigError, match=f"shared_prompt: on, but {reason}"):
        rayrm.fit(
            config_for(folder, tmp_path, "refused", shared_prompt="on"),
            datasets={"train": text_rows(5)},
        )


def test_fit_takes_a_ray_data_set_inside_an_actor(
    ray_session: None, base_model: Path, tmp_path: Path
) -> None:
    import ray
    import ray.data

    @ray.remote(num_cpus=1)
    class Caller:
        def train(self, config: dict[str, Any]) -> Any:
            import rayrm

            rows = ray.data.from_items(text_rows(NUM_PAIRS))
            held_out = {"a": text_rows(5), "b": text_rows(3)}
            return rayrm.fit(config, datasets={"train": rows, "eval": held_out})

    config = config_for(
        base_model,
        tmp_path,
        "actor",
        num_train_epochs=1,
        eval_steps=2,
        metric_for_best_model="eval_b_accuracy",
    )
    caller: Any = Caller
    result: Any = ray.get(caller.remote().train.remote(config))
    told = json.loads(Path(result.run_dir, "result.json").read_text())
    assert told["pairs"] == NUM_PAIRS
    assert result.metrics["eval_a_num_pairs"] == 5
    assert result.metrics["eval_b_num_pairs"] == 3
    assert "eval_loss" in result.metrics
    assert Path(result.model_dir, "model.safetensors").exists()


def test_no_usable_row_ends_with_the_counts_by_reason(
    ray_session: None, base_model: Path, tmp_path: Path
) -> None:
    import rayrm

    config = config_for(base_model, tmp_path, "none")
    config["data"]["max_length"] = 8
    with pytest.raises(rayrm.DataError, match=r"none of 13 rows .*13 too_long.*data\.max_length"):
        rayrm.fit(config, datasets={"train": text_rows(NUM_PAIRS)})


def test_on_bad_row_stop_names_the_first_bad_row(
    ray_session: None, base_model: Path, tmp_path: Path
) -> None:
    import rayrm

    config = config_for(base_model, tmp_path, "stop")
    config["data"]["on_bad_row"] = "stop"
    rows = [*text_rows(3), {"prompt": "a", "chosen": "", "rejected": "b"}]
    with pytest.raises(rayrm.DataError, match="row 3: empty_response"):
        rayrm.fit(config, datasets={"train": rows})


def test_the_best_model_is_exported_and_its_metrics_are_told(
    ray_session: None, base_model: Path, tmp_path: Path
) -> None:
    import rayrm

    config = config_for(
        base_model,
        tmp_path,
        "best",
        num_train_epochs=1,
        learning_rate=1e-2,
        eval_steps=1,
        save_steps=None,
        metric_for_best_model="eval_loss",
        early_stopping_patience=2,
    )
    rows = text_rows(NUM_PAIRS)
    # held out with the labels the other way round: the better it is learned, the worse
    swapped = [
        row | {"chosen": row["rejected"], "rejected": row["chosen"], "margin": 0.0} for row in rows
    ]
    result = rayrm.fit(config, datasets={"train": rows, "eval": swapped})
    text = Path(result.run_dir, "metrics.jsonl").read_text(encoding="utf-8")
    losses = [x["eval_loss"] for x in map(json.loads, text.splitlines()) if "eval_loss" in x]
    assert losses.index(min(losses)) == 0
    assert len(losses) == 3  # two more without a gain, and training stops
    assert result.metrics["eval_loss"] == losses[0]
    told = json.loads(Path(result.run_dir, "result.json").read_text())
    assert told["metrics"]["step"] == 1
    assert told["steps"] == 3


def test_a_broken_file_ends_in_one_error_that_names_it(
    ray_session: None, base_model: Path, tmp_path: Path
) -> None:
    import rayrm

    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(gzip.compress(json.dumps(text_rows(1)[0]).encode() * 400)[:60])
    config = config_for(base_model, tmp_path, "broken")
    config["data"]["train"] = str(broken)
    with pytest.raises(rayrm.DataError) as error:
        rayrm.fit(config)
    assert str(error.value).startswith(f"{broken}: cannot be read")
    assert "Traceback" not in str(error.value)


def test_a_run_folder_that_cannot_be_made_is_a_fault_of_the_configuration(
    base_model: Path, tmp_path: Path
) -> None:
    import rayrm

    (tmp_path / "file").touch()
    config = config_for(base_model, tmp_path / "file", "run")
    with pytest.raises(rayrm.ConfigError, match=r"run\.output_dir: cannot make"):
        rayrm.fit(config, datasets={"train": text_rows(1)})
