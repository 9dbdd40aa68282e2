from pathlib import Path
from typing import Any

import pytest

import rayrm
from rayrm.config.loader import load_config
from rayrm.errors import ConfigError
from rayrm.preflight import check_before_start, with_absolute_paths
from tests.builders import tiny_llama_folder, word_tokenizer

ROWS = [{"chosen": "a", "rejected": "b"}]


@pytest.fixture(autouse=True)
def a_file_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources that the overrides name."""
    (tmp_path / "x.jsonl").touch()
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a language model."""
    return tiny_llama_folder(tmp_path_factory.mktemp("model"), word_tokenizer())


@pytest.fixture(autouse=True)
def no_wandb_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have a key of their own."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"overrides": "train.max_steps=4"}, "overrides: 'train.max_steps=4' is one text"),
        ({"datasets": ROWS}, "datasets: a list; give {'train': rows, 'eval': rows}"),
    ],
)
@pytest.mark.parametrize("call", [rayrm.fit, rayrm.sweep])
def test_an_argument_of_another_type_is_told(call: Any, arguments: dict[str, Any], told: str):
    with pytest.raises(ConfigError) as caught:
        call({}, **arguments)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize("field", ["name_or_path", "adapter_path"])
def test_the_folder_of_a_run_is_refused_with_that_of_its_model(
    field: str, model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "result.json").touch()
    with pytest.raises(ConfigError, match=rf"^model\.{field}: .*; give {run}/model$"):
        check(model, f"model.{field}={run}")


def check(model: Path, *overrides: str, **datasets: Any) -> None:
    config = load_config({}, [f"model.name_or_path={model}", *overrides])
    check_before_start(config, datasets)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], id="the defaults"),
        pytest.param(["data.eval=x.jsonl", "train.eval_steps=5"], id="evaluation steps"),
        pytest.param(["data.eval=x.jsonl", "train.metric_for_best_model=eval_ties"], id="a metric"),
        pytest.param(
            ["data.eval={a: x.jsonl, b: x.jsonl}", "train.metric_for_best_model=eval_b_margin"],
            id="a metric of one of several sets",
        ),
        pytest.param(
            ["data.eval={a: x.jsonl, b: x.jsonl}", "train.metric_for_best_model=eval_accuracy"],
            id="a metric over all of several sets",
        ),
        pytest.param(["tracking.wandb.mode=auto"], id="W&B without a key is offline"),
        pytest.param(["model.lora.r=4"], id="LoRA"),
        pytest.param(
            [
                "train.lr_scheduler_type=cosine_with_min_lr",
                "train.lr_scheduler_kwargs={min_lr_rate: 0.1}",
            ],
            id="a schedule with its arguments",
        ),
    ],
)
def test_what_can_run_is_let_through(model: Path, overrides: list[str]):
    check(model, *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train=[]"], r"^data\.train: no source; name one, or hand fit\(\) a data set$"),
        (
            ["train.eval_steps=5"],
            r"^train\.eval_steps: has no effect without data\.eval; set it to null$",
        ),
        (
            ["train.metric_for_best_model=eval_loss"],
            r"^train\.metric_for_best_model: has no effect without data\.eval; set it to null$",
        ),
        (
            ["train.lr_scheduler_type=cosine_with_min_lr"],
            r"^train\.lr_scheduler_kwargs: .*min_lr",
        ),
        (
            ["train.lr_scheduler_kwargs={num_cycle: 2}"],
            r"^train\.lr_scheduler_kwargs: .*num_cycle",
        ),
        (
            ["data.eval=x.jsonl", "train.metric_for_best_model=eval_acc"],
            r"gives no 'eval_acc'; it gives eval_loss, eval_accuracy, ",
        ),
        (
            ["data.eval=x.jsonl", "train.metric_for_best_model=accuracy"],
            "gives no 'accuracy'",
        ),
        (
            ["data.eval={a: x.jsonl, b: x.jsonl}", "train.metric_for_best_model=eval_margin"],
            "gives no 'eval_margin'; it gives eval_loss, eval_accuracy, eval_a_loss, ",
        ),
        (
            ["tracking.wandb.mode=online"],
            r"^tracking\.wandb\.mode: online needs a key: set WANDB_API_KEY",
        ),
        (["model.eos_token=<none>"], r"^model\.eos_token: "),
        (["model.chat_template_path=/no/such/file"], r"^model\.chat_template_path: "),
        (
            ["model.name_or_path=/no/such/folder"],
            r"^model\.name_or_path: there is no folder /no/such/folder$",
        ),
        (["model.attn_implementation=flash"], r"^model\.attn_implementation: 'flash' is none of "),
        (["model.lora.target_modules=[no_proj]"], r"^model\.lora\.target_modules: no_proj is no "),
        (
            ["train.shared_prompt=on", "model.attn_implementation=eager"],
            r"^train\.shared_prompt: on, but model\.attn_implementation is eager",
        ),
        (
            ["data.train=[]", "train.eval_steps=5", "model.lora.target_modules=[no_proj]"],
            r"^data\.train: no source.*\ntrain\.eval_steps: .*\nmodel\.lora\.target_modules: ",
        ),
    ],
)
def test_what_cannot_run_is_refused(model: Path, overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        check(model, *overrides)


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="classifier with 3 labels"):
        check(tiny_llama_folder(tmp_path, word_tokenizer(), num_labels=3))


def test_a_key_lets_wandb_go_online(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    check(model, "tracking.wandb.mode=online")


def test_data_sets_that_are_handed_over_stand_for_the_configured(model: Path):
    check(model, "data.train=[]", train=ROWS)
    check(model, "train.eval_steps=5", eval=ROWS)
    check(model, "train.metric_for_best_model=eval_hard_loss", eval={"hard": ROWS})


@pytest.mark.parametrize("name", ["test", "eval_hard"])
def test_data_sets_of_an_unknown_name_are_refused(model: Path, name: str):
    with pytest.raises(ConfigError, match=rf"^datasets: unknown key '{name}'; give train and eval"):
        check(model, **{name: ROWS})


@pytest.mark.parametrize(
    ("datasets", "told"),
    [
        ({"train": "x.jsonl"}, "^datasets: 'train' is a str; hand over a ray.data.Dataset, "),
        ({"eval": {"a": ROWS, "b": None}}, "^datasets: 'eval_b' is a NoneType; hand over "),
    ],
)
def test_rows_of_another_type_are_refused(model: Path, datasets: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=told):
        check(model, "data.train=x.jsonl", **datasets)


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that relative paths begin at; home is one above."""
    folder = tmp_path / "work"
    (folder / "models" / "tiny").mkdir(parents=True)
    (folder / "quickstart").mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("field", "path", "absolute"),
    [
        ("run.output_dir", "runs", "{work}/runs"),
        ("run.output_dir", "~/runs", "{home}/runs"),
        ("run.output_dir", "/runs", "/runs"),
        ("run.output_dir", "s3://bucket/runs", "s3://bucket/runs"),
        ("model.name_or_path", "models/tiny", "{work}/models/tiny"),
        ("model.name_or_path", "~/work/models/tiny", "{work}/models/tiny"),
        ("model.name_or_path", "owner/model", "owner/model"),
        ("model.name_or_path", "quickstart", "quickstart"),
        ("model.chat_template_path", "chat.jinja", "{work}/chat.jinja"),
        ("model.chat_template_path", "~/chat.jinja", "{home}/chat.jinja"),
    ],
)
def test_local_paths_become_absolute(working_folder: Path, field: str, path: str, absolute: str):
    section, name = field.split(".")
    config = with_absolute_paths(load_config({section: {name: path}}))
    expected = absolute.format(work=working_folder, home=working_folder.parent)
    assert getattr(getattr(config, section), name) == expected


@pytest.mark.parametrize(
    ("path", "absolute"),
    [
        ("pairs/*.jsonl", "{work}/pairs/*.jsonl"),
        ("../pairs.jsonl", "{home}/pairs.jsonl"),
        ("~/pairs", "{home}/pairs"),
        ("hub:owner/name", "hub:owner/name"),
        ("quickstart:eval", "quickstart:eval"),
        ("gs://bucket/*.parquet", "gs://bucket/*.parquet"),
    ],
)
def test_paths_of_sources_become_absolute(working_folder: Path, path: str, absolute: str):
    source = {"path": path, "limit": 3}
    given = {"train": [source, "b.jsonl"], "eval": {"x": source}}
    config = with_absolute_paths(load_config({"data": given}))
    expected = absolute.format(work=working_folder, home=working_folder.parent)
    assert [one.path for one in config.data.train] == [expected, f"{working_folder}/b.jsonl"]
    assert (config.data.eval["x"].path, config.data.train[0].limit) == (expected, 3)


def test_nothing_else_is_changed(working_folder: Path):
    config = load_config({"train": {"max_steps": 7}, "model": {"lora": {"target_modules": ["q"]}}})
    changed = with_absolute_paths(config)
    assert changed.train == config.train
    assert changed.model == config.model
    assert with_absolute_paths(changed) == changed
    assert changed.run.output_dir == f"{working_folder}/outputs"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.columns.chosn=better", "data.columns: there is no standard column 'chosn'"),
        ("data.train=missing.jsonl", "data.train: no such file, folder or match: missing.jsonl"),
        ("data.eval={a: x.jsonl, b: b.csv}", "data.eval.b: no such file, folder or match: b.csv"),
    ],
)
def test_a_source_or_column_that_is_not_there_is_told_before_ray_starts(
    model: Path, override: str, message: str
):
    with pytest.raises(ConfigError) as error:
        check(model, override)
    assert str(error.value).startswith(message)
