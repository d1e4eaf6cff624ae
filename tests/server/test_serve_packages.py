"""The server's room without the server's packages: its face, its help, and an error that names what is missing."""

from __future__ import annotations

import pytest
from absent import mktts_without, python_without
from commands import examples

import mktts.server

PACKAGES = ("fastapi", "starlette", "pydantic", "uvicorn", "websockets", "prometheus_client")


def test_every_name_of_the_face_is_there():
    assert all(getattr(mktts.server, name) for name in mktts.server.__all__)
    with pytest.raises(AttributeError, match="Studio"):
        mktts.server.Studio  # noqa: B018


def test_the_face_is_imported_without_the_packages():
    done = python_without(
        PACKAGES, "from mktts.server import Limits, listen, read_keys; listen('localhost', 0, Limits())"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_help_needs_none_of_the_packages():
    done = mktts_without(PACKAGES, "serve", "--help")
    assert done.returncode == 0 and "--api-key-file" in done.stdout
    assert examples("serve")


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "prometheus_client"])
def test_serving_without_a_package_names_it(package):
    done = mktts_without([package], "serve", "--port", "0")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"the package {package}" in done.stderr and "pip install -r requirements.txt" in done.stderr
