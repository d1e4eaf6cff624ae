// The loudspeaker: plays queued 16-bit samples at the bot's rate; clear() drops them at once.
export async function openSpeaker(rateHz, onReport) {
  const context = new AudioContext({ sampleRate: rateHz, latencyHint: "interactive" });
  try {
    return await wire(context, onReport);
  } catch (error) {
    context.close();
    throw error;
  }
}

async function wire(context, onReport) {
  await context.audioWorklet.addModule(new URL("playback.js", import.meta.url));
  const playback = new AudioWorkletNode(context, "playback", { numberOfInputs: 0, outputChannelCount: [1] });
  const output_ms = () => 1000 * (context.outputLatency || context.baseLatency || 0);
  playback.port.onmessage = ({ data }) => onReport({ ...data, output_ms: output_ms() });
  playback.connect(context.destination);
  await context.resume();
  return {
    play: (bytes) => playback.port.postMessage(bytes, [bytes]),
    choose: (deviceId) => context.setSinkId?.(deviceId),
    clear: () => playback.port.postMessage("clear"),
    close: () => context.close(),
  };
}
