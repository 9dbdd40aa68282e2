"""``rayrm.export``: what it takes, what it refuses, and that rewards stay."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from rayrm.config.schema import ModelSection
from rayrm.errors import ConfigError, RayrmError
from rayrm.export import export, push
from rayrm.model.build import build_reward_model
from rayrm.model.tokenizer import load_tokenizer
from rayrm.training.convert import convert
from tests.builders import tiny_llama_folder, word_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A reward model in float32."""
    return tiny_llama_folder(tmp_path / "model", word_tokenizer(), num_labels=1)


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    """An adapter that changes every reward, saved with its tokenizer."""
    section = ModelSection.model_validate(
        {"name_or_path": str(model), "dtype": "float32", "lora": {"r": 2}}
    )
    tokenizer = load_tokenizer(section)
    built = build_reward_model(section, tokenizer, seed=0)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3)
    folder = tmp_path / "adapter"
    classifier: Any = built.classifier
    classifier.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_adapter_is_a_plain_model_of_the_dtype_asked_for(
    dtype: Any, adapter: Path, tmp_path: Path
) -> None:
    convert(str(adapter), str(tmp_path / "out"), merge=True, dtype=dtype)
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert next(found.parameters()).dtype == getattr(torch, dtype)


def test_an_adapter_keeps_the_dtype_of_its_base_where_none_is_asked_for(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    half = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.bfloat16)
    half.save_pretrained(model)
    convert(str(adapter), str(tmp_path / "out"), merge=True)
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_an_export_of_an_export_is_the_same(model: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    convert(str(model), str(one))
    convert(str(one), str(two))
    names = {path.name for path in one.iterdir()}
    assert "model.safetensors" in names
    assert {path.name for path in two.iterdir()} == names
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


def test_what_was_known_about_the_rewards_goes_along(adapter: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(tmp_path / "model")
    config.reward_mean, config.reward_std = -3.0, 0.5
    config.save_pretrained(adapter)
    (adapter / "README.md").write_text("# about")
    (adapter / "curves.png").write_bytes(b"drawn")
    convert(str(adapter), str(tmp_path / "out"), merge=True)
    found = AutoConfig.from_pretrained(tmp_path / "out")
    assert (found.reward_mean, found.reward_std) == (-3.0, 0.5)
    assert (tmp_path / "out" / "README.md").read_text() == "# about"
    assert (tmp_path / "out" / "curves.png").read_bytes() == b"drawn"


def test_what_is_there_already_is_not_overwritten(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="is there already, and not an empty folder"):
        convert(str(model), str(tmp_path / "out"))
    assert (tmp_path / "out" / "mine").read_text() == "mine"


def test_a_whole_model_has_nothing_to_merge(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to merge; leave out --merge"):
        convert(str(model), str(tmp_path / "out"), merge=True)
    assert not (tmp_path / "out").exists()


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    causal = tiny_llama_folder(tmp_path / "causal", word_tokenizer())
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no scalar head"):
        convert(str(causal), str(tmp_path / "out"))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "else").mkdir()
    with pytest.raises(ConfigError, match="is neither a run of rayrm, one of its checkpoints"):
        convert(str(tmp_path / "else"), str(tmp_path / "out"))


def test_an_adapter_without_a_head_is_refused(adapter: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = adapter / "adapter_model.safetensors"
    kept = {name: t for name, t in load_file(weights).items() if ".score." not in name}
    save_file(kept, weights)
    with pytest.raises(ConfigError, match="this adapter has no head"):
        convert(str(adapter), str(tmp_path / "out"), merge=True)


def truncate(folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:60])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("config.json", "config.json cannot be read"),
        ("model.safetensors", "cannot load .* as a sequence classifier"),
    ],
)
def test_a_model_with_a_broken_file_is_told(
    name: str, told: str, model: Path, tmp_path: Path
) -> None:
    truncate(model, name)
    with pytest.raises(ConfigError, match=told):
        convert(str(model), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_adapter_whose_base_is_gone_is_told_with_the_place_to_mend(
    adapter: Path, model: Path, tmp_path: Path
) -> None:
    model.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=rf"its base, {model}, is not there.*adapter_config"):
        convert(str(adapter), str(tmp_path / "out"), merge=True)


def test_a_base_beside_a_moved_adapter_is_found_and_one_of_dead_links_is_told(
    adapter: Path, model: Path, tmp_path: Path
) -> None:
    expected = convert(str(adapter), str(tmp_path / "before"), merge=True)
    place = adapter / "adapter_config.json"
    settings = json.loads(place.read_text())
    settings["base_model_name_or_path"] = "/the/old/place/base"
    place.write_text(json.dumps(settings))
    (adapter / "base").mkdir()
    for file in model.iterdir():
        (adapter / "base" / file.name).symlink_to(file)
    assert convert(str(adapter), str(tmp_path / "out"), merge=True) == expected
    model.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=rf"its base are those at {model}/.*, which is not there"):
        convert(str(adapter), str(tmp_path / "other"), merge=True)


def test_a_run_that_ended_before_its_first_checkpoint_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "run" / "data_report.json").write_text("{}")
    with pytest.raises(ConfigError, match="no model and no complete checkpoint"):
        convert(str(tmp_path / "run"), str(tmp_path / "out"))


@pytest.mark.parametrize("place", ["model/sub", "model", "model/config.json/sub"])
def test_a_place_in_the_source_or_below_a_file_is_refused(
    place: str, model: Path, tmp_path: Path
) -> None:
    before = sorted(path.name for path in model.iterdir())
    with pytest.raises(ConfigError, match=r"lies in|cannot be made"):
        convert(str(model), str(tmp_path / place))
    assert sorted(path.name for path in model.iterdir()) == before


def test_a_place_that_cannot_be_made_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/file/out: cannot be made"):
        convert(str(model), str(tmp_path / "file" / "out"))


def test_a_home_folder_is_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    convert("~/model", "~/out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_name_that_the_hub_cannot_have_is_refused_before_the_export(
    model: Path, tmp_path: Path
) -> None:
    given = Namespace(
        source=str(model), out=str(tmp_path / "out"), merge=False, dtype=None, push_to_hub="a b!!"
    )
    with pytest.raises(ConfigError, match="--push-to-hub: "):
        export(given)
    assert not (tmp_path / "out").exists()


def test_a_hub_that_is_not_reached_leaves_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RayrmError, match=rf"the model is at {tmp_path}"):
        push(str(tmp_path), "a/b")


def test_the_command_tells_where_the_model_is_and_ends_with_2_for_a_wrong_one(
    adapter: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "rayrm.export", str(adapter)]
    done = subprocess.run([*command, str(tmp_path / "out"), "--merge"], capture_output=True)
    assert done.returncode == 0
    assert f"model: {tmp_path / 'out'}\n" in done.stdout.decode()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["id2label"] == {
        "0": "LABEL_0"
    }
    again = subprocess.run([*command, str(tmp_path / "out")], capture_output=True)
    assert again.returncode == 2
    assert "is there already" in again.stderr.decode()


def test_a_push_that_fails_names_the_folder_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "no-token")
    with pytest.raises(RayrmError, match=rf"--push-to-hub a/b: .*the model is at {tmp_path}"):
        push(str(tmp_path), "a/b")
