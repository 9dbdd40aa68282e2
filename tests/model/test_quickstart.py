import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rayrm.data.synthetic import KINDS, generate_pairs
from rayrm.model import quickstart
from rayrm.model.quickstart import build_quickstart_model, quickstart_folder

# Another process with other hash seeds: plain transformers load a first build, then a second is
# written.
ELSEWHERE = """
import sys
from pathlib import Path
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from rayrm.model.quickstart import build_quickstart_model
folder, second = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
batch = tokenizer(["a robin", "a robin and tea"], padding=True, return_tensors="pt")
print(tuple(model(**batch).logits.shape))
build_quickstart_model(Path(second))
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the quickstart model, built once."""
    folder = tmp_path_factory.mktemp("quickstart") / "model"
    build_quickstart_model(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer as plain transformers load it."""
    return AutoTokenizer.from_pretrained(folder)


def test_plain_transformers_load_it_offline_and_a_second_build_has_the_same_bytes(
    folder: Path, tmp_path: Path
):
    result = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(folder), str(tmp_path / "second")],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "7"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "(2, 1)" in result.stdout.splitlines()
    assert contents(tmp_path / "second") == contents(folder)


def test_building_leaves_the_random_states_alone_and_the_seed_counts(folder: Path, tmp_path: Path):
    before = torch.get_rng_state(), random.getstate()
    build_quickstart_model(tmp_path / "other", seed=1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    weights = "model.safetensors"
    assert (tmp_path / "other" / weights).read_bytes() != (folder / weights).read_bytes()


def test_padding_is_no_eos_and_every_turn_ends_in_eos(tokenizer: PreTrainedTokenizerFast):
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "tea"}]
    prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    start, end = "<|im_start|>", "<|im_end|>"
    assert prompt == f"<|bos|>{start}user\nHi{end}{start}assistant\n"
    assert tokenizer.apply_chat_template(turns, tokenize=False) == f"{prompt}tea{end}"
    assert tokenizer.eos_token == end


def test_its_words_are_one_token_each_and_any_text_survives(tokenizer: PreTrainedTokenizerFast):
    words = {word for kind, things in KINDS.items() for word in (kind, *things)}
    assert {word for word in words if len(tokenizer.tokenize(f" {word}")) != 1} == set()
    for text in ("naïve 👋\n\ttabs", next(generate_pairs("eval"))["prompt"][0]["content"]):
        ids = tokenizer.encode(text)
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids[1:]) == text


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the empty folder that serves as the user's cache."""
    monkeypatch.setenv("RAYRM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_folder_is_built_once(cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    built: list[Path] = []

    def build(target: Path) -> None:
        built.append(target)
        shutil.copytree(folder, target)

    monkeypatch.setattr(quickstart, "build_quickstart_model", build)
    assert quickstart_folder() == quickstart_folder()
    assert len(built) == 1
    assert list(cache.iterdir()) == [quickstart_folder()]
    assert contents(quickstart_folder()) == contents(folder)


def test_who_loses_the_race_takes_the_folder_of_the_winner(
    cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def build_slowly(target: Path) -> None:
        monkeypatch.setattr(quickstart, "build_quickstart_model", build)
        winner = quickstart_folder()
        (winner / "winner").touch()
        build(target)

    def build(target: Path) -> None:
        shutil.copytree(folder, target)

    monkeypatch.setattr(quickstart, "build_quickstart_model", build_slowly)
    assert (quickstart_folder() / "winner").exists()
    assert list(cache.iterdir()) == [quickstart_folder()]


def test_a_build_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(target: Path) -> None:
        target.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(quickstart, "build_quickstart_model", fail)
    with pytest.raises(OSError, match="disk full"):
        quickstart_folder()
    assert list(cache.iterdir()) == []
