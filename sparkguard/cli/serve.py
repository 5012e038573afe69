"""sparkguard serve: the supervisor of the runners, in the foreground."""

from __future__ import annotations

import os

import click

from sparkguard.cli.terminal import HELP, epilog, say
from sparkguard.errors import CONFIG, NOT_FOUND, OK, OSERR, TEMPFAIL, UNAVAILABLE, SparkguardError

_EXAMPLES = """
sparkguard serve                                     http://127.0.0.1:8090/ is its page
MODELS_DIR=~/gguf SPARK_PORT=9000 sparkguard serve
sparkguard serve --check                             would it start?
"""


@click.command(
    "serve",
    context_settings=HELP,
    epilog=epilog(_EXAMPLES, OK, UNAVAILABLE, OSERR, TEMPFAIL, CONFIG, NOT_FOUND),
    short_help="run models on demand, behind one address",
)
@click.option("--check", is_flag=True, help="Look at settings, key, engine and machine, and start nothing.")
def command(check: bool) -> int:
    """Serves the GGUF models under MODELS_DIR: OpenAI's and Anthropic's APIs, a control API, and a page.

    Each model runs in a process of its own, which the first request starts and which never starts where it would not fit.
    SIGTERM and Ctrl-C let running requests end; SIGHUP reads the settings again.
    """
    try:
        from sparkguard.web import service
    except ModuleNotFoundError as error:
        raise SparkguardError(
            f"the Python package {error.name} is not installed", "pip install 'sparkguard[runners]' brings all it needs", CONFIG
        ) from None
    if check:
        fit = service.check(os.environ)
        site, engine = fit.site, fit.engine
        say(f"it would serve {site.models_dir} on {site.host}:{site.port} with {engine.path} ({engine.version})")
        return OK
    service.serve(os.environ)
    return OK
