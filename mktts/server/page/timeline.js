// When each chunk of a stream is played, and how late it was. Pure code: a test can import it.
const LEAD_S = 0.03; // delay before the first chunk, so that the next one may arrive a little later

// Schedules chunks one after another. All times are in seconds on one clock.
export class Timeline {
  constructor(leadS = LEAD_S) {
    this.lead = leadS;
    this.end = null; // end of the last chunk
    this.first = null; // start of the first chunk
    this.late = 0; // total silence between chunks
    this.gaps = 0;
    this.sound = 0;
  }

  // The start time of a chunk of `durationS` that arrived at `nowS`.
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

// Reads 16-bit samples from a streamed WAV, whose bytes may arrive in pieces of any size.
export class WavReader {
  constructor() {
    this.skip = WAV_HEADER_BYTES;
    this.odd = null; // the first byte of an incomplete sample
  }

  // Returns the samples that `bytes` (Uint8Array) completes, as a Float32Array.
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
