"""One Ray for the session, and small models on disk."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
# Ray's tokens: a head writes one to the home folder, and the next client then needs it
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", "rayrm-tests-" + "0" * 32)
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Start a local Ray with four logical CPUs, whatever the machine has."""
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=300_000_000,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny language model whose padding token is its EOS."""
    from tests.builders import tiny_llama_folder, word_tokenizer

    tokenizer = word_tokenizer(eos_token="<|im_end|>", pad_token="<|im_end|>")
    return tiny_llama_folder(tmp_path_factory.mktemp("base") / "model", tokenizer)
