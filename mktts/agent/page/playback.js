// Audio worklet of the loudspeaker: plays queued audio, drops it on "clear", and reports its state.
import { PlayQueue } from "./queue.js";

const REPORT_S = 0.05;

class Playback extends AudioWorkletProcessor {
  constructor() {
    super();
    this.queue = new PlayQueue(sampleRate);
    this.peak = 0;
    this.sinceReport = 0;
    this.port.onmessage = ({ data }) => (data === "clear" ? this.clear() : this.queue.push(new Int16Array(data)));
  }

  process(_, [[output]]) {
    const starts = this.queue.pull(output);
    for (const value of output) this.peak = Math.max(this.peak, Math.abs(value));
    this.sinceReport += output.length;
    if (starts || this.sinceReport >= REPORT_S * sampleRate) this.report(starts);
    return true;
  }

  clear() {
    this.queue.clear();
    this.report(false);
  }

  report(starts) {
    const { queue } = this;
    const ms = (samples) => (1000 * samples) / sampleRate;
    this.port.postMessage({
      peak: this.peak,
      waited_ms: starts ? ms(queue.startedAfter) : null,
      queued_ms: ms(queue.queued),
      lead_ms: ms(queue.lead),
      played_ms: ms(queue.played),
      dropped_ms: ms(queue.dropped),
      underruns: queue.underruns,
    });
    this.peak = 0;
    this.sinceReport = 0;
  }
}

registerProcessor("playback", Playback);
