"""python -m rayrm.export SOURCE OUT [--merge]: a model that loads, from a run or an adapter."""

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter

from rayrm.cli import exit_status
from rayrm.errors import ConfigError, RayrmError

PURPOSE = """Write a reward model to a folder that plain transformers or peft loads.

The folder is loaded again and compared before it counts as written. SOURCE stays as it is. Of a run
that ended before its export, or goes on still, the newest complete checkpoint is taken."""


def export(given: Namespace) -> None:
    """Export what the command line asks for and say where it is."""
    from rayrm.training.convert import convert  # loads torch, which --help never needs

    if given.push_to_hub is not None:
        check_name(given.push_to_hub)
    difference = convert(given.source, given.out, merge=given.merge, dtype=given.dtype)
    print(f"model: {given.out}\nlargest difference of a reward after reloading: {difference:.2g}")
    if given.push_to_hub is not None:
        print(f"hub: {push(given.out, given.push_to_hub)}")


def check_name(name: str) -> None:
    """Refuse a name that the hub cannot have, before there is anything to upload."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"--push-to-hub: {error}") from error


def push(folder: str, name: str) -> str:
    """Upload a folder to a private repository of the hub, made where it is missing; return its URL.

    Raises:
        RayrmError: the hub is not reached, or refuses.
    """
    from huggingface_hub import HfApi

    try:
        url = HfApi().create_repo(name, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=folder)
    except (
        Exception
    ) as error:  # of the hub, its client or the network: the model stands all the same
        first_line = str(error).strip().split("\n")[0]
        raise RayrmError(
            f"--push-to-hub {name}: {first_line}; the model is at {folder}: be online and logged "
            f"in (hf auth login, or HF_TOKEN), then hf upload {name} {folder}"
        ) from error
    return str(url)


def main() -> int:
    """Run the command and return its exit status."""
    parser = ArgumentParser(
        prog="python -m rayrm.export",
        description=PURPOSE,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", metavar="SOURCE", help="folder of a run, a checkpoint, an adapter or a model"
    )
    parser.add_argument("out", metavar="OUT", help="folder to write; not there yet, or empty")
    parser.add_argument(
        "--merge", action="store_true", help="add the adapter to its base: a whole model"
    )
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], help="of the weights (default: as trained)"
    )
    parser.add_argument(
        "--push-to-hub", metavar="NAME", help="upload OUT to this private repository, too"
    )
    given = parser.parse_args()
    return exit_status(lambda: export(given))


if __name__ == "__main__":
    sys.exit(main())
