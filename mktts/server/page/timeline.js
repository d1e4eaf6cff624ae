// When each piece of a stream is played, and how late it was. Pure code: a test can import it.
const LEAD_S = 0.03; // before the first sound, so that the next piece need not be there already

// Pieces one behind the other. All times are those of one clock, in seconds.
export class Timeline {
  constructor(leadS = LEAD_S) {
    this.lead = leadS;
    this.end = null; // of the last piece
    this.first = null; // start of the first one
    this.late = 0; // sum of the silences inside the speech
    this.gaps = 0;
    this.sound = 0;
  }

  // Where a piece of `durationS` begins that has come at `nowS`.
  place(nowS, durationS) {
    let start = this.end;
    if (start === null) start = this.first = nowS + this.lead;
    else if (start < nowS) {
      this.late += nowS - start;
      this.gaps += 1;
      start = nowS;
    }
    this.end = start + durationS;
    this.sound += durationS;
    return start;
  }
}

const WAV_HEADER_BYTES = 44; // as this server writes it: RIFF, fmt of 16 bytes, data

// 16-bit samples out of the bytes of a streamed WAV, in whatever pieces they come.
export class WavReader {
  constructor() {
    this.skip = WAV_HEADER_BYTES;
    this.odd = null; // half a sample
  }

  // A Float32Array of the samples that `bytes` (Uint8Array) completes.
  push(bytes) {
    const skipped = Math.min(this.skip, bytes.length);
    this.skip -= skipped;
    let rest = bytes.subarray(skipped);
    if (this.odd !== null && rest.length) {
      const joined = new Uint8Array(rest.length + 1);
      joined[0] = this.odd;
      joined.set(rest, 1);
      rest = joined;
      this.odd = null;
    }
    if (rest.length % 2) this.odd = rest[rest.length - 1];
    const samples = new Float32Array(rest.length >> 1);
    const view = new DataView(rest.buffer, rest.byteOffset, rest.length);
    for (let i = 0; i < samples.length; i++) samples[i] = view.getInt16(2 * i, true) / 32768;
    return samples;
  }
}
