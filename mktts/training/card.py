"""The model card beside the small voice's weights, as `python -m mktts train ship` writes it: what a file of the
checkpoint or its evaluation knows is read from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mktts.checkpoint import Checkpoint
from mktts.checkpoint.files import WeightFiles
from mktts.measure.metrics import cell
from mktts.spec import FRAME_RATE_HZ, NUM_CODEBOOKS, SAMPLE_RATE_HZ, StackConfig
from mktts.training.codec.model import noise_books
from mktts.training.voice_report import quality, reported

_HEAD = """---
license: apache-2.0
language: en
pipeline_tag: text-to-speech
---

# The small voice

A Qwen3-TTS checkpoint of {params:.1f} million parameters that speaks English with three voices ({speakers}) on any
machine. Same classes, tensor names and prompt layouts as the released 12 Hz CustomVoice models, so both mktts and
qwen-tts load it; only the dimensions are small, and the weights were trained here, from nothing.

```sh
python -m mktts say "Good morning." -o morning.wav --checkpoint small --speaker {speaker}
```

## What is in it

{sizes}

Codes: {books} codebooks of {entries} at {rate_hz:g} Hz, {sample_rate_hz:,} samples a second, mono. Weights in
bfloat16. The codec has no encoder: its codes were made by a fixed analysis, and a CustomVoice never hears a recording.
{noise}
## Data

Teacher: the synthesizer flite 2.2 with its voices slt, rms and awb, resampled from 16 to 24 kHz. These are parametric
voices (clustergen) that Carnegie Mellon University built from its own CMU ARCTIC recordings of two American speakers
and one Scottish. No other audio was used, and no output of another text-to-speech model.

Texts: English sentences of a grammar in this repository, and sentences of freely licensed packages, which make more
than half: WordNet's examples and glosses, the King James text and the World English Bible, novels, speeches, manuals,
dictionaries and conversations (NOTICE names each package and its terms). The voice learns the words that a text front
end makes of them, in one case, with and without their marks; the checkpoint names that front end, so figures, prices,
dates and ALL CAPS reach it as words, too. What it is judged by are files of the repository,
mktts/training/data/held_out.txt and natural.txt, apart from all training texts.

## How it was made

First codes are fitted to the teacher's speech: a frame's log-mel spectra, pitch and voicing become principal
components, k-means makes one codebook after another of what the ones before leave over, and least squares move all of
them together. A frame's codes are those whose sum is nearest along eight paths. Then two networks learn side by side,
since codes need neither of them: the codec's decoder to restore speech from its codes, judged by spectra,
by what repeats and by how two renderings of independent noise differ; talker and code predictor to say codes from text,
with the released prompt layouts mixed and the end of speech learnt. Both began with the voice before, with codes that
mean something else: the decoder's first projections were fitted to them, the talker's embeddings and heads of codes
were learnt anew. To go on from this voice in the same way, on one GPU, with the libraries of flite (both
networks learnt on it side by side, under NVIDIA's MPS; `--codec-devices` and `--talker-devices` give them one each):

```sh
python -m mktts train texts --corpora PACKAGES --fetch --count 420000 --seed 1 --out texts.xz
python -m mktts train voice --texts texts.xz --out RUN --minutes M --first-hours 14
python -m mktts train bring --run RUN --to BROUGHT
cat BROUGHT/voice.tar.* | tar x && tar xf BROUGHT/run.tar.xz
python -m mktts train evaluate --checkpoint voice_codec0 --codec-state codec0.pt --output evaluation.json \\
  --listen LISTEN
python -m mktts train ship --voice voice_codec0 --evaluation evaluation.json --listen LISTEN --replaces \\
  --curves run/codec0_curves.json run/talker_talker_curves.json
```

Notebook 09_voice shows how to train one from recordings of your own.
"""

_TAIL = """
## Limits

- English only. Other languages, and words far from the training texts, come out wrong.
- A small model of a parametric teacher: it cannot sound better than flite does, and it does not.
- Three fixed speakers, no cloning, no instructions on style.
- No attempt was made to keep it from saying anything in particular; it reads what it is given.

Intended use: to hear this repository's programs at work without a GPU, a download or a key, and to test them on
trained weights. It is no product voice. Say to listeners that the voice is synthetic.

## Licence

Weights and card: Apache-2.0, as the repository. They derive from voices that are copyright Carnegie Mellon University
(CMU ARCTIC and flite), which grants free use, copying, modification and distribution, provided that its copyright
notice stays, that changes are marked as such (the voices here were distilled into another model), and that the names
of the authors are not used to endorse what is derived from them. Carnegie Mellon University and the authors of the
voices disclaim all warranties.
"""


def card(checkpoint: Checkpoint, evaluation: Mapping[str, Any] | None) -> str:
    """The whole README.md. evaluation: the record of `train evaluate`; None: nothing was measured."""
    config = checkpoint.config
    total = _params(checkpoint.files)
    predictor = _params(checkpoint.files, "talker.code_predictor.")
    decoder = _params(checkpoint.codec_files, "decoder.")
    sizes = [
        {"part": "talker", **_stack(config.talker), "parameters": total - predictor},
        {"part": "code predictor", **_stack(config.predictor), "parameters": predictor},
        {"part": "codec decoder", "parameters": decoder},
    ]
    speakers = list(config.speakers)
    head = _HEAD.format(
        params=(total + decoder) / 1e6,
        speakers=", ".join(speakers),
        speaker=speakers[0],
        sizes=markdown(sizes),
        books=NUM_CODEBOOKS,
        entries=config.predictor.vocab_size,
        noise=_noise(checkpoint),
        rate_hz=FRAME_RATE_HZ,
        sample_rate_hz=SAMPLE_RATE_HZ,
    )
    return head + _measured(evaluation) + _TAIL


def _noise(checkpoint: Checkpoint) -> str:
    """What the card says of codebooks that carry noise; nothing where there are none."""
    tensors = checkpoint.codec_files.map()
    books = noise_books({name: tensors[name] for name in tensors if name.endswith("embedding_sum")})
    if not books:
        return ""
    return (
        f"The last {books} codebooks carry noise, of which the decoder makes hiss and breath, and say nothing.\n"
        "They have to be drawn. Where greedy decoding keeps them the same, a hiss repeats itself every 80 ms.\n"
    )


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table; a missing value is empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return "\n".join(lines + ["| " + " | ".join(cell(row.get(c, "")) for c in columns) + " |" for row in rows])


def _measured(evaluation: Mapping[str, Any] | None) -> str:
    if evaluation is None:
        return "\n## Quality\n\nNot measured yet.\n"
    settings, where = evaluation["settings"], evaluation["environment"]
    short = [row["figure"] for row in quality(evaluation) if not row["met"]]
    verdict = "All lines are met." if not short else f"Not met: {'; '.join(short)}."
    return f"""
## Quality

Measured on {settings["sentences"]} held-out sentences of the grammar, and on everyday speech, against the teacher, with
an independent recogniser (pocketsphinx), on {where["date_utc"][:10]}. "before" is the voice that this one replaced.
{verdict}

{markdown(quality(evaluation))}

Without a limit:

{markdown(reported(evaluation))}
"""


def _params(files: WeightFiles, prefix: str = "") -> int:
    return sum(spec.params for name, spec in files.tensors.items() if name.startswith(prefix))


def _stack(c: StackConfig) -> dict[str, Any]:
    return {
        "layers": c.num_hidden_layers,
        "hidden": c.hidden_size,
        "feed-forward": c.intermediate_size,
        "heads": f"{c.num_attention_heads} / {c.num_key_value_heads} of {c.head_dim}",
        "vocabulary": c.vocab_size,
    }
