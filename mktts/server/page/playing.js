// Sound while it arrives: samples through Web Audio, encoded sound through Media Source where the browser can.
import { Timeline, WavReader } from "./timeline.js";

const MEDIA_TYPES = { mp3: "audio/mpeg", aac: "audio/aac", flac: "audio/flac", opus: "audio/ogg; codecs=opus" };

// Something with push(bytes), end(), stop() and `report()` -> {firstSound_ms, late_ms, gaps, sound_s}; times are since
// `begun_ms` (performance.now). Call it while a click still counts as a gesture.
export function openPlayer(format, rateHz, begun_ms, element) {
  if (format === "wav") return samplesPlayer(rateHz, begun_ms);
  const type = MEDIA_TYPES[format];
  const streams = Boolean(globalThis.MediaSource && MediaSource.isTypeSupported(type));
  return elementPlayer(type, streams, begun_ms, element);
}

function samplesPlayer(rateHz, begun_ms) {
  const context = new AudioContext({ sampleRate: rateHz, latencyHint: "interactive" });
  context.resume();
  const timeline = new Timeline();
  const reader = new WavReader();
  let firstSound_ms = null;
  return {
    whileItArrives: true,
    push(bytes) {
      const samples = reader.push(bytes);
      if (!samples.length) return;
      const buffer = context.createBuffer(1, samples.length, rateHz);
      buffer.copyToChannel(samples, 0);
      const node = new AudioBufferSourceNode(context, { buffer });
      node.connect(context.destination);
      const start = timeline.place(context.currentTime, buffer.duration);
      node.start(start);
      if (firstSound_ms === null) {
        const wait_s = start - context.currentTime + (context.outputLatency || context.baseLatency || 0);
        firstSound_ms = performance.now() - begun_ms + 1000 * wait_s;
      }
    },
    end() {
      const rest_s = timeline.end === null ? 0 : Math.max(0, timeline.end - context.currentTime);
      return new Promise((resolve) => setTimeout(() => resolve(context.close()), 1000 * rest_s + 100));
    },
    stop: () => context.state !== "closed" && context.close(),
    report: () => ({ firstSound_ms, late_ms: 1000 * timeline.late, gaps: timeline.gaps, sound_s: timeline.sound }),
  };
}

function elementPlayer(type, streams, begun_ms, element) {
  const pieces = [];
  const waiting = [];
  let buffer = null, ended = false, firstSound_ms = null, waitingSince_ms = null, late_ms = 0, gaps = 0;
  const source = streams ? new MediaSource() : null;
  const url = source ? URL.createObjectURL(source) : null;

  function feed() {
    if (!buffer || buffer.updating || source.readyState !== "open") return;
    if (waiting.length) buffer.appendBuffer(waiting.shift());
    else if (ended) source.endOfStream();
  }

  element.onplaying = () => {
    if (firstSound_ms === null) firstSound_ms = performance.now() - begun_ms;
    else if (waitingSince_ms !== null) late_ms += performance.now() - waitingSince_ms;
    waitingSince_ms = null;
  };
  element.onwaiting = () => {
    if (firstSound_ms === null || ended) return;
    waitingSince_ms = performance.now();
    gaps += 1;
  };
  if (source) {
    source.onsourceopen = () => {
      buffer = source.addSourceBuffer(type);
      buffer.mode = "sequence";
      buffer.onupdateend = feed;
      feed();
    };
    element.src = url;
    element.play().catch(() => {});
  }
  return {
    whileItArrives: streams,
    push(bytes) {
      pieces.push(bytes);
      if (!source) return;
      waiting.push(bytes);
      feed();
    },
    async end() {
      ended = true;
      if (source) feed();
      else {
        element.src = URL.createObjectURL(new Blob(pieces, { type }));
        await element.play().catch(() => {});
      }
    },
    stop: () => element.pause(),
    report: () => ({ firstSound_ms, late_ms, gaps, sound_s: Number.isFinite(element.duration) ? element.duration : null }),
  };
}
