// A ring buffer of samples between the network and the sound card.
// Pure code: the playback worklet imports it, and so can a test.
const LEAD_S = 0.06; // initial delay before playback, so that a late chunk causes no gap
const MAX_LEAD_S = 0.3;
const MORE_LEAD_S = 0.04; // added after a gap inside speech
const LESS_LEAD_S = 0.02; // subtracted after CALM_S without a gap
const CALM_S = 10;
const LATE_S = 0.2; // a chunk within this time after the queue ran dry was late; after it, a new utterance begins
const FADE_S = 0.005; // length of the fade-out after clear(), which avoids a click
const CAPACITY_S = 30;

export class PlayQueue {
  constructor(rateHz) {
    this.rate = rateHz;
    this.ring = new Float32Array(CAPACITY_S * rateHz);
    this.read = this.queued = 0;
    this.lead = LEAD_S * rateHz;
    this.playing = false;
    this.waited = 0; // samples since the first one queued, or since the queue ran dry
    this.calm = 0;
    this.played = this.dropped = this.underruns = 0;
  }

  // Queues an Int16Array; samples that do not fit are dropped and counted.
  push(samples) {
    if (!this.playing && this.queued === 0) {
      if (this.played > 0 && this.waited < LATE_S * this.rate) this.stumble();
      this.waited = 0;
    }
    const fits = Math.min(samples.length, this.ring.length - this.queued);
    for (let i = 0; i < fits; i++) this.ring[(this.read + this.queued + i) % this.ring.length] = samples[i] / 32768;
    this.queued += fits;
    this.dropped += samples.length - fits;
  }

  // Fills a Float32Array with the next samples, or silence if there are none. Returns true when playback starts.
  pull(output) {
    const starts = !this.playing && this.queued > 0 && Math.max(this.queued, this.waited) >= this.lead;
    if (starts) {
      this.playing = true;
      this.startedAfter = this.waited;
    }
    const taken = this.playing ? Math.min(output.length, this.queued) : 0;
    for (let i = 0; i < taken; i++) output[i] = this.ring[(this.read + i) % this.ring.length];
    output.fill(0, taken);
    this.read = (this.read + taken) % this.ring.length;
    this.queued -= taken;
    this.played += taken;
    if (this.playing && this.queued === 0) this.rest();
    if (!this.playing) this.waited += output.length - taken;
    else this.settle(taken);
    return starts;
  }

  // Drops all queued samples except for a short fade-out.
  clear() {
    const fade = this.playing ? Math.min(this.queued, Math.round(FADE_S * this.rate)) : 0;
    for (let i = 0; i < fade; i++) this.ring[(this.read + i) % this.ring.length] *= 1 - (i + 1) / fade;
    this.dropped += this.queued - fade;
    this.queued = fade;
    this.cleared = true; // the next chunk begins a new utterance, however soon it arrives
    if (fade === 0) this.rest();
  }

  rest() {
    this.playing = false;
    this.waited = this.cleared ? Infinity : 0;
    this.cleared = false;
  }

  stumble() {
    this.underruns += 1;
    this.calm = 0;
    this.lead = Math.min(this.lead + MORE_LEAD_S * this.rate, MAX_LEAD_S * this.rate);
  }

  settle(samples) {
    this.calm += samples;
    if (this.calm < CALM_S * this.rate) return;
    this.calm = 0;
    this.lead = Math.max(this.lead - LESS_LEAD_S * this.rate, LEAD_S * this.rate);
  }
}
