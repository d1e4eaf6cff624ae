// Plays a streamed WAV through Web Audio while it arrives.
import { Timeline, WavReader } from "./timeline.js";

// A player with push(bytes) -> samples, end(), stop(), heard_s() and report() -> {firstSound_ms, late_ms, gaps,
// sound_s}. begun_ms: origin of firstSound_ms, as performance.now(). Open it in a click handler: audio needs a gesture.
export function openPlayer(rateHz, begun_ms) {
  const context = new AudioContext({ sampleRate: rateHz, latencyHint: "interactive" });
  context.resume();
  const timeline = new Timeline();
  const reader = new WavReader();
  const latency_s = () => context.outputLatency || context.baseLatency || 0;
  let firstSound_ms = null;
  return {
    push(bytes) {
      const samples = reader.push(bytes);
      if (!samples.length) return samples;
      const buffer = context.createBuffer(1, samples.length, rateHz);
      buffer.copyToChannel(samples, 0);
      const node = new AudioBufferSourceNode(context, { buffer });
      node.connect(context.destination);
      const start = timeline.place(context.currentTime, buffer.duration);
      node.start(start);
      firstSound_ms ??= performance.now() - begun_ms + 1000 * (start - context.currentTime + latency_s());
      return samples;
    },
    end() {
      const rest_s = timeline.end === null ? 0 : Math.max(0, timeline.end - context.currentTime + latency_s());
      return new Promise((resolve) => setTimeout(resolve, 1000 * rest_s));
    },
    stop: () => context.state !== "closed" && context.close(),
    heard_s: () => (timeline.first === null ? 0 : context.currentTime - timeline.first - latency_s()),
    report: () => ({ firstSound_ms, late_ms: 1000 * timeline.late, gaps: timeline.gaps, sound_s: timeline.sound }),
  };
}
