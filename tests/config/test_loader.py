import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrm.config.loader import differing_fields, dump_config, load_config, load_sweep
from rayrm.config.reference import dotted_fields
from rayrm.config.schema import LoraSection, RunConfig, Source
from rayrm.config.space import check_space
from rayrm.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def refusal(source: Any = (), overrides: list[str] | None = None) -> list[str]:
    """The lines of the one error that this configuration gets."""
    with pytest.raises(ConfigError) as caught:
        load_config(dict(source) if source == () else source, overrides or [])
    return [line.strip() for line in str(caught.value).splitlines()]


@pytest.fixture
def yaml_file(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_loads(path: Path):
    if path.name == "sweep.yaml":
        check_space(load_sweep(path))
    else:
        assert load_config(path) != RunConfig()


def test_no_source_means_the_shipped_quickstart():
    assert load_config() == load_config(CONFIGS / "quickstart.yaml")


def test_overrides_win_over_the_file_and_the_file_over_the_defaults(yaml_file: Any):
    path = yaml_file("train: {batch_size: 8, learning_rate: 1e-5}")
    train = load_config(path, ["train.batch_size=4", "train.batch_size=2"]).train
    assert (train.batch_size, train.learning_rate, train.logging_steps) == (2, 1e-5, 10)


def test_a_config_loads_from_each_kind_of_source(yaml_file: Any):
    path = yaml_file("\ufefftrain: {max_steps: 3}\n")
    config = load_config(path)
    assert config.train.max_steps == 3
    assert load_config(str(path)) == config
    assert load_config({"train": {"max_steps": 3}}) == config
    assert load_config(config) == config
    assert load_config(dump_config(config)) == config
    assert load_config(yaml_file(json.dumps(dump_config(config)))) == config


def test_an_empty_file_means_the_defaults(yaml_file: Any):
    assert load_config(yaml_file("# nothing yet\n")) == RunConfig()


@pytest.mark.parametrize("before", [{}, {"model": None}, {"model": {"lora": None}}])
def test_an_override_makes_the_section_it_needs(before: dict[str, Any]):
    assert load_config(before, ["model.lora.r=8"]).model.lora == LoraSection(r=8)
    assert load_config(before, ["model.lora={r: 8}"]).model.lora == LoraSection(r=8)


def test_an_override_with_null_or_nothing_turns_a_section_off():
    for override in ("model.lora=null", "model.lora="):
        assert load_config({"model": {"lora": {"r": 8}}}, [override]).model.lora is None


def test_an_override_keeps_the_rest_of_a_section():
    wandb = load_config({"tracking": {"wandb": {"group": "g"}}}, ["tracking.wandb.mode=offline"])
    assert wandb.tracking.wandb is not None
    assert (wandb.tracking.wandb.group, wandb.tracking.wandb.mode) == ("g", "offline")


def test_a_negative_number_and_an_exponent_are_values():
    train = load_config({}, ["train.max_steps=-1", "train.learning_rate=1e-5"]).train
    assert (train.max_steps, train.learning_rate) == (-1, 1e-5)


@pytest.mark.parametrize("name", ["2024", "2024-01-31", "1e5", "007", "12e", "1_a"])
def test_a_name_stays_as_it_was_typed(name: str):
    assert load_config({}, [f"run.name={name}"]).run.name == name


@pytest.mark.parametrize("word", ["auto", "on", "off"])
def test_a_switch_is_read_as_it_was_typed_though_yaml_takes_it_for_a_boolean(
    yaml_file: Any, word: str
):
    assert load_config({}, [f"train.shared_prompt={word}"]).train.shared_prompt == word
    assert load_config(yaml_file(f"train: {{shared_prompt: {word}}}")).train.shared_prompt == word


def test_a_number_that_is_not_the_text_that_was_typed_is_refused():
    assert refusal({}, ["run.name=1.10"])[1].endswith("put it in quotes if it is text (override)")


@pytest.mark.parametrize(
    ("train", "override", "paths"),
    [
        ("a", "data.train.1.path=b", ["a", "b"]),
        ("a", "data.train.1=b", ["a", "b"]),
        ("a", "data.train.0.path=b", ["b"]),
        ("a", "data.train.path=b", ["b"]),
        ({"path": "a"}, "data.train.1.path=b", ["a", "b"]),
        (["a"], "data.train.path=b", ["b"]),
        (["a", "b"], "data.train.0=c", ["c", "b"]),
        (["a", "b"], "data.train=c", ["c"]),
        (["a"], "data.train=[]", []),
    ],
)
def test_an_override_reaches_into_training_sources(train: Any, override: str, paths: list[str]):
    sources = load_config({"data": {"train": train}}, [override]).data.train
    assert [source.path for source in sources] == paths


def test_an_override_appends_to_the_default_sources():
    sources = load_config({}, ["data.train.1.path=b"]).data.train
    assert sources == (*RunConfig().data.train, Source(path="b"))


def test_an_override_reaches_into_the_only_evaluation_source():
    limited = {"": Source(path="a", limit=3)}
    for given_as in ("a", {"path": "a"}):
        config = load_config({"data": {"eval": given_as}})
        assert load_config(config, ["data.eval.limit=3"]).data.eval == limited
        assert load_config({"data": {"eval": given_as}}, ["data.eval.limit=3"]) == load_config(
            config, ["data.eval.limit=3"]
        )


def test_an_override_adds_an_evaluation_set():
    before = {"data": {"eval": {"one": "a"}}}
    sets = load_config(before, ["data.eval.two=b", "data.eval.one.limit=5"]).data.eval
    assert sets == {"one": Source(path="a", limit=5), "two": Source(path="b")}


def test_a_named_set_does_not_mix_with_an_unnamed_one():
    lines = refusal({"data": {"eval": "a"}}, ["data.eval.two=b"])
    assert lines[1].startswith("data.eval.two: unknown key; the fields here are path, split")


def test_an_override_under_a_value_or_beside_a_list_is_refused():
    lines = refusal(
        {"data": {"train": ["a", "b"]}}, ["train.max_steps.x=1", "data.train.4=c", "data.train.x=c"]
    )
    assert lines[1] == "train.max_steps.x: train.max_steps is -1, not a section (override)"
    assert lines[2].startswith("data.train.4: data.train is a list of 2; name an item")
    assert lines[3].startswith("data.train.x: data.train is a list of 2; name an item")


@pytest.mark.parametrize("override", ["foo", "=3", "a..b=1", ".a=1", "a.=1", "train max_steps=1"])
def test_a_malformed_override_is_refused(override: str):
    assert refusal({}, [override])[1].endswith("is no override; write section.field=value")


def test_an_override_that_is_no_yaml_is_refused():
    (_, line) = refusal({}, ["data.train=*.jsonl"])
    assert line.startswith("data.train, line 1, column 2: ")
    assert line.endswith("does the value need quotes? (override)")


def test_all_faults_are_told_at_once_with_path_value_and_remedy(yaml_file: Any):
    path = yaml_file(
        "train: {batch_size: 0, lerning_rate: 1e-4, max_length: 7}\n"
        "data: {train: [{split: a}, 3]}\n"
        "loss: 5\n"
    )
    lines = refusal(path, ["foo", "zero.stage=4", "model.lora.target_modules=[1, {}]"])
    assert lines[0] == f"9 faults in {path}:"
    assert lines[1] == '"foo" is no override; write section.field=value'
    told = dict(line.split(": ", 1) for line in lines[2:])
    assert told == {
        "model.lora.target_modules": "got [1, {}], expected text or list of text (override)",
        "data.train.0.path": "missing; expected text",
        "data.train.1": "got 3, expected text or {path, split, name, limit}"
        "; put it in quotes if it is text",
        "loss": "got 5, expected {objective, center_rewards_coefficient, label_smoothing}",
        "train.batch_size": "got 0, expected whole number >= 1",
        "train.lerning_rate": "unknown key; did you mean learning_rate?",
        "train.max_length": told["train.max_length"],
        "zero.stage": "got 4, expected one of 0, 1, 2, 3 (override)",
    }
    assert told["train.max_length"].startswith("unknown key; the fields here are batch_size, ")
    assert told["train.max_length"].endswith("; did you mean data.max_length?")


def test_a_far_name_lists_the_fields_of_its_section_only():
    (_, line) = refusal({"loss": {"beta": 1}})
    assert line == (
        "loss.beta: unknown key; the fields here are "
        "objective, center_rewards_coefficient, label_smoothing"
    )


def test_a_null_section_that_cannot_be_off_says_what_to_do():
    (_, line) = refusal({"train": None})
    assert line == "train: null; give it fields, or leave the line out for the defaults"


def test_a_rule_between_fields_is_told_at_its_section():
    (_, line) = refusal({"train": {"max_steps": 5, "num_train_epochs": 2}})
    assert line == "train: num_train_epochs has no effect with max_steps set; remove one"


def test_a_bad_name_of_an_evaluation_set_is_shown():
    (_, line) = refusal({"data": {"eval": {"held out": "a"}}})
    assert line.startswith('data.eval.held out: the name "held out" does not fit')


def test_a_search_section_names_the_sweep_command():
    assert refusal({"search": {}})[1] == "search: sweeps run with python -m rayrm.tune"


@pytest.mark.parametrize(
    ("override", "variable"),
    [
        ("tracking.wandb.api_key=hunter2", "WANDB_API_KEY"),
        ("WANDB_API_KEY=hunter2", "WANDB_API_KEY"),
        ("model.token=hunter2", "HF_TOKEN"),
        ("model.model_init_kwargs.token=hunter2", "HF_TOKEN"),
    ],
)
def test_a_secret_is_sent_to_the_environment_and_never_echoed(override: str, variable: str):
    text = "\n".join(refusal({}, [override]))
    assert f"set {variable} in the environment" in text
    assert "hunter2" not in text


def test_no_value_of_an_unknown_key_is_echoed():
    assert "hunter2" not in "\n".join(refusal({"run": {"pin": "hunter2"}}))


def test_a_missing_file_is_named(tmp_path: Path):
    assert refusal(tmp_path / "no.yaml") == [f"there is no configuration file {tmp_path}/no.yaml"]


def test_a_folder_is_no_configuration_file(tmp_path: Path):
    assert refusal(tmp_path)[0].startswith(f"cannot read the configuration file {tmp_path}: ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run: [", "config.yaml, line 1, column 7: "),
        ("run:\n  name: a\n  name: b", "config.yaml, line 3, column 3: name is given twice"),
        ("run: {}\nrun: {}", "config.yaml, line 2, column 1: run is given twice"),
        ("train:\n  on: 1", "config.yaml, line 2, column 3: the name on is not text to YAML"),
        ("zero: {extra: {1: 2}}", "config.yaml, line 1, column 16: the name 1 is not text"),
        ("run: !!python/name:os.system", "config.yaml, line 1, column 6: "),
        ("run: &run {name: *run}", "config.yaml: Circular reference"),
        ("- run", 'config.yaml should hold sections (train:, data: ...), not ["run"]'),
        ("run", 'config.yaml should hold sections (train:, data: ...), not "run"'),
        ("run: {}\n---\nrun: {}", "config.yaml, line 2, column 1: "),
        ("\0", "config.yaml: unacceptable character"),
    ],
)
def test_a_file_that_is_no_mapping_of_sections_gets_one_line(yaml_file: Any, text: str, says: str):
    (line,) = refusal(yaml_file(text))
    assert says in line


def test_merge_keys_are_no_duplicates(yaml_file: Any):
    path = yaml_file("train: {<<: {max_steps: 3, batch_size: 8}, max_steps: 4}")
    train = load_config(path).train
    assert (train.max_steps, train.batch_size) == (4, 8)


def test_a_name_that_is_not_text_in_a_mapping_is_refused():
    assert refusal({1: 2})[1].startswith("the name 1 does not fit")
    assert refusal({"run": {1: 2}})[1].startswith("run: the name 1 does not fit")


def test_differing_fields_are_dotted_paths():
    one = load_config({"model": {"lora": {"r": 8}}, "data": {"eval": "a"}})
    other = load_config({"model": {"lora": {"r": 4}}, "data": {"eval": "b"}, "run": {"seed": 1}})
    assert differing_fields(one, other) == ["run.seed", "model.lora.r", "data.eval.path"]
    assert differing_fields(one, load_config({"data": {"eval": "a"}})) == ["model.lora"]
    assert differing_fields(one, one) == []


PATHS = st.sampled_from([path for path, _ in dotted_fields()] + ["data.train.0", "run.nmae", "x"])
VALUES = st.one_of(
    st.sampled_from(
        ["null", "true", "-1", "1e5", "0.5", "[]", "{}", "[1, a]", "{path: a}", "*", "on"]
    ),
    st.text(max_size=8),
)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.lists(st.tuples(PATHS, VALUES), max_size=3))
def test_any_overrides_give_a_config_or_one_plain_error(pairs: list[tuple[str, str]]):
    try:
        config = load_config({}, [f"{path}={value}" for path, value in pairs])
    except ConfigError as error:
        text = str(error)
        assert not any(
            word in text for word in ("pydantic", "Section", "dict_type", "Input should")
        )
        return
    assert load_config(json.loads(json.dumps(dump_config(config)))) == config
