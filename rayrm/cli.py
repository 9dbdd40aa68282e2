"""What the commands share: reading the command line, and turning errors into exit statuses.

Nothing heavy is imported here, so that --help answers at once and a wrong command fails at once.
"""

import logging
import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rayrm import __version__
from rayrm.config.reference import describe_fields, list_fields
from rayrm.errors import ConfigError, RayrmError

EXIT_STATUSES = """exit status:
  0        done
  1        the run failed
  2        the configuration or the command is wrong; nothing was started
  130 143  stopped by Ctrl-C or SIGTERM, with a complete checkpoint

fields (--fields adds their types and defaults):"""


_NOISY = (
    # peft loads bitsandbytes, which warns of a kernel that it can do without
    "bitsandbytes.backends.cpu.ops",
    # Ray tells at each start that it guards its ports by a token
    "ray._private.authentication.authentication_token_setup",
)


class ConfigRequest(NamedTuple):
    """A configuration as a command line names it; a path of None means the quickstart."""

    path: str | None
    overrides: list[str]


def parse_config_request(
    command: str,
    purpose: str,
    arguments: Sequence[str] | None = None,
    *,
    of_sweep: bool = False,
) -> ConfigRequest:
    """Read '[CONFIG.yaml] [section.field=value ...]', or answer --help, --fields or --version."""
    parser = ArgumentParser(
        prog=f"python -m rayrm.{command}",
        usage="%(prog)s [CONFIG.yaml] [section.field=value ...]",
        description=purpose,
        epilog=f"{EXIT_STATUSES}\n{list_fields(of_sweep=of_sweep)}",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG.yaml section.field=value",
        help="the configuration (default: configs/quickstart.yaml), then what to change in it; "
        "values are YAML, such as model.lora=null or 'model.lora={r: 8}'",
    )
    parser.add_argument(
        "--fields", action="store_true", help="print every field with its type and default"
    )
    parser.add_argument("--version", action="version", version=f"rayrm {__version__}")
    given = parser.parse_args(arguments)
    if given.fields:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head is no error
        print(describe_fields(of_sweep=of_sweep))
        parser.exit()
    words: list[str] = given.words
    has_path = bool(words) and "=" not in words[0]
    return ConfigRequest(words[0] if has_path else None, words[1:] if has_path else words)


def exit_status(action: Callable[[], None]) -> int:
    """Run a command and return its exit status; an error of rayrm costs one message on stderr.

    Any other exception is a bug of ours and keeps its traceback.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("rayrm").setLevel(logging.INFO)
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as Ray, once it starts
    try:
        action()
    except RayrmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as ended:
        if ended.code != signal.SIGTERM:
            raise
        return 128 + signal.SIGTERM
    return 0
