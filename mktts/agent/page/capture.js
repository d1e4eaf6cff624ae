// Audio worklet of the microphone: resamples its audio from any rate to 16-bit frames at the bot's rate.
import { Resampler } from "./resample.js";

class Capture extends AudioWorkletProcessor {
  constructor({ processorOptions: { rateHz, frameSamples } }) {
    super();
    this.resampler = new Resampler(sampleRate, rateHz); // sampleRate: a worklet global, the audio context's rate
    this.frame = new Int16Array(frameSamples);
    this.filled = 0;
  }

  process([[channel]]) {
    if (!channel) return true; // the microphone is not connected yet
    for (const value of this.resampler.push(channel)) {
      this.frame[this.filled++] = Math.round(Math.max(-1, Math.min(1, value)) * 32767);
      if (this.filled < this.frame.length) continue;
      this.port.postMessage(this.frame.slice().buffer);
      this.filled = 0;
    }
    return true;
  }
}

registerProcessor("capture", Capture);
