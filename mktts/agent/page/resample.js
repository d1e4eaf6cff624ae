// Streaming sample-rate conversion by a windowed sinc filter, with one set of taps per phase of the rational ratio.
// Pure code: the capture worklet imports it, and so can a test.
const LOBES = 12; // zero crossings on each side of the kernel, at the lower of the two rates
const PASS = 0.92; // of the lower Nyquist frequency; the rest is the transition band

const divisor = (a, b) => (b ? divisor(b, a % b) : a);
const sinc = (x) => (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));

function taps(phase, half, cutoff) {
  const weights = new Float32Array(2 * half);
  for (let k = 0; k < weights.length; k++) {
    const x = k - half + 1 - phase; // distance from the output's position, in input samples
    weights[k] = sinc(cutoff * x) * 0.5 * (1 + Math.cos((Math.PI * x) / half));
  }
  const sum = weights.reduce((a, b) => a + b, 0); // normalised, so that every phase has unit gain at DC
  return weights.map((weight) => weight / sum);
}

export class Resampler {
  constructor(fromHz, toHz) {
    const common = divisor(fromHz, toHz);
    const cutoff = PASS * Math.min(1, toHz / fromHz);
    this.up = toHz / common;
    this.down = fromHz / common;
    this.half = Math.ceil(LOBES / cutoff);
    this.filters = Array.from({ length: this.up }, (_, phase) => taps(phase / this.up, this.half, cutoff));
    this.held = new Float32Array(this.half - 1); // input that later output needs; initially silence
    this.phase = 0;
  }

  // Returns the samples that the input so far determines, as a Float32Array; they lag by `half` input samples.
  push(input) {
    const line = new Float32Array(this.held.length + input.length);
    line.set(this.held);
    line.set(input, this.held.length);
    const output = [];
    let start = 0;
    while (start + 2 * this.half <= line.length) {
      const filter = this.filters[this.phase];
      let sum = 0;
      for (let k = 0; k < filter.length; k++) sum += filter[k] * line[start + k];
      output.push(sum);
      this.phase += this.down;
      start += Math.floor(this.phase / this.up);
      this.phase %= this.up;
    }
    this.held = line.slice(start);
    return Float32Array.from(output);
  }
}
