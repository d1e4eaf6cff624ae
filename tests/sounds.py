"""Sound decoded by something else than what made it."""

import io

import numpy as np


def decoded(data: bytes) -> tuple[str, np.ndarray, int]:
    """The codec's name, mono float32 samples and their rate, of encoded sound: FFmpeg's own opinion."""
    import av

    with av.open(io.BytesIO(data)) as container:
        (stream,) = container.streams.audio
        to_float = av.AudioResampler(format="flt", layout="mono", rate=stream.rate)
        frames = [plain for frame in container.decode(stream) for plain in to_float.resample(frame)]
        pieces = [frame.to_ndarray()[0] for frame in frames]
        return stream.codec_context.codec.name, np.concatenate(pieces), stream.rate


def tone(seconds: float, frequency_hz: float = 440.0, rate_hz: int = 24_000, peak: float = 0.5) -> np.ndarray:
    """A sine, float32."""
    return (peak * np.sin(2 * np.pi * frequency_hz * np.arange(round(seconds * rate_hz)) / rate_hz)).astype(np.float32)


def loudest_hz(pcm: np.ndarray, rate_hz: int) -> float:
    """The frequency of the strongest line of its spectrum."""
    spectrum = np.abs(np.fft.rfft(pcm * np.hanning(len(pcm))))
    return float(np.argmax(spectrum) * rate_hz / len(pcm))
