"""flite, the teacher's program: its libraries in this process where they are there, else a program for every sentence.

A process takes 25 ms to start, as long as a second and a half of speech takes to make.
"""

from __future__ import annotations

import ctypes
import io
import os
import subprocess
import wave
from functools import cache
from typing import Any

import numpy as np

from mktts.audio import from_pcm16
from mktts.errors import AudioError, BackendUnavailable

RATE_HZ = 16_000
PROGRAM = "FLITE"  # environment: a program that takes a voice's name and then flite's own options
_SEED = 1  # of C's random numbers, which the voices' noise is made of: what a new process has


class _Wave(ctypes.Structure):
    """cst_wave of flite 2.2 (cst_wave.h)."""

    _fields_ = (
        ("type", ctypes.c_char_p),
        ("sample_rate", ctypes.c_int),
        ("num_samples", ctypes.c_int),
        ("num_channels", ctypes.c_int),
        ("samples", ctypes.POINTER(ctypes.c_short)),
    )


def spoken(text: str, voice: str) -> np.ndarray:
    """float32 (samples,) at 16 kHz, as flite says `text`; the same for the same text, in whatever order.

    $FLITE, where it is set, names a program to take instead of the libraries. Raises BackendUnavailable without flite,
    AudioError where it gives no speech of that form.
    """
    library = None if os.environ.get(PROGRAM) else _library()
    return _by_library(library, text, voice) if library else pcm_of(_by_program(text, voice))


def pcm_of(wav: bytes) -> np.ndarray:
    """WAV bytes, 16-bit mono at 16 kHz -> float32 (samples,). Raises AudioError for another form."""
    try:
        with wave.open(io.BytesIO(wav)) as file:
            form = (file.getnchannels(), file.getsampwidth(), file.getframerate())
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise AudioError(f"expected a WAV file from the teacher: {error}") from None
    if form != (1, 2, RATE_HZ):
        raise AudioError(f"expected 1 channel of 2 bytes at {RATE_HZ} Hz, got {form}")
    return from_pcm16(data)


def _by_program(text: str, voice: str) -> bytes:
    command = [os.environ.get(PROGRAM, "flite"), voice, "-t", text, "-o", "/dev/stdout"]
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        why = f"install flite (Debian: apt-get install flite) or set FLITE to a program taking a voice: {error}"
        raise BackendUnavailable(f"the teacher needs flite: {why}") from None


def _by_library(library: Any, text: str, voice: str) -> np.ndarray:
    ctypes.CDLL(None).srand(_SEED)
    made = library.flite_text_to_wave(text.encode(), _voice(voice))
    if not made:
        raise AudioError(f"expected speech from the teacher, got nothing for {text!r}")
    try:
        form = (made.contents.num_channels, made.contents.sample_rate)
        if form != (1, RATE_HZ):
            raise AudioError(f"expected 1 channel at {RATE_HZ} Hz from the teacher, got {form}")
        return from_pcm16(np.ctypeslib.as_array(made.contents.samples, (made.contents.num_samples,)).astype("<i2"))
    finally:
        library.delete_wave(made)


@cache
def _library() -> Any | None:
    try:
        library = ctypes.CDLL("libflite.so.1", mode=ctypes.RTLD_GLOBAL)
        for needed in ("libflite_usenglish.so.1", "libflite_cmulex.so.1"):
            ctypes.CDLL(needed, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None
    library.flite_text_to_wave.restype = ctypes.POINTER(_Wave)
    library.flite_text_to_wave.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
    library.delete_wave.argtypes = (ctypes.POINTER(_Wave),)
    library.flite_init()
    return library


@cache
def _voice(name: str) -> Any:
    try:
        register = getattr(ctypes.CDLL(f"libflite_cmu_us_{name}.so.1"), f"register_cmu_us_{name}")
    except OSError as error:
        raise BackendUnavailable(f"the teacher needs flite's voice {name}: {error}") from None
    register.restype, register.argtypes = ctypes.c_void_p, (ctypes.c_char_p,)
    return register(None)
