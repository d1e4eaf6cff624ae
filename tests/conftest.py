"""Checkpoints that the whole suite shares, made once per run, whichever xdist worker comes first; a synthesizer."""

import gc
import inspect
import os
import ssl
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import httpx
import pytest

# Before torch is imported: as many threads as the models of the tests are served with; workers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.engine import capacity
from mktts.engine.admission import Admission, AdmissionLimits, Capacity
from mktts.model.tokenizer import TextTokenizer
from mktts.synth import Synthesizer, loading

pytest_plugins = ["time_limits"]

gc.disable()  # until all is imported: that makes a million objects which stay, and collections visited them for 5 s


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def checkpoint_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Points $MKTTS_CACHE at a folder all workers (and the processes they start) share, unless it is set already."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MKTTS_CACHE", os.environ.get("MKTTS_CACHE", str(shared / "mktts-cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def imported_objects_frozen() -> None:
    """Collections leave out the 850 000 objects of packages: half a second each. A server that ends unfreezes them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def patient_clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One certificate for httpx, which reads all of certifi's for each request: 25 ms; a minute until a time-out."""
    first, *_ = httpx.create_ssl_context().get_ca_certs(binary_form=True)
    path = tmp_path_factory.mktemp("authority") / "one.pem"
    path.write_text(ssl.DER_cert_to_PEM_cert(first), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        for phase in ("connect", "read", "write", "pool"):
            patch.setattr(inspect.signature(httpx.get).parameters["timeout"].default, phase, 60.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def vocabularies_read_once(checkpoint_cache: None) -> Iterator[None]:
    """Keeps the tokenizers of the cache's checkpoints, whose files do not change: each takes 0.25 s to read."""
    shared, read = Path(os.environ["MKTTS_CACHE"]).resolve(), TextTokenizer.load
    kept = cache(read)

    def load(folder: str | Path) -> TextTokenizer:
        return (kept if Path(folder).resolve().is_relative_to(shared) else read)(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextTokenizer, "load", load)
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_admission() -> Iterator[None]:
    """Streams on the batch engine of this CPU wait for admission for a minute, and nothing is measured: how many this
    machine serves at the moment depends on what else runs here. A test of admission brings its own settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "Admission", partial(Admission, AdmissionLimits(max_wait_s=60.0)))
        patch.setattr(capacity, "measure", lambda runner, prompt, before: Capacity(1_000, "of a test"))
        patch.setattr(capacity, "keep", lambda key, runner, capacity: None)
        yield


def opened(source: str) -> Callable[..., Checkpoint]:
    """A fixture: this checkpoint."""

    @pytest.fixture(scope="session")
    def checkpoint(checkpoint_cache: None) -> Checkpoint:
        return open_checkpoint(source)

    return checkpoint


tiny = opened("random:tiny")  # CustomVoice, 64 wide, tiny codec
tiny_base = opened("random:tiny:base")
tiny_design = opened("random:tiny:voice_design")
tiny_projected = opened("random:tiny-projected")  # its talker is wider than its predictor; takes an instruction
tiny_margin = opened("random:tiny:margin")  # greedy choices win by a wide margin


@pytest.fixture(scope="module")  # not for longer: a server sets its limits
def synth(tiny: Checkpoint) -> Iterator[Synthesizer]:
    with Synthesizer.load(tiny, device="cpu", cpu_threads=1, engine="single") as loaded:
        yield loaded
