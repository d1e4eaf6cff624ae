// The microphone's side of the audio thread: any rate in, frames of 16-bit samples at the bot's rate out.
import { Resampler } from "./resample.js";

class Capture extends AudioWorkletProcessor {
  constructor({ processorOptions: { rateHz, frameSamples } }) {
    super();
    this.resampler = new Resampler(sampleRate, rateHz); // sampleRate: this audio context's
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
